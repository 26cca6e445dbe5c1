"""Device helpers that more than one kernel uses unchanged."""

# pyright: reportOperatorIssue=false
# The bodies are Triton's language.

import triton
import triton.language as tl

# Half-precision products are exact in float32; float32 ones must not fall to TF32's ten bits.
PRECISION = tl.constexpr("ieee")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SHIFT = tl.constexpr(4096.0)  # a power of two, so that it rounds nothing


@triton.jit
def head_of(view, b, h):
    """Return where head ``h`` of batch entry ``b`` starts, both 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@triton.jit
def visible_keys(lengths_ptr, b, M):
    """Return how many of the M keys of batch entry ``b`` are no padding."""
    limit = M
    if lengths_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 1), M)
    return limit


@triton.jit
def load_rows(
    ptr, start, stride_n, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load rows ``start`` to ``start + BLOCK`` as (BLOCK, BLOCK_D), zero outside the matrix.

    Only the tile's start is a 64-bit offset: 64-bit offsets of every element would cost registers.
    """
    local, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]  # (BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    return tl.load(ptr + local[:, None] * stride_n + dims[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    ptr, tile, start, stride_n, num_rows,
    BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store (BLOCK, BLOCK_D) from row ``start`` on, in the dtype of ``ptr``, inside the matrix."""
    local, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]  # (BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    ptrs = ptr + local[:, None] * stride_n + dims[None, :]  # (BLOCK, BLOCK_D)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def product_apart(a, b, PRODUCTS: tl.constexpr = PRECISION):
    """Return a b from an accumulator of its own, for sums over more terms than a tile has.

    A tensor core truncates its accumulator every 16 terms: one that runs over thousands of tokens
    drifts. Triton joins ``acc + tl.dot(a, b)`` into such a chain, unless passed what imprecision
    is allowed, which means nothing else for the dtypes here.
    """
    return tl.dot(a, b, input_precision=PRODUCTS, max_num_imprecise_acc=a.shape[-1])


@triton.jit
def add_product(acc, a, b, PRODUCTS: tl.constexpr = PRECISION):
    """Return acc + a b: for float32 the terms of a tile are added up before they are added to acc.

    Float32 products are a chain of multiply-adds that round the running sum at each term. Over
    2,048 tokens such a chain is off by several times what sums of tiles are. In half precision the
    inputs are rounded by more, and a chain takes fewer registers.
    """
    if a.dtype == tl.float32 and PRODUCTS == PRECISION:
        acc += product_apart(a, b)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRODUCTS)
    return acc


@triton.jit
def parts_of(x, DTYPE: tl.constexpr):
    """Return float32 ``x`` as three numbers of DTYPE that add up to it, the largest first.

    Two numbers of bfloat16 hold 16 bits, three all 24. Two of float16 hold 22, and fewer where the
    second is below 6e-5: multiply by ``SHIFT`` what is at most 1.
    """
    high = x.to(DTYPE)
    rest = x - high.to(tl.float32)
    middle = rest.to(DTYPE)
    return high, middle, (rest - middle.to(tl.float32)).to(DTYPE)


@triton.jit
def product_of_parts(high, middle, low, b):
    """Return (high + middle + low) b of what ``parts_of`` gave: as many products as b has need of.

    The smallest first, and apart from other sums: the chain starts at zero.
    """
    if b.dtype == tl.float32:
        return product_apart(high, b)
    product = tl.zeros([high.shape[0], b.shape[1]], tl.float32)
    if b.dtype == tl.bfloat16:
        product = tl.dot(low, b, product)
    return tl.dot(high, b, tl.dot(middle, b, product))


@triton.jit
def narrow(tile, DTYPE: tl.constexpr):
    """Return ``tile`` in DTYPE and what it was divided by: float16 ends at 65504 and at 6e-8."""
    divisor = 1.0
    if tl.float16 == DTYPE:
        largest = tl.max(tl.abs(tile))
        divisor = tl.where(largest > 0, largest, 1.0)
        tile /= divisor
    return tile.to(DTYPE), divisor


@triton.jit
def scaled(s, factor):
    """Return ``s * factor``, rounded before anything is subtracted from it.

    A product that is no multiply-add the compiler would join with the subtraction of a maximum: it
    is then exact where the maximum was rounded, and their difference at the maximum not 0.
    """
    return tl.fma(s, factor, 0.0)


@triton.jit
def exponential(x, DTYPE: tl.constexpr):
    """Return e^x for float32 inputs, 2^x for half precision: ``units`` goes with it.

    Base 2 saves several instructions a score; in float32 it costs a bit of every probability.
    """
    return tl.exp(x) if tl.float32 == DTYPE else tl.exp2(x)


@triton.jit
def units(DTYPE: tl.constexpr):
    """Return how many units of ``exponential``'s exponent make a nat."""
    return 1.0 if tl.float32 == DTYPE else LOG2_E


@triton.jit
def nats(DTYPE: tl.constexpr):
    """Return how many nats make a unit of ``exponential``'s exponent."""
    return 1.0 if tl.float32 == DTYPE else LN_2


@triton.jit
def softmax_step(
    s, row_max, row_sum, row_centred, row_square, DTYPE: tl.constexpr, STATS: tl.constexpr
):
    """Let rows see scores (rows, cols), in units of ``exponential``, with the online softmax.

    Returns e^(s - maximum), by what all before is to be multiplied, and, with these, the maxima
    and sums of rows: of e and, with STATS, of e times its exponent and of e^2. A step has a score
    that is finite.
    """
    new_max = tl.maximum(row_max, tl.max(s, axis=1))  # (rows,)
    alpha = exponential(row_max - new_max, DTYPE)
    p = exponential(s - new_max[:, None], DTYPE)  # (rows, cols)
    if STATS:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max - new_max)
        centred = tl.where(s == float("-inf"), 0.0, s - new_max[:, None])
        row_centred = alpha * (row_centred + row_sum * shift) + tl.sum(p * centred, axis=1)
        row_square = alpha * alpha * row_square + tl.sum(p * p, axis=1)
    row_sum = alpha * row_sum + tl.sum(p, axis=1)  # (rows,)
    return p, alpha, new_max, row_sum, row_centred, row_square


@triton.jit
def keep_tile(seed, rows, cols, batch_head, threshold):
    """Return which scores dropout keeps: a pure function of the seed and the position.

    The counter is (column, row, batch * H + head, 0), so that no tile size changes the mask.
    """
    zero = rows[:, None] * 0 + cols[None, :] * 0  # (rows, cols)
    bits, _, _, _ = tl.philox(
        seed, zero + cols[None, :], zero + rows[:, None], zero + batch_head, zero
    )
    return (bits >> 1).to(tl.int32) >= threshold
