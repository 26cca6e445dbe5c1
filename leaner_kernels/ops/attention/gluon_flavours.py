"""What masks and dropout change in the kernels in Gluon, for scores in any layout.

``rows`` and ``cols`` number the scores and broadcast against each other: (R, 1) and (1, C), or, of
scores whose rows are columns of a product, (1, R) and (C, 1). The conventions are those of
scores.py and ``keep_tile``.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Gluon: layouts are constants, branches are decided early.

from leaner_kernels.ops._gluon import gl, gluon
from leaner_kernels.ops.attention.gluon_tiles import max_log_sum_of


@gluon.jit
def load_mask(ptr, stride_n, stride_m, rows, cols, N):
    """Return what a head's mask has for scores, 0 outside.

    A stride of rows that is None is 0, of a mask over keys: each of them is then loaded once, and
    the tile broadcasts to the scores.
    """
    ptrs, inside = ptr + cols * stride_m, cols < N
    if stride_n is not None:
        ptrs, inside = ptrs + rows * stride_n, inside & (rows < N)
    return gl.load(ptrs, mask=inside, other=0)


@gluon.jit
def masked(s, scale, tile):
    """Return scores with a tile of a mask: hidden by a boolean one, scaled and added to another.

    One rounding, and the most negative number hides as -inf does: see ``biased``.
    """
    if tile.dtype == gl.uint8:
        s = gl.where(tile != 0, s, float("-inf"))
    else:
        bias = tile.to(gl.float32)
        s = gl.fma(s, scale, gl.where(bias < -1e38, float("-inf"), bias))
    return s


@gluon.jit
def kept(seed_ptr, threshold, head, rows, cols):
    """Return which scores dropout keeps, of a head counted over all entries; see ``keep_tile``."""
    seed = gl.load(seed_ptr)
    k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
    zero = (rows * 0 + cols * 0).to(gl.uint32)
    c0, c1 = zero + cols.to(gl.uint32), zero + rows.to(gl.uint32)
    c2, c3 = zero + head.to(gl.uint32), zero
    for _ in gl.static_range(10):
        high, low = gl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c2, c3 = gl.umulhi(c0, 0xD2511F53) ^ c3 ^ k1, c0 * 0xD2511F53
        c0, c1 = high ^ c1 ^ k0, low
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return (c0 >> 1).to(gl.int32) >= threshold


@gluon.jit
def pivot_of(row_max, factor, MASKED: gl.constexpr):
    """Return what is subtracted from exponents, rounded by itself: 0 of a row that sees no key yet.

    Without a mask every row sees the first key, so that no maximum is infinite.
    """
    pivot = gl.fma(row_max, factor, 0.0)
    if MASKED:
        pivot = gl.where(row_max == float("-inf"), 0.0, pivot)
    return pivot


@gluon.jit
def divisor_of(row_sum, MASKED: gl.constexpr):
    """Return what rows are divided by."""
    if MASKED:
        row_sum = gl.where(row_sum == 0, 1.0, row_sum)
    return row_sum


@gluon.jit
def store_max_log_sum(ptr, rows, row_max, divisor, factor, inside, MASKED: gl.constexpr):
    """Store what the backward needs of rows, 0 and inf where one sees no key; return the second.

    That of a row that sees none is returned as 0.
    """
    unseeing = row_max == float("-inf")
    if MASKED:
        row_max = gl.where(unseeing, 0.0, row_max)
    row_max, log_sum = max_log_sum_of(row_max, divisor, factor)
    gl.store(ptr + rows * 2, row_max, mask=inside)
    stored = log_sum
    if MASKED:
        stored = gl.where(unseeing, float("inf"), log_sum)
    gl.store(ptr + rows * 2 + 1, stored, mask=inside)
    return log_sum
