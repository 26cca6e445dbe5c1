"""Gluon kernels of softmax attention for short sequences on Hopper: a program owns a head.

Sizes: B batch, H query heads, N tokens, D head dimension, T columns of a tail (gluon_tiles.py).

Forward: K and V stay in shared memory. Tiles of query rows pass over them one after the other with
the online softmax, while the next tile is being copied. The rows of the tail are the columns of
transposed products, and see all keys at once. Each thread keeps its own partial sums of a row,
which are added at the end. The statistics of a head are complete in its program.

Backward: a launch makes two passes, each with two operands resident in shared memory. The first
keeps K and V: tiles of rows give dQ, and their contributions to dK and dV of the tail are summed on
the way, transposed (D, T). The second keeps Q and dO: tiles of keys give dK and dV. P and dS go
from accumulators to the left operand of the next product within registers. Every element is written
once, without atomics: the result is bitwise deterministic.
"""

import triton
from torch import Tensor

from ... import _tiles
from ..._gluon import (
    barrier,
    commit_copies,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    wait_copies,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LOG2_E
from ...route import Results
from ..call import (
    Call,
    Gradients,
    backward_arguments,
    forward_arguments,
    hopper_tails,
    tiles_and_tail,
)
from . import gluon_tiles as common
from .gluon_tiles import Dropout, Mask, RowState, Scoring
from .scores import FILL_BLOCK, SPARE_PROGRAMS, fill_gradients, find_sequence

# For calls with as many rows as keys and at least 264 heads over all batch entries. ``PAIRED``
# passes two tiles of rows over the keys together, in calls without a tail, a mask or dropout.
# ``PARTIAL`` keeps the sums of the statistics within threads until the end of a head.
_SHARED = ("shared",)
_ALL = "dropout", "mask", "shared"
FORWARD_TILES = Tiles(
    "hopper_forward",
    rule(dim=16, tokens=1024, takes=_ALL),
    rule(dim=32, tokens=128, takes=_SHARED, maxnreg=96),
    rule(dim=32, tokens=448, takes=_SHARED),
    rule(dim=32, tokens=512, takes=_SHARED, PAIRED=True, maxnreg=168),
    rule(dim=32, tokens=768, takes=_SHARED, PAIRED=True, maxnreg=255),
    rule(dim=32, tokens=512, takes=_ALL),
    rule(dim=64, tokens=208, takes=("padded_dim", "shared"), maxnreg=128),
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
    rule(dim=32, tokens=128, takes=_SHARED, maxnreg=96),
    rule(dim=32, tokens=512, takes=_ALL),
    rule(dim=32, tokens=768, takes=_SHARED),
    rule(dim=64, tokens=144, takes=("padded_dim", "shared"), maxnreg=168),
    rule(dim=64, tokens=160, takes=("padded_dim", "shared"), maxnreg=255),
    rule(dim=64, tokens=208, takes=("padded_dim", "shared"), maxnreg=128),
    rule(dim=64, tokens=384, takes=("padded_dim", "shared")),
    rule(dim=64, tokens=384, takes=("padded_dim", *_ALL), maxnreg=255),
    rule(dim=128, tokens=320, takes=("padded_dim", "shared")),
    num_warps=4,
)


@gluon.jit
def _start_scores(left, right, zero):
    """Start the product left right^T; ``left`` is in shared memory or in registers."""
    if not isinstance(left, gl.shared_memory_descriptor):
        left = gl.convert_layout(left, gl.DotOperandLayout(0, zero.type.layout, 2))
    return warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_step(
    state,
    s,
    v,
    first,
    start,
    scoring,
    SCALED: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STATS: gl.constexpr,
):
    """Update the online softmax with scores (64, keys); leave the product with V in flight."""
    acc, row_max, row_sum, centred, square = state
    dropout = scoring.dropout
    factor = scoring.factor
    SCORES: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = row_max.type.layout
    MASKED: gl.constexpr = scoring.mask.ptr is not None
    OUT: gl.constexpr = acc.type.layout
    OWN: gl.constexpr = row_sum.type.layout
    cols = gl.arange(0, v.shape[0], gl.SliceLayout(0, SCORES))
    # Bits 1 and 2 of a column depend on the lane, its other bits on the register alone. With the
    # lane's bits moved to the other side, the masks compare with compile-time constants.
    register_cols, lane_cols = (cols & ~6)[None, :], (cols & 6)[None, :]
    rows = gl.arange(0, 64, gl.SliceLayout(1, SCORES))[:, None] + (first - start)
    end = None
    if HIDES:
        end = scoring.limit - start - lane_cols
    s = common.mask_scores(s, rows - lane_cols, register_cols, end, CAUSAL, float("-inf"))
    new_max = gl.maximum(row_max, gl.convert_layout(gl.max(s, 1), ROWS))
    pivot = common.pivot_of(new_max, factor, MASKED, SCALED)
    shift = common.shift_of(row_max, pivot, factor, SCALED)
    # Exponents are in base 2, with log2 e in ``factor``: exp2 is one instruction.
    alpha = gl.exp2(shift)
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, SCORES))[:, None]
    exponent = common.exponents_of(s, pivot, factor, SCALED)
    p = gl.exp2(exponent)
    # The sums so far were relative to the old maximum.
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    weight = p
    if dropout.seed_ptr is not None:
        rows = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
        keep = common.keep_mask(dropout, rows, start + cols[None, :])
        weight = gl.where(keep, p, 0.0)
    # P goes from the accumulator to the left operand within registers. Dropout affects this product
    # only: the sums below are of P itself.
    left = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(0, OUT, 2))
    # Stays in flight: the sums of the statistics are computed under it.
    acc = warpgroup_mma(left, v, acc, is_async=True)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OWN))[:, None]
    if STATS:
        shift = gl.convert_layout(shift, gl.SliceLayout(1, OWN))[:, None]
        # Finite, since a first step would compute row_sum * shift = 0 * -inf = nan. Likewise below,
        # where P is 0 for a hidden key.
        shift = gl.maximum(shift, -1e30)
        if HIDES or CAUSAL or MASKED:
            exponent = gl.maximum(exponent, -1e30)
        # sum(p * exponent): its exponents move by ``shift`` with the maximum.
        centred = alpha * (centred + row_sum * shift)
        centred = common.add_thread_products(centred, p, exponent)
        square = common.add_thread_products(alpha * alpha * square, p, p)
    row_sum = row_sum * alpha + gl.convert_layout(common.thread_sums(p), OWN)
    return RowState(acc, new_max, row_sum, centred, square)


