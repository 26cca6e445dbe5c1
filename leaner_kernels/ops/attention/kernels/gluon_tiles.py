"""Helpers of the Gluon kernels: tiles of 64 rows, row statistics, masks, dropout, backward steps.

The Hopper kernels are written in Gluon because Triton's language unrolls a tuple of resident tiles.
The addresses and wgmma descriptors of all products then stay live in registers, and spill. For the
same reason the trip counts of loops over tiles are run-time values, row strides are constants, and
addresses are recomputed where they are used.

A tail is the tokens after the last whole tile, where they are few: they are the T columns of a
transposed product, which costs less than another tile of 64 rows.
"""

from ..._gluon import copy_async, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..._triton import LN_2, LOG2_E
from ..call import GluonView


@gluon.jit
def here(x):
    """Return ``x`` unchanged; stop the compiler from hoisting it out of a loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def own_head(view, GROUP: gl.constexpr = 1):
    """Return a pointer to this program's head, which GROUP query heads share.

    It points into this program's batch entry, or to token ``view.first`` of a varlen batch. The
    address is recomputed at each use: kept live, the addresses of all tensors would fill registers.
    """
    # Impure inline assembly: the compiler cannot merge these reads of the program's index, nor
    # hoist them out of a loop.
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
    # Offsets between heads are 64-bit, offsets within one head 32-bit (``_fits_gluon``).
    return view.ptr + (b.to(gl.int64) * view.stride_b + h.to(gl.int64) * view.stride_h)


@gluon.jit
def fetch_rows(
    shared,
    view,
    start,
    end,
    D: gl.constexpr,
    MASK: gl.constexpr,
    LAYOUT: gl.constexpr,
    GROUP: gl.constexpr = 1,
):
    """Start an asynchronous copy of rows from ``start`` on; with MASK, write zeros from ``end`` on.

    The copy is not sliced: Triton 3.6 puts a barrier between the slices of a copy.
    """
    WIDTH: gl.constexpr = shared.shape[1]
    rows = here(gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = (
        own_head(view, GROUP)
        + start * view.stride_n
        + (rows[:, None] * view.stride_n + dims[None, :])
    )
    # Masked elements are written as zeros: products read whole tiles.
    if MASK or D < WIDTH:
        copy_async(shared, ptrs, mask=(start + rows < end)[:, None] & (dims < D)[None, :])
    else:
        copy_async(shared, ptrs)


@gluon.jit
def left_rows(
    view,
    start,
    end,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    ROWS: gl.constexpr = 64,
    GROUP: gl.constexpr = 1,
):
    """Load rows into registers, such as those of a left operand; zeros from ``end`` on."""
    rows = here(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (start + rows < end)[:, None]  # (ROWS, 1)
    if D < WIDTH:
        inside = inside & (dims < D)[None, :]
    ptrs = (
        own_head(view, GROUP)
        + start * view.stride_n
        + (rows[:, None] * view.stride_n + dims[None, :])
    )
    return gl.load(ptrs, mask=inside, other=0.0)  # (ROWS, WIDTH)


@gluon.jit
def fetch_tiles(
    tiles,
    view,
    end,
    D: gl.constexpr,
    MASK: gl.constexpr,
    LAYOUT: gl.constexpr,
    GROUP: gl.constexpr = 1,
):
    """Start asynchronous copies of all whole tiles of a head."""
    COUNT: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    for i in gl.static_range(COUNT):
        fetch_rows(
            shared=tiles.index(i),
            view=view,
            start=i * ROWS,
            end=end,
            D=D,
            MASK=MASK,
            LAYOUT=LAYOUT,
            GROUP=GROUP,
        )


@gluon.jit
def put_rows(view, x, stage, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile of rows through shared memory; with MASK, only the rows before ``end``."""
    WIDTH: gl.constexpr = stage.shape[1]
    # 128 threads store 8 elements, 16 bytes, each.
    STEP: gl.constexpr = 1024 // WIDTH
    # In the layout of a product a thread holds two neighbouring elements. Shared memory regroups
    # them into the 16-byte vectors of LAYOUT.
    stage.store(x.to(stage.dtype))
    rows = here(gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = own_head(view) + start * view.stride_n + (rows[:, None] * view.stride_n + dims[None, :])
    for i in gl.static_range(stage.shape[0] // STEP):
        # A part is (STEP, WIDTH).
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
    """Convert a tile of rows to the layout of its store through shared memory."""
    stage.store(x.to(stage.dtype))
    return stage.load(LAYOUT)


@gluon.jit
def put_own(view, x, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile of rows in its own layout; with MASK, only the rows before ``end``."""
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
    """Return a layout of 64 rows in which a thread holds 16 contiguous bytes of a row.

    A warp owns the same 16 rows as in the layout of a product, so that a conversion between the two
    moves data only within a warp.
    """
    # The register bases: eight neighbouring elements, 16 bytes of half precision.
    eight = [[0, 1], [0, 2], [0, 4]]
    if block_dim == 16:
        held, lanes = eight, [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]]
    else:
        # The lanes of a row cover 32 elements; the other registers are row + 8 and wider heads.
        held = [*eight, [8, 0], *([0, n] for n in (32, 64) if n < block_dim)]
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, block_dim])


@gluon.jit
def put_exchanged(view, x, start, end, D: gl.constexpr, MASK: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile of rows in ``exchanged_layout``; with MASK, only the rows before ``end``."""
    x = gl.convert_layout(x.to(view.ptr.dtype.element_ty), LAYOUT)
    put_own(view=view, x=x, start=start, end=end, D=D, MASK=MASK, LAYOUT=LAYOUT)


@gluon.constexpr_function
def turned_layout(block_dim, columns):
    """Return a layout (dims, rows) like ``exchanged_layout``, of a transposed product."""
    held, lanes = [[1, 0], [2, 0], [4, 0]], [[8, 0]]
    for n in (1, 2, 4, 8, 16):
        if n < columns:
            (lanes if len(lanes) < 5 else held).append([0, n])
    lanes += [[0, 0]] * (5 - len(lanes))
    if block_dim > 64:
        held.append([64, 0])
    warps = [[n, 0] if n < block_dim else [0, 0] for n in (16, 32)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [block_dim, columns])


@gluon.jit
def put_columns(view, x, start, end, D: gl.constexpr):
    """Store a transposed tile (dims, rows) as rows from ``start`` on; skip rows from ``end`` on."""
    LAYOUT: gl.constexpr = turned_layout(x.shape[0], x.shape[1])
    x = gl.convert_layout(x.to(view.ptr.dtype.element_ty), LAYOUT)
    dims = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    rows = start + here(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)))
    ptrs = own_head(view) + (rows[None, :] * view.stride_n + dims[:, None])
    inside = (rows < end)[None, :]
    if x.shape[0] > D:
        inside = inside & (dims < D)[:, None]
    gl.store(ptrs, x, mask=inside)


@gluon.jit
def from_token(view, first):
    """Return a view of the sequence of a varlen batch that starts at token ``first``."""
    return GluonView(view.ptr, view.stride_b, view.stride_h, view.stride_n, first.to(gl.int32))


@gluon.jit
def number_of_keys(lengths_ptr, M):
    """Return the number of keys that are visible in this program's batch entry, from 1 to M."""
    limit = M
    if lengths_ptr is not None:
        # Lengths are not checked on the host: clamping keeps accesses inside the tensor.
        limit = gl.minimum(gl.maximum(gl.load(lengths_ptr + gl.program_id(1)), 1), M)
    return limit


@gluon.jit
def _pairs_of(ptr, rows, inside, LAYOUT: gl.constexpr):
    """Return pointers to the pair of each row, (rows, 2), and the mask for them."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    which = gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))[None, :]
    ptrs = ptr + (gl.convert_layout(rows, ROWS)[:, None] * 2 + which)
    return ptrs, gl.convert_layout(inside, ROWS)[:, None] & (which >= 0)


@gluon.jit
def row_statistics(saved, rows, inside, factor, SCALED: gl.constexpr = False):
    """Return the log-sum-exp of rows in base 2, and the factor that its rounding leaves in P.

    ``saved`` are pointers to pairs and to the log-sum-exp, one of them None. The log-sum-exp is inf
    where not ``inside``, so that P = 0. With SCALED it is in units of the scores, as
    ``exponents_of`` subtracts it. Beside a large maximum, the log of the sum is rounded away. P is
    then off by a factor, which the caller applies to dO, and through dO to delta. If only the
    log-sum-exp was saved, the factor is 1.
    """
    if saved[0] is None:
        lse = gl.load(saved[1] + rows, mask=inside, other=float("inf")) * LOG2_E  # (rows,)
        lse = lse * (1.0 / factor) if SCALED else lse
        lost = gl.zeros_like(lse)
    else:
        # Pairs (maximum, log of the sum); the second is in nats.
        LAYOUT: gl.constexpr = gl.join(rows, rows).type.layout
        ptrs, pairs_inside = _pairs_of(saved[0], rows, inside, LAYOUT)
        row_max, log_sum = gl.load(ptrs, mask=pairs_inside, other=0.0).split()
        row_max = gl.convert_layout(row_max, rows.type.layout)  # (rows,)
        log_sum = gl.convert_layout(log_sum, rows.type.layout)
        log_sum = gl.where(inside, log_sum, float("inf")) * LOG2_E
        if SCALED:
            lse = row_max + log_sum * (1.0 / factor)
            lost = gl.where(lse == float("inf"), 0.0, (lse - row_max) * factor - log_sum)
        else:
            lse = row_max * factor + log_sum
            lost = gl.where(lse == float("inf"), 0.0, (lse - row_max * factor) - log_sum)
    return lse, gl.exp2(lost)


@gluon.jit
def own_sum(x):
    """Sum each row over the elements of a thread: (rows, 4) partial sums of four threads."""
    # A row of a product lies with four threads, each with two of every eight columns. Summing
    # within threads alone needs no shuffles in the loop over keys; ``joined`` adds the four later.
    COLS: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(x.reshape([x.shape[0], COLS // 8, 4, 2]), 3), 1)


@gluon.jit
def own_parts(x):
    """Split rows into tensors (rows, 4), each with one element of each of a row's four threads."""
    ROWS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1] // 8
    # Halve the columns of a thread until each tensor holds one: splits move no data between
    # threads.
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
    """Add ``own_sum(x * y)`` to (rows, 4) with one multiply-add per element."""
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
    """Sum the four partial sums of ``own_sum`` for each row: (rows,)."""
    return gl.convert_layout(gl.sum(x, 1), LAYOUT)


