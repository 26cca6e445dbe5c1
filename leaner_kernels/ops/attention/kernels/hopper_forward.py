"""Gluon forward of softmax attention for short sequences on Hopper: a program owns a head.

Sizes: B batch, H query heads, N tokens, D head dimension, T tokens of a tail (gluon_tiles.py). K
and V stay in shared memory; one tile of query rows after the other passes over them with the online
softmax, while the next is on its way; the tail's rows stand in columns. Sums of a row are kept by
the thread, and joined at the end. The statistics of a head are complete in its program.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The body of the kernel is Gluon: layouts are constants, branches are decided early.

from torch import Tensor

from ..._gluon import (
    barrier,
    commit_copies,
    fence_async_shared,
    gl,
    gluon,
    wait_copies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LN_2, LOG2_E
from ..call import Call
from .gluon_tiles import (
    arguments_of,
    cut_for_hopper,
    divisor_of,
    exponents_of,
    fetch_rows,
    fetch_tiles,
    joined,
    kept,
    number_of_keys,
    own_products,
    own_sum,
    pivot_of,
    put_columns,
    put_own,
    put_rows,
    shift_of,
    store_max_log_sum,
    store_statistics,
    visible_tiles,
    wait_for_scores,
)

# For as many rows as keys and at least 264 heads of all entries. ``PAIRED`` passes two tiles of
# rows over the keys together; without a tail in columns, mask or dropout.
_SHARED = ("shared",)
_ALL = "dropout", "mask", "shared"
TILES = Tiles(
    "hopper_forward",
    rule(dim=16, tokens=1024, takes=_ALL),
    rule(dim=32, tokens=448, takes=_SHARED),
    rule(dim=32, tokens=512, takes=_SHARED, PAIRED=True, maxnreg=168),
    rule(dim=32, tokens=768, takes=_SHARED, PAIRED=True, maxnreg=255),
    rule(dim=32, tokens=512, takes=_ALL),
    rule(dim=64, tokens=384, takes=("padded_dim", "shared")),
    rule(dim=64, tokens=208, takes=("dropout", "padded_dim", "shared"), maxnreg=168),
    rule(dim=64, tokens=384, takes=("dropout", "padded_dim", "shared"), maxnreg=255),
    rule(dim=64, tokens=384, takes=("padded_dim", *_ALL)),
    rule(dim=128, tokens=320, takes=("padded_dim", "shared")),
    rule(dim=128, tokens=320, takes=("dropout", "padded_dim", "shared"), maxnreg=255),
    rule(dim=128, tokens=320, takes=("mask", "padded_dim", "shared"), maxnreg=255),
    num_warps=4,
)
STATISTICS_TILES = Tiles(
    "hopper_forward_statistics",
    rule(dim=16, tokens=1024, takes=_ALL),
    rule(dim=32, tokens=512, takes=_ALL),
    rule(dim=32, tokens=768, takes=_SHARED),
    rule(dim=64, tokens=384, takes=("padded_dim", "shared")),
    rule(dim=64, tokens=384, takes=("padded_dim", *_ALL), maxnreg=255),
    rule(dim=128, tokens=320, takes=("padded_dim", "shared")),
    num_warps=4,
)


@gluon.jit
def _start_scores(x, y, zero):
    """Start x y^T; ``x`` may be in registers."""
    if not isinstance(x, gl.shared_memory_descriptor):
        x = gl.convert_layout(x, gl.DotOperandLayout(0, zero.type.layout, 2))
    return warpgroup_mma(x, y.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_step(
    state, s, y, first, start, limit, factor, dropout, MASK: gl.constexpr,
    HIDES: gl.constexpr, CAUSAL: gl.constexpr, STATS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Let a tile of rows see the keys of scores ``s``; the product with V is then under way."""
    acc, row_max, row_sum, centred, square = state
    SCORES: gl.constexpr = s.type.layout
    MASKED: gl.constexpr = MASK != "none"
    SCALED: gl.constexpr = MASK == "additive"
    OUT: gl.constexpr = acc.type.layout
    OWN: gl.constexpr = row_sum.type.layout
    cols = gl.arange(0, y.shape[0], gl.SliceLayout(0, SCORES))
    # Bits 1 and 2 of a column are the lane's; the rest is a constant of the comparison.
    known, lanes = (cols & ~6)[None, :], (cols & 6)[None, :]
    if HIDES:
        s = gl.where(known < limit - start - lanes, s, float("-inf"))
    if CAUSAL:
        rows = gl.arange(0, 64, gl.SliceLayout(1, SCORES))[:, None] + (first - start)
        s = gl.where(known <= rows - lanes, s, float("-inf"))
    new_max = gl.maximum(row_max, gl.convert_layout(gl.max(s, 1), ROWS))
    pivot = pivot_of(new_max, factor, MASKED, SCALED)
    shift = shift_of(row_max, pivot, factor, SCALED)
    alpha = gl.exp2(shift)
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, SCORES))[:, None]
    exponent = exponents_of(s, pivot, factor, SCALED)
    p = gl.exp2(exponent)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weight = p
    if dropout[0] is not None:
        rows = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
        keep = kept(dropout[0], dropout[1], dropout[2], rows, start + cols[None, :])
        weight = gl.where(keep, p, 0.0)
    left = gl.convert_layout(weight.to(y.dtype), gl.DotOperandLayout(0, OUT, 2))
    acc = warpgroup_mma(left, y, acc, is_async=True)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OWN))[:, None]
    if STATS:
        shift = gl.convert_layout(shift, gl.SliceLayout(1, OWN))[:, None]
        shift = gl.maximum(shift, -1e30)
        if HIDES or CAUSAL or MASKED:
            exponent = gl.maximum(exponent, -1e30)
        centred = alpha * (centred + row_sum * shift)
        centred = own_products(centred, p, exponent)
        square = own_products(alpha * alpha * square, p, p)
    row_sum = row_sum * alpha + gl.convert_layout(own_sum(p), OWN)
    return acc, new_max, row_sum, centred, square