@gluon.jit
def step(
    state,
    q,
    k,
    v,
    zero,
    first,
    start,
    scoring,
    SCALED: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STATS: gl.constexpr,
):
    """Update the online softmax of a tile of rows with a tile, or a tail, of keys."""
    SCORES: gl.constexpr = zero.type.layout
    s = _start_scores(q, k, zero)
    cols = (start + gl.arange(0, k.shape[0], gl.SliceLayout(0, SCORES)))[None, :]
    rows = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    s = common.wait_for_scores(s, 0, scoring, rows, cols)
    state = _start_step(
        state=state,
        s=s,
        v=v,
        first=first,
        start=start,
        scoring=scoring,
        SCALED=SCALED,
        HIDES=HIDES,
        CAUSAL=CAUSAL,
        STATS=STATS,
    )
    return wait_for_output(state)


@gluon.jit
def with_acc(state, acc):
    """Return ``state`` with another accumulator."""
    return RowState(acc, state.row_max, state.row_sum, state.centred, state.square)


@gluon.jit
def wait_for_output(state):
    """Wait for the product with V that ``_start_step`` left in flight."""
    return with_acc(state, warpgroup_mma_wait(0, [state.acc]))


@gluon.jit
def paired_step(
    state, next_state, q, next_q, k, v, zero, scoring, SCALED: gl.constexpr, STATS: gl.constexpr
):
    """Update two tiles of rows with a tile of keys; products of one overlap the other's softmax."""
    s, next_s = _start_scores(q, k, zero), _start_scores(next_q, k, zero)
    # In flight: both scores. The first are done when one group is left.
    s = warpgroup_mma_wait(1, [s])
    state = _start_step(
        state=state,
        s=s,
        v=v,
        first=0,
        start=0,
        scoring=scoring,
        SCALED=SCALED,
        HIDES=False,
        CAUSAL=False,
        STATS=STATS,
    )
    # In flight: the second scores and the first product with V, which may stay.
    next_s = warpgroup_mma_wait(1, [next_s])
    next_state = _start_step(
        state=next_state,
        s=next_s,
        v=v,
        first=0,
        start=0,
        scoring=scoring,
        SCALED=SCALED,
        HIDES=False,
        CAUSAL=False,
        STATS=STATS,
    )
    # In flight: both products with V. The next step rescales their accumulators.
    acc, next_acc = warpgroup_mma_wait(0, [state.acc, next_state.acc])
    return with_acc(state, acc), with_acc(next_state, next_acc)


