"""Triton kernels of softmax attention for up to 64 tokens: a program owns several whole heads.

Sizes: B batch, H query heads, N query rows, M key columns, D head dimension. Mapping: one program
owns HEADS consecutive heads, of one sequence or of several; every tile has a leading axis for
them, along which Triton lays out the warps, so that a warp works on heads of its own. All scores
of a head are in registers at once: no loop, and the backward computes softmax and delta = sum(P *
dP) again from Q, K, V and dO alone, seven tensors in all. Exponentials are in base 2, as in
segments.py.
"""

# pyright: reportArgumentType=false
# A launch passes plain numbers where the kernel declares constants.

import triton
import triton.language as tl
from torch import Tensor

from ..._launch_cache import Launch
from ..._tiles import Tile
from ..._triton import LN_2, PRECISION
from ..call import Call, shared_arguments, view_of
from .scores import (
    biased,
    exponent_factor,
    row_lse,
    store_max_log_sum,
)


@triton.jit
def _axes(A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Return indices along each axis of an (A, B, C) tile."""
    return (
        tl.arange(0, A)[:, None, None],
        tl.arange(0, B)[None, :, None],
        tl.arange(0, C)[None, None, :],
    )


@triton.jit
def _load_heads(
    view, offset, limit, exists,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load (HEADS, BLOCK, BLOCK_D), zero outside; ``offset``, ``limit``, ``exists``: (HEADS,)."""
    _, rows, dims = _axes(HEADS, BLOCK, BLOCK_D)  # (1, BLOCK, 1), (1, 1, BLOCK_D)
    inside = (rows < limit[:, None, None]) & exists[:, None, None]  # (HEADS, BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)
    ptrs = view.ptr + offset[:, None, None] + rows * view.stride_n + dims
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _store_heads(
    view, tile, offset, limit, exists,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store (HEADS, BLOCK, BLOCK_D) in the dtype of ``view``, inside the matrices."""
    _, rows, dims = _axes(HEADS, BLOCK, BLOCK_D)
    inside = (rows < limit) & exists[:, None, None]  # (HEADS, BLOCK, 1)
    if D < BLOCK_D:
        inside = inside & (dims < D)
    ptrs = view.ptr + offset[:, None, None] + rows * view.stride_n + dims
    tl.store(ptrs, tile.to(view.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _score_heads(
    q, k, mask, mask_offset, N, M, limit, exists, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return scores (HEADS, ROWS, COLS), -inf where hidden; see ``exponent_factor``."""
    _, rows, cols = _axes(HEADS, ROWS, COLS)  # (1, ROWS, 1), (1, 1, COLS)
    s = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision=PRECISION)  # (HEADS, ROWS, COLS)
    if SCALED and MASK != "additive":
        s = tl.fma(s, scale, 0.0)
    seen = cols < limit[:, None, None]  # (HEADS, 1, COLS)
    if CAUSAL:
        seen = seen & (cols <= rows)
    if MASK != "none":
        ptrs = mask.ptr + mask_offset[:, None, None] + rows * mask.stride_n + cols * mask.stride_m
        inside = (rows < N) & (cols < M) & exists[:, None, None]
        tile = tl.load(ptrs, mask=inside, other=0)  # (HEADS, ROWS, COLS)
        if MASK == "boolean":
            seen = seen & (tile != 0)
        else:
            s = biased(s, scale, tile)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _keep_heads(seed, head, threshold, HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return which scores dropout keeps: ``keep_tile`` for several heads."""
    _, rows, cols = _axes(HEADS, ROWS, COLS)
    zero = tl.zeros([HEADS, ROWS, COLS], tl.int32)
    bits, _, _, _ = tl.philox(seed, zero + cols, zero + rows, zero + head[:, None, None], zero)
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=["B", "H", "GROUP", "N", "M", "threshold"])
def _multihead_fwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    stats_ptr,
    B,
    H,
    GROUP,
    N,
    M,
    scale,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
):
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)  # (HEADS,)
    exists = head < B * H
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    kv = h // GROUP
    limit = tl.zeros([HEADS], tl.int32) + M
    if lengths_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths_ptr + b, mask=exists, other=1), 1), M)
    every_row = tl.zeros([HEADS], tl.int32) + N
    q_offset = b * q_view.stride_b + h * q_view.stride_h  # (HEADS,)
    k_offset = b * k_view.stride_b + kv * k_view.stride_h
    v_offset = b * v_view.stride_b + kv * v_view.stride_h
    mask_offset = b * mask_view.stride_b + h * mask_view.stride_h
    q = _load_heads(q_view, q_offset, every_row, exists, HEADS, ROWS, D, BLOCK_D)
    k = _load_heads(k_view, k_offset, limit, exists, HEADS, COLS, D, BLOCK_D)
    v = _load_heads(v_view, v_offset, limit, exists, HEADS, COLS, D, BLOCK_D)
    s = _score_heads(  # (HEADS, ROWS, COLS)
        q, k, mask_view, mask_offset, N, M, limit, exists, scale,
        HEADS, ROWS, COLS, CAUSAL, MASK, SCALED,
    )  # fmt: skip
    row_max = tl.max(s, axis=2)  # (HEADS, ROWS)
    # A row that sees no key has no maximum to subtract.
    pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
    exponent = (s - pivot[:, :, None]) * exponent_factor(scale, SCALED, q.dtype)
    p = tl.exp2(exponent)  # (HEADS, ROWS, COLS)
    row_sum = tl.sum(p, axis=2)  # (HEADS, ROWS)
    divisor = tl.where(row_sum == 0, 1.0, row_sum)
    dropped = p
    if seed_ptr is not None:
        keep = _keep_heads(tl.load(seed_ptr), head, threshold, HEADS, ROWS, COLS)
        dropped = tl.where(keep, p, 0.0)
    a = tl.dot(dropped.to(v.dtype), v, input_precision=PRECISION)  # (HEADS, ROWS, BLOCK_D)
    a *= (keep_scale / divisor)[:, :, None]
    out_offset = b * out_view.stride_b + h * out_view.stride_h
    _store_heads(out_view, a, out_offset, N, exists, HEADS, ROWS, D, BLOCK_D)
    rows = tl.arange(0, ROWS)[None, :]
    inside = (rows < N) & exists[:, None]  # (HEADS, ROWS)
    row_stats = head.to(tl.int64)[:, None] * N  # (HEADS, 1)
    store_max_log_sum(max_log_sum_ptr, row_stats, rows, pivot, row_sum == 0, divisor, inside)
    if stats_ptr is not None:
        lse = row_lse(row_max, divisor, scale, SCALED)
        tl.store(lse_ptr + row_stats + rows, lse, mask=inside)
        centred = tl.where(s == float("-inf"), 0.0, exponent)
        entropy = tl.log(divisor) - LN_2 * tl.sum(p * centred, axis=2) / divisor  # (HEADS, ROWS)
        total = tl.sum(tl.where(inside, entropy, 0.0), axis=1)  # (HEADS,)
        square = tl.sum(p * p, axis=2) / (divisor * divisor)  # (HEADS, ROWS)
        prob_square = tl.sum(tl.where(inside, square, 0.0), axis=1)
        head_square = tl.sum(tl.where(inside, tl.sum(a * a, axis=2), 0.0), axis=1)  # (HEADS,)
        # A maximum passes nan over; a sum does not, and a diverged model must show.
        largest = tl.max(tl.where(inside, row_max, float("-inf")), axis=1)  # (HEADS,)
        if not SCALED:
            largest *= scale
        largest = tl.where(total == total, largest, float("nan"))
        maxima = tl.sum(tl.where(inside, pivot, 0.0), axis=1)
        if not SCALED:
            maxima *= scale
        step = tl.cast(B * H, tl.int64)
        tl.store(stats_ptr + head, largest, mask=exists)
        tl.store(stats_ptr + step + head, total / N, mask=exists)
        tl.store(stats_ptr + 2 * step + head, tl.sqrt(prob_square), mask=exists)
        tl.store(stats_ptr + 3 * step + head, tl.sqrt(head_square), mask=exists)
        maxima = tl.where(total == total, maxima / N, float("nan"))
        tl.store(stats_ptr + 4 * step + head, maxima, mask=exists)


@triton.jit(do_not_specialize=["B", "H", "N", "M", "threshold"])
def _multihead_bwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    do_view,
    dq_view,
    dk_view,
    dv_view,
    ds_ptr,
    B,
    H,
    N,
    M,
    scale,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
):
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)  # (HEADS,)
    exists = head < B * H
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    limit = tl.zeros([HEADS], tl.int32) + M
    if lengths_ptr is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths_ptr + b, mask=exists, other=1), 1), M)
    every_row = tl.zeros([HEADS], tl.int32) + N
    q_offset = b * q_view.stride_b + h * q_view.stride_h  # (HEADS,)
    k_offset = b * k_view.stride_b + h * k_view.stride_h
    v_offset = b * v_view.stride_b + h * v_view.stride_h
    do_offset = b * do_view.stride_b + h * do_view.stride_h
    mask_offset = b * mask_view.stride_b + h * mask_view.stride_h
    q = _load_heads(q_view, q_offset, every_row, exists, HEADS, ROWS, D, BLOCK_D)
    k = _load_heads(k_view, k_offset, limit, exists, HEADS, COLS, D, BLOCK_D)
    v = _load_heads(v_view, v_offset, limit, exists, HEADS, COLS, D, BLOCK_D)
    do = _load_heads(do_view, do_offset, every_row, exists, HEADS, ROWS, D, BLOCK_D)
    s = _score_heads(  # (HEADS, ROWS, COLS)
        q, k, mask_view, mask_offset, N, M, limit, exists, scale,
        HEADS, ROWS, COLS, CAUSAL, MASK, SCALED,
    )  # fmt: skip
    row_max = tl.max(s, axis=2)  # (HEADS, ROWS)
    pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp2((s - pivot[:, :, None]) * exponent_factor(scale, SCALED, q.dtype))
    row_sum = tl.sum(p, axis=2)  # (HEADS, ROWS)
    # A row that saw no key, and a row outside the matrix, contributes nothing.
    real = (row_sum != 0) & (tl.arange(0, ROWS) < N)[None, :]  # (HEADS, ROWS)
    p *= (1.0 / tl.where(real, row_sum, float("inf")))[:, :, None]
    dp = tl.dot(do, tl.permute(v, (0, 2, 1)), input_precision=PRECISION)  # (HEADS, ROWS, COLS)
    dropped = p
    if seed_ptr is not None:
        keep = _keep_heads(tl.load(seed_ptr), head, threshold, HEADS, ROWS, COLS)
        dp = tl.where(keep, dp * keep_scale, 0.0)
        dropped = tl.where(keep, p * keep_scale, 0.0)
    dv = tl.dot(tl.permute(dropped.to(v.dtype), (0, 2, 1)), do, input_precision=PRECISION)
    dv_offset = b * dv_view.stride_b + h * dv_view.stride_h
    _store_heads(dv_view, dv, dv_offset, M, exists, HEADS, COLS, D, BLOCK_D)
    ds = p * (dp - tl.sum(p * dp, axis=2)[:, :, None])  # (HEADS, ROWS, COLS)
    if ds_ptr is not None:
        _, rows, cols = _axes(HEADS, ROWS, COLS)  # (1, ROWS, 1), (1, 1, COLS)
        ptrs = ds_ptr + (head.to(tl.int64)[:, None, None] * N + rows) * M + cols
        tl.store(ptrs, ds, mask=(rows < N) & (cols < M) & exists[:, None, None])
    narrow = ds.to(k.dtype)
    dk = tl.dot(tl.permute(narrow, (0, 2, 1)), q, input_precision=PRECISION) * scale
    dk_offset = b * dk_view.stride_b + h * dk_view.stride_h
    _store_heads(dk_view, dk, dk_offset, M, exists, HEADS, COLS, D, BLOCK_D)
    dq = tl.dot(narrow, k, input_precision=PRECISION) * scale  # (HEADS, ROWS, BLOCK_D)
    dq_offset = b * dq_view.stride_b + h * dq_view.stride_h
    _store_heads(dq_view, dq, dq_offset, N, exists, HEADS, ROWS, D, BLOCK_D)


def prepare_forward(
    tile: Tile,
    call: Call,
    out: Tensor,
    max_log_sum: Tensor,
    lse: Tensor | None,
    stats: Tensor | None,
) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2).

    With ``stats`` (statistics, B, H), also those and lse (B, H, N).
    """
    batch, heads, _, _ = call.query.shape
    arguments = dict(
        **shared_arguments(call),
        out_view=view_of("out", out),
        **tile.arguments,
        B=batch,
        lse_ptr=lse,
        max_log_sum_ptr=max_log_sum,
        stats_ptr=stats,
    )
    return Launch(_multihead_fwd_kernel, (triton.cdiv(batch * heads, tile["HEADS"]),), arguments)


def prepare_backward(
    tile: Tile,
    grad: Tensor,
    call: Call,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ds: Tensor | None,
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, M) float32."""
    batch, heads, _, _ = call.query.shape
    arguments = shared_arguments(call)
    del arguments["GROUP"]
    arguments = dict(
        **arguments,
        do_view=view_of("grad", grad),
        dq_view=view_of("dq", dq),
        dk_view=view_of("dk", dk),
        dv_view=view_of("dv", dv),
        **tile.arguments,
        B=batch,
        ds_ptr=ds,
    )
    return Launch(_multihead_bwd_kernel, (triton.cdiv(batch * heads, tile["HEADS"]),), arguments)
