"""Triton backward of window attention: one packed gradient, deterministic, without atomics.

Sizes as in forward.py. A window that fits one tile needs one launch: a program owns a head of a
window and recomputes the softmax and delta = sum(P * dP), so that neither the output nor the
log-sum-exp is read. Larger windows need two launches, with P from the log-sum-exp: programs that
own ROWS rows of a head write dQ and delta, then programs that own COLS columns write dK and dV.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# The bodies of kernels are Triton's language.

import triton
import triton.language as tl

from .._tiles import Tiles
from .._triton import add_product, exponential, scaled, units
from .forward import (
    LARGE_WINDOWS,
    WHOLE_WINDOWS,
    find_head,
    head_offset,
    load_tokens,
    product,
    store_tokens,
    token_offsets,
)

# Windows that need one launch. The scores and their gradients fill the registers of four warps.
TILES = Tiles("window_backward", *WHOLE_WINDOWS, num_stages=1)
# Programs of the first launch own rows, those of the second own columns.
TILED_TILES = Tiles("window_tiled_backward", *LARGE_WINDOWS, num_stages=1)


@triton.jit(do_not_specialize=["H", "windows_y", "windows_x"])
def window_bwd_kernel(
    qkv_view,
    do_view,
    dqkv_ptr,
    H,
    windows_y,
    windows_x,
    scale,
    WINDOW_Y: tl.constexpr,
    WINDOW_X: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dqkv (B, Y, X, 3, H, D) for windows of at most BLOCK tokens."""
    N: tl.constexpr = WINDOW_Y * WINDOW_X
    b, wy, wx, h = find_head(tl.program_id(0), H, windows_y, windows_x)
    y, x = wy * WINDOW_Y, wx * WINDOW_X
    inside = tl.arange(0, BLOCK) < N
    start = head_offset(qkv_view, b, y, x, h)
    tokens = start + token_offsets(0, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, BLOCK)
    q = load_tokens(qkv_view.ptr, tokens, inside, D, BLOCK_D)  # (BLOCK, BLOCK_D)
    k = load_tokens(qkv_view.ptr + qkv_view.stride_k, tokens, inside, D, BLOCK_D)
    v = load_tokens(qkv_view.ptr + qkv_view.stride_v, tokens, inside, D, BLOCK_D)
    start = head_offset(do_view, b, y, x, h)
    tokens = start + token_offsets(0, do_view.stride_y, do_view.stride_x, WINDOW_X, BLOCK)
    do = load_tokens(do_view.ptr, tokens, inside, D, BLOCK_D)  # (BLOCK, BLOCK_D)

    s = scaled(product(q, tl.trans(k)), scale * units(q.dtype))  # (BLOCK, BLOCK)
    s = tl.where(tl.arange(0, BLOCK) < N, s, float("-inf"))
    p = exponential(s - tl.max(s, axis=1)[:, None], q.dtype)  # (BLOCK, BLOCK)
    # A row outside the window contributes nothing: its gradient was loaded as zero.
    p *= (1.0 / tl.sum(p, axis=1))[:, None]
    dp = product(do, tl.trans(v))  # (BLOCK, BLOCK)

    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    start = (b * size_yx + y * size_x + x) * 3 * H * D + h * D
    out = start + token_offsets(0, size_x * 3 * H * D, 3 * H * D, WINDOW_X, BLOCK)
    dv = product(tl.trans(p.to(v.dtype)), do)  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr + 2 * H * D, dv, out, inside, D, BLOCK_D)
    delta = tl.sum(p * dp, axis=1)  # (BLOCK,)
    ds = (p * (dp - delta[:, None])).to(q.dtype)  # (BLOCK, BLOCK)
    dk = product(tl.trans(ds), q) * scale  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr + H * D, dk, out, inside, D, BLOCK_D)
    dq = product(ds, k) * scale  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr, dq, out, inside, D, BLOCK_D)


@triton.jit
def _probabilities(q, k, lse, col, scale, N: tl.constexpr, COLS: tl.constexpr):
    """Return P (ROWS, COLS) of columns from ``col`` on, zero outside the window."""
    s = product(q, tl.trans(k)) * (scale * units(q.dtype))  # (ROWS, COLS)
    p = exponential(s - lse[:, None] * units(q.dtype), q.dtype)
    return tl.where(col + tl.arange(0, COLS) < N, p, 0.0)


