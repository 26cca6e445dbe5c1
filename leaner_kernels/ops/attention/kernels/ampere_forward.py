"""Gluon forward of softmax attention for short sequences on Ampere: a program owns a head.

Sizes: B batch, H query heads, N tokens, D head dimension, T columns of a tail (gluon_tiles.py). K
and V stay in shared memory. Tiles of query rows, with 16 or 32 rows per warp, pass over them one
after the other with the online softmax. A tail of up to 16 rows becomes columns of transposed
products, of which 8 cost an eighth of a tile. Each thread keeps its own partial sums of a row,
which are added at the end. The statistics of a head are complete in its program.
"""

from ..._gluon import barrier, commit_copies, gl, gluon, mma, wait_copies
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LOG2_E
from ..call import Call, Results, forward_arguments, tiles_and_tail
from .ampere_tiles import (
    copied,
    copy_rows,
    head_start,
    in_memory,
    load_columns,
    load_left,
    store_columns,
    store_product_rows,
)
from .gluon_tiles import (
    add_sums,
    divisor_of,
    exponents_of,
    joined,
    kept,
    load_mask,
    masked,
    no_sums,
    number_of_keys,
    own_sum,
    pivot_of,
    put_max_log_sum,
    reduce_sums,
    shift_of,
    store_statistics,
    sums_of_rows,
    visible_tiles,
)

