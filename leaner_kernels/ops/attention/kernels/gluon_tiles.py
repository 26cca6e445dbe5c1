"""What the kernels in Gluon share: tiles of 64 rows, copied and stored.

Those for Hopper are written in Gluon because Triton's language unrolls a tuple of resident tiles:
the addresses and descriptors of all products then stay in registers, and spill. For the same reason
loops over tiles have a trip count that the compiler does not know, the strides of rows are
constants, and addresses are found anew where they are needed.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Gluon: layouts are constants, branches are decided early.

from ..._gluon import copy_async, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..._triton import LN_2, LOG2_E
from ..call import GluonView


@gluon.jit
def here(x):
    """Return ``x``; the compiler cannot find it ahead of a loop, to stay in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def own_head(view, GROUP: gl.constexpr = 1):
    """Return where this program's head starts, which GROUP query heads share.

    In its entry of the batch, or at ``view.first``. It is computed anew at each use: kept from one
    to the next, the addresses of all tensors would fill registers.
    """
    h = gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    if view.first is None:
        b = gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.y;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        b = here(view.first)
    if GROUP > 1:
        h = h // GROUP
    return view.ptr + (b.to(gl.int64) * view.stride_b + h.to(gl.int64) * view.stride_h)


@gluon.jit
def fetch_rows(
    shared, view, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr,
    GROUP: gl.constexpr = 1,
):  # fmt: skip
    """Start to copy rows from ``start`` on into shared memory; with MASK, zeros from ``end`` on.

    In one piece: Triton 3.6 puts a barrier between the slices of a copy.
    """
    WIDTH: gl.constexpr = shared.shape[1]
    rows = here(gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = (
        own_head(view, GROUP)
        + start * view.stride_n
        + (rows[:, None] * view.stride_n + dims[None, :])
    )
    if MASK or D < WIDTH:
        copy_async(shared, ptrs, mask=(start + rows < end)[:, None] & (dims < D)[None, :])
    else:
        copy_async(shared, ptrs)


@gluon.jit
def left_rows(
    view, start, end, D: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
    ROWS: gl.constexpr = 64, GROUP: gl.constexpr = 1,
):  # fmt: skip
    """Return rows, of a left operand say, zeros from ``end`` on."""
    rows = here(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (start + rows < end)[:, None]
    if D < WIDTH:
        inside = inside & (dims < D)[None, :]
    ptrs = (
        own_head(view, GROUP)
        + start * view.stride_n
        + (rows[:, None] * view.stride_n + dims[None, :])
    )
    return gl.load(ptrs, mask=inside, other=0.0)


@gluon.jit
def fetch_tiles(
    tiles, view, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr,
    GROUP: gl.constexpr = 1,
):  # fmt: skip
    """Start to copy all whole tiles of a head."""
    COUNT: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    for i in gl.static_range(COUNT):
        fetch_rows(tiles.index(i), view, i * ROWS, end, D, MASK, LAYOUT, GROUP)


@gluon.jit
def put_rows(
    view, x, stage, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Store a tile of rows by way of shared memory; with MASK, those before ``end``."""
    WIDTH: gl.constexpr = stage.shape[1]
    STEP: gl.constexpr = 1024 // WIDTH
    stage.store(x.to(stage.dtype))
    rows = here(gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = own_head(view) + start * view.stride_n + (rows[:, None] * view.stride_n + dims[None, :])
    for i in gl.static_range(stage.shape[0] // STEP):
        part, target = stage.slice(i * STEP, STEP).load(LAYOUT), ptrs + i * STEP * view.stride_n
        inside = (start + i * STEP + rows < end)[:, None]
        if D < WIDTH:
            gl.store(target, part, mask=inside & (dims < D)[None, :])
        elif MASK:
            gl.store(target, part, mask=inside)
        else:
            gl.store(target, part)


@gluon.jit
def turned_rows(x, stage, LAYOUT: gl.constexpr):
    """Return a tile of rows as its threads store it, by way of shared memory."""
    stage.store(x.to(stage.dtype))
    return stage.load(LAYOUT)


@gluon.jit
def put_own(
    view, x, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Store a tile of rows as its threads hold them; with MASK, those before ``end``."""
    rows = here(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = own_head(view) + start * view.stride_n + (rows[:, None] * view.stride_n + dims[None, :])
    x, inside = x.to(view.ptr.dtype.element_ty), (start + rows < end)[:, None]
    if x.shape[1] > D:
        gl.store(ptrs, x, mask=inside & (dims < D)[None, :])
    elif MASK:
        gl.store(ptrs, x, mask=inside)
    else:
        gl.store(ptrs, x)


@gluon.constexpr_function
def exchanged_layout(block_dim):
    """Return the layout of 64 rows whose threads hold 16 bytes of a row side by side.

    Each warp has the rows that it has of a product: between the two layouts no data leaves it.
    """
    eight = [[0, 1], [0, 2], [0, 4]]
    if block_dim == 16:
        held, lanes = eight, [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]]
    else:
        held = [*eight, [8, 0], *([0, n] for n in (32, 64) if n < block_dim)]
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, block_dim])


@gluon.jit
def put_exchanged(view, x, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile of rows in ``exchanged_layout``; with MASK, those before ``end``."""
    x = gl.convert_layout(x.to(view.ptr.dtype.element_ty), LAYOUT)
    put_own(view, x, start, end, D, MASK, LAYOUT)


@gluon.jit
def put_columns(view, x, start, end, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Store (dims, rows) as rows from ``start`` on, those before ``end``."""
    dims = here(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)))
    rows = start + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = own_head(view) + (rows[None, :] * view.stride_n + dims[:, None])
    inside = (rows < end)[None, :]
    if x.shape[0] > D:
        inside = inside & (dims < D)[:, None]
    gl.store(ptrs, x.to(view.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def from_token(view, first):
    """Return a view of the sequence of a varlen batch that starts at token ``first``."""
    return GluonView(view.ptr, view.stride_b, view.stride_h, view.stride_n, first.to(gl.int32))


@gluon.jit
def number_of_keys(lengths_ptr, M):
    """Return how many keys this program's entry of the batch sees."""
    limit = M
    if lengths_ptr is not None:
        limit = gl.minimum(gl.maximum(gl.load(lengths_ptr + gl.program_id(1)), 1), M)
    return limit


@gluon.jit
def row_statistics(ptr, rows, inside, factor, SCALED: gl.constexpr = False):
    """Return the log-sum-exp of rows in base 2, inf where not ``inside``, and what it lost.

    SCALED gives it in units of scores: what ``exponents_of`` subtracts from them. Beside a large
    maximum the log of the sum is rounded away: P is then too large by a factor, which belongs into
    dO, and with it into delta.
    """
    row_max = gl.load(ptr + rows * 2, mask=inside, other=0.0)
    log_sum = gl.load(ptr + rows * 2 + 1, mask=inside, other=float("inf")) * LOG2_E
    if SCALED:
        lse = row_max + log_sum * (1.0 / factor)
        lost = gl.where(lse == float("inf"), 0.0, (lse - row_max) * factor - log_sum)
    else:
        lse = row_max * factor + log_sum
        lost = gl.where(lse == float("inf"), 0.0, (lse - row_max * factor) - log_sum)
    return lse, gl.exp2(lost)


@gluon.jit
def own_sum(x):
    """Return (rows, 4): of each row what each of four threads holds."""
    COLS: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(x.reshape([x.shape[0], COLS // 8, 4, 2]), 3), 1)


@gluon.jit
def own_parts(x):
    """Return tensors (rows, 4): of each row what each of four threads holds, one at a time."""
    ROWS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1] // 8
    even, odd = x.reshape([ROWS, COUNT, 4, 2]).split()
    parts = (even, odd)
    for n in gl.static_range(3):
        if COUNT >> n > 1:
            halves = ()
            for i in gl.static_range(2 << n):
                half = parts[i].reshape([ROWS, 2, COUNT >> n + 1, 4]).permute((0, 2, 3, 1))
                low, high = half.split()
                halves = halves + (low, high)  # noqa: RUF005
            parts = halves
    return parts


@gluon.jit
def own_products(total, x, y):
    """Add to (rows, 4) the own sums of x y: a multiply-add each, where ``own_sum`` takes three."""
    xs, ys = own_parts(x), own_parts(y)
    for i in gl.static_range(x.shape[1] // 4):
        total = gl.fma(
            gl.convert_layout(xs[i].reshape(total.shape), total.type.layout),
            gl.convert_layout(ys[i].reshape(total.shape), total.type.layout),
            total,
        )
    return total


@gluon.jit
def joined(x, LAYOUT: gl.constexpr):
    """Return (rows,) sums of what ``own_sum`` left apart."""
    return gl.convert_layout(gl.sum(x, 1), LAYOUT)


@gluon.jit
def correct(do_tile, ptr, start, end, factor, SCALED: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiply rows of dO in shared memory by what ``row_statistics`` returns."""
    rows = start + gl.arange(0, do_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    do = do_tile.load(LAYOUT)
    _, lost = row_statistics(ptr, rows, rows < end, factor, SCALED)
    do_tile.store((do.to(gl.float32) * lost[:, None]).to(do.dtype))


@gluon.jit
def visible_tiles(
    full, limit, first, BLOCK: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr
):
    """Return how many tiles of keys all of BLOCK rows see whole, and how many some row sees."""
    seen, last = full, full
    if HIDES:
        seen, last = gl.minimum(limit // 64, full), gl.minimum((limit + 63) // 64, full)
    if CAUSAL:
        seen, last = gl.minimum(seen, first // 64), gl.minimum(last, (first + BLOCK) // 64)
    return seen, last


# --- The epilogue: statistics of a head, as ``ops/_epilogue.py`` has it for Triton ----------------


@gluon.jit
def no_sums(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of no rows: largest score, entropy, squares of P, of the output, maxima."""
    zero = gl.zeros([ROWS], gl.float32, LAYOUT)
    return gl.full([ROWS], float("-inf"), gl.float32, LAYOUT), zero, zero, zero, zero


@gluon.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside):
    """Return the sums of rows, of which those not ``inside`` add nothing; exponents in base 2.

    What they are made of, ``sums_of_rows`` of ``ops/_epilogue.py`` tells.
    """
    entropy = gl.log(row_sum) - LN_2 * row_centred / row_sum
    square = row_square / (row_sum * row_sum)
    return sums_of_entropies(row_max, entropy, square, out_square, inside)


@gluon.jit
def sums_of_entropies(row_max, entropy, square, out_square, inside):
    """Return the sums of rows whose entropies and squares are known."""
    row_max = gl.where(inside, row_max, float("-inf"))
    return (
        row_max,
        gl.where(inside, entropy, 0.0),
        gl.where(inside, square, 0.0),
        gl.where(inside, out_square, 0.0),
        # A row that sees no key counts as 0.
        gl.where(row_max == float("-inf"), 0.0, row_max),
    )


@gluon.jit
def with_output(sums, out_square):
    """Return sums of rows of P with the squares of the output, which were summed up apart."""
    return sums[0], sums[1], sums[2], out_square, sums[4]


@gluon.jit
def add_sums(sums, others):
    """Return both together."""
    largest = gl.maximum(sums[0], others[0])
    square, out_square = sums[2] + others[2], sums[3] + others[3]
    return largest, sums[1] + others[1], square, out_square, sums[4] + others[4]


@gluon.jit
def reduce_sums(sums, AXIS: gl.constexpr = 0):
    """Return the sums over rows."""
    largest, entropy = gl.max(sums[0], AXIS), gl.sum(sums[1], AXIS)
    square, out_square = gl.sum(sums[2], AXIS), gl.sum(sums[3], AXIS)
    return largest, entropy, square, out_square, gl.sum(sums[4], AXIS)


@gluon.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale, inside):
    """Store the statistics of a head, whose sums are complete, into (statistics, B, H).

    ``scale`` is what scores are still to be multiplied by; ``inside`` may be None.
    """
    ptr += head
    step = num_heads.to(gl.int64)
    # A maximum passes nan over; a sum does not, and a diverged model must show.
    diverged = sums[1] != sums[1]
    gl.store(ptr, gl.where(diverged, float("nan"), sums[0] * scale), mask=inside)
    gl.store(ptr + step, sums[1] / num_rows, mask=inside)
    gl.store(ptr + 2 * step, gl.sqrt(sums[2]), mask=inside)
    gl.store(ptr + 3 * step, gl.sqrt(sums[3]), mask=inside)
    mean_row_max = gl.where(diverged, float("nan"), sums[4] * scale / num_rows)
    gl.store(ptr + 4 * step, mean_row_max, mask=inside)


# --- Masks and dropout, for scores in any layout --------------------------------------------------
# ``rows`` and ``cols`` number the scores and broadcast against each other: (R, 1) and (1, C), or,
# of scores whose rows are columns of a product, (1, R) and (C, 1).


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
def masked(
    s, tile, scale, rows, cols, limit, HIDDEN: gl.constexpr, HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return scores, ``HIDDEN`` where anything hides a key from a row; or so P or dS, with 0.

    Every kind of mask is applied here and nowhere else. ``tile`` is what a mask has for these
    scores, or None: a boolean one hides; another is added to ``scale`` times the scores, in one
    rounding, and its most negative number hides as -inf does (see ``biased``). With ``HIDES`` keys
    from ``limit`` on are hidden.
    """
    if tile is not None:
        if tile.dtype == gl.uint8:
            s = gl.where(tile != 0, s, HIDDEN)
        else:
            bias = tile.to(gl.float32)
            s = gl.fma(s, scale, gl.where(bias < -1e38, HIDDEN, bias))
    if HIDES:
        s = gl.where(cols < limit, s, HIDDEN)
    if CAUSAL:
        s = gl.where(cols <= rows, s, HIDDEN)
    return s


@gluon.jit
def wait_for_scores(
    s, PENDING: gl.constexpr, mask, rows, cols, N, limit, HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return scores of wgmma, ``masked``; a tile of a mask is loaded meanwhile.

    ``mask`` is its view, and what multiplies scores before it is added. ``PENDING`` products that
    were started since are still under way.
    """
    tile = None
    if mask[0].ptr is not None:
        view = mask[0]
        head = own_head(GluonView(view.ptr, view.stride_b, view.stride_h, view.stride_n, None))
        tile = load_mask(head, view.stride_n, view.stride_m, rows, cols, N)
    s = warpgroup_mma_wait(PENDING, [s])
    return masked(s, tile, mask[1], rows, cols, limit, float("-inf"), HIDES, CAUSAL)


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
def put_max_log_sum(
    ptr, rows, row_max, divisor, factor, inside, MASKED: gl.constexpr, SCALED: gl.constexpr
):
    """Store what the backward needs of rows; return the log of the sum, 0 of one that sees none.

    Of a row that sees no key: 0 and inf.
    """
    unseeing = row_max == float("-inf")
    if MASKED:
        row_max = gl.where(unseeing, 0.0, row_max)
    log_sum = gl.log(divisor)
    if not SCALED:
        # What rounding the pivot lost goes to the sum.
        log_sum -= gl.fma(row_max, factor, -gl.fma(row_max, factor, 0.0)) * LN_2
    stored = log_sum
    if MASKED:
        stored = gl.where(unseeing, float("inf"), log_sum)
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
    tile = load_mask(mask[0], mask[1], mask[2], rows, cols, N)
    s = masked(s, tile, mask[3], rows, cols, N, float("-inf"), False, False)
    return gl.exp2(exponents_of(s, lse, factor, SCALED))


@gluon.jit
def store_ds(ptr, ds, rows, cols, N):
    """Store the gradient of a head's scores, where a mask wants it."""
    if ptr is not None:
        gl.store(ptr + (rows * N + cols), ds, mask=(rows < N) & (cols < N))


# --- Steps of the backward on Hopper --------------------------------------------------------------


@gluon.jit
def start_products(left, dp_left, right, dp_right, zero):
    """Start left right^T and dp_left dp_right^T: scores and dP.

    Of queries and keys, or, turned, of keys and queries.
    """
    s = warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(dp_left, dp_right.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def rows_step(
    dq, q, do, k, v, zero, lse, delta, first, start, limit, factor, N, mask, dropout, ds_ptr,
    SCALED: gl.constexpr, LEFT: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Add to dQ of a tile what a tile of keys gives."""
    SCORES: gl.constexpr = zero.type.layout
    s, dp = start_products(q, do, k, v, zero)
    keys = (start + gl.arange(0, 64, gl.SliceLayout(0, SCORES)))[None, :]
    queries = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    s = wait_for_scores(s, 1, mask, queries, keys, N, 0, False, False)
    p = gl.exp2(exponents_of(s, lse, factor, SCALED))
    dp = warpgroup_mma_wait(0, [dp])
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], queries, keys)
        note_kept(dropout[4].index((first * dropout[5] + start) // 64), keep)
        dp = gl.where(keep, dp * dropout[3], 0.0)
    ds = p * (dp - delta)
    ds = masked(ds, None, None, queries, keys, limit, 0.0, HIDES, CAUSAL)
    store_ds(ds_ptr, ds, queries, keys, N)
    dq = warpgroup_mma(gl.convert_layout(ds.to(k.dtype), LEFT), k, dq, is_async=True)
    return warpgroup_mma_wait(0, [dq])


@gluon.jit
def keys_step(
    dk, dv, k, v, q, do, zero, lse, delta, first, start, factor, N, mask, dropout,
    SCALED: gl.constexpr, LEFT: gl.constexpr, CAUSAL: gl.constexpr, limit=None,
):  # fmt: skip
    """Add to dK and dV of a tile what a tile, or a tail, of rows gives; return dS (keys, rows).

    Keys from ``limit`` on, unless it is None, are hidden; without it the caller hides them.
    """
    SCORES: gl.constexpr = zero.type.layout
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    s, dp = start_products(k, v, q, do, zero)
    keys = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    queries = (start + gl.arange(0, q.shape[0], COLS))[None, :]
    s = wait_for_scores(s, 1, mask, queries, keys, N, 0, False, False)
    p = gl.exp2(exponents_of(s, lse.load(COLS)[None, :], factor, SCALED))
    p = masked(p, None, None, queries, keys, limit, 0.0, limit is not None, CAUSAL)
    weight = p
    if dropout[0] is not None:
        if q.shape[0] == 64:
            keep = kept_before(dropout[4].index((start * dropout[5] + first) // 64), SCORES)
        else:
            keep = kept(dropout[0], dropout[1], dropout[2], queries, keys)
        weight = gl.where(keep, p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(weight.to(do.dtype), LEFT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    if dropout[0] is not None:
        dp = gl.where(keep, dp * dropout[3], 0.0)
    ds = p * (dp - delta.load(COLS)[None, :])
    dk = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), LEFT), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv, ds
