"""Gluon backward of softmax attention on Hopper for heads whose Q, K, V and dO fit on chip.

Sizes: B batch, H heads, N tokens, D head dimension, T columns of a tail (gluon_tiles.py). A program
owns a head and copies each of the four into shared memory once: no loop waits for memory, and delta
= sum(dO O) reads dO from there. The first pass, over tiles of rows, computes dQ; the second, over
tiles of keys, computes dK and dV. dQ, dK and dV of a tail, transposed (D, T), are summed on the way
from the scores that the passes compute anyway. Every element is written once, without atomics: the
result is bitwise deterministic.
"""

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
from ...route import Results
from ..call import BIAS_SLOTS, Call, Gradients, backward_arguments, hopper_tails, tiles_and_tail
from . import gluon_tiles as common
from .gluon_tiles import Dropout, Mask, Scoring

SLOTS = gl.constexpr(BIAS_SLOTS)

# For calls with as many rows as keys. Up to these lengths, at least two programs fit on an SM.
BACKWARD_TILES = Tiles(
    "hopper_resident_backward",
    rule(dim=32, tokens=128, maxnreg=128),
    rule(dim=32, tokens=256, takes=("mask",), maxnreg=255),
    rule(dim=64, tokens=208, takes=("mask", "padded_dim"), maxnreg=255),
    num_warps=4,
)