@gluon.jit(do_not_specialize=["H", "N", "full", "threshold"])
def _hopper_fwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    stats_ptr,
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
    PARTIAL: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if BLOCK_D > 64 else 2 * BLOCK_D, 16, 2)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    STATS: gl.constexpr = stats_ptr is not None
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    STORE: gl.constexpr = common.vector_layout(BLOCK_D)
    AT_ONCE: gl.constexpr = 2 if PAIRED else 1
    # An additive mask is added to scaled scores. All others are scaled in their exponents.
    MASKED: gl.constexpr = mask_view.ptr is not None
    SCALED: gl.constexpr = MASK == "additive"
    unit = 1.0 if SCALED else scale
    out_scale = 1.0 if seed_ptr is None else keep_scale
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    limit = common.visible_keys(lengths_ptr, N)
    factor = unit * LOG2_E
    # With a tail, rows of Q are loaded straight into registers, the next tile as soon as the last
    # product has read the current one. This saves the buffer of Q, which leaves room for another
    # program on the SM, and the barriers of the loop over tiles.
    if T > 0:
        q_rows = common.load_rows(q_view, 0, N, D, BLOCK_D, STORE)
    else:
        q_tile = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
        common.fetch_rows(q_tile, q_view, 0, N, D, False)
    if PAIRED:
        next_q_tile = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
        common.fetch_rows(next_q_tile, q_view, 64, N, D, True)
    common.fetch_tiles(ks, k_view, limit, D, HIDES, GROUP)
    common.fetch_tiles(vs, v_view, limit, D, HIDES, GROUP)
    if T > 0:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
        if not CAUSAL:  # Unread here, it would be allocated over another buffer.
            k_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
            common.fetch_rows(
                shared=k_tail, view=k_view, start=FULL * 64, end=limit, D=D, MASK=True, GROUP=GROUP
            )
        v_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        zero_t = gl.zeros([64, T], gl.float32, TAIL)
        common.fetch_rows(
            shared=v_tail, view=v_view, start=FULL * 64, end=limit, D=D, MASK=True, GROUP=GROUP
        )
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(2 * T, 16, 2)
        COLS: gl.constexpr = gl.SliceLayout(0, TAIL)
        q_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        common.fetch_rows(q_tail, q_view, FULL * 64, N, D, True)
    commit_copies()
    head = gl.program_id(1) * H + gl.program_id(0)
    dropout = Dropout(seed_ptr, threshold, head)
    mask = Mask(
        ptr=mask_view.ptr,
        stride_n=mask_view.stride_n,
        stride_m=mask_view.stride_m,
        scale=scale,
        stride_b=mask_view.stride_b,
        stride_h=mask_view.stride_h,
    )
    scoring = Scoring(N, limit, factor, mask, dropout)
    row_stats = head.to(gl.int64) * N
    # All copies so far must land: Q, K and V. A thread waits for its own copies, orders them before
    # wgmma's reads of shared memory with the fence, and the barrier does so for all threads.
    wait_copies(0)
    fence_async_shared()
    barrier()
    # Partial sums of rows, one for each of a row's four threads.
    OWN: gl.constexpr = common.thread_sums(zero).type.layout
    zero_partials = gl.zeros([64, 4], gl.float32, OWN)
    if PARTIAL:
        sums = common.no_partial_sums(OWN)
    elif STATS:
        sums = common.no_sums(64, ROWS)
    for tile in range(0, full, AT_ONCE):
        first = tile * 64
        if T > 0:
            # Moves data within a warp only: no barrier is needed.
            q = gl.convert_layout(q_rows, LEFT)
        else:
            q = q_tile.load(LEFT)
            if PAIRED:
                next_q = next_q_tile.load(LEFT)
            # All warps hold this tile of Q in registers: its buffer is free for the next, whose
            # copy runs under the whole loop over keys.
            barrier()
            if tile + AT_ONCE < full:
                common.fetch_rows(q_tile, q_view, first + AT_ONCE * 64, N, D, RAGGED)
                if PAIRED:
                    common.fetch_rows(next_q_tile, q_view, first + 192, N, D, True)
            commit_copies()
        acc = gl.zeros([64, BLOCK_D], gl.float32, OUT)
        row_max = gl.full([64], float("-inf"), gl.float32, ROWS)
        state = RowState(acc, row_max, zero_partials, zero_partials, zero_partials)
        # The first ``num_unmasked`` tiles of keys need no mask: the hot loop has no comparisons.
        num_unmasked, num_visible = common.visible_tiles(full, limit, first, 64, HIDES, CAUSAL)
        if PAIRED:
            next_state = state
            second = first + 64
            next_unmasked, next_visible = common.visible_tiles(
                full, limit, second, 64, HIDES, CAUSAL
            )
            # Three ranges of keys: both tiles of rows see them in full, then the second alone does,
            # then a mask hides some from the second.
            for i in range(num_unmasked):
                state, next_state = paired_step(
                    state=state,
                    next_state=next_state,
                    q=q,
                    next_q=next_q,
                    k=ks.index(i),
                    v=vs.index(i),
                    zero=zero,
                    scoring=scoring,
                    SCALED=SCALED,
                    STATS=STATS,
                )
            for i in range(num_unmasked, next_unmasked):
                next_state = step(
                    state=next_state,
                    q=next_q,
                    k=ks.index(i),
                    v=vs.index(i),
                    zero=zero,
                    first=second,
                    start=i * 64,
                    scoring=scoring,
                    SCALED=SCALED,
                    HIDES=False,
                    CAUSAL=False,
                    STATS=STATS,
                )
            if HIDES or CAUSAL:
                for i in range(next_unmasked, next_visible):
                    next_state = step(
                        state=next_state,
                        q=next_q,
                        k=ks.index(i),
                        v=vs.index(i),
                        zero=zero,
                        first=second,
                        start=i * 64,
                        scoring=scoring,
                        SCALED=SCALED,
                        HIDES=HIDES,
                        CAUSAL=CAUSAL,
                        STATS=STATS,
                    )
        else:
            for i in range(num_unmasked):
                state = step(
                    state=state,
                    q=q,
                    k=ks.index(i),
                    v=vs.index(i),
                    zero=zero,
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    SCALED=SCALED,
                    HIDES=False,
                    CAUSAL=False,
                    STATS=STATS,
                )
        if HIDES or CAUSAL:
            for i in range(num_unmasked, num_visible):
                state = step(
                    state=state,
                    q=q,
                    k=ks.index(i),
                    v=vs.index(i),
                    zero=zero,
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    SCALED=SCALED,
                    HIDES=HIDES,
                    CAUSAL=CAUSAL,
                    STATS=STATS,
                )
        # Under a causal mask no row of a whole tile sees the keys of the tail, which come later.
        if T > 0 and not CAUSAL:
            s = _start_scores(q, k_tail, zero_t)
            cols = (full * 64 + gl.arange(0, T, COLS))[None, :]
            rows = (first + gl.arange(0, 64, gl.SliceLayout(1, TAIL)))[:, None]
            s = common.wait_for_scores(s, 0, scoring, rows, cols)
        if T > 0:
            # The scores above were the last product to read Q: load the next rows under the softmax
            # and the product with V. After the last tile these are the tail's keys, for the tail's
            # rows.
            if tile + 1 < full:
                q_rows = common.load_rows(q_view, first + 64, N, D, BLOCK_D, STORE)
            else:
                q_rows = common.load_rows(
                    view=k_view,
                    start=first + 64,
                    end=limit,
                    D=D,
                    WIDTH=BLOCK_D,
                    LAYOUT=STORE,
                    GROUP=GROUP,
                )
        if T > 0 and not CAUSAL:
            state = _start_step(
                state=state,
                s=s,
                v=v_tail,
                first=first,
                start=full * 64,
                scoring=scoring,
                SCALED=SCALED,
                HIDES=True,
                CAUSAL=False,
                STATS=STATS,
            )
            state = wait_for_output(state)
        if T == 0:
            # The next tile of Q must land before its registers are loaded. This comes before the
            # stores below, since the fence would wait for them.
            wait_copies(0)
            fence_async_shared()
            barrier()
        states = (state,)
        if PAIRED:
            states = (state, next_state)
        for n in gl.static_range(AT_ONCE):
            acc, row_max, row_sum, centred, square = states[n]
            start = first + n * 64
            # Only now do the four threads of a row add their partial sums.
            divisor = common.divisor_of(common.sum_threads(row_sum, ROWS), MASKED)
            acc = acc * (out_scale / gl.convert_layout(divisor, gl.SliceLayout(1, OUT)))[:, None]
            common.store_product_rows(out_view, acc, start, N, D, RAGGED or n > 0)
            rows = start + gl.arange(0, 64, ROWS)
            inside = rows < N
            log_sum = common.store_row_statistics(
                max_log_sum_ptr=max_log_sum_ptr,
                lse_ptr=lse_ptr,
                rows=row_stats + rows,
                row_max=row_max,
                divisor=divisor,
                factor=factor,
                unit=unit,
                inside=inside,
                MASKED=MASKED,
                SCALED=SCALED,
            )
            if STATS:
                gl.store(lse_ptr + row_stats + rows, row_max * unit + log_sum, mask=inside)
            if PARTIAL:
                if not (RAGGED or n > 0):
                    inside = None
                sums = common.add_partial_sums(
                    sums=sums,
                    acc=acc,
                    row_max=row_max,
                    divisor=divisor,
                    centred=centred,
                    square=square,
                    inside=inside,
                    MASKED=MASKED,
                )
            elif STATS:
                norm = gl.convert_layout(gl.sum(acc * acc, 1), ROWS)
                rows_sums = common.sums_of_rows(
                    row_max,
                    divisor,
                    common.sum_threads(centred, ROWS),
                    common.sum_threads(square, ROWS),
                    norm,
                    inside,
                )
                sums = common.add_sums(sums, rows_sums)
    if PARTIAL:
        sums = common.reduce_partial_sums(sums)
    elif STATS:
        sums = common.reduce_sums(sums)
    if T > 0:
        # The tail's rows as columns: S^T = K Q^T (keys, T) of all tiles is held in registers, and
        # the softmax needs no running maximum. P^T is stored over K, which has been read by then.
        started, scores = (), ()
        for i in gl.static_range(FULL):
            started = started + (_start_scores(ks.index(i), q_tail, zero_t),)  # noqa: RUF005
        # The loop left the tail's keys in ``q_rows``, zeros past the last.
        last_k = gl.convert_layout(q_rows, gl.DotOperandLayout(0, TAIL, 2))
        started = started + (_start_scores(last_k, q_tail, zero_t),)  # noqa: RUF005
        top_t = gl.full([64, T], float("-inf"), gl.float32, TAIL)
        for i in gl.static_range(FULL + 1):
            # FULL + 1 products were started in order; the i-th is done when FULL - i are left.
            first = full * 64
            keys = (i * 64 + gl.arange(0, 64, gl.SliceLayout(1, TAIL)))[:, None]
            rows = (first + gl.arange(0, T, COLS))[None, :]
            s_t = common.wait_for_scores(started[i], FULL - i, scoring, rows, keys)
            bound = limit if HIDES or i == FULL else None
            s_t = common.mask_scores(s_t, rows, keys, bound, CAUSAL and i == FULL, float("-inf"))
            top_t = gl.maximum(top_t, s_t)
            scores = scores + (s_t,)  # noqa: RUF005
        # The reduction over keys crosses warps, which therefore have all finished their scores
        # before P overwrites K.
        max_t = gl.max(top_t, 0)
        pivot_t = common.pivot_of(max_t, factor, MASKED, SCALED)
        p_buffers = reinterpret(ks, [FULL * BLOCK_D // T, 64, T], TRANSPOSED)
        # Sums within a thread, (64, T): they are added over the keys at the end.
        total_t, centred_t, square_t = zero_t, zero_t, zero_t
        for i in gl.static_range(FULL + 1):
            exponent = common.exponents_of(scores[i], pivot_t[None, :], factor, SCALED)
            p = gl.exp2(exponent)
            total_t += p
            if PARTIAL:
                if HIDES or CAUSAL or MASKED or i == FULL:
                    exponent = gl.maximum(exponent, -1e30)
                centred_t += p * exponent
                square_t += p * p
            elif STATS:
                centred_t += p * gl.maximum(exponent, -1e30)
                square_t += p * p
            if seed_ptr is not None:
                keys = (i * 64 + gl.arange(0, 64, gl.SliceLayout(1, TAIL)))[:, None]
                rows = (full * 64 + gl.arange(0, T, COLS))[None, :]
                p = gl.where(common.keep_mask(dropout, rows, keys), p, 0.0)
            p_buffers.index(i).store(p.to(DTYPE))
        # P^T of all warps must be visible to wgmma, which reads it as the right operand.
        fence_async_shared()
        barrier()
        acc_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)  # out^T = V^T P^T
        for i in gl.static_range(FULL):
            v = vs.index(i).permute((1, 0))
            acc_t = warpgroup_mma(v, p_buffers.index(i), acc_t, is_async=True)
        # The tail has T keys, not 64: the rest of this tile of P is not read.
        p_buffer = p_buffers.index(FULL).slice(0, T)
        acc_t = warpgroup_mma(v_tail.permute((1, 0)), p_buffer, acc_t, is_async=True)
        acc_t = warpgroup_mma_wait(0, [acc_t])
        if PARTIAL:
            total_t, centred_t, square_t = common.sum_three(total_t, centred_t, square_t)
        else:
            total_t = gl.sum(total_t, 0)
        divisor_t = common.divisor_of(total_t, MASKED)
        acc_t = acc_t * (out_scale / divisor_t)[None, :]
        common.store_columns(out_view, acc_t, full * 64, N, D)
        rows_t = full * 64 + gl.arange(0, T, COLS)
        inside_t = rows_t < N
        log_sum_t = common.store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            rows=row_stats + rows_t,
            row_max=max_t,
            divisor=divisor_t,
            factor=factor,
            unit=unit,
            inside=inside_t,
            MASKED=MASKED,
            SCALED=SCALED,
        )
        if STATS:
            gl.store(lse_ptr + row_stats + rows_t, max_t * unit + log_sum_t, mask=inside_t)
            if not PARTIAL:
                centred_t, square_t = gl.sum(centred_t, 0), gl.sum(square_t, 0)
            rows_sums = common.sums_of_rows(
                max_t,
                divisor_t,
                centred_t,
                square_t,
                gl.sum(acc_t * acc_t, 0),
                inside_t,
            )
            sums = common.add_sums(sums, common.reduce_sums(rows_sums))
    if STATS:
        common.store_statistics(
            ptr=stats_ptr,
            sums=sums,
            head=head,
            num_heads=H * gl.num_programs(1),
            num_rows=N,
            scale=unit,
            inside=None,
        )


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    batch, heads, tokens, _ = call.query.shape
    arguments = forward_arguments(_hopper_fwd_kernel, call, results)
    # With a mask, the scores of a tail would spill for heads wider than 64.
    wide = arguments["BLOCK_D"] > 64 and call.attn_mask is not None
    full, tail = tiles_and_tail(tokens, () if wide else hopper_tails(arguments["BLOCK_D"]))
    paired = tile.constexprs.get("PAIRED", False)
    arguments |= dict(
        **tile.options,
        PAIRED=paired and tail == 0 and call.attn_mask is None and call.seed is None,
        full=full,
        FULL=full,
        T=tail,
        RAGGED=tail == 0 and tokens % 64 != 0,
        PARTIAL=tile.constexprs.get("PARTIAL", False) and results.stats is not None,
    )
    return Launch(_hopper_fwd_kernel, (heads, batch), arguments)