@gluon.jit
def _step(
    state, q, x, y, zero, first, start, limit, factor, N, mask, dropout, MASK: gl.constexpr,
    HIDES: gl.constexpr, CAUSAL: gl.constexpr, STATS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Let a tile of rows see a tile, or a tail, of keys."""
    SCORES: gl.constexpr = zero.type.layout
    s = _start_scores(q, x, zero)
    cols = (start + gl.arange(0, x.shape[0], gl.SliceLayout(0, SCORES)))[None, :]
    rows = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    s = wait_for_scores(s, 0, mask, rows, cols, N)
    state = _start_step(
        state, s, y, first, start, limit, factor, dropout, MASK, HIDES, CAUSAL, STATS, ROWS
    )
    return warpgroup_mma_wait(0, [state[0]]), state[1], state[2], state[3], state[4]


@gluon.jit
def _paired_step(
    state, state_b, q, q_b, x, y, zero, factor, STATS: gl.constexpr, ROWS: gl.constexpr
):
    """Let two tiles of rows see a tile of keys whole, products of one under the other's softmax."""
    s, s_b = _start_scores(q, x, zero), _start_scores(q_b, x, zero)
    s = warpgroup_mma_wait(1, [s])
    state = _start_step(state, s, y, 0, 0, 0, factor, (None,), "none", False, False, STATS, ROWS)
    s_b = warpgroup_mma_wait(1, [s_b])
    state_b = _start_step(
        state_b, s_b, y, 0, 0, 0, factor, (None,), "none", False, False, STATS, ROWS
    )
    acc, acc_b = warpgroup_mma_wait(0, [state[0], state_b[0]])
    state = acc, state[1], state[2], state[3], state[4]
    return state, (acc_b, state_b[1], state_b[2], state_b[3], state_b[4])


@gluon.jit
def _turned_scores(
    s, PENDING: gl.constexpr, first, start, limit, N, mask, T: gl.constexpr,
    SCORES: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return (keys, rows) scores of the tail's rows, -inf where hidden.

    ``PENDING`` products that were started since are still under way.
    """
    keys = (start + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    rows = (first + gl.arange(0, T, gl.SliceLayout(0, SCORES)))[None, :]
    s = wait_for_scores(s, PENDING, mask, rows, keys, N)
    if HIDES:
        s = gl.where(keys < limit, s, float("-inf"))
    if CAUSAL:
        s = gl.where(keys <= rows, s, float("-inf"))
    return s


@gluon.jit
def _turned_step(
    acc, total, centred, square, s, y, turn, pivot, factor, first, start, dropout,
    SCALED: gl.constexpr, STATS: gl.constexpr,
):  # fmt: skip
    """Let the tail's rows see the keys of ``s``, by way of shared memory."""
    exponent = exponents_of(s, pivot[None, :], factor, SCALED)
    p = gl.exp2(exponent)
    total += p
    if STATS:
        centred += p * gl.maximum(exponent, -1e30)
        square += p * p
    if dropout[0] is not None:
        SCORES: gl.constexpr = s.type.layout
        keys = (start + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
        rows = (first + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES)))[None, :]
        p = gl.where(kept(dropout[0], dropout[1], dropout[2], rows, keys), p, 0.0)
    turn.store(p.to(y.dtype))
    fence_async_shared()
    barrier()
    KEYS: gl.constexpr = y.shape[0]
    acc = warpgroup_mma(y.permute((1, 0)), turn.slice(0, KEYS), acc, is_async=True)
    return warpgroup_mma_wait(0, [acc]), total, centred, square


@gluon.jit(do_not_specialize=["H", "N", "full", "threshold"])
def _hopper_fwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    max_logit_ptr,
    entropy_ptr,
    prob_norm_ptr,
    head_norm_ptr,
    H,
    N,
    full,
    scale,
    mask_view,
    seed_ptr,
    keep_scale,
    threshold,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    RAGGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
    GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    LANES: gl.constexpr = BLOCK_D // 8
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if BLOCK_D > 64 else 2 * BLOCK_D, 16, 2)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    STATS: gl.constexpr = max_logit_ptr is not None
    # Heads of 32 are stored by the threads that hold them: two barriers less than by way of ``b``.
    DIRECT: gl.constexpr = BLOCK_D == 32
    AT_ONCE: gl.constexpr = 2 if PAIRED else 1
    # With a scale of its own, where one is added: the scores are then scaled from the start.
    mask = mask_view, scale
    MASKED: gl.constexpr = mask_view.ptr is not None
    SCALED: gl.constexpr = MASK == "additive"
    unit = 1.0 if SCALED else scale
    gain = 1.0 if seed_ptr is None else keep_scale
    xs = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    ys = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    a = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
    if PAIRED:
        a_b = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
    if not DIRECT:
        b = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    limit = number_of_keys(lengths_ptr, N)
    factor = unit * LOG2_E
    fetch_rows(a, q_view, 0, N, D, False, BLOCKED)
    if PAIRED:
        fetch_rows(a_b, q_view, 64, N, D, True, BLOCKED)
    fetch_tiles(xs, k_view, limit, D, HIDES, BLOCKED, GROUP)
    fetch_tiles(ys, v_view, limit, D, HIDES, BLOCKED, GROUP)
    if T > 0:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
        x_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        y_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        zero_t = gl.zeros([64, T], gl.float32, TAIL)
        fetch_rows(x_tail, k_view, FULL * 64, limit, D, True, BLOCKED, GROUP)
        fetch_rows(y_tail, v_view, FULL * 64, limit, D, True, BLOCKED, GROUP)
        TURNED: gl.constexpr = gl.NVMMASharedLayout(2 * T, 16, 2)
        COLS: gl.constexpr = gl.SliceLayout(0, TAIL)
        turns = gl.allocate_shared_memory(DTYPE, [2, 64, T], TURNED)
        q_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        fetch_rows(q_tail, q_view, FULL * 64, N, D, True, BLOCKED)
    commit_copies()
    head = gl.program_id(1) * H + gl.program_id(0)
    dropout = seed_ptr, threshold, head
    row_stats = head.to(gl.int64) * N
    wait_copies(0)
    fence_async_shared()
    barrier()
    OWN: gl.constexpr = own_sum(zero).type.layout
    none = gl.zeros([64, 4], gl.float32, OWN)
    if STATS:
        top = gl.full([64], float("-inf"), gl.float32, ROWS)
        entropy = gl.zeros([64], gl.float32, ROWS)
        prob_square = gl.zeros([64], gl.float32, ROWS)
        head_square = gl.zeros([64], gl.float32, ROWS)
    for tile in range(0, full, AT_ONCE):
        first = tile * 64
        q = a.load(gl.DotOperandLayout(0, OUT, 2))
        if PAIRED:
            q_b = a_b.load(gl.DotOperandLayout(0, OUT, 2))
        barrier()
        if tile + AT_ONCE < full:
            fetch_rows(a, q_view, first + AT_ONCE * 64, N, D, RAGGED, BLOCKED)
            if PAIRED:
                fetch_rows(a_b, q_view, first + 192, N, D, True, BLOCKED)
        elif T > 0:
            fetch_rows(a, k_view, first + 64, limit, D, True, BLOCKED, GROUP)
        commit_copies()
        acc = gl.zeros([64, BLOCK_D], gl.float32, OUT)
        state = acc, gl.full([64], float("-inf"), gl.float32, ROWS), none, none, none
        seen, last = visible_tiles(full, limit, first, 64, HIDES, CAUSAL)
        if PAIRED:
            state_b = state
            second = first + 64
            seen_b, last_b = visible_tiles(full, limit, second, 64, HIDES, CAUSAL)
            for i in range(seen):
                state, state_b = _paired_step(
                    state, state_b, q, q_b, xs.index(i), ys.index(i), zero, factor, STATS, ROWS
                )
            for i in range(seen, seen_b):
                state_b = _step(
                    state_b, q_b, xs.index(i), ys.index(i), zero, second, i * 64, limit, factor,
                    N, mask, dropout, MASK, False, False, STATS, ROWS,
                )  # fmt: skip
            if HIDES or CAUSAL:
                for i in range(seen_b, last_b):
                    state_b = _step(
                        state_b, q_b, xs.index(i), ys.index(i), zero, second, i * 64, limit,
                        factor, N, mask, dropout, MASK, HIDES, CAUSAL, STATS, ROWS,
                    )  # fmt: skip
        else:
            for i in range(seen):
                state = _step(
                    state, q, xs.index(i), ys.index(i), zero, first, i * 64, limit, factor, N,
                    mask, dropout, MASK, False, False, STATS, ROWS,
                )  # fmt: skip
        if HIDES or CAUSAL:
            for i in range(seen, last):
                state = _step(
                    state, q, xs.index(i), ys.index(i), zero, first, i * 64, limit, factor, N,
                    mask, dropout, MASK, HIDES, CAUSAL, STATS, ROWS,
                )  # fmt: skip
        if T > 0 and not CAUSAL:
            state = _step(
                state, q, x_tail, y_tail, zero_t, first, full * 64, limit, factor, N, mask,
                dropout, MASK, True, False, STATS, ROWS,
            )  # fmt: skip
        states = (state,)
        if PAIRED:
            states = (state, state_b)
        for n in gl.static_range(AT_ONCE):
            acc, row_max, row_sum, centred, square = states[n]
            start = first + n * 64
            divisor = divisor_of(joined(row_sum, ROWS), MASKED)
            acc = acc * (gain / gl.convert_layout(divisor, gl.SliceLayout(1, OUT)))[:, None]
            if DIRECT:
                put_own(out_view, acc, start, N, D, RAGGED or n > 0, OUT)
            else:
                put_rows(out_view, acc, b, start, N, D, RAGGED or n > 0, BLOCKED)
            rows = start + gl.arange(0, 64, ROWS)
            inside = rows < N
            log_sum = store_max_log_sum(
                max_log_sum_ptr, row_stats + rows, row_max, divisor, factor, inside, MASKED, SCALED
            )
            if STATS:
                gl.store(lse_ptr + row_stats + rows, row_max * unit + log_sum, mask=inside)
                top = gl.maximum(top, gl.where(inside, row_max, float("-inf")))
                row_entropy = gl.log(divisor) - LN_2 * joined(centred, ROWS) / divisor
                entropy += gl.where(inside, row_entropy, 0.0)
                prob_square += gl.where(inside, joined(square, ROWS) / (divisor * divisor), 0.0)
                norm = gl.convert_layout(gl.sum(acc * acc, 1), ROWS)
                head_square += gl.where(inside, norm, 0.0)
        wait_copies(0)
        fence_async_shared()
        barrier()
    if STATS:
        largest, total = gl.max(top, 0), gl.sum(entropy, 0)
        prob_total, head_total = gl.sum(prob_square, 0), gl.sum(head_square, 0)
    if T > 0:
        # The tail's rows, in columns: their maxima, then the rest.
        started, scores = (), ()
        for i in gl.static_range(FULL):
            started = started + (_start_scores(xs.index(i), q_tail, zero_t),)  # noqa: RUF005
        started = started + (_start_scores(a, q_tail, zero_t),)  # noqa: RUF005
        top_t = gl.full([64, T], float("-inf"), gl.float32, TAIL)
        for i in gl.static_range(FULL + 1):
            s_t = _turned_scores(
                started[i], FULL - i, full * 64, i * 64, limit, N, mask, T, TAIL,
                HIDES or i == FULL, CAUSAL and i == FULL,
            )  # fmt: skip
            top_t = gl.maximum(top_t, s_t)
            scores = scores + (s_t,)  # noqa: RUF005
        max_t = gl.max(top_t, 0)
        pivot_t = pivot_of(max_t, factor, MASKED, SCALED)
        acc_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        total_t, centred_t, square_t = zero_t, zero_t, zero_t
        for i in gl.static_range(FULL):
            acc_t, total_t, centred_t, square_t = _turned_step(
                acc_t, total_t, centred_t, square_t, scores[i], ys.index(i), turns.index(i % 2),
                pivot_t, factor, full * 64, i * 64, dropout, SCALED, STATS,
            )  # fmt: skip
        acc_t, total_t, centred_t, square_t = _turned_step(
            acc_t, total_t, centred_t, square_t, scores[FULL], y_tail, turns.index(FULL % 2),
            pivot_t, factor, full * 64, full * 64, dropout, SCALED, STATS,
        )  # fmt: skip
        divisor_t = divisor_of(gl.sum(total_t, 0), MASKED)
        acc_t = acc_t * (gain / divisor_t)[None, :]
        put_columns(out_view, acc_t, full * 64, N, D, TAIL)
        rows_t = full * 64 + gl.arange(0, T, COLS)
        inside_t = rows_t < N
        log_sum_t = store_max_log_sum(
            max_log_sum_ptr, row_stats + rows_t, max_t, divisor_t, factor, inside_t, MASKED, SCALED
        )
        if STATS:
            gl.store(lse_ptr + row_stats + rows_t, max_t * unit + log_sum_t, mask=inside_t)
            largest = gl.maximum(largest, gl.max(gl.where(inside_t, max_t, float("-inf")), 0))
            entropy_t = gl.log(divisor_t) - LN_2 * gl.sum(centred_t, 0) / divisor_t
            total += gl.sum(gl.where(inside_t, entropy_t, 0.0), 0)
            square_t = gl.sum(square_t, 0) / (divisor_t * divisor_t)
            prob_total += gl.sum(gl.where(inside_t, square_t, 0.0), 0)
            head_total += gl.sum(gl.where(inside_t, gl.sum(acc_t * acc_t, 0), 0.0), 0)
    if STATS:
        store_statistics(
            max_logit_ptr, entropy_ptr, prob_norm_ptr, head_norm_ptr, head, largest, total,
            prob_total, head_total, unit, N,
        )  # fmt: skip


def prepare(
    tile: Tile,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    stats: list[Tensor] | None,
) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2).

    With ``stats``, also lse (B, H, N) and the four (B, H).
    """
    batch, heads, tokens, _ = call.query.shape
    arguments = arguments_of(_hopper_fwd_kernel, call, {"out": out})
    full, tail = cut_for_hopper(tokens, arguments["BLOCK_D"])
    paired = tile.constexprs.get("PAIRED", False)
    names = "lse_ptr", "max_logit_ptr", "entropy_ptr", "prob_norm_ptr", "head_norm_ptr"
    arguments |= dict(
        **dict(zip(names, stats or (None,) * 5, strict=True)),
        **tile.options,
        PAIRED=paired and tail == 0 and call.attn_mask is None and call.seed is None,
        max_log_sum_ptr=max_log_sum,
        full=full,
        FULL=full,
        T=tail,
        RAGGED=tail == 0 and tokens % 64 != 0,
    )
    return Launch(_hopper_fwd_kernel, (heads, batch), arguments)
