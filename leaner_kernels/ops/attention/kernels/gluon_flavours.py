"""What masks and dropout change in the kernels in Gluon, for scores in any layout.

``rows`` and ``cols`` number the scores and broadcast against each other: (R, 1) and (1, C), or, of
scores whose rows are columns of a product, (1, R) and (C, 1). The conventions are those of
scores.py and ``keep_tile``.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Gluon: layouts are constants, branches are decided early.

from leaner_kernels.ops._gluon import gl, gluon, warpgroup_mma_wait
from leaner_kernels.ops.attention.kernels.gluon_tiles import head_of, max_log_sum_of


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
def wait_for_scores(s, PENDING: gl.constexpr, mask, rows, cols, N):
    """Return scores of wgmma under a mask, which is loaded meanwhile.

    ``mask`` is its view, and what multiplies scores before it is added.
    """
    if mask[0].ptr is not None:
        view = mask[0]
        tile = load_mask(head_of(view), view.stride_n, view.stride_m, rows, cols, N)
        s = masked(warpgroup_mma_wait(PENDING, [s]), mask[1], tile)
    else:
        s = warpgroup_mma_wait(PENDING, [s])
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
def dropped(dp, p, dropout, rows, cols):
    """Return dP behind dropout and, less the factor of what is kept, P.

    ``dropout`` is a seed's pointer, the threshold, the head and the factor.
    """
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], rows, cols)
        dp, p = gl.where(keep, dp * dropout[3], 0.0), gl.where(keep, p, 0.0)
    return dp, p


@gluon.jit
def note_kept(words, keep):
    """Write which of 64 x 64 scores are kept into shared memory: (2, rows), 32 keys a word."""
    bits = keep.to(gl.int32).reshape([64, 2, 32])
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, bits.type.layout))
    bits = bits << gl.arange(0, 32, INNER)[None, None, :]
    words.store(gl.sum(bits, 2).permute((1, 0)))


@gluon.jit
def kept_before(words, LAYOUT: gl.constexpr):
    """Return what ``note_kept`` wrote as (keys, rows), for a tenth of what finding it costs."""
    APART: gl.constexpr = gl.zeros([64, 64], gl.int32, LAYOUT).reshape([2, 32, 64]).type.layout
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, APART))
    bits = words.load(gl.SliceLayout(1, APART))[:, None, :]
    bits = bits >> gl.arange(0, 32, INNER)[None, :, None]
    return gl.convert_layout((bits & 1).reshape([64, 64]), LAYOUT) != 0


@gluon.jit
def pivot_of(row_max, factor, MASKED: gl.constexpr, SCALED: gl.constexpr = False):
    """Return what ``exponents_of`` subtracts: 0 of a row that sees no key yet.

    Without a mask every row sees the first key, so that no maximum is infinite.
    """
    pivot = row_max
    if not SCALED:
        # Rounded by itself, and not where it is subtracted.
        pivot = gl.fma(row_max, factor, 0.0)
    if MASKED:
        pivot = gl.where(row_max == float("-inf"), 0.0, pivot)
    return pivot


@gluon.jit
def exponents_of(s, pivot, factor, SCALED: gl.constexpr):
    """Return exponents of scores less what broadcasts: one instruction unless a mask is added.

    Scores may then be so large that a maximum's product, rounded, is many exponents off.
    """
    exponent = s * factor - pivot
    if SCALED:
        exponent = (s - pivot) * factor
    return exponent


@gluon.jit
def shift_of(row_max, pivot, factor, SCALED: gl.constexpr):
    """Return by how much exponents change where the maximum of a row does, 0 where it does not."""
    shift = gl.fma(row_max, factor, 0.0) - pivot
    if SCALED:
        shift = (row_max - pivot) * factor
    return shift


@gluon.jit
def divisor_of(row_sum, MASKED: gl.constexpr):
    """Return what rows are divided by."""
    if MASKED:
        row_sum = gl.where(row_sum == 0, 1.0, row_sum)
    return row_sum


@gluon.jit
def max_log_sum_kept(row_max, divisor, factor, MASKED: gl.constexpr, SCALED: gl.constexpr):
    """Return the maximum of rows, the log of the sum, and what the backward needs in its place.

    Of a row that sees no key: 0, 0 and inf.
    """
    unseeing = row_max == float("-inf")
    if MASKED:
        row_max = gl.where(unseeing, 0.0, row_max)
    log_sum = gl.log(divisor)
    if not SCALED:
        row_max, log_sum = max_log_sum_of(row_max, divisor, factor)
    stored = log_sum
    if MASKED:
        stored = gl.where(unseeing, float("inf"), log_sum)
    return row_max, log_sum, stored


@gluon.jit
def store_max_log_sum(
    ptr, rows, row_max, divisor, factor, inside, MASKED: gl.constexpr, SCALED: gl.constexpr
):
    """Store what the backward needs of rows; return the log of the sum, 0 of one that sees none."""
    row_max, log_sum, stored = max_log_sum_kept(row_max, divisor, factor, MASKED, SCALED)
    gl.store(ptr + rows * 2, row_max, mask=inside)
    gl.store(ptr + rows * 2 + 1, stored, mask=inside)
    return log_sum


@gluon.jit
def behind_dropout(dp, p, dropout, rows, cols):
    """Return dP and P behind dropout of (pointer to a seed, threshold, head, factor)."""
    weight = p
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], rows, cols)
        dp, weight = gl.where(keep, dp * dropout[3], 0.0), gl.where(keep, p * dropout[3], 0.0)
    return dp, weight


@gluon.jit
def masked_p(s, lse, factor, mask, rows, cols, N, SCALED: gl.constexpr):
    """Return probabilities of products that ``mask`` hides or is added to.

    It is a pointer, strides of row and column, a scale, and where its gradient is stored.
    """
    s = masked(s, mask[3], load_mask(mask[0], mask[1], mask[2], rows, cols, N))
    return gl.exp2(exponents_of(s, lse, factor, SCALED))


@gluon.jit
def store_ds(ptr, ds, rows, cols, N):
    """Store the gradient of a head's scores, where a mask wants it."""
    if ptr is not None:
        gl.store(ptr + (rows * N + cols), ds, mask=(rows < N) & (cols < N))
