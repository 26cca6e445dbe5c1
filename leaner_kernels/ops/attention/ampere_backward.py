"""Gluon backward of softmax attention for short sequences on Ampere: two programs own a head.

Sizes: B batch, H heads, N tokens, D head dimension. Both programs are of one launch. The first
keeps K and V in shared memory: one tile of 64 rows after the other gives dQ. The second keeps Q and
dO: one tile of keys after the other gives dK and dV. A warp owns 16 rows of a tile, so that P and
dS go from accumulators to the left operand of the next product within registers; left operands come
straight from global memory in the product's own layout. Every element is written once, without
atomics: the result is bitwise deterministic.

Written in Gluon because Triton's language stores K a second time where its transpose is an operand,
and gives the warps of a product columns of it.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The body of the kernel is Gluon: layouts are constants, branches are decided early.

from torch import Tensor

from leaner_kernels.ops._gluon import (
    barrier,
    commit_copies,
    copy_async,
    gl,
    gluon,
    mma,
    wait_copies,
)
from leaner_kernels.ops._plans import Launch
from leaner_kernels.ops._triton import LOG2_E
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.gluon_tiles import (
    TILE,
    arguments_of,
    number_of_keys,
    row_statistics,
)
from leaner_kernels.ops.attention.tiles import AmpereTiles, power_of_2


@gluon.jit
def _load(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (ROWS, D) rows from ``start`` on, zero from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    return gl.load(ptrs, mask=(start + rows < end)[:, None], other=0.0)


@gluon.jit
def _store(ptr, STRIDE: gl.constexpr, x, start, end, D: gl.constexpr):
    """Store rows before ``end`` in the layout of a product."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(start + rows < end)[:, None])


@gluon.jit
def _fetch(shared, ptr, STRIDE: gl.constexpr, start, end, LAYOUT: gl.constexpr):
    """Start to copy rows into shared memory, zeros from ``end`` on."""
    rows = gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    copy_async(shared, ptrs, mask=(start + rows < end)[:, None])