@gluon.jit
def correct(do_tile, saved, start, end, factor, SCALED: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiply rows of dO in shared memory by the factor that ``row_statistics`` returns."""
    rows = start + gl.arange(0, do_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    do = do_tile.load(LAYOUT)  # (rows, D)
    _, lost = row_statistics(saved, rows, rows < end, factor, SCALED)
    do_tile.store((do.to(gl.float32) * lost[:, None]).to(do.dtype))


@gluon.jit
def visible_tiles(
    full, limit, first, BLOCK: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr
):
    """Return how many tiles of keys every row sees in full, and how many at least one row sees."""
    # Tiles before the first number need no mask; those from there to the second are masked.
    seen, last = full, full
    if HIDES:
        seen, last = gl.minimum(limit // 64, full), gl.minimum((limit + 63) // 64, full)
    if CAUSAL:
        # The diagonal crosses the tiles of keys from the first of these rows to the last.
        seen, last = gl.minimum(seen, first // 64), gl.minimum(last, (first + BLOCK) // 64)
    return seen, last


# --- The epilogue: statistics of a head, as ``ops/_epilogue.py`` has it for Triton ----------------


@gluon.jit
def no_sums(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return sums of zero rows: largest score, entropy, squares of P and of the output, maxima."""
    zero = gl.zeros([ROWS], gl.float32, LAYOUT)
    return gl.full([ROWS], float("-inf"), gl.float32, LAYOUT), zero, zero, zero, zero


@gluon.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside):
    """Return the sums of rows, with zeros for rows not ``inside``; exponents are in base 2.

    ``sums_of_rows`` of ``ops/_epilogue.py`` describes the arguments.
    """
    # H = log(sum e) - sum(e log e) / sum(e), with the maximum as pivot of all exponents.
    entropy = gl.log(row_sum) - LN_2 * row_centred / row_sum
    square = row_square / (row_sum * row_sum)
    return sums_of_entropies(row_max, entropy, square, out_square, inside)