# The rounding error of a smaller log-sum-exp in float32 is invisible in half precision.
LARGE_LSE = gl.constexpr(1024.0)

# For calls with as many rows as keys; beyond 256 tokens with at least 264 heads over all entries.
# ``IN_REGISTERS`` keeps a tile of Q and dO, then of K and V, in registers while the next is being
# loaded: more programs fit on an SM, and the loops have no barriers. With a tail, these tiles stay
# in shared memory. ``RESIDENT``, the programs that an SM holds at once, lets ``split_last`` split
# heads.
_EVERY = "dropout", "mask", "varlen"
BACKWARD_TILES = Tiles(
    "hopper_backward",
    rule(dim=16, tokens=1024, takes=("varlen",)),
    rule(dim=16, tokens=1024, takes=_EVERY, maxnreg=255),
    rule(dim=32, tokens=512, takes=("varlen",), IN_REGISTERS=True, maxnreg=168),
    rule(dim=32, tokens=256, takes=("dropout", "varlen"), maxnreg=168),
    rule(dim=32, tokens=768, takes=_EVERY, maxnreg=255),
    rule(dim=64, tokens=640, takes=("padded_dim", "varlen"), maxnreg=255),
    rule(dim=64, tokens=512, takes=("padded_dim", *_EVERY), maxnreg=255),
    rule(dim=128, tokens=320, takes=("dropout", "padded_dim", "varlen"), maxnreg=255),
    num_warps=4,
)