# For calls with as many rows as keys and at least 264 heads over all batch entries. ``BLOCK`` is
# the rows of a tile, 16 or 32 per warp; ``STEP`` is the keys of one step.
_SHARED, _MASKED, _DROPPED = ("shared",), ("mask", "shared"), ("dropout", "shared")
_ALL = "dropout", *_MASKED
TILES = Tiles(
    "ampere_forward",
    rule(dim=16, tokens=256, STEP=64, BLOCK=64, num_warps=4),
    rule(
        dim=32, tokens=256, takes=_MASKED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=128
    ),
    rule(
        dim=32, tokens=256, takes=_DROPPED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(
        dim=32, tokens=224, takes=_MASKED, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(
        dim=32, tokens=224, takes=_DROPPED, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(dim=16, tokens=512, gpus=(86,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=512, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=16, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=1024, gpus=(80,), STEP=64, BLOCK=256, num_warps=16, maxnreg=128),
    rule(
        dim=64, tokens=224, takes=_SHARED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(dim=64, tokens=224, takes=_ALL, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=320, gpus=(80,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=64, tokens=640, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=224, takes=_ALL, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=256, gpus=(86,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=128, STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=128, tokens=224, gpus=(80,), STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=128, tokens=256, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
)
STATISTICS_TILES = Tiles(
    "ampere_forward_statistics",
    rule(dim=16, tokens=256, STEP=64, BLOCK=64, num_warps=4, maxnreg=128),
    rule(dim=16, tokens=512, STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=16, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=224, takes=_MASKED, STEP=64, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=32, tokens=224, takes=_DROPPED, STEP=64, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=32, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=224, takes=_MASKED, STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=224, takes=_DROPPED, STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=256, gpus=(86,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=640, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=224, gpus=(80,), STEP=16, BLOCK=64, num_warps=4, maxnreg=255),
)


@gluon.jit
def _step(
    acc, row_max, row_sum, centred, square, q, k, v, first, start, limit, factor, N, mask,
    dropout, HIDES: gl.constexpr, CAUSAL: gl.constexpr, STATS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Update the online softmax of a tile of rows with a few keys."""
    MMA: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OWN: gl.constexpr = row_sum.type.layout
    KEYS: gl.constexpr = k.shape[0]
    MASKED: gl.constexpr = mask[0] is not None
    zero = gl.zeros([q.shape[0], KEYS], gl.float32, MMA)
    s = mma(q, k.permute((1, 0)).load(RIGHT), zero)  # (rows, KEYS)
    cols = (start + gl.arange(0, KEYS, gl.SliceLayout(0, MMA)))[None, :]
    rows = (first + gl.arange(0, q.shape[0], gl.SliceLayout(1, MMA)))[:, None]
    tile = None
    if MASKED:
        tile = load_mask(mask[0], mask[1], mask[2], rows, cols, N)
    s = masked(s, tile, mask[3], rows, cols, limit, float("-inf"), HIDES, CAUSAL)
    new_max = gl.maximum(row_max, gl.max(s, 1))
    # Explicit fmas round these products here: the compiler cannot fuse them into the subtractions.
    pivot = gl.fma(new_max, factor, 0.0)
    shift = gl.fma(row_max, factor, 0.0) - pivot
    if MASKED:
        pivot = pivot_of(new_max, factor, MASKED, SCALED)
        shift = shift_of(row_max, pivot, factor, SCALED)
    # Exponents are in base 2, with log2 e in ``factor``: exp2 is one instruction.
    alpha = gl.exp2(shift)
    exponent = s * factor - pivot[:, None]  # one multiply-add
    if SCALED:
        # Beside large masks the difference comes first (``exponents_of``).
        exponent = (s - pivot[:, None]) * factor
    p = gl.exp2(exponent)
    # The sums so far were relative to the old maximum.
    acc = acc * alpha[:, None]
    weight = p
    if dropout[0] is not None:
        weight = gl.where(kept(dropout[0], dropout[1], dropout[2], rows, cols), p, 0.0)
    # P goes from the accumulator to the left operand within registers. Dropout affects this product
    # only: the sums below are of P itself.
    acc = mma(gl.convert_layout(weight.to(q.dtype), LEFT), v.load(RIGHT), acc)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OWN))[:, None]
    if STATS:
        shift = gl.convert_layout(shift, gl.SliceLayout(1, OWN))[:, None]
        # 0 * -inf would be nan: row_sum is 0 before the first key, and p is 0 where a key is
        # hidden.
        shift = gl.where(shift == float("-inf"), 0.0, shift)
        if HIDES or CAUSAL or MASKED:
            exponent = gl.where(exponent == float("-inf"), 0.0, exponent)
        # With a new maximum, every exponent moves by ``shift``.
        centred = alpha * (centred + row_sum * shift)
        centred += gl.convert_layout(own_sum(p * exponent), OWN)
        square = alpha * alpha * square + gl.convert_layout(own_sum(p * p), OWN)
    row_sum = row_sum * alpha + gl.convert_layout(own_sum(p), OWN)
    return acc, new_max, row_sum, centred, square


@gluon.jit
def _segment(
    acc, row_max, row_sum, centred, square, q, k, v, first, start, limit, factor, N, mask, dropout,
    STEP: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr, STATS: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """Update the online softmax with the keys of a buffer, STEP at a time."""
    STEPS: gl.constexpr = k.shape[0] // STEP
    # Fewer keys at a time need fewer registers for scores.
    for n in gl.static_range(STEPS):
        acc, row_max, row_sum, centred, square = _step(
            acc, row_max, row_sum, centred, square, q, k.slice(n * STEP, STEP),
            v.slice(n * STEP, STEP), first, start + n * STEP, limit, factor, N, mask, dropout,
            HIDES, CAUSAL, STATS, SCALED,
        )  # fmt: skip
    return acc, row_max, row_sum, centred, square


@gluon.jit
def _turned_scores(k, q, first, start, limit, N, mask, HIDES: gl.constexpr, CAUSAL: gl.constexpr):
    """Return transposed scores (keys, rows) of the tail's rows, -inf where hidden."""
    MMA: gl.constexpr = k.type.layout.parent
    s = mma(k, q, gl.zeros([64, q.shape[1]], gl.float32, MMA))
    keys = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
    rows = (first + gl.arange(0, q.shape[1], gl.SliceLayout(0, MMA)))[None, :]
    tile = None
    if mask[0] is not None:
        tile = load_mask(mask[0], mask[1], mask[2], rows, keys, N)
    return masked(s, tile, mask[3], rows, keys, limit, float("-inf"), HIDES, CAUSAL)


@gluon.jit
def _turned_step(
    acc, total, centred, square, s, v, turn, pivot, factor, first, start, dropout,
    SCALED: gl.constexpr, STATS: gl.constexpr,
):  # fmt: skip
    """Add the keys of ``s`` to the output of the tail's rows; P passes through shared memory."""
    MMA: gl.constexpr = acc.type.layout
    KEYS: gl.constexpr = v.shape[0]
    exponent = exponents_of(s, pivot[None, :], factor, SCALED)
    p = gl.exp2(exponent)
    total += p
    if STATS:
        centred += p * gl.where(exponent == float("-inf"), 0.0, exponent)
        square += p * p
    if dropout[0] is not None:
        keys = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
        rows = (first + gl.arange(0, s.shape[1], gl.SliceLayout(0, MMA)))[None, :]
        p = gl.where(kept(dropout[0], dropout[1], dropout[2], rows, keys), p, 0.0)
    turn.store(p.to(v.dtype))
    # All warps have stored their keys of P^T, which each reads as the right operand. The caller
    # alternates two buffers, so that one barrier is enough.
    barrier()
    left = v.permute((1, 0)).load(gl.DotOperandLayout(0, MMA, 2))
    acc = mma(left, turn.slice(0, KEYS).load(gl.DotOperandLayout(1, MMA, 2)), acc)
    return acc, total, centred, square


@gluon.jit(do_not_specialize=["H", "N", "full", "threshold"])
def _ampere_fwd_kernel(
    q_view, k_view, v_view, mask_view, lengths_ptr, seed_ptr, out_view, lse_ptr, max_log_sum_ptr,
    stats_ptr, H, N, full, scale, keep_scale, threshold,
    D: gl.constexpr, FULL: gl.constexpr, T: gl.constexpr, TAIL_KEYS: gl.constexpr,
    RAGGED: gl.constexpr, STEP: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
    CAUSAL: gl.constexpr, SCALED: gl.constexpr, GROUP: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COPIED: gl.constexpr = copied(D, WARPS, ORDERED)
    SHARED: gl.constexpr = in_memory(D)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    STATS: gl.constexpr = stats_ptr is not None
    TAIL: gl.constexpr = FULL * 64
    h_64, b_64 = gl.program_id(0).to(gl.int64), gl.program_id(1).to(gl.int64)
    q_ptr = head_start(q_view, b_64, h_64)
    kv_64 = (gl.program_id(0) // GROUP).to(gl.int64)
    k_ptr = head_start(k_view, b_64, kv_64)
    v_ptr = head_start(v_view, b_64, kv_64)
    out_ptr = head_start(out_view, b_64, h_64)
    head = b_64 * H + h_64
    limit = number_of_keys(lengths_ptr, N)
    MASKED: gl.constexpr = mask_view.ptr is not None
    mask = mask_view.ptr, mask_view.stride_n, mask_view.stride_m, scale
    if MASKED:
        mask_ptr = head_start(mask_view, b_64, h_64)
        mask = mask_ptr, mask_view.stride_n, mask_view.stride_m, scale
    dropout = seed_ptr, threshold, gl.program_id(1) * H + gl.program_id(0)
    # An additive mask is added to scaled scores. All others are scaled in their exponents.
    unit = 1.0 if SCALED else scale
    gain = 1.0 if seed_ptr is None else keep_scale
    factor = unit * LOG2_E
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)  # whole tiles of the head
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    for n in gl.static_range(FULL):
        copy_rows(ks.index(n), k_ptr, k_view.stride_n, n * 64, limit, COPIED, ORDERED)
        copy_rows(vs.index(n), v_ptr, v_view.stride_n, n * 64, limit, COPIED, ORDERED)
    if T > 0:
        k_tail = gl.allocate_shared_memory(DTYPE, [TAIL_KEYS, D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [TAIL_KEYS, D], SHARED)
        copy_rows(k_tail, k_ptr, k_view.stride_n, TAIL, limit, COPIED, ORDERED)
        copy_rows(v_tail, v_ptr, v_view.stride_n, TAIL, limit, COPIED, ORDERED)
    commit_copies()
    # Wait for K and V of all threads. The loops over tiles only read them, without barriers.
    wait_copies(0)
    barrier()
    # Partial sums of rows, one for each of a row's four threads.
    OWN: gl.constexpr = own_sum(gl.zeros([BLOCK, 64], gl.float32, MMA)).type.layout
    none = gl.zeros([BLOCK, 4], gl.float32, OWN)
    if STATS:
        sums = no_sums(BLOCK, ROWS)
    # With a tail, this loop ends at the last whole tile; without one, at the last row.
    end = gl.minimum(N, full * 64)
    for first in range(0, end, BLOCK):
        # straight from global memory to registers
        q = load_left(q_ptr, q_view.stride_n, first, end, BLOCK, D, LEFT, WARPS, ORDERED)
        acc = gl.zeros([BLOCK, D], gl.float32, MMA)
        row_max = gl.full([BLOCK], float("-inf"), gl.float32, ROWS)
        # Statistics of P before dropout, relative to the running maximum.
        row_sum, centred, square = none, none, none
        # Tiles of keys up to ``seen`` need no mask: the hot loop compiles without comparisons.
        seen, last = visible_tiles(full, limit, first, BLOCK, HIDES, CAUSAL)
        for i in range(seen):
            acc, row_max, row_sum, centred, square = _segment(
                acc, row_max, row_sum, centred, square, q, ks.index(i), vs.index(i), first, i * 64,
                limit, factor, N, mask, dropout, STEP, False, False, STATS, SCALED,
            )  # fmt: skip
        if HIDES or CAUSAL:
            for i in range(seen, last):
                acc, row_max, row_sum, centred, square = _segment(
                    acc, row_max, row_sum, centred, square, q, ks.index(i), vs.index(i), first,
                    i * 64, limit, factor, N, mask, dropout, STEP, HIDES, CAUSAL, STATS, SCALED,
                )  # fmt: skip
        # Under a causal mask no row of a whole tile sees the keys of the tail, which come later.
        if T > 0 and not CAUSAL:
            acc, row_max, row_sum, centred, square = _segment(
                acc, row_max, row_sum, centred, square, q, k_tail, v_tail, first, full * 64, limit,
                factor, N, mask, dropout, TAIL_KEYS, True, False, STATS, SCALED,
            )  # fmt: skip
        # Only now do the four threads of a row add their partial sums.
        divisor = divisor_of(joined(row_sum, ROWS), MASKED)
        acc = acc * (gain / divisor)[:, None]
        store_product_rows(out_ptr, out_view.stride_n, acc, first, end, WARPS, ORDERED)
        rows = first + gl.arange(0, BLOCK, ROWS)
        inside = rows < end
        log_sum = put_max_log_sum(
            max_log_sum_ptr, head * N + rows, row_max, divisor, factor, inside, MASKED, SCALED
        )
        if STATS:
            gl.store(lse_ptr + head * N + rows, row_max * unit + log_sum, mask=inside)
            rows_sums = sums_of_rows(
                row_max, divisor, joined(centred, ROWS), joined(square, ROWS),
                gl.sum(acc * acc, 1), inside,
            )  # fmt: skip
            sums = add_sums(sums, rows_sums)
    if STATS:
        sums = reduce_sums(sums)
    if T > 0:
        # The tail's rows as columns: S^T = K Q^T (64 keys, T) of all tiles is held in registers, so
        # that the maxima are known before the first exponential.
        q_tail = load_columns(  # (D, T), the right operand
            q_ptr, q_view.stride_n, TAIL, N, T, D, gl.DotOperandLayout(1, MMA, 2), ORDERED
        )
        scores = ()
        top_t = gl.full([64, T], float("-inf"), gl.float32, MMA)
        for i in gl.static_range(FULL):
            s_t = _turned_scores(
                ks.index(i).load(LEFT), q_tail, TAIL, i * 64, limit, N, mask, HIDES, False
            )
            top_t = gl.maximum(top_t, s_t)
            scores = scores + (s_t,)  # noqa: RUF005
        # The tail's own keys, zeros past the last: a left operand has 64 rows, the buffer fewer.
        k_left = load_left(k_ptr, k_view.stride_n, TAIL, limit, 64, D, LEFT, WARPS, ORDERED)
        s_t = _turned_scores(k_left, q_tail, TAIL, TAIL, limit, N, mask, True, CAUSAL)
        scores = scores + (s_t,)  # noqa: RUF005
        max_t = gl.max(gl.maximum(top_t, s_t), 0)  # (T,): this reduction crosses warps
        pivot_t = pivot_of(max_t, factor, MASKED, SCALED)
        turns = gl.allocate_shared_memory(  # P^T of two tiles, used alternately
            DTYPE, [2, 64, T], gl.SwizzledSharedLayout(8, 64 // T, T // 8, [1, 0])
        )
        acc_t = gl.zeros([D, T], gl.float32, MMA)  # out^T = V^T P^T
        zero_t = gl.zeros([64, T], gl.float32, MMA)
        # Sums within a thread, (64, T): they are added over the keys at the end.
        total_t, centred_t, square_t = zero_t, zero_t, zero_t
        for i in gl.static_range(FULL):
            acc_t, total_t, centred_t, square_t = _turned_step(
                acc_t, total_t, centred_t, square_t, scores[i], vs.index(i), turns.index(i % 2),
                pivot_t, factor, TAIL, i * 64, dropout, SCALED, STATS,
            )  # fmt: skip
        acc_t, total_t, centred_t, square_t = _turned_step(
            acc_t, total_t, centred_t, square_t, scores[FULL], v_tail, turns.index(FULL % 2),
            pivot_t, factor, TAIL, TAIL, dropout, SCALED, STATS,
        )  # fmt: skip
        divisor_t = divisor_of(gl.sum(total_t, 0), MASKED)
        acc_t = acc_t * (gain / divisor_t)[None, :]  # (D, T)
        store_columns(out_ptr, out_view.stride_n, acc_t, TAIL, N, ORDERED)
        rows_t = TAIL + gl.arange(0, T, gl.SliceLayout(0, MMA))
        inside_t = rows_t < N
        log_sum_t = put_max_log_sum(
            max_log_sum_ptr, head * N + rows_t, max_t, divisor_t, factor, inside_t, MASKED, SCALED
        )
        if STATS:
            gl.store(lse_ptr + head * N + rows_t, max_t * unit + log_sum_t, mask=inside_t)
            rows_sums = sums_of_rows(
                max_t, divisor_t, gl.sum(centred_t, 0), gl.sum(square_t, 0),
                gl.sum(acc_t * acc_t, 0), inside_t,
            )  # fmt: skip
            sums = add_sums(sums, reduce_sums(rows_sums))
    if STATS:
        store_statistics(stats_ptr, sums, head, H * gl.num_programs(1), N, unit, None)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2).

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    batch, heads, tokens, _ = call.query.shape
    # A thread keeps T / 2 scores of each tile: 64 registers are affordable.
    tails = tuple(size for size in (8, 16) if size * (tokens // 64 + 1) <= 128)
    full, tail = tiles_and_tail(tokens, tails)
    arguments = forward_arguments(_ampere_fwd_kernel, call, results)
    arguments |= dict(
        **tile.arguments,
        full=full,
        FULL=full,
        T=tail,
        TAIL_KEYS=max(16, tail),
        RAGGED=tail == 0 and tokens % 64 != 0,
        WARPS=tile.options["num_warps"],
        # Predicted: up to 256 tokens, 4-byte copies cost more than wide loads and stores save.
        ORDERED=full > 4 and arguments["D"] in (32, 64),
    )
    return Launch(_ampere_fwd_kernel, (heads, batch), arguments)