@gluon.jit
def _rows_segment(
    dq, q, grad, x, y, lse, delta, first, start, limit, factor, STEP: gl.constexpr,
    STEPS: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Add to dQ of a tile what STEPS times STEP keys in a buffer give."""
    MMA: gl.constexpr = dq.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for n in gl.static_range(STEPS):
        keys, values = x.slice(n * STEP, STEP), y.slice(n * STEP, STEP)
        zero = gl.zeros([64, STEP], gl.float32, MMA)
        s = mma(q, keys.permute((1, 0)).load(RIGHT), zero)
        dp = mma(grad, values.permute((1, 0)).load(RIGHT), zero)
        ds = gl.exp2(s * factor - lse) * (dp - delta)
        cols = (start + n * STEP + gl.arange(0, STEP, gl.SliceLayout(0, MMA)))[None, :]
        if HIDES:
            ds = gl.where(cols < limit, ds, 0.0)
        if CAUSAL:
            rows = (first + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
            ds = gl.where(cols <= rows, ds, 0.0)
        dq = mma(gl.convert_layout(ds.to(q.dtype), LEFT), keys.load(RIGHT), dq)
    return dq


@gluon.jit
def _keys_segment(
    dk, dv, k, v, x, y, lses, deltas, first, start, factor, STEP: gl.constexpr,
    STEPS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Add to dK and dV of a tile what STEPS times STEP rows in a buffer give."""
    MMA: gl.constexpr = dk.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    for n in gl.static_range(STEPS):
        queries, grads = x.slice(n * STEP, STEP), y.slice(n * STEP, STEP)
        lse, delta = lses.slice(n * STEP, STEP), deltas.slice(n * STEP, STEP)
        zero = gl.zeros([64, STEP], gl.float32, MMA)
        s = mma(k, queries.permute((1, 0)).load(RIGHT), zero)
        dp = mma(v, grads.permute((1, 0)).load(RIGHT), zero)
        p = gl.exp2(s * factor - lse.load(COLS)[None, :])
        if CAUSAL:
            keys = (first + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
            rows = (start + n * STEP + gl.arange(0, STEP, COLS))[None, :]
            p = gl.where(keys <= rows, p, 0.0)
        ds = p * (dp - delta.load(COLS)[None, :])
        dv = mma(gl.convert_layout(p.to(k.dtype), LEFT), grads.load(RIGHT), dv)
        dk = mma(gl.convert_layout(ds.to(k.dtype), LEFT), queries.load(RIGHT), dk)
    return dk, dv


@gluon.jit
def _describe_rows(
    grads, lses, deltas, grad, GRAD_STRIDE: gl.constexpr, out, OUT_STRIDE: gl.constexpr,
    max_log_sum_ptr, start, end, factor, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write dO, the log-sum-exp and delta = sum(dO O) of rows to shared memory."""
    ROWS: gl.constexpr = grads.shape[0]
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lse, lost = row_statistics(max_log_sum_ptr, rows, rows < end, factor)
    x = _load(grad, GRAD_STRIDE, start, end, ROWS, D, LAYOUT).to(gl.float32) * lost[:, None]
    grads.store(x.to(grads.dtype))
    lses.store(lse)
    deltas.store(gl.sum(x * _load(out, OUT_STRIDE, start, end, ROWS, D, LAYOUT).to(gl.float32), 1))


@gluon.jit(do_not_specialize=["H", "N", "full"])
def _ampere_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    grad_ptr,
    out_ptr,
    max_log_sum_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    stride_q_b,
    stride_q_h,
    stride_k_b,
    stride_k_h,
    stride_v_b,
    stride_v_h,
    stride_grad_b,
    stride_grad_h,
    stride_out_b,
    stride_out_h,
    stride_dq_b,
    stride_dq_h,
    stride_dk_b,
    stride_dk_h,
    stride_dv_b,
    stride_dv_h,
    H,
    N,
    full,
    scale,
    stride_q_n: gl.constexpr,
    stride_k_n: gl.constexpr,
    stride_v_n: gl.constexpr,
    stride_grad_n: gl.constexpr,
    stride_out_n: gl.constexpr,
    stride_dq_n: gl.constexpr,
    stride_dk_n: gl.constexpr,
    stride_dv_n: gl.constexpr,
    D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    TAIL_STEPS: gl.constexpr,
    STEP: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    LANES: gl.constexpr = D // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    OWN: gl.constexpr = gl.SliceLayout(1, MMA)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(
        8, 64 // D if D < 64 else 1, 8 if D >= 64 else LANES, [1, 0]
    )
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HIDES: gl.constexpr = lengths_ptr is not None
    h = gl.program_id(0) // 2
    h_64, b_64 = h.to(gl.int64), gl.program_id(1).to(gl.int64)
    query = q_ptr + (b_64 * stride_q_b + h_64 * stride_q_h)
    key = k_ptr + (b_64 * stride_k_b + h_64 * stride_k_h)
    value = v_ptr + (b_64 * stride_v_b + h_64 * stride_v_h)
    grad = grad_ptr + (b_64 * stride_grad_b + h_64 * stride_grad_h)
    out = out_ptr + (b_64 * stride_out_b + h_64 * stride_out_h)
    max_log_sum_ptr += (b_64 * H + h_64) * N * 2
    limit = number_of_keys(lengths_ptr, N)
    factor = scale * LOG2_E
    xs = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    ys = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    if T > 0:
        x_tail = gl.allocate_shared_memory(DTYPE, [T, D], SHARED)
        y_tail = gl.allocate_shared_memory(DTYPE, [T, D], SHARED)
    if gl.program_id(0) % 2 == 0:
        for n in gl.static_range(FULL):
            _fetch(xs.index(n), key, stride_k_n, n * 64, limit, BLOCKED)
            _fetch(ys.index(n), value, stride_v_n, n * 64, limit, BLOCKED)
        if T > 0:
            _fetch(x_tail, key, stride_k_n, FULL * 64, limit, BLOCKED)
            _fetch(y_tail, value, stride_v_n, FULL * 64, limit, BLOCKED)
        commit_copies()
        dquery = dq_ptr + (b_64 * stride_dq_b + h_64 * stride_dq_h)
        wait_copies(0)
        barrier()
        for first in range(0, N, 64):
            rows = first + gl.arange(0, 64, OWN)
            lse, lost = row_statistics(max_log_sum_ptr, rows, rows < N, factor)
            q = _load(query, stride_q_n, first, N, 64, D, LEFT)
            grads = _load(grad, stride_grad_n, first, N, 64, D, LEFT)
            outs = _load(out, stride_out_n, first, N, 64, D, LEFT)
            lost = gl.convert_layout(lost, gl.SliceLayout(1, LEFT))[:, None]
            wide = grads.to(gl.float32) * lost
            grads = wide.to(DTYPE)
            delta = gl.convert_layout(gl.sum(wide * outs.to(gl.float32), 1), OWN)
            dq = gl.zeros([64, D], gl.float32, MMA)
            last = full
            if CAUSAL:
                last = gl.minimum(first // 64 + 1, full)
            for i in range(last):
                dq = _rows_segment(
                    dq, q, grads, xs.index(i), ys.index(i), lse[:, None], delta[:, None], first,
                    i * 64, limit, factor, STEP, 64 // STEP, HIDES, CAUSAL,
                )  # fmt: skip
            if T > 0:
                dq = _rows_segment(
                    dq, q, grads, x_tail, y_tail, lse[:, None], delta[:, None], first, full * 64,
                    limit, factor, 16, TAIL_STEPS, True, CAUSAL,
                )  # fmt: skip
            _store(dquery, stride_dq_n, dq * scale, first, N, D)
    else:
        lses = gl.allocate_shared_memory(gl.float32, [FULL, 64], VECTOR)
        deltas = gl.allocate_shared_memory(gl.float32, [FULL, 64], VECTOR)
        for n in gl.static_range(FULL):
            _fetch(xs.index(n), query, stride_q_n, n * 64, N, BLOCKED)
        if T > 0:
            _fetch(x_tail, query, stride_q_n, FULL * 64, N, BLOCKED)
            lse_tail = gl.allocate_shared_memory(gl.float32, [T], VECTOR)
            delta_tail = gl.allocate_shared_memory(gl.float32, [T], VECTOR)
        commit_copies()
        for n in range(full):
            _describe_rows(
                ys.index(n), lses.index(n), deltas.index(n), grad, stride_grad_n, out, stride_out_n,
                max_log_sum_ptr, n * 64, N, factor, D, BLOCKED,
            )  # fmt: skip
        if T > 0:
            _describe_rows(
                y_tail, lse_tail, delta_tail, grad, stride_grad_n, out, stride_out_n,
                max_log_sum_ptr, full * 64, N, factor, D, BLOCKED,
            )  # fmt: skip
        dkey = dk_ptr + (b_64 * stride_dk_b + h_64 * stride_dk_h)
        dvalue = dv_ptr + (b_64 * stride_dv_b + h_64 * stride_dv_h)
        wait_copies(0)
        barrier()
        for first in range(0, N, 64):
            k = _load(key, stride_k_n, first, limit, 64, D, LEFT)
            v = _load(value, stride_v_n, first, limit, 64, D, LEFT)
            dk = gl.zeros([64, D], gl.float32, MMA)
            dv = gl.zeros([64, D], gl.float32, MMA)
            start = 0
            if CAUSAL:
                start = first // 64
            for i in range(start, full):
                dk, dv = _keys_segment(
                    dk, dv, k, v, xs.index(i), ys.index(i), lses.index(i), deltas.index(i), first,
                    i * 64, factor, STEP, 64 // STEP, CAUSAL,
                )  # fmt: skip
            if T > 0:
                dk, dv = _keys_segment(
                    dk, dv, k, v, x_tail, y_tail, lse_tail, delta_tail, first, full * 64, factor,
                    16, TAIL_STEPS, CAUSAL,
                )  # fmt: skip
            if HIDES:
                seen = (first + gl.arange(0, 64, OWN) < limit)[:, None]
                dk, dv = gl.where(seen, dk, 0.0), gl.where(seen, dv, 0.0)
            _store(dkey, stride_dk_n, dk * scale, first, N, D)
            _store(dvalue, stride_dv_n, dv, first, N, D)


def prepare(
    tiles: AmpereTiles,
    grad: Tensor,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Launch:
    """Return the launch that writes dq, dk and dv (B, H, N, D)."""
    batch, heads, tokens, _ = call.query.shape
    full, left = divmod(tokens, TILE)
    steps = -(-left // 16)
    tensors = {"grad": grad, "out": out, "dq": dq, "dk": dk, "dv": dv}
    arguments = arguments_of(_ampere_bwd_kernel, call, tensors)
    arguments |= dict(
        **tiles.options,
        max_log_sum_ptr=max_log_sum,
        full=full,
        FULL=full,
        T=16 * power_of_2(steps) if steps else 0,
        TAIL_STEPS=steps,
        STEP=tiles.STEP,
    )
    return Launch(_ampere_bwd_kernel, (2 * heads, batch), arguments)
