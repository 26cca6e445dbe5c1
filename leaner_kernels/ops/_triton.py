"""Device helpers that more than one kernel uses unchanged."""

import triton
import triton.language as tl

# Half-precision products are exact in float32; float32 ones must not fall to TF32's ten bits.
PRECISION = tl.constexpr("ieee")
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    ptr, start, stride_n, num_rows, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load rows ``start`` to ``start + BLOCK`` as (BLOCK, BLOCK_D), zero outside the matrix.

    Only the tile's start is a 64-bit offset: 64-bit offsets of every element would cost registers.
    """
    local, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    return tl.load(ptr + local[:, None] * stride_n + dims[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(
    ptr,
    tile,
    start,
    stride_n,
    num_rows,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store (BLOCK, BLOCK_D) from row ``start`` on, in the dtype of ``ptr``, inside the matrix."""
    local, dims = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = (start + local < num_rows)[:, None]
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    ptr += tl.cast(start, tl.int64) * stride_n
    ptrs = ptr + local[:, None] * stride_n + dims[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


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
def keep_tile(seed, rows, cols, batch_head, threshold):
    """Return which scores dropout keeps: a pure function of the seed and the position.

    The counter is (column, row, batch * H + head, 0), so that no tile size changes the mask.
    """
    zero = rows[:, None] * 0 + cols[None, :] * 0
    bits, _, _, _ = tl.philox(
        seed, zero + cols[None, :], zero + rows[:, None], zero + batch_head, zero
    )
    return (bits >> 1).to(tl.int32) >= threshold