@triton.jit(do_not_specialize=["H", "windows_y", "windows_x"])
def window_bwd_rows_kernel(
    qkv_view,
    do_view,
    lse_ptr,
    delta_ptr,
    dqkv_ptr,
    H,
    windows_y,
    windows_x,
    scale,
    WINDOW_Y: tl.constexpr,
    WINDOW_X: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write dQ into dqkv (B, Y, X, 3, H, D), and delta (B, H, Y, X)."""
    N: tl.constexpr = WINDOW_Y * WINDOW_X
    num_tiles = tl.cdiv(N, ROWS)
    first = tl.program_id(0) % num_tiles * ROWS
    b, wy, wx, h = find_head(tl.program_id(0) // num_tiles, H, windows_y, windows_x)
    y, x = wy * WINDOW_Y, wx * WINDOW_X
    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    inside = first + tl.arange(0, ROWS) < N
    start = head_offset(qkv_view, b, y, x, h)
    rows = start + token_offsets(first, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, ROWS)
    q = load_tokens(qkv_view.ptr, rows, inside, D, BLOCK_D)  # (ROWS, BLOCK_D)
    do_start = head_offset(do_view, b, y, x, h)
    do_rows = token_offsets(first, do_view.stride_y, do_view.stride_x, WINDOW_X, ROWS)
    do = load_tokens(do_view.ptr, do_start + do_rows, inside, D, BLOCK_D)  # (ROWS, BLOCK_D)
    map_start = (b * H + h) * size_yx + y * size_x + x
    map_rows = map_start + token_offsets(first, size_x, 1, WINDOW_X, ROWS)
    lse = tl.load(lse_ptr + map_rows, mask=inside, other=0.0)  # (ROWS,)
    delta = tl.zeros([ROWS], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for col in range(0, N, COLS):
        cols = start + token_offsets(col, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, COLS)
        seen = col + tl.arange(0, COLS) < N
        k = load_tokens(qkv_view.ptr + qkv_view.stride_k, cols, seen, D, BLOCK_D)  # (COLS, BLOCK_D)
        v = load_tokens(qkv_view.ptr + qkv_view.stride_v, cols, seen, D, BLOCK_D)  # (COLS, BLOCK_D)
        p = _probabilities(q, k, lse, col, scale, N, COLS)  # (ROWS, COLS)
        delta += tl.sum(p * product(do, tl.trans(v)), axis=1)  # (ROWS,)
        if q.dtype == tl.float32:
            row_sum += tl.sum(p, axis=1)  # (ROWS,)
    if q.dtype == tl.float32:
        # The log-sum-exp is rounded, so that a row of P does not sum to exactly 1. Without the
        # quotient, dP - delta keeps that fraction of a dP that it should cancel. In half precision
        # other rounding errors dominate.
        delta /= row_sum
    tl.store(delta_ptr + map_rows, delta, mask=inside)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for col in range(0, N, COLS):
        cols = start + token_offsets(col, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, COLS)
        seen = col + tl.arange(0, COLS) < N
        k = load_tokens(qkv_view.ptr + qkv_view.stride_k, cols, seen, D, BLOCK_D)
        v = load_tokens(qkv_view.ptr + qkv_view.stride_v, cols, seen, D, BLOCK_D)
        p = _probabilities(q, k, lse, col, scale, N, COLS)
        ds = p * (product(do, tl.trans(v)) - delta[:, None])  # (ROWS, COLS)
        dq = add_product(dq, ds.to(k.dtype), k)  # (ROWS, BLOCK_D)
    out = (b * size_yx + y * size_x + x) * 3 * H * D + h * D
    rows = out + token_offsets(first, size_x * 3 * H * D, 3 * H * D, WINDOW_X, ROWS)
    store_tokens(dqkv_ptr, dq * scale, rows, inside, D, BLOCK_D)


@triton.jit(do_not_specialize=["H", "windows_y", "windows_x"])
def window_bwd_cols_kernel(
    qkv_view,
    do_view,
    lse_ptr,
    delta_ptr,
    dqkv_ptr,
    H,
    windows_y,
    windows_x,
    scale,
    WINDOW_Y: tl.constexpr,
    WINDOW_X: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write dK and dV into dqkv (B, Y, X, 3, H, D)."""
    N: tl.constexpr = WINDOW_Y * WINDOW_X
    num_tiles = tl.cdiv(N, COLS)
    first = tl.program_id(0) % num_tiles * COLS
    b, wy, wx, h = find_head(tl.program_id(0) // num_tiles, H, windows_y, windows_x)
    y, x = wy * WINDOW_Y, wx * WINDOW_X
    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    inside = first + tl.arange(0, COLS) < N
    start = head_offset(qkv_view, b, y, x, h)
    cols = start + token_offsets(first, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, COLS)
    k = load_tokens(qkv_view.ptr + qkv_view.stride_k, cols, inside, D, BLOCK_D)  # (COLS, BLOCK_D)
    v = load_tokens(qkv_view.ptr + qkv_view.stride_v, cols, inside, D, BLOCK_D)  # (COLS, BLOCK_D)
    do_start = head_offset(do_view, b, y, x, h)
    map_start = (b * H + h) * size_yx + y * size_x + x
    dk = tl.zeros([COLS, BLOCK_D], tl.float32)
    dv = tl.zeros([COLS, BLOCK_D], tl.float32)
    for row in range(0, N, ROWS):
        seen = row + tl.arange(0, ROWS) < N
        rows = token_offsets(row, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, ROWS)
        q = load_tokens(qkv_view.ptr, start + rows, seen, D, BLOCK_D)  # (ROWS, BLOCK_D)
        rows = token_offsets(row, do_view.stride_y, do_view.stride_x, WINDOW_X, ROWS)
        # Rows outside the window are loaded as zeros and add nothing below.
        do = load_tokens(do_view.ptr, do_start + rows, seen, D, BLOCK_D)  # (ROWS, BLOCK_D)
        map_rows = map_start + token_offsets(row, size_x, 1, WINDOW_X, ROWS)
        lse = tl.load(lse_ptr + map_rows, mask=seen, other=0.0)  # (ROWS,)
        delta = tl.load(delta_ptr + map_rows, mask=seen, other=0.0)  # (ROWS,)
        p = _probabilities(q, k, lse, first, scale, N, COLS)  # (ROWS, COLS)
        dv = add_product(dv, tl.trans(p.to(v.dtype)), do)  # (COLS, BLOCK_D)
        ds = p * (product(do, tl.trans(v)) - delta[:, None])  # (ROWS, COLS)
        dk = add_product(dk, tl.trans(ds.to(q.dtype)), q)  # (COLS, BLOCK_D)
    out = (b * size_yx + y * size_x + x) * 3 * H * D + h * D
    rows = out + token_offsets(first, size_x * 3 * H * D, 3 * H * D, WINDOW_X, COLS)
    store_tokens(dqkv_ptr + H * D, dk * scale, rows, inside, D, BLOCK_D)
    store_tokens(dqkv_ptr + 2 * H * D, dv, rows, inside, D, BLOCK_D)