@gluon.jit
def _load_rows(
    out_view,
    saved,
    start,
    scoring,
    ROWS: gl.constexpr,
    SCALED: gl.constexpr,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Load rows of the output; return them with the results of ``load_row_statistics``."""
    N = scoring.N
    out = common.load_rows(
        view=out_view, start=start, end=N, D=D, WIDTH=WIDTH, LAYOUT=LAYOUT, ROWS=ROWS
    )
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lse, correction = common.load_row_statistics(saved, rows, rows < N, scoring.factor, SCALED)
    return out, lse, correction


@gluon.jit
def _describe_rows(do_rows, lses, deltas, loaded):
    """Store the log-sum-exp and delta = sum(dO O) of rows, and dO times the former's factor."""
    out, lse, correction = loaded
    do = do_rows.load(out.type.layout).to(gl.float32) * correction[:, None]
    do_rows.store(do.to(do_rows.dtype))
    lses.store(lse)
    deltas.store(gl.sum(do * out.to(gl.float32), 1))


@gluon.jit
def _thread_sums_of_product(x):
    """Add up the two rows, eight apart, of a thread in the layout of a product: (4, 8, D)."""
    return gl.sum(x.reshape([4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def _thread_sums_of_copy(x):
    """Add up the rows of a thread in ``copy_layout``: (warps, rows of a warp, D)."""
    ROWS: gl.constexpr = 256 // x.shape[1]
    x = x.to(gl.float32).reshape([x.shape[0] // (4 * ROWS), 4, ROWS, x.shape[1]])
    return gl.sum(x, 0)


@gluon.jit
def _store_warps(bias_ptr, FIRST: gl.constexpr, sums, H, D: gl.constexpr):
    """Add up (4, rows, D) within each warp, and store them from slot ``FIRST`` of this head on."""
    x = gl.sum(sums, 1)  # (4, D)
    LAYOUT: gl.constexpr = x.type.layout
    slots = FIRST + gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    start = bias_ptr + ((gl.program_id(1) * SLOTS * H + gl.program_id(0)).to(gl.int64) * D)
    gl.store(start + (slots * (H * D))[:, None] + dims[None, :], x, mask=(dims < D)[None, :])


@gluon.jit(do_not_specialize=["H", "N", "full"])
def _hopper_resident_bwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    do_view,
    out_view,
    max_log_sum_ptr,
    lse_ptr,
    dq_view,
    dk_view,
    dv_view,
    H,
    N,
    full,
    scale,
    mask_view,
    ds_ptr,
    bias_ptr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    RAGGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASK: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    BLOCKED: gl.constexpr = common.copy_layout(BLOCK_D)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_D, 16, 2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = FULL + (1 if T > 0 else 0)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    SCALED: gl.constexpr = MASK == "additive"
    head = gl.program_id(1) * H + gl.program_id(0)
    # Here, as a function of Triton 3.6 cannot return None: one of the two is None.
    if max_log_sum_ptr is None:
        lse_ptr += head.to(gl.int64) * N
    else:
        max_log_sum_ptr += head.to(gl.int64) * N * 2
    saved = common.SavedRows(max_log_sum_ptr, lse_ptr)
    if ds_ptr is not None:
        ds_ptr += head.to(gl.int64) * N * N
    qs = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    dos = gl.allocate_shared_memory(DTYPE, [FULL, 64, BLOCK_D], SHARED)
    lses = gl.allocate_shared_memory(gl.float32, [TILES, 64], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [TILES, 64], VECTOR)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    limit = common.visible_keys(lengths_ptr, N)
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
    scoring = Scoring(N, limit, factor, mask, Dropout())  # dropout goes to hopper.py

    # dO is copied first, and O is loaded: delta is computed while Q, K and V are being copied.
    for n in gl.static_range(FULL):
        common.fetch_rows(dos.index(n), do_view, n * 64, N, D, RAGGED)
    if T > 0:
        TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 16])
        ROWS_T: gl.constexpr = gl.SliceLayout(1, TAIL)
        COLS_T: gl.constexpr = gl.SliceLayout(0, TAIL)
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout(2 * T, 16, 2)
        q_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        k_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        do_tail = gl.allocate_shared_memory(DTYPE, [T, BLOCK_D], SHARED)
        tails = gl.allocate_shared_memory(DTYPE, [2, 64, T], TRANSPOSED)
        p_tail, ds_tail = tails.index(0), tails.index(1)
        common.fetch_rows(do_tail, do_view, FULL * 64, N, D, True)
    commit_copies()  # first group: dO
    loaded = ()
    for n in gl.static_range(TILES):
        rows = _load_rows(
            out_view=out_view,
            saved=saved,
            start=n * 64,
            scoring=scoring,
            ROWS=64 if n < FULL else T,
            SCALED=SCALED,
            D=D,
            WIDTH=BLOCK_D,
            LAYOUT=BLOCKED,
        )
        loaded = loaded + (rows,)  # noqa: RUF005
    barrier()  # keeps the loads of O before the copies in program order
    for n in gl.static_range(FULL):
        common.fetch_rows(qs.index(n), q_view, n * 64, N, D, RAGGED)
        common.fetch_rows(ks.index(n), k_view, n * 64, limit, D, HIDES)
        common.fetch_rows(vs.index(n), v_view, n * 64, limit, D, HIDES)
    if T > 0:
        common.fetch_rows(q_tail, q_view, FULL * 64, N, D, True)
        common.fetch_rows(k_tail, k_view, FULL * 64, limit, D, True)
        common.fetch_rows(v_tail, v_view, FULL * 64, limit, D, True)
    commit_copies()  # second group: Q, K and V
    # dO has landed when one group is left. No barrier: a thread reads back only what it copied.
    wait_copies(1)
    if T > 0:
        lse_tail, delta_tail = lses.index(FULL).slice(0, T), deltas.index(FULL).slice(0, T)
        if bias_ptr is not None:
            do_sum = _thread_sums_of_copy(do_tail.load(BLOCKED))
        _describe_rows(do_tail, lse_tail, delta_tail, loaded[FULL])
        dq_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        dk_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        dv_t = gl.zeros([BLOCK_D, T], gl.float32, TAIL)
        zero_t = gl.zeros([64, T], gl.float32, TAIL)
    for n in gl.static_range(FULL):
        if bias_ptr is not None:
            rows_sum = _thread_sums_of_copy(dos.index(n).load(BLOCKED))
            if n > 0 or T > 0:
                do_sum = gl.convert_layout(do_sum, rows_sum.type.layout) + rows_sum
            else:
                do_sum = rows_sum
        _describe_rows(dos.index(n), lses.index(n), deltas.index(n), loaded[n])
    # Q, K and V of all threads, and the corrected dO, must be visible to wgmma in all warps.
    wait_copies(0)
    fence_async_shared()
    barrier()

    if bias_ptr is not None:
        # Rows of P add up to 1, so that dV sums to what dO does; rows of dS add up to 0, and so
        # does dK.
        _store_warps(bias_ptr, 5, do_sum, H, D)
        dq_sum = _thread_sums_of_product(gl.zeros([64, BLOCK_D], gl.float32, GRADS))
    # Tiles of rows: their dQ, and their contributions to dK and dV of the tail.
    for tile in range(0, full):
        first = tile * 64
        q, do = qs.index(tile), dos.index(tile)
        lse = lses.index(tile).load(ROWS)[:, None]
        delta = deltas.index(tile).load(ROWS)[:, None]
        dq = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        if T > 0 and not CAUSAL:
            # The tail's keys come first: P and dS (64, T). Under a causal mask none of these rows
            # sees them.
            s, dp = common.start_products(q, do, k_tail, v_tail, zero_t)
            keys = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
            queries = (first + gl.arange(0, 64, ROWS_T))[:, None]
            s = common.wait_for_scores(s, 1, scoring, queries, keys)
            # dP is still in flight.
            p = gl.exp2(common.exponents_of(s, gl.convert_layout(lse, TAIL), factor, SCALED))
            p = common.mask_scores(p, queries, keys, limit, False, 0.0)
            dp = warpgroup_mma_wait(0, [dp])
            ds = p * (dp - gl.convert_layout(delta, TAIL))
            common.store_ds(scoring, ds, queries, keys)
            ds = ds.to(DTYPE)
            # dK and dV of the tail need P and dS as right operands, from shared memory.
            p_tail.store(p.to(DTYPE))
            ds_tail.store(ds)
            # Its left operand is in registers: it may start ahead of the fence.
            dq = warpgroup_mma(gl.convert_layout(ds, LEFT), k_tail, dq, is_async=True)
            fence_async_shared()
            barrier()
            # dK^T = Q^T dS and dV^T = dO^T P, both (D, T).
            dk_t = warpgroup_mma(q.permute((1, 0)), ds_tail, dk_t, is_async=True)
            dv_t = warpgroup_mma(do.permute((1, 0)), p_tail, dv_t, is_async=True)
            dq, dk_t, dv_t = warpgroup_mma_wait(0, [dq, dk_t, dv_t])
        num_unmasked, num_visible = common.visible_tiles(full, limit, first, 64, HIDES, CAUSAL)
        # Tiles that every row sees in full, then those that a mask cuts.
        for i in range(num_unmasked):
            dq = common.rows_step(
                dq=dq,
                q=q,
                do=do,
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
                    q=q,
                    do=do,
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
        if T > 0 and not CAUSAL:
            barrier()  # all warps are done with P and dS of the tail
        if bias_ptr is not None:
            dq_sum += _thread_sums_of_product(dq)
        common.store_product_rows(dq_view, dq * scale, first, N, D, RAGGED)

    if bias_ptr is not None:
        _store_warps(bias_ptr, 0, dq_sum * scale, H, D)
    # Tiles of keys: their dK and dV, and their contributions to dQ of the tail. No barrier between
    # the passes: Q, K, V and dO are only read.
    for tile in range(0, full):
        first = tile * 64
        k, v = ks.index(tile), vs.index(tile)
        dk = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        dv = gl.zeros([64, BLOCK_D], gl.float32, GRADS)
        if T > 0:
            dk, dv, ds = common.keys_step(
                dk=dk,
                dv=dv,
                k=k,
                v=v,
                q=q_tail,
                do=do_tail,
                zero=zero_t,
                lse=lse_tail,
                delta=delta_tail,
                first=first,
                start=full * 64,
                scoring=scoring,
                SCALED=SCALED,
                CAUSAL=False,
                limit=limit if HIDES else None,
            )
            keys = (first + gl.arange(0, 64, ROWS_T))[:, None]
            queries = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
            common.store_ds(scoring, ds, queries, keys)
            # The two buffers alternate, so that one barrier is enough: a warp that writes a buffer
            # again has passed the barrier of the other, and all warps had read this one by then.
            ds_buffer = tails.index(tile & 1)
            ds_buffer.store(ds.to(DTYPE))
            fence_async_shared()
            barrier()
            # dQ^T = K^T dS^T, (D, T).
            dq_t = warpgroup_mma(k.permute((1, 0)), ds_buffer, dq_t, is_async=True)
            dq_t = warpgroup_mma_wait(0, [dq_t])
        start = 0
        if CAUSAL:
            # The diagonal tile first, with its mask; rows above it see none of these keys.
            start = tile + 1
            dk, dv = common.keys_step(
                dk=dk,
                dv=dv,
                k=k,
                v=v,
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
                k=k,
                v=v,
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
        if HIDES:
            # Hidden keys were copied as zeros, and P of a zero score may overflow: discard their
            # rows.
            visible = (first + gl.arange(0, 64, gl.SliceLayout(1, GRADS)) < limit)[:, None]
            dk, dv = gl.where(visible, dk, 0.0), gl.where(visible, dv, 0.0)
        common.store_product_rows(dk_view, dk * scale, first, N, D, RAGGED)
        common.store_product_rows(dv_view, dv, first, N, D, RAGGED)

    if T > 0:
        # The tail's keys with the tail's rows. The buffers of the tail hold T rows, but a left
        # operand has 64: it is loaded into registers, with zeros past the last token.
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, TAIL, 2)
        k_tile = common.load_rows(k_view, full * 64, limit, D, BLOCK_D, OPERAND)
        v_tile = common.load_rows(v_view, full * 64, limit, D, BLOCK_D, OPERAND)
        barrier()  # all warps are done with dS of the tiles before
        s, dp = common.start_products(k_tile, v_tile, q_tail, do_tail, zero_t)
        keys = (full * 64 + gl.arange(0, 64, ROWS_T))[:, None]
        queries = (full * 64 + gl.arange(0, T, COLS_T))[None, :]
        s = common.wait_for_scores(s, 1, scoring, queries, keys)
        p = gl.exp2(common.exponents_of(s, lse_tail.load(COLS_T)[None, :], factor, SCALED))
        p = common.mask_scores(p, queries, keys, limit, CAUSAL, 0.0)
        dp = warpgroup_mma_wait(0, [dp])
        p_tail.store(p.to(DTYPE))
        ds = p * (dp - delta_tail.load(COLS_T)[None, :])
        common.store_ds(scoring, ds, queries, keys)
        ds_tail.store(ds.to(DTYPE))
        fence_async_shared()
        barrier()
        # P^T and dS^T were stored as (keys, rows): dK and dV sum over rows, and read their
        # transpose.
        p_tail_t, ds_tail_t = (
            p_tail.slice(0, T).permute((1, 0)),
            ds_tail.slice(0, T).permute((1, 0)),
        )
        dq_t = warpgroup_mma(k_tail.permute((1, 0)), ds_tail.slice(0, T), dq_t, is_async=True)
        dk_t = warpgroup_mma(q_tail.permute((1, 0)), ds_tail_t, dk_t, is_async=True)
        dv_t = warpgroup_mma(do_tail.permute((1, 0)), p_tail_t, dv_t, is_async=True)
        dq_t, dk_t, dv_t = warpgroup_mma_wait(0, [dq_t, dk_t, dv_t])
        common.store_columns(dq_view, dq_t * scale, full * 64, N, D)
        common.store_columns(dk_view, dk_t * scale, full * 64, N, D)
        common.store_columns(dv_view, dv_t, full * 64, N, D)
    if bias_ptr is not None:
        if T > 0:
            tail_sum = gl.sum(dq_t, 1) * scale  # (D,)
        else:
            tail_sum = gl.zeros([BLOCK_D], gl.float32, gl.SliceLayout(0, BLOCKED))
        dims = gl.arange(0, BLOCK_D, tail_sum.type.layout)
        slot = (gl.program_id(1) * SLOTS + 4) * H + gl.program_id(0)
        gl.store(bias_ptr + slot.to(gl.int64) * D + dims, tail_sum, mask=dims < D)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, N) float32."""
    batch, heads, tokens, _ = call.query.shape
    arguments = backward_arguments(_hopper_resident_bwd_kernel, grad, call, saved, gradients)
    tails = hopper_tails(arguments["BLOCK_D"])
    if call.attn_mask is not None:
        tails = tails[:1]  # with a mask, a tail of 32 spills
    full, tail = tiles_and_tail(tokens, tails)
    ragged = tail == 0 and tokens % 64 != 0
    arguments |= dict(**tile.options, full=full, FULL=full, T=tail, RAGGED=ragged)
    return Launch(_hopper_resident_bwd_kernel, (heads, batch), arguments)