@gluon.jit
def _load_rows(
    do_view,
    out_view,
    saved,
    start,
    scoring,
    SCALED: gl.constexpr,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Load 64 rows of dO and of the output, with the results of ``load_row_statistics``."""
    N = scoring.N
    do = common.load_rows(do_view, start, N, D, WIDTH, LAYOUT)
    out = common.load_rows(out_view, start, N, D, WIDTH, LAYOUT)
    rows = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lse, correction = common.load_row_statistics(saved, rows, rows < N, scoring.factor, SCALED)
    return do, out, lse, correction


@gluon.jit
def _describe_rows(lses, deltas, loaded):
    """Store the log-sum-exp and delta = sum(dO O) of 64 rows; return the size of the former."""
    do, out, lse, correction = loaded
    lses.store(lse)
    deltas.store(gl.sum(do.to(gl.float32) * out.to(gl.float32), 1) * correction)
    # Rows past the end have inf, and must not count as large.
    return gl.where(lse == float("inf"), 0.0, gl.abs(lse))


@gluon.jit
def _left_pair(
    one_view, other_view, start, end, D: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """Load a tile of rows of two tensors as left operands."""
    one = common.load_rows(one_view, start, end, D, WIDTH, LAYOUT)
    return one, common.load_rows(other_view, start, end, D, WIDTH, LAYOUT)


@gluon.jit
def _corrected(do, saved, start, scoring, SCALED: gl.constexpr):
    """Multiply rows of dO in registers by the factor that ``load_row_statistics`` returns."""
    rows = start + gl.arange(0, do.shape[0], gl.SliceLayout(1, do.type.layout))
    inside = rows < scoring.N
    _, correction = common.load_row_statistics(saved, rows, inside, scoring.factor, SCALED)
    return (do.to(gl.float32) * correction[:, None]).to(do.dtype)


@gluon.jit(
    do_not_specialize=["B", "H", "N", "TOKENS", "KEY_TOKENS", "full", "threshold", "whole_entries"]
)
def _hopper_bwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    starts_ptr,
    key_starts_ptr,
    do_view,
    out_view,
    max_log_sum_ptr,
    lse_ptr,
    dq_view,
    dk_view,
    dv_view,
    B,
    H,
    N,
    TOKENS,
    KEY_TOKENS,
    full,
    scale,
    mask_view,
    seed_ptr,
    ds_ptr,
    keep_scale,
    threshold,
    whole_entries,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    RAGGED: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    BLOCKED: gl.constexpr = common.copy_layout(BLOCK_D)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if BLOCK_D > 64 else 2 * BLOCK_D, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = FULL + (1 if T > 0 else 0)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    VARLEN: gl.constexpr = starts_ptr is not None
    head = gl.program_id(1) * H + gl.program_id(0)
    M, full_keys, num_tiles = N, full, full
    first_tile, last_tile = 0, full
    if PARTS > 1:
        # The heads of the last entries have PARTS programs each, which fill the GPU once more. A
        # program computes the same tiles of rows and of keys: under a causal mask, tile i of rows
        # sees i + 1 tiles of keys, and tile i of keys is seen by all from i on.
        extra = gl.program_id(1) - whole_entries
        split = extra >= 0
        part = gl.where(split, extra % PARTS, 0)
        entry = gl.where(split, whole_entries + extra // PARTS, gl.program_id(1))
        first_tile = part * full // PARTS
        last_tile = gl.where(split, (part + 1) * full // PARTS, full)
        head = entry * H + gl.program_id(0)
        q_view, dq_view = common.from_token(q_view, entry), common.from_token(dq_view, entry)
        k_view, dk_view = common.from_token(k_view, entry), common.from_token(dk_view, entry)
        v_view, dv_view = common.from_token(v_view, entry), common.from_token(dv_view, entry)
        do_view, out_view = common.from_token(do_view, entry), common.from_token(out_view, entry)
    if VARLEN:
        # The programs past the last sequence zero the gradients of tokens that no sequence owns.
        if gl.program_id(1) >= B:
            lanes = gl.arange(0, FILL_BLOCK, gl.BlockedLayout([8], [32], [4], [0]))
            fill_gradients(
                dq_ptr=dq_view.ptr,
                dk_ptr=dk_view.ptr,
                dv_ptr=dv_view.ptr,
                starts_ptr=starts_ptr,
                key_starts_ptr=key_starts_ptr,
                num_sequences=B,
                num_tokens=TOKENS,
                num_keys=KEY_TOKENS,
                width=H * D,
                key_width=H * D,
                program=head - B * H,
                num_programs=(gl.num_programs(1) - B) * H,
                lanes=lanes,
            )
            return
        first_key, M = find_sequence(key_starts_ptr, gl.program_id(1), KEY_TOKENS, N)
        first_row, N = find_sequence(starts_ptr, gl.program_id(1), TOKENS, N)
        full, full_keys = (N + 63) // 64, (M + 63) // 64
        last_tile = full
        # N and M are now the tokens of this sequence; ``num_tiles`` keeps the tiles of the longest.
        q_view, dq_view = (
            common.from_token(q_view, first_row),
            common.from_token(dq_view, first_row),
        )
        do_view, out_view = (
            common.from_token(do_view, first_row),
            common.from_token(out_view, first_row),
        )
        k_view, dk_view = (
            common.from_token(k_view, first_key),
            common.from_token(dk_view, first_key),
        )
        v_view, dv_view = (
            common.from_token(v_view, first_key),
            common.from_token(dv_view, first_key),
        )
        row_start = gl.program_id(0).to(gl.int64) * TOKENS + first_row
    else:
        row_start = head.to(gl.int64) * N
    # Here, as a function of Triton 3.6 cannot return None: one of the two is None.
    if max_log_sum_ptr is None:
        lse_ptr += row_start
    else:
        max_log_sum_ptr += row_start * 2
    saved = common.SavedRows(max_log_sum_ptr, lse_ptr)
    if ds_ptr is not None:
        ds_ptr += head.to(gl.int64) * N * N
    dropout = Dropout(seed_ptr, threshold, head, keep_scale)
    if seed_ptr is not None:
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        # A bit for each score: the first pass writes the bits, and the second reads them.
        keep_words = gl.allocate_shared_memory(gl.int32, [FULL * FULL, 2, 64], WORDS)
        dropout = Dropout(seed_ptr, threshold, head, keep_scale, keep_words, num_tiles)
        if VARLEN or lengths_ptr is not None:
            for n in range(num_tiles * num_tiles):  # the first pass skips hidden tiles
                keep_words.index(n).store(gl.zeros([2, 64], gl.int32, BLOCKED))
    # K and V are resident first, and then Q and dO in the same memory. One tile of the other two is
    # in ``q_tile`` and ``do_tile``, or in registers, while the next is being loaded.
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    if not IN_REGISTERS:
        q_tile = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
        do_tile = gl.allocate_shared_memory(DTYPE, [64, BLOCK_D], SHARED)
    lses = gl.allocate_shared_memory(gl.float32, [TILES, 64], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [TILES, 64], VECTOR)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    limit = common.visible_keys(lengths_ptr, M)
    SCALED: gl.constexpr = MASK == "additive"
    factor = (1.0 if SCALED else scale) * LOG2_E
    mask = Mask(
        ptr=mask_view.ptr,
        stride_n=mask_view.stride_n,
        stride_m=mask_view.stride_m,
        scale=scale,
        ds_ptr=ds_ptr,
        stride_b=mask_view.stride_b,
        stride_h=mask_view.stride_h,
    )
    scoring = Scoring(N, limit, factor, mask, dropout)

    if IN_REGISTERS:
        following = _left_pair(
            one_view=q_view,
            other_view=do_view,
            start=first_tile * 64,
            end=N,
            D=D,
            WIDTH=BLOCK_D,
            LAYOUT=OPERAND,
        )
    else:
        common.fetch_rows(q_tile, q_view, 0, N, D, VARLEN)
        common.fetch_rows(do_tile, do_view, 0, N, D, VARLEN)
    if PARTS > 1:
        for i in range(0, last_tile if CAUSAL else full):
            common.fetch_rows(ks.index(i), k_view, i * 64, limit, D, HIDES)
            common.fetch_rows(vs.index(i), v_view, i * 64, limit, D, HIDES)
    else:
        common.fetch_tiles(ks, k_view, limit, D, HIDES)
        common.fetch_tiles(vs, v_view, limit, D, HIDES)
    if T > 0:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
        ROWS_T: gl.constexpr = gl.SliceLayout(1, TAIL)
        COLS_T: gl.constexpr = gl.SliceLayout(0, TAIL)
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(2 * T, 16, 2)
        k_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        tails = gl.allocate_shared_memory(DTYPE, [2, 64, T], TRANSPOSED)
        p_tail, ds_tail = tails.index(0), tails.index(1)
        dk_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        dv_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        zero_t = gl.zeros([64, T], gl.float32, TAIL)
        common.fetch_rows(k_tail, k_view, FULL * 64, limit, D, True)
        common.fetch_rows(v_tail, v_view, FULL * 64, limit, D, True)
    # One group: the copies run while delta is computed below.
    commit_copies()
    largest = gl.zeros([64], gl.float32, gl.SliceLayout(1, BLOCKED))
    # No row above the first tile sees keys from there on.
    first_row_tile = first_tile if CAUSAL else 0
    # In a causal varlen batch, a tile of keys may be past the last tile of rows. The statistics of
    # such rows are written too: a log-sum-exp of inf makes P zero.
    if IN_REGISTERS:
        # Loads run one tile ahead of the sums that need them.
        following_rows = _load_rows(
            do_view=do_view,
            out_view=out_view,
            saved=saved,
            start=first_row_tile * 64,
            scoring=scoring,
            SCALED=SCALED,
            D=D,
            WIDTH=BLOCK_D,
            LAYOUT=BLOCKED,
        )
    for n in range(first_row_tile, gl.maximum(full, full_keys) if VARLEN else (N + 63) // 64):
        if IN_REGISTERS:
            rows = following_rows
            following_rows = _load_rows(
                do_view=do_view,
                out_view=out_view,
                saved=saved,
                start=n * 64 + 64,
                scoring=scoring,
                SCALED=SCALED,
                D=D,
                WIDTH=BLOCK_D,
                LAYOUT=BLOCKED,
            )
        else:
            rows = _load_rows(
                do_view=do_view,
                out_view=out_view,
                saved=saved,
                start=n * 64,
                scoring=scoring,
                SCALED=SCALED,
                D=D,
                WIDTH=BLOCK_D,
                LAYOUT=BLOCKED,
            )
        largest = gl.maximum(largest, _describe_rows(lses.index(n), deltas.index(n), rows))
    is_large = gl.max(largest, 0) > LARGE_LSE  # the same in all warps
    wait_copies(0)
    if not IN_REGISTERS:  # noqa: SIM102 (Gluon compiles both sides of `and`)
        if is_large:
            barrier()
            common.correct(do_tile, saved, 0, scoring, SCALED, BLOCKED)
    # All copies, the statistics and a corrected dO must be visible to wgmma, and in all warps.
    fence_async_shared()
    barrier()

    # First pass, over tiles of rows: dQ, and the contributions of these rows to the tail's keys.
    for tile in range(first_tile, last_tile):
        first = tile * 64
        if IN_REGISTERS:
            q_tile, do_tile = following
            # Loaded under the loop over keys; past the last tile these are zeros, which nothing
            # reads.
            following = _left_pair(
                one_view=q_view,
                other_view=do_view,
                start=first + 64,
                end=N,
                D=D,
                WIDTH=BLOCK_D,
                LAYOUT=OPERAND,
            )
            if is_large:
                do_tile = _corrected(do_tile, saved, first, scoring, SCALED)
        lse = lses.index(tile).load(ROWS)[:, None]
        delta = deltas.index(tile).load(ROWS)[:, None]
        dq = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        num_unmasked, num_visible = common.visible_tiles(full_keys, limit, first, 64, HIDES, CAUSAL)
        for i in range(num_unmasked):
            dq = common.rows_step(
                dq=dq,
                q=q_tile,
                do=do_tile,
                k=ks.index(i),
                v=vs.index(i),
                zero=zero,
                lse=lse,
                delta=delta,
                first=first,
                start=i * 64,
                scoring=scoring,
                SCALED=SCALED,
                HIDES=False,
                CAUSAL=False,
            )
        if HIDES or CAUSAL:
            for i in range(num_unmasked, num_visible):
                dq = common.rows_step(
                    dq=dq,
                    q=q_tile,
                    do=do_tile,
                    k=ks.index(i),
                    v=vs.index(i),
                    zero=zero,
                    lse=lse,
                    delta=delta,
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    SCALED=SCALED,
                    HIDES=HIDES,
                    CAUSAL=CAUSAL,
                )
        # The tail's keys: P and dS (64, T). Under a causal mask none of these rows sees them.
        if T > 0 and not CAUSAL:
            s, dp = common.start_products(q_tile, do_tile, k_tail, v_tail, zero_t)
            keys = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
            queries = (first + gl.arange(0, 64, ROWS_T))[:, None]
            s = common.wait_for_scores(s, 1, scoring, queries, keys)
            p = gl.exp2(common.exponents_of(s, gl.convert_layout(lse, TAIL), factor, SCALED))
            p = common.mask_scores(p, queries, keys, limit, False, 0.0)
            dp = warpgroup_mma_wait(0, [dp])
            dp, weight = common.apply_dropout(dp, p, dropout, queries, keys, False)
            ds = (p * (dp - gl.convert_layout(delta, TAIL))).to(DTYPE)
            # dK and dV of the tail need P and dS as right operands, from shared memory.
            p_tail.store(weight.to(DTYPE))
            ds_tail.store(ds)
            # Its left operand is in registers: it may start ahead of the fence.
            dq = warpgroup_mma(gl.convert_layout(ds, LEFT), k_tail, dq, is_async=True)
            fence_async_shared()
            barrier()
            # dK^T = Q^T dS and dV^T = dO^T P, both (D, T).
            dk_t = warpgroup_mma(q_tile.permute((1, 0)), ds_tail, dk_t, is_async=True)
            dv_t = warpgroup_mma(do_tile.permute((1, 0)), p_tail, dv_t, is_async=True)
            dq, dk_t, dv_t = warpgroup_mma_wait(0, [dq, dk_t, dv_t])
        if IN_REGISTERS:
            common.store_product_rows(dq_view, dq * scale, first, N, D, RAGGED)
        else:
            barrier()  # all warps are done with Q, dO, P and dS of this tile
            if tile + 1 < full:
                common.fetch_rows(q_tile, q_view, first + 64, N, D, RAGGED)
            # dQ is staged in the buffer of dO, which no product reads any more. Its store comes
            # after the fence, which would wait for it. A varlen batch stores at once: its addresses
            # leave no registers to keep dQ in.
            if VARLEN:
                common.store_staged_rows(
                    view=dq_view, x=dq * scale, stage=do_tile, start=first, end=N, D=D, MASK=RAGGED
                )
            else:
                dq_rows = common.convert_staged(dq * scale, do_tile, BLOCKED)
            if tile + 1 < full:
                common.fetch_rows(do_tile, do_view, first + 64, N, D, RAGGED)
                commit_copies()
                wait_copies(0)
                if is_large:
                    barrier()  # ``correct`` reads what other threads copied
                    common.correct(do_tile, saved, first + 64, scoring, SCALED, BLOCKED)
                fence_async_shared()
                barrier()
            if not VARLEN:
                common.store_rows(dq_view, dq_rows, first, N, D, RAGGED)

    if T > 0:
        # The tail's rows as columns: dQ^T (D, T), and their contributions to dK and dV of the tail.
        # The tail's Q and dO replace its K and V, which now fill the tiles of Q and dO to 64 rows.
        q_tail, do_tail, k_tile, v_tile = k_tail, v_tail, q_tile, do_tile
        common.fetch_rows(q_tail, q_view, full * 64, N, D, True)
        common.fetch_rows(do_tail, do_view, full * 64, N, D, True)
        common.fetch_rows(k_tile, k_view, full * 64, limit, D, True)
        common.fetch_rows(v_tile, v_view, full * 64, limit, D, True)
        commit_copies()
        wait_copies(0)
        if is_large:
            barrier()
            common.correct(do_tail, saved, full * 64, scoring, SCALED, BLOCKED)
        fence_async_shared()
        barrier()
        dq_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        lse_t = lses.index(full).slice(0, T).load(COLS_T)[None, :]
        delta_t = deltas.index(full).slice(0, T)
        queries = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
        # S^T and dP^T (64, T): the keys of a tile by the tail's rows.
        for n in gl.static_range(FULL):
            s_t, dp_t = common.start_products(ks.index(n), vs.index(n), q_tail, do_tail, zero_t)
            keys = (n * 64 + gl.arange(0, 64, ROWS_T))[:, None]
            s_t = common.wait_for_scores(s_t, 1, scoring, queries, keys)
            p_t = gl.exp2(common.exponents_of(s_t, lse_t, factor, SCALED))
            dp_t = warpgroup_mma_wait(0, [dp_t])
            dp_t, _ = common.apply_dropout(dp_t, p_t, dropout, queries, keys, False)
            ds_t = p_t * (dp_t - delta_t.load(COLS_T)[None, :])
            ds_t = common.mask_scores(ds_t, queries, keys, limit if HIDES else None, False, 0.0)
            # The two buffers alternate, so that one barrier is enough: a warp that writes a buffer
            # again has passed the barrier of the other, and all warps had read this one by then.
            ds_buffer = tails.index(n % 2)
            ds_buffer.store(ds_t.to(DTYPE))
            fence_async_shared()
            barrier()
            dq_t = warpgroup_mma(ks.index(n).permute((1, 0)), ds_buffer, dq_t, is_async=True)
            dq_t = warpgroup_mma_wait(0, [dq_t])
        barrier()  # all warps are done with dS of the tiles before
        # The tail's keys with the tail's rows, the last contribution to all three gradients.
        s, dp = common.start_products(k_tile, v_tile, q_tail, do_tail, zero_t)
        keys = (full * 64 + gl.arange(0, 64, ROWS_T))[:, None]
        s = common.wait_for_scores(s, 1, scoring, queries, keys)
        p = gl.exp2(common.exponents_of(s, lse_t, factor, SCALED))
        p = common.mask_scores(p, queries, keys, limit, CAUSAL, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        dp, weight = common.apply_dropout(dp, p, dropout, queries, keys, False)
        p_tail.store(weight.to(DTYPE))
        ds_tail.store((p * (dp - delta_t.load(COLS_T)[None, :])).to(DTYPE))
        fence_async_shared()
        barrier()
        p_tail_t, ds_tail_t = (
            p_tail.slice(0, T).permute((1, 0)),
            ds_tail.slice(0, T).permute((1, 0)),
        )
        dq_t = warpgroup_mma(k_tile.permute((1, 0)), ds_tail, dq_t, is_async=True)
        dk_t = warpgroup_mma(q_tail.permute((1, 0)), ds_tail_t, dk_t, is_async=True)
        dv_t = warpgroup_mma(do_tail.permute((1, 0)), p_tail_t, dv_t, is_async=True)
        dq_t, dk_t, dv_t = warpgroup_mma_wait(0, [dq_t, dk_t, dv_t])
        barrier()  # all warps are done with K and V, and with the tiles of Q and dO

    # Second pass, over tiles of keys: Q and dO take the place of K and V.
    qs, dos = ks, vs
    if IN_REGISTERS:
        barrier()  # all warps are done with K and V
        following = _left_pair(
            one_view=k_view,
            other_view=v_view,
            start=first_tile * 64,
            end=limit,
            D=D,
            WIDTH=BLOCK_D,
            LAYOUT=OPERAND,
        )
    else:
        k_tile, v_tile = q_tile, do_tile
        common.fetch_rows(k_tile, k_view, 0, limit, D, HIDES)
        common.fetch_rows(v_tile, v_view, 0, limit, D, HIDES)
    if PARTS > 1:
        for i in range(first_row_tile, full):
            common.fetch_rows(qs.index(i), q_view, i * 64, N, D, RAGGED)
            common.fetch_rows(dos.index(i), do_view, i * 64, N, D, RAGGED)
    else:
        common.fetch_tiles(qs, q_view, N, D, RAGGED)
        common.fetch_tiles(dos, do_view, N, D, RAGGED)
    commit_copies()
    wait_copies(0)
    if is_large:
        barrier()
        # The resident dO is corrected as its tiles were: rounded once to the dtype of the inputs.
        for i in range(first_row_tile, full):
            common.correct(dos.index(i), saved, i * 64, scoring, SCALED, BLOCKED)
    fence_async_shared()
    barrier()
    if T > 0:
        # Stored after the fence, which would have waited for these stores.
        common.store_columns(dq_view, dq_t * scale, full * 64, N, D)
        common.store_columns(dk_view, dk_t * scale, full * 64, N, D)
        if seed_ptr is not None:
            dv_t *= keep_scale
        common.store_columns(dv_view, dv_t, full * 64, N, D)
    last_tile = full_keys if VARLEN else last_tile
    for tile in range(first_tile, last_tile):
        first = tile * 64
        if IN_REGISTERS:
            k_tile, v_tile = following
            following = _left_pair(
                one_view=k_view,
                other_view=v_view,
                start=first + 64,
                end=limit,
                D=D,
                WIDTH=BLOCK_D,
                LAYOUT=OPERAND,
            )
        dk = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        dv = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        start = 0
        if CAUSAL:
            # The diagonal tile first, with its mask; rows above it see none of these keys.
            start = tile + 1
            dk, dv = common.keys_step(
                dk=dk,
                dv=dv,
                k=k_tile,
                v=v_tile,
                q=qs.index(tile),
                do=dos.index(tile),
                zero=zero,
                lse=lses.index(tile),
                delta=deltas.index(tile),
                first=first,
                start=first,
                scoring=scoring,
                SCALED=SCALED,
                CAUSAL=True,
            )[:2]
        for i in range(start, full):
            dk, dv = common.keys_step(
                dk=dk,
                dv=dv,
                k=k_tile,
                v=v_tile,
                q=qs.index(i),
                do=dos.index(i),
                zero=zero,
                lse=lses.index(i),
                delta=deltas.index(i),
                first=first,
                start=i * 64,
                scoring=scoring,
                SCALED=SCALED,
                CAUSAL=False,
            )[:2]
        if T > 0:
            dk, dv = common.keys_step(
                dk=dk,
                dv=dv,
                k=k_tile,
                v=v_tile,
                q=q_tail,
                do=do_tail,
                zero=zero_t,
                lse=lses.index(full).slice(0, T),
                delta=deltas.index(full).slice(0, T),
                first=first,
                start=full * 64,
                scoring=scoring,
                SCALED=SCALED,
                CAUSAL=False,
            )[:2]
        if seed_ptr is not None:
            # Once for the finished sum, not for each P.
            dv *= keep_scale
        # Hidden keys were copied as zeros, and P of a zero score may overflow: discard their rows.
        if HIDES:
            visible = (first + gl.arange(0, 64, gl.SliceLayout(1, GRADS)) < limit)[:, None]
            dk, dv = gl.where(visible, dk, 0.0), gl.where(visible, dv, 0.0)
        if IN_REGISTERS:
            common.store_product_rows(dk_view, dk * scale, first, M, D, RAGGED)
            common.store_product_rows(dv_view, dv, first, M, D, RAGGED)
        else:
            # dK and dV are staged in the buffers of K and V of this tile, and stored after the
            # fence; the next tile is copied meanwhile.
            dk_rows = common.convert_staged(dk * scale, k_tile, BLOCKED)
            if tile + 1 < full_keys:
                common.fetch_rows(k_tile, k_view, first + 64, limit, D, HIDES)
            dv_rows = common.convert_staged(dv, v_tile, BLOCKED)
            if tile + 1 < full_keys:
                common.fetch_rows(v_tile, v_view, first + 64, limit, D, HIDES)
            commit_copies()
            wait_copies(0)
            fence_async_shared()
            barrier()
            common.store_rows(dk_view, dk_rows, first, M, D, RAGGED)
            common.store_rows(dv_view, dv_rows, first, M, D, RAGGED)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, N) float32.

    In a varlen batch the tensors are (T, H, D), and the gradients are contiguous.
    """
    arguments = backward_arguments(_hopper_bwd_kernel, grad, call, saved, gradients)
    heads, tokens, dim = arguments["H"], arguments["N"], arguments["BLOCK_D"]
    varlen = call.sequences is not None
    # A tail spills in calls with two of these. dS, which comes with a mask, makes two: it is stored
    # by the loops over whole tiles alone.
    taken = call.attn_mask, call.seed, gradients.ds
    crowded = sum(t is not None for t in taken) + dim // 128 > 1
    full, tail = tiles_and_tail(tokens, () if crowded or varlen else hopper_tails(dim))
    arguments |= dict(
        **tile.options,
        full=full,
        FULL=full,
        T=tail,
        RAGGED=varlen or (tail == 0 and tokens % 64 != 0),
        IN_REGISTERS=tile.constexprs.get("IN_REGISTERS", False) and not tail,
        whole_entries=None,
        PARTS=1,
    )
    entries = call.batch + (triton.cdiv(SPARE_PROGRAMS, heads) if varlen else 0)
    resident = tile.constexprs.get("RESIDENT", 0) * _tiles.multiprocessors(grad.device)
    plain = not varlen and all(t is None for t in (*taken, call.key_lengths))
    if resident and plain and arguments["IN_REGISTERS"]:
        whole, parts = split_last(call.batch, heads, resident, full)
        if parts > 1:
            arguments |= {"whole_entries": whole, "PARTS": parts}
            entries = whole + (call.batch - whole) * parts
    return Launch(_hopper_bwd_kernel, (heads, entries), arguments)


def split_last(entries: int, heads: int, resident: int, tiles: int) -> tuple[int, int]:
    """Return how many entries have one program a head, and how many programs the other heads have.

    Programs fill a GPU ``resident`` at a time. The heads that are left for the last time are
    split, into parts of ``tiles``, as far as all of their programs are resident at once.

    >>> split_last(128, 16, 396, 8), split_last(128, 16, 512, 8), split_last(3, 16, 396, 8)
    ((123, 4), (128, 1), (0, 8))
    """
    left = entries * heads % resident
    whole = (entries * heads - left) // heads
    programs = (entries - whole) * heads
    parts = next((n for n in (8, 4, 2) if n <= tiles and programs * n <= resident), 1)
    return (whole, parts) if programs and parts > 1 else (entries, 1)
