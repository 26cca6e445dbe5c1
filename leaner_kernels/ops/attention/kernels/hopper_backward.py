"""Gluon backward of softmax attention for short sequences on Hopper: a program owns a head.

Sizes: B batch, H heads, N tokens, D head dimension, T columns of a tail (gluon_tiles.py). A launch
makes two passes, each with two operands resident in shared memory. The first keeps K and V: tiles
of rows give dQ, and their contributions to dK and dV of the tail are summed on the way, transposed
(D, T). The second keeps Q and dO: tiles of keys give dK and dV. P and dS go from accumulators to
the left operand of the next product within registers. Every element is written once, without
atomics: the result is bitwise deterministic.
"""

import triton
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
from ..._triton import LOG2_E
from ..call import Call, Gradients, Results, backward_arguments, hopper_tails, tiles_and_tail
from .gluon_tiles import (
    correct,
    dropped,
    exchanged_layout,
    exponents_of,
    fetch_rows,
    fetch_tiles,
    from_token,
    keys_step,
    left_rows,
    masked,
    number_of_keys,
    put_columns,
    put_exchanged,
    put_own,
    put_rows,
    row_statistics,
    rows_step,
    start_products,
    turned_rows,
    visible_tiles,
    wait_for_scores,
)
from .scores import FILL, SPARE_PROGRAMS, fill_gradients, find_sequence

# The rounding error of a smaller log-sum-exp in float32 is invisible in half precision.
LARGE_LSE = gl.constexpr(1024.0)

# For calls with as many rows as keys; beyond 256 tokens with at least 264 heads over all entries.
# ``IN_REGISTERS`` keeps a tile of Q and dO, then of K and V, in registers while the next is being
# loaded: more programs fit on an SM, and the loops have no barriers. With a tail, these tiles stay
# in shared memory.
_ALL = "dropout", "mask", "varlen"
TILES = Tiles(
    "hopper_backward",
    rule(dim=16, tokens=1024, takes=("varlen",)),
    rule(dim=16, tokens=1024, takes=_ALL, maxnreg=255),
    rule(dim=32, tokens=512, takes=("varlen",), IN_REGISTERS=True, maxnreg=168),
    rule(dim=32, tokens=256, takes=("dropout", "varlen"), maxnreg=168),
    rule(dim=32, tokens=768, takes=_ALL, maxnreg=255),
    rule(dim=64, tokens=640, takes=("padded_dim", "varlen"), maxnreg=255),
    rule(dim=64, tokens=512, takes=("padded_dim", *_ALL), maxnreg=255),
    rule(dim=128, tokens=320, takes=("dropout", "padded_dim", "varlen"), maxnreg=255),
    num_warps=4,
)