@gluon.jit
def sums_of_entropies(row_max, entropy, square, out_square, inside):
    """Return the sums of rows from their entropies and squares."""
    row_max = gl.where(inside, row_max, float("-inf"))
    return (
        row_max,
        gl.where(inside, entropy, 0.0),
        gl.where(inside, square, 0.0),
        gl.where(inside, out_square, 0.0),
        # A row without a visible key counts as 0.
        gl.where(row_max == float("-inf"), 0.0, row_max),
    )


@gluon.jit
def with_output(sums, out_square):
    """Return the sums of P with ``out_square``, which was summed separately."""
    return sums[0], sums[1], sums[2], out_square, sums[4]


@gluon.jit
def add_sums(sums, others):
    """Combine two tuples of sums."""
    largest = gl.maximum(sums[0], others[0])
    square, out_square = sums[2] + others[2], sums[3] + others[3]
    return largest, sums[1] + others[1], square, out_square, sums[4] + others[4]


@gluon.jit
def reduce_sums(sums, AXIS: gl.constexpr = 0):
    """Reduce the sums over rows."""
    largest, entropy = gl.max(sums[0], AXIS), gl.sum(sums[1], AXIS)
    square, out_square = gl.sum(sums[2], AXIS), gl.sum(sums[3], AXIS)
    return largest, entropy, square, out_square, gl.sum(sums[4], AXIS)


