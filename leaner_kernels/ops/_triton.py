"""Device functions that several Triton kernels share."""

# pyright: reportOperatorIssue=false
# The bodies are Triton's language.

import triton
import triton.language as tl

# Half-precision products are exact in float32; float32 products must not be rounded to TF32.
PRECISION = tl.constexpr("ieee")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SHIFT = tl.constexpr(4096.0)  # a power of two, so that multiplication is exact


@triton.jit
def head_of(view, b, h):
    """Return a pointer to head ``h`` of batch entry ``b``; both indices are 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@triton.jit
def visible_keys(lengths_ptr, b, M):
    """Return the number of keys of batch entry ``b`` that are not padding, from 1 to M."""
    limit = M
    if lengths_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 1), M)
    return limit


@triton.jit
def load_rows(ptr, start, stride_n, num_rows, D: tl.constexpr, SHAPE: tl.constexpr):
    """Load rows from ``start`` on as SHAPE, (BLOCK, BLOCK_D), zero outside (num_rows, D).

    Only the tile's start is a 64-bit offset: 64-bit offsets of every element would cost registers.
    """
    BLOCK_D: tl.constexpr = SHAPE[1]
    local = tl.arange(0, SHAPE[0])
    dims = tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]  # (BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    ptrs = ptr + local[:, None] * stride_n + dims[None, :]  # (BLOCK, BLOCK_D)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_rows(ptr, tile, start, stride_n, num_rows, D: tl.constexpr):
    """Store a tile from row ``start`` on, in the dtype of ``ptr``, inside (num_rows, D)."""
    BLOCK_D: tl.constexpr = tile.shape[1]
    local = tl.arange(0, tile.shape[0])
    dims = tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]  # (BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    ptrs = ptr + local[:, None] * stride_n + dims[None, :]  # (BLOCK, BLOCK_D)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def product_apart(a, b):
    """Return a b from a separate accumulator, for sums over more terms than a tile has.

    Tensor cores truncate their accumulator every 16 terms, so that one that runs over thousands of
    tokens drifts. Triton fuses ``acc + tl.dot(a, b)`` into such a chain, unless
    ``max_num_imprecise_acc`` is given, which has no other effect for these dtypes.
    """
    return tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=a.shape[-1])


@triton.jit
def add_product(acc, a, b):
    """Return acc + a b; in float32, sum the terms of a tile before adding them to ``acc``.

    A float32 product is a chain of multiply-adds, each of which rounds the running sum. Over 2,048
    tokens the error of such a chain is several times that of sums of tiles. In half precision the
    rounding of the inputs dominates, and a chain needs fewer registers.
    """
    if a.dtype == tl.float32:
        acc += product_apart(a, b)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def parts_of(x, DTYPE: tl.constexpr):
    """Split float32 ``x`` into a sum of three numbers of DTYPE, the largest first.

    Two bfloat16 numbers hold 16 bits, three hold all 24. Two float16 numbers hold 22 bits, and
    fewer if the second is below 6e-5: multiply numbers of at most 1 by ``SHIFT`` first.
    """
    high = x.to(DTYPE)
    rest = x - high.to(tl.float32)
    middle = rest.to(DTYPE)
    return high, middle, (rest - middle.to(tl.float32)).to(DTYPE)


@triton.jit
def product_of_parts(high, middle, low, b):
    """Return (high + middle + low) b, with as few products as the dtype of b allows.

    The smallest part comes first, in a separate accumulator that starts at zero.
    """
    if b.dtype == tl.float32:
        return product_apart(high, b)
    product = tl.zeros([high.shape[0], b.shape[1]], tl.float32)
    if b.dtype == tl.bfloat16:
        product = tl.dot(low, b, product)
    return tl.dot(high, b, tl.dot(middle, b, product))


@triton.jit
def narrow(tile, DTYPE: tl.constexpr):
    """Return ``tile`` in DTYPE, and its divisor: float16 covers 6e-8 to 65504 only."""
    divisor = 1.0
    if tl.float16 == DTYPE:
        largest = tl.max(tl.abs(tile))
        divisor = tl.where(largest > 0, largest, 1.0)
        tile /= divisor
    return tile.to(DTYPE), divisor


@triton.jit
def scaled(s, factor):
    """Return ``s * factor``, rounded here.

    The compiler would fuse a plain product with the subtraction of a maximum. The product is then
    exact but the maximum is rounded, so that their difference at the maximum is not 0.
    """
    return tl.fma(s, factor, 0.0)


@triton.jit
def exponential(x, DTYPE: tl.constexpr):
    """Return e^x for float32 inputs and 2^x for half precision; ``units`` converts to this base.

    Base 2 saves several instructions per score; in float32 it costs one bit of every probability.
    """
    return tl.exp(x) if tl.float32 == DTYPE else tl.exp2(x)


@triton.jit
def units(DTYPE: tl.constexpr):
    """Return the units of ``exponential``'s exponent per nat."""
    return 1.0 if tl.float32 == DTYPE else LOG2_E


@triton.jit
def nats(DTYPE: tl.constexpr):
    """Return the nats per unit of ``exponential``'s exponent."""
    return 1.0 if tl.float32 == DTYPE else LN_2


@triton.jit
def softmax_step(
    s, row_max, row_sum, row_centred, row_square, DTYPE: tl.constexpr, STATS: tl.constexpr
):
    """Update the online softmax of rows with scores (rows, cols), in units of ``exponential``.

    Returns e = e^(s - maximum), the factor of all earlier sums, and the updated maxima and sums of
    rows: of e and, with STATS, of e times its exponent and of e^2. Each row must have a finite
    score.
    """
    new_max = tl.maximum(row_max, tl.max(s, axis=1))  # (rows,)
    alpha = exponential(row_max - new_max, DTYPE)  # 0 in the first step: row_max is -inf
    p = exponential(s - new_max[:, None], DTYPE)  # (rows, cols)
    if STATS:
        # No 0 * inf: row_sum is 0 in the first step, and p is 0 where s is -inf.
        shift = tl.where(row_max == float("-inf"), 0.0, row_max - new_max)
        centred = tl.where(s == float("-inf"), 0.0, s - new_max[:, None])
        row_centred = alpha * (row_centred + row_sum * shift) + tl.sum(p * centred, axis=1)
        row_square = alpha * alpha * row_square + tl.sum(p * p, axis=1)
    row_sum = alpha * row_sum + tl.sum(p, axis=1)  # (rows,)
    return p, alpha, new_max, row_sum, row_centred, row_square


@triton.jit
def keep_tile(seed, rows, cols, batch_head, threshold):
    """Return which scores dropout keeps, as a pure function of the seed and the position.

    The counter of Philox is (column, row, batch * H + head, 0): the mask depends on no tile size.
    """
    zero = rows[:, None] * 0 + cols[None, :] * 0  # (rows, cols)
    bits, _, _, _ = tl.philox(
        seed, zero + cols[None, :], zero + rows[:, None], zero + batch_head, zero
    )
    # 31 bits, since ``threshold`` is p * 2^31 and comparisons are signed.
    return (bits >> 1).to(tl.int32) >= threshold