@gluon.jit
def _load_rows(
    do_view, out_view, max_log_sum_ptr, start, end, factor, SCALED: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load 64 rows of dO and of the output; return them with the results of ``row_statistics``."""
    do = left_rows(do_view, start, end, D, WIDTH, LAYOUT)
    out = left_rows(out_view, start, end, D, WIDTH, LAYOUT)
    rows = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    lse, lost = row_statistics(max_log_sum_ptr, rows, rows < end, factor, SCALED)
    return do, out, lse, lost


@gluon.jit
def _describe_rows(lses, deltas, loaded):
    """Store the log-sum-exp and delta = sum(dO O) of 64 rows; return the size of the former."""
    do, out, lse, lost = loaded
    lses.store(lse)
    deltas.store(gl.sum(do.to(gl.float32) * out.to(gl.float32), 1) * lost)
    # Rows past the end have inf, and must not count as large.
    return gl.where(lse == float("inf"), 0.0, gl.abs(lse))


@gluon.jit
def _left_pair(
    one_view, other_view, start, end, D: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Load a tile of rows of two tensors as left operands."""
    one = left_rows(one_view, start, end, D, WIDTH, LAYOUT)
    return one, left_rows(other_view, start, end, D, WIDTH, LAYOUT)


@gluon.jit
def _corrected(do, ptr, start, end, factor, SCALED: gl.constexpr):
    """Multiply rows of dO in registers by the factor that ``row_statistics`` returns."""
    rows = start + gl.arange(0, do.shape[0], gl.SliceLayout(1, do.type.layout))
    _, lost = row_statistics(ptr, rows, rows < end, factor, SCALED)
    return (do.to(gl.float32) * lost[:, None]).to(do.dtype)


@gluon.jit(do_not_specialize=["B", "H", "N", "TOKENS", "KEY_TOKENS", "full", "threshold"])
def _hopper_bwd_kernel(
    q_view, k_view, v_view, lengths_ptr, starts_ptr, key_starts_ptr, do_view, out_view,
    max_log_sum_ptr, dq_view, dk_view, dv_view, B, H, N, TOKENS, KEY_TOKENS, full, scale, mask_view,
    seed_ptr, ds_ptr, keep_scale, threshold,
    D: gl.constexpr, BLOCK_D: gl.constexpr, FULL: gl.constexpr, T: gl.constexpr,
    RAGGED: gl.constexpr, IN_REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    LANES: gl.constexpr = BLOCK_D // 8
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if BLOCK_D > 64 else 2 * BLOCK_D, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STORE: gl.constexpr = exchanged_layout(BLOCK_D)
    TILES: gl.constexpr = FULL + (1 if T > 0 else 0)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    VARLEN: gl.constexpr = starts_ptr is not None
    head = gl.program_id(1) * H + gl.program_id(0)
    M, full_keys, most = N, full, full
    if VARLEN:
        # The programs past the last sequence zero the gradients of tokens that no sequence owns.
        if gl.program_id(1) >= B:
            lanes = gl.arange(0, FILL, gl.BlockedLayout([8], [32], [4], [0]))
            fill_gradients(
                dq_view.ptr, dk_view.ptr, dv_view.ptr, starts_ptr, key_starts_ptr, B, TOKENS,
                KEY_TOKENS, H * D, H * D, head - B * H, (gl.num_programs(1) - B) * H, lanes,
            )  # fmt: skip
            return
        first_key, M = find_sequence(key_starts_ptr, gl.program_id(1), KEY_TOKENS, N)
        first_row, N = find_sequence(starts_ptr, gl.program_id(1), TOKENS, N)
        full, full_keys = (N + 63) // 64, (M + 63) // 64
        # N and M are now the tokens of this sequence; ``most`` keeps the tiles of the longest.
        q_view, dq_view = from_token(q_view, first_row), from_token(dq_view, first_row)
        do_view, out_view = from_token(do_view, first_row), from_token(out_view, first_row)
        k_view, dk_view = from_token(k_view, first_key), from_token(dk_view, first_key)
        v_view, dv_view = from_token(v_view, first_key), from_token(dv_view, first_key)
        max_log_sum_ptr += (gl.program_id(0).to(gl.int64) * TOKENS + first_row) * 2
    else:
        max_log_sum_ptr += head.to(gl.int64) * N * 2
    if ds_ptr is not None:
        ds_ptr += head.to(gl.int64) * N * N
    dropout = seed_ptr, threshold, head, keep_scale
    mask = mask_view, scale
    if seed_ptr is not None:
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        # A bit for each score: the first pass writes the bits, and the second reads them.
        keeps = gl.allocate_shared_memory(gl.int32, [FULL * FULL, 2, 64], WORDS)
        dropout = seed_ptr, threshold, head, keep_scale, keeps, most
        if VARLEN or lengths_ptr is not None:
            for n in range(most * most):  # the first pass skips hidden tiles
                keeps.index(n).store(gl.zeros([2, 64], gl.int32, BLOCKED))
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
    limit = number_of_keys(lengths_ptr, M)
    SCALED: gl.constexpr = MASK == "additive"
    factor = (1.0 if SCALED else scale) * LOG2_E

    if IN_REGISTERS:
        following = _left_pair(q_view, do_view, 0, N, D, BLOCK_D, OPERAND)
    else:
        fetch_rows(q_tile, q_view, 0, N, D, VARLEN, BLOCKED)
        fetch_rows(do_tile, do_view, 0, N, D, VARLEN, BLOCKED)
    fetch_tiles(ks, k_view, limit, D, HIDES, BLOCKED)
    fetch_tiles(vs, v_view, limit, D, HIDES, BLOCKED)
    if T > 0:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
        ROWS_T: gl.constexpr = gl.SliceLayout(1, TAIL)
        COLS_T: gl.constexpr = gl.SliceLayout(0, TAIL)
        TURNED: gl.constexpr = gl.NVMMASharedLayout(2 * T, 16, 2)
        k_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        tails = gl.allocate_shared_memory(DTYPE, [2, 64, T], TURNED)
        p_tail, ds_tail = tails.index(0), tails.index(1)
        dk_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        dv_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        zero_t = gl.zeros([64, T], gl.float32, TAIL)
        fetch_rows(k_tail, k_view, FULL * 64, limit, D, True, BLOCKED)
        fetch_rows(v_tail, v_view, FULL * 64, limit, D, True, BLOCKED)
    # One group: the copies run while delta is computed below.
    commit_copies()
    largest = gl.zeros([64], gl.float32, gl.SliceLayout(1, BLOCKED))
    # In a causal varlen batch, a tile of keys may be past the last tile of rows. The statistics of
    # such rows are written too: a log-sum-exp of inf makes P zero.
    if IN_REGISTERS:
        # Loads run one tile ahead of the sums that need them.
        following_rows = _load_rows(
            do_view, out_view, max_log_sum_ptr, 0, N, factor, SCALED, D, BLOCK_D, BLOCKED
        )
    for n in range(gl.maximum(full, full_keys) if VARLEN else (N + 63) // 64):
        if IN_REGISTERS:
            rows = following_rows
            following_rows = _load_rows(
                do_view, out_view, max_log_sum_ptr, n * 64 + 64, N, factor, SCALED, D, BLOCK_D,
                BLOCKED,
            )  # fmt: skip
        else:
            rows = _load_rows(
                do_view, out_view, max_log_sum_ptr, n * 64, N, factor, SCALED, D, BLOCK_D, BLOCKED
            )
        largest = gl.maximum(largest, _describe_rows(lses.index(n), deltas.index(n), rows))
    is_large = gl.max(largest, 0) > LARGE_LSE  # the same in all warps
    wait_copies(0)
    if not IN_REGISTERS:  # noqa: SIM102 (Gluon compiles both sides of `and`)
        if is_large:
            barrier()
            correct(do_tile, max_log_sum_ptr, 0, N, factor, SCALED, BLOCKED)
    # All copies, the statistics and a corrected dO must be visible to wgmma, and in all warps.
    fence_async_shared()
    barrier()

    # First pass, over tiles of rows: dQ, and the contributions of these rows to the tail's keys.
    for tile in range(0, full):
        first = tile * 64
        if IN_REGISTERS:
            q_tile, do_tile = following
            # Loaded under the loop over keys; past the last tile these are zeros, which nothing
            # reads.
            following = _left_pair(q_view, do_view, first + 64, N, D, BLOCK_D, OPERAND)
            if is_large:
                do_tile = _corrected(do_tile, max_log_sum_ptr, first, N, factor, SCALED)
        lse = lses.index(tile).load(ROWS)[:, None]
        delta = deltas.index(tile).load(ROWS)[:, None]
        dq = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        seen, last = visible_tiles(full_keys, limit, first, 64, HIDES, CAUSAL)
        for i in range(seen):
            dq = rows_step(
                dq, q_tile, do_tile, ks.index(i), vs.index(i), zero, lse, delta, first, i * 64,
                limit, factor, N, mask, dropout, ds_ptr, SCALED, LEFT, False, False,
            )  # fmt: skip
        if HIDES or CAUSAL:
            for i in range(seen, last):
                dq = rows_step(
                    dq, q_tile, do_tile, ks.index(i), vs.index(i), zero, lse, delta, first, i * 64,
                    limit, factor, N, mask, dropout, ds_ptr, SCALED, LEFT, HIDES, CAUSAL,
                )  # fmt: skip
        # The tail's keys: P and dS (64, T). Under a causal mask none of these rows sees them.
        if T > 0 and not CAUSAL:
            s, dp = start_products(q_tile, do_tile, k_tail, v_tail, zero_t)
            keys = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
            queries = (first + gl.arange(0, 64, ROWS_T))[:, None]
            s = wait_for_scores(s, 1, mask, queries, keys, N, 0, False, False)
            p = gl.exp2(exponents_of(s, gl.convert_layout(lse, TAIL), factor, SCALED))
            p = masked(p, None, None, queries, keys, limit, 0.0, True, False)
            dp = warpgroup_mma_wait(0, [dp])
            dp, weight = dropped(dp, p, dropout, queries, keys)
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
            put_exchanged(dq_view, dq * scale, first, N, D, RAGGED, STORE)
        else:
            barrier()  # all warps are done with Q, dO, P and dS of this tile
            if tile + 1 < full:
                fetch_rows(q_tile, q_view, first + 64, N, D, RAGGED, BLOCKED)
            # dQ is staged in the buffer of dO, which no product reads any more. Its store comes
            # after the fence, which would wait for it. A varlen batch stores at once: its addresses
            # leave no registers to keep dQ in.
            if VARLEN:
                put_rows(dq_view, dq * scale, do_tile, first, N, D, RAGGED, BLOCKED)
            else:
                dq_rows = turned_rows(dq * scale, do_tile, BLOCKED)
            if tile + 1 < full:
                fetch_rows(do_tile, do_view, first + 64, N, D, RAGGED, BLOCKED)
                commit_copies()
                wait_copies(0)
                if is_large:
                    barrier()  # ``correct`` reads what other threads copied
                    correct(do_tile, max_log_sum_ptr, first + 64, N, factor, SCALED, BLOCKED)
                fence_async_shared()
                barrier()
            if not VARLEN:
                put_own(dq_view, dq_rows, first, N, D, RAGGED, BLOCKED)

    if T > 0:
        # The tail's rows as columns: dQ^T (D, T), and their contributions to dK and dV of the tail.
        # The tail's Q and dO replace its K and V, which now fill the tiles of Q and dO to 64 rows.
        q_tail, do_tail, k_tile, v_tile = k_tail, v_tail, q_tile, do_tile
        fetch_rows(q_tail, q_view, full * 64, N, D, True, BLOCKED)
        fetch_rows(do_tail, do_view, full * 64, N, D, True, BLOCKED)
        fetch_rows(k_tile, k_view, full * 64, limit, D, True, BLOCKED)
        fetch_rows(v_tile, v_view, full * 64, limit, D, True, BLOCKED)
        commit_copies()
        wait_copies(0)
        if is_large:
            barrier()
            correct(do_tail, max_log_sum_ptr, full * 64, N, factor, SCALED, BLOCKED)
        fence_async_shared()
        barrier()
        dq_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        lse_t = lses.index(full).slice(0, T).load(COLS_T)[None, :]
        delta_t = deltas.index(full).slice(0, T)
        queries = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
        # S^T and dP^T (64, T): the keys of a tile by the tail's rows.
        for n in gl.static_range(FULL):
            s_t, dp_t = start_products(ks.index(n), vs.index(n), q_tail, do_tail, zero_t)
            keys = (n * 64 + gl.arange(0, 64, ROWS_T))[:, None]
            s_t = wait_for_scores(s_t, 1, mask, queries, keys, N, 0, False, False)
            p_t = gl.exp2(exponents_of(s_t, lse_t, factor, SCALED))
            dp_t = warpgroup_mma_wait(0, [dp_t])
            dp_t, _ = dropped(dp_t, p_t, dropout, queries, keys)
            ds_t = p_t * (dp_t - delta_t.load(COLS_T)[None, :])
            ds_t = masked(ds_t, None, None, queries, keys, limit, 0.0, HIDES, False)
            # The two buffers alternate, so that one barrier is enough: a warp that writes a buffer
            # again has passed the barrier of the other, and all warps had read this one by then.
            turn = tails.index(n % 2)
            turn.store(ds_t.to(DTYPE))
            fence_async_shared()
            barrier()
            dq_t = warpgroup_mma(ks.index(n).permute((1, 0)), turn, dq_t, is_async=True)
            dq_t = warpgroup_mma_wait(0, [dq_t])
        barrier()  # all warps are done with dS of the tiles before
        # The tail's keys with the tail's rows, the last contribution to all three gradients.
        s, dp = start_products(k_tile, v_tile, q_tail, do_tail, zero_t)
        keys = (full * 64 + gl.arange(0, 64, ROWS_T))[:, None]
        s = wait_for_scores(s, 1, mask, queries, keys, N, 0, False, False)
        p = gl.exp2(exponents_of(s, lse_t, factor, SCALED))
        p = masked(p, None, None, queries, keys, limit, 0.0, True, CAUSAL)
        dp = warpgroup_mma_wait(0, [dp])
        dp, weight = dropped(dp, p, dropout, queries, keys)
        p_tail.store(weight.to(DTYPE))
        ds_tail.store((p * (dp - delta_t.load(COLS_T)[None, :])).to(DTYPE))
        fence_async_shared()
        barrier()
        own_p, own_ds = p_tail.slice(0, T).permute((1, 0)), ds_tail.slice(0, T).permute((1, 0))
        dq_t = warpgroup_mma(k_tile.permute((1, 0)), ds_tail, dq_t, is_async=True)
        dk_t = warpgroup_mma(q_tail.permute((1, 0)), own_ds, dk_t, is_async=True)
        dv_t = warpgroup_mma(do_tail.permute((1, 0)), own_p, dv_t, is_async=True)
        dq_t, dk_t, dv_t = warpgroup_mma_wait(0, [dq_t, dk_t, dv_t])
        barrier()  # all warps are done with K and V, and with the tiles of Q and dO

    # Second pass, over tiles of keys: Q and dO take the place of K and V.
    qs, dos = ks, vs
    if IN_REGISTERS:
        barrier()  # all warps are done with K and V
        following = _left_pair(k_view, v_view, 0, limit, D, BLOCK_D, OPERAND)
    else:
        k_tile, v_tile = q_tile, do_tile
        fetch_rows(k_tile, k_view, 0, limit, D, HIDES, BLOCKED)
        fetch_rows(v_tile, v_view, 0, limit, D, HIDES, BLOCKED)
    fetch_tiles(qs, q_view, N, D, RAGGED, BLOCKED)
    fetch_tiles(dos, do_view, N, D, RAGGED, BLOCKED)
    commit_copies()
    wait_copies(0)
    if is_large:
        barrier()
        # The resident dO is corrected as its tiles were: rounded once to the dtype of the inputs.
        for i in range(full):
            correct(dos.index(i), max_log_sum_ptr, i * 64, N, factor, SCALED, BLOCKED)
    fence_async_shared()
    barrier()
    if T > 0:
        # Stored after the fence, which would have waited for these stores.
        put_columns(dq_view, dq_t * scale, full * 64, N, D)
        put_columns(dk_view, dk_t * scale, full * 64, N, D)
        if seed_ptr is not None:
            dv_t *= keep_scale
        put_columns(dv_view, dv_t, full * 64, N, D)
    for tile in range(0, full_keys):
        first = tile * 64
        if IN_REGISTERS:
            k_tile, v_tile = following
            following = _left_pair(k_view, v_view, first + 64, limit, D, BLOCK_D, OPERAND)
        dk = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        dv = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        start = 0
        if CAUSAL:
            # The diagonal tile first, with its mask; rows above it see none of these keys.
            start = tile + 1
            dk, dv = keys_step(
                dk, dv, k_tile, v_tile, qs.index(tile), dos.index(tile), zero, lses.index(tile),
                deltas.index(tile), first, first, factor, N, mask, dropout, SCALED, LEFT,
                True,
            )[:2]  # fmt: skip
        for i in range(start, full):
            dk, dv = keys_step(
                dk, dv, k_tile, v_tile, qs.index(i), dos.index(i), zero, lses.index(i),
                deltas.index(i), first, i * 64, factor, N, mask, dropout, SCALED, LEFT, False,
            )[:2]  # fmt: skip
        if T > 0:
            dk, dv = keys_step(
                dk, dv, k_tile, v_tile, q_tail, do_tail, zero_t, lses.index(full).slice(0, T),
                deltas.index(full).slice(0, T), first, full * 64, factor, N, mask, dropout, SCALED,
                LEFT, False,
            )[:2]  # fmt: skip
        if seed_ptr is not None:
            # Once for the finished sum, not for each P.
            dv *= keep_scale
        # Hidden keys were copied as zeros, and P of a zero score may overflow: discard their rows.
        if HIDES:
            seen = (first + gl.arange(0, 64, gl.SliceLayout(1, GRADS)) < limit)[:, None]
            dk, dv = gl.where(seen, dk, 0.0), gl.where(seen, dv, 0.0)
        if IN_REGISTERS:
            put_exchanged(dk_view, dk * scale, first, M, D, RAGGED, STORE)
            put_exchanged(dv_view, dv, first, M, D, RAGGED, STORE)
        else:
            # dK and dV are staged in the buffers of K and V of this tile, and stored after the
            # fence; the next tile is copied meanwhile.
            dk_rows = turned_rows(dk * scale, k_tile, BLOCKED)
            if tile + 1 < full_keys:
                fetch_rows(k_tile, k_view, first + 64, limit, D, HIDES, BLOCKED)
            dv_rows = turned_rows(dv, v_tile, BLOCKED)
            if tile + 1 < full_keys:
                fetch_rows(v_tile, v_view, first + 64, limit, D, HIDES, BLOCKED)
            commit_copies()
            wait_copies(0)
            fence_async_shared()
            barrier()
            put_own(dk_view, dk_rows, first, M, D, RAGGED, BLOCKED)
            put_own(dv_view, dv_rows, first, M, D, RAGGED, BLOCKED)


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
    )
    spare = triton.cdiv(SPARE_PROGRAMS, heads) if varlen else 0
    return Launch(_hopper_bwd_kernel, (heads, call.batch + spare), arguments)