@gluon.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale, inside):
    """Store the statistics of a head with complete sums into (statistics, B, H).

    ``scale`` multiplies the maxima of the scores; ``inside`` may be None.
    """
    # The caller passes a pointer to the first statistic; each is (B, H).
    ptr += head
    step = num_heads.to(gl.int64)
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    diverged = sums[1] != sums[1]
    gl.store(ptr, gl.where(diverged, float("nan"), sums[0] * scale), mask=inside)
    gl.store(ptr + step, sums[1] / num_rows, mask=inside)
    gl.store(ptr + 2 * step, gl.sqrt(sums[2]), mask=inside)
    gl.store(ptr + 3 * step, gl.sqrt(sums[3]), mask=inside)
    mean_row_max = gl.where(diverged, float("nan"), sums[4] * scale / num_rows)
    gl.store(ptr + 4 * step, mean_row_max, mask=inside)


# --- Masks and dropout, for scores in any layout --------------------------------------------------
# ``rows`` and ``cols`` are the indices of the scores, and broadcast against each other: (R, 1) and
# (1, C), or, in a transposed product, (1, R) and (C, 1).


@gluon.jit
def load_mask(ptr, stride_n, stride_m, rows, cols, N):
    """Load the mask of a head for a tile of scores, 0 outside.

    A row stride of None stands for 0, as in a mask over keys: each key is then loaded once, and the
    tile broadcasts to the scores.
    """
    ptrs, inside = ptr + cols * stride_m, cols < N
    if stride_n is not None:
        ptrs, inside = ptrs + rows * stride_n, inside & (rows < N)
    return gl.load(ptrs, mask=inside, other=0)


@gluon.jit
def masked(
    s,
    tile,
    scale,
    rows,
    cols,
    limit,
    HIDDEN: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Replace scores of hidden keys by ``HIDDEN``: -inf for scores, 0 for P or dS.

    Every kind of mask is applied here and nowhere else. ``tile`` is the mask of these scores, or
    None. A boolean mask hides keys. An additive mask is added to ``scale`` times the scores with a
    single rounding; its most negative number hides a key, as -inf does (see ``biased``). With
    ``HIDES``, keys from ``limit`` on are hidden.
    """
    if tile is not None:
        if tile.dtype == gl.uint8:
            s = gl.where(tile != 0, s, HIDDEN)
        else:
            bias = tile.to(gl.float32)
            # One multiply-add, so that the backward recomputes exactly the scores whose maximum the
            # forward stored.
            s = gl.fma(s, scale, gl.where(bias < -1e38, HIDDEN, bias))  # (rows, cols)
    if HIDES:
        s = gl.where(cols < limit, s, HIDDEN)
    if CAUSAL:
        s = gl.where(cols <= rows, s, HIDDEN)
    return s


@gluon.jit
def wait_for_scores(
    s, PENDING: gl.constexpr, mask, rows, cols, N, limit, HIDES: gl.constexpr, CAUSAL: gl.constexpr
):
    """Wait for scores of wgmma and return them ``masked``; load the tile of a mask meanwhile.

    ``mask`` is the view of the mask, and the factor of the scores before it is added. The
    ``PENDING`` products that were started after the scores may stay in flight.
    """
    tile = None
    if mask[0].ptr is not None:
        view = mask[0]
        head = own_head(GluonView(view.ptr, view.stride_b, view.stride_h, view.stride_n, None))
        tile = load_mask(head, view.stride_n, view.stride_m, rows, cols, N)
    # wgmma groups complete in order: with at most PENDING left, the scores are done.
    s = warpgroup_mma_wait(PENDING, [s])
    return masked(
        s=s,
        tile=tile,
        scale=mask[1],
        rows=rows,
        cols=cols,
        limit=limit,
        HIDDEN=float("-inf"),
        HIDES=HIDES,
        CAUSAL=CAUSAL,
    )


@gluon.jit
def kept(seed_ptr, threshold, head, rows, cols):
    """Return which scores dropout keeps; ``head`` counts over all entries. See ``keep_tile``."""
    seed = gl.load(seed_ptr)
    k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
    zero = (rows * 0 + cols * 0).to(gl.uint32)
    c0, c1 = zero + cols.to(gl.uint32), zero + rows.to(gl.uint32)
    c2, c3 = zero + head.to(gl.uint32), zero
    # Philox 4x32 with ten rounds, as tl.philox computes it, and the same counter as ``keep_tile``:
    # (column, row, head, 0). The mask depends on no tile size.
    for _ in gl.static_range(10):
        high, low = gl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c2, c3 = gl.umulhi(c0, 0xD2511F53) ^ c3 ^ k1, c0 * 0xD2511F53
        c0, c1 = high ^ c1 ^ k0, low
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return (c0 >> 1).to(gl.int32) >= threshold


@gluon.jit
def dropped(dp, p, dropout, rows, cols):
    """Apply dropout to dP and to P; P is left without the factor 1 / (1 - p).

    ``dropout`` holds the pointer of the seed, the threshold, the head and that factor.
    """
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], rows, cols)
        dp, p = gl.where(keep, dp * dropout[3], 0.0), gl.where(keep, p, 0.0)
    return dp, p


@gluon.jit
def note_kept(words, keep):
    """Pack which of 64 x 64 scores are kept into shared memory: (2, rows) words of 32 keys."""
    bits = keep.to(gl.int32).reshape([64, 2, 32])  # (rows, 2, 32)
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, bits.type.layout))
    bits = bits << gl.arange(0, 32, INNER)[None, None, :]  # key i of a word is bit i
    words.store(gl.sum(bits, 2).permute((1, 0)))  # (2, rows)


@gluon.jit
def kept_before(words, LAYOUT: gl.constexpr):
    """Unpack ``note_kept`` as (keys, rows); a tenth of the cost of running Philox again."""
    APART: gl.constexpr = gl.zeros([64, 64], gl.int32, LAYOUT).reshape([2, 32, 64]).type.layout
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, APART))
    bits = words.load(gl.SliceLayout(1, APART))[:, None, :]  # (2, 1, 64): words, then rows
    bits = bits >> gl.arange(0, 32, INNER)[None, :, None]  # (2, 32, 64)
    return gl.convert_layout((bits & 1).reshape([64, 64]), LAYOUT) != 0


@gluon.jit
def pivot_of(row_max, factor, MASKED: gl.constexpr, SCALED: gl.constexpr = False):
    """Return the pivot that ``exponents_of`` subtracts; 0 for a row without a visible key so far.

    Without a mask every row sees the first key, so that every maximum is finite.
    """
    pivot = row_max
    if not SCALED:
        # An explicit fma rounds the product here: the compiler cannot fuse it into the subtraction.
        pivot = gl.fma(row_max, factor, 0.0)
    if MASKED:
        # -inf - (-inf) would be nan.
        pivot = gl.where(row_max == float("-inf"), 0.0, pivot)
    return pivot


@gluon.jit
def exponents_of(s, pivot, factor, SCALED: gl.constexpr):
    """Return the base-2 exponents of scores less ``pivot``: one multiply-add, unless SCALED.

    With an additive mask, scores may be so large that the rounded product of a maximum is off by
    many exponents. The difference is then taken first, and is exact at the maximum.
    """
    exponent = s * factor - pivot
    if SCALED:
        exponent = (s - pivot) * factor
    return exponent


@gluon.jit
def shift_of(row_max, pivot, factor, SCALED: gl.constexpr):
    """Return the change of exponents from one row maximum to the next; 0 if it stayed the same."""
    shift = gl.fma(row_max, factor, 0.0) - pivot
    if SCALED:
        shift = (row_max - pivot) * factor
    return shift


@gluon.jit
def divisor_of(row_sum, MASKED: gl.constexpr):
    """Return the divisor of rows: their sums, or 1 for a row without a visible key."""
    if MASKED:
        row_sum = gl.where(row_sum == 0, 1.0, row_sum)
    return row_sum


@gluon.jit
def put_row_statistics(
    max_log_sum_ptr,
    lse_ptr,
    rows,
    row_max,
    divisor,
    factor,
    unit,
    inside,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Store the maximum of each row and the log of its sum, for the backward; return the latter.

    For a row without a visible key, 0 and inf are stored, and 0 is returned. If ``max_log_sum_ptr``
    is None, the function stores the log-sum-exp, which is inf for such a row. ``unit`` scales the
    maxima.
    """
    unseeing = row_max == float("-inf")
    if MASKED:
        row_max = gl.where(unseeing, 0.0, row_max)
    log_sum = gl.log(divisor)
    if not SCALED:
        # The sum takes up the rounding error of the pivot, which the second fma gives exactly.
        log_sum -= gl.fma(row_max, factor, -gl.fma(row_max, factor, 0.0)) * LN_2
    stored = log_sum
    if MASKED:
        stored = gl.where(unseeing, float("inf"), log_sum)
    if max_log_sum_ptr is None:
        gl.store(lse_ptr + rows, row_max * unit + stored, mask=inside)
    else:
        both = gl.join(row_max, stored)  # (rows, 2): one store of 8 bytes
        LAYOUT: gl.constexpr = both.type.layout
        ptrs, inside = _pairs_of(max_log_sum_ptr, rows, inside, LAYOUT)
        gl.store(ptrs, both, mask=inside)
    return log_sum


@gluon.jit
def behind_dropout(dp, p, dropout, rows, cols):
    """Apply ``dropout`` (pointer of the seed, threshold, head, factor) to dP and to P."""
    weight = p
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], rows, cols)
        dp, weight = gl.where(keep, dp * dropout[3], 0.0), gl.where(keep, p * dropout[3], 0.0)
    return dp, weight


@gluon.jit
def masked_p(s, lse, factor, mask, rows, cols, N, SCALED: gl.constexpr):
    """Compute probabilities from products under ``mask``.

    ``mask`` is a pointer, the strides of rows and columns, a scale, and the pointer of dS.
    """
    tile = load_mask(mask[0], mask[1], mask[2], rows, cols, N)
    s = masked(
        s=s,
        tile=tile,
        scale=mask[3],
        rows=rows,
        cols=cols,
        limit=N,
        HIDDEN=float("-inf"),
        HIDES=False,
        CAUSAL=False,
    )
    return gl.exp2(exponents_of(s, lse, factor, SCALED))


@gluon.jit
def store_ds(ptr, ds, rows, cols, N):
    """Store dS of a head, if an additive mask requires its gradient."""
    if ptr is not None:
        gl.store(ptr + (rows * N + cols), ds, mask=(rows < N) & (cols < N))


# --- Steps of the backward on Hopper --------------------------------------------------------------


@gluon.jit
def start_products(left, dp_left, right, dp_right, zero):
    """Start the products left right^T and dp_left dp_right^T: scores and dP.

    The operands are queries and keys, or, for transposed scores, keys and queries.
    """
    # ``zero`` lends its layout alone: use_acc=False writes the accumulator without reading it.
    s = warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(dp_left, dp_right.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def rows_step(
    dq,
    q,
    do,
    k,
    v,
    zero,
    lse,
    delta,
    first,
    start,
    limit,
    factor,
    N,
    mask,
    dropout,
    ds_ptr,
    SCALED: gl.constexpr,
    LEFT: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Add the contribution of a tile of keys to dQ of a tile of rows."""
    SCORES: gl.constexpr = zero.type.layout
    s, dp = start_products(q, do, k, v, zero)  # both (64, 64): rows by keys
    keys = (start + gl.arange(0, 64, gl.SliceLayout(0, SCORES)))[None, :]
    queries = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    # dP is still in flight: P is computed under it.
    s = wait_for_scores(
        s=s, PENDING=1, mask=mask, rows=queries, cols=keys, N=N, limit=0, HIDES=False, CAUSAL=False
    )
    p = gl.exp2(exponents_of(s, lse, factor, SCALED))  # (64, 64)
    dp = warpgroup_mma_wait(0, [dp])
    if dropout[0] is not None:
        keep = kept(dropout[0], dropout[1], dropout[2], queries, keys)
        note_kept(dropout[4].index((first * dropout[5] + start) // 64), keep)
        dp = gl.where(keep, dp * dropout[3], 0.0)
    ds = p * (dp - delta)
    # Masking dS instead of P is enough here: dQ needs no other product of P.
    ds = masked(
        s=ds,
        tile=None,
        scale=None,
        rows=queries,
        cols=keys,
        limit=limit,
        HIDDEN=0.0,
        HIDES=HIDES,
        CAUSAL=CAUSAL,
    )
    store_ds(ds_ptr, ds, queries, keys, N)
    # dS goes from the accumulator to the left operand within registers.
    dq = warpgroup_mma(gl.convert_layout(ds.to(k.dtype), LEFT), k, dq, is_async=True)
    return warpgroup_mma_wait(0, [dq])


@gluon.jit
def keys_step(
    dk,
    dv,
    k,
    v,
    q,
    do,
    zero,
    lse,
    delta,
    first,
    start,
    factor,
    N,
    mask,
    dropout,
    SCALED: gl.constexpr,
    LEFT: gl.constexpr,
    CAUSAL: gl.constexpr,
    limit=None,
):
    """Add what a tile or tail of rows contributes to dK and dV of a tile; return dS (keys, rows).

    Keys from ``limit`` on are hidden. If ``limit`` is None, the caller hides them.
    """
    SCORES: gl.constexpr = zero.type.layout
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    s, dp = start_products(k, v, q, do, zero)  # both (64, rows): keys by rows
    keys = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    queries = (start + gl.arange(0, q.shape[0], COLS))[None, :]
    s = wait_for_scores(
        s=s, PENDING=1, mask=mask, rows=queries, cols=keys, N=N, limit=0, HIDES=False, CAUSAL=False
    )
    p = gl.exp2(exponents_of(s, lse.load(COLS)[None, :], factor, SCALED))
    p = masked(
        s=p,
        tile=None,
        scale=None,
        rows=queries,
        cols=keys,
        limit=limit,
        HIDDEN=0.0,
        HIDES=limit is not None,
        CAUSAL=CAUSAL,
    )
    weight = p
    if dropout[0] is not None:
        # The first pass kept the bits of whole tiles; those of a tail are drawn again.
        if q.shape[0] == 64:
            keep = kept_before(dropout[4].index((start * dropout[5] + first) // 64), SCORES)
        else:
            keep = kept(dropout[0], dropout[1], dropout[2], queries, keys)
        weight = gl.where(keep, p, 0.0)
    # dV needs only P, so its product starts while dP is still in flight.
    dv = warpgroup_mma(gl.convert_layout(weight.to(do.dtype), LEFT), do, dv, is_async=True)
    # dP is older than dV: with one group left, dP is done and dV still runs.
    dp = warpgroup_mma_wait(1, [dp])
    if dropout[0] is not None:
        dp = gl.where(keep, dp * dropout[3], 0.0)
    ds = p * (dp - delta.load(COLS)[None, :])
    dk = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), LEFT), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv, ds
