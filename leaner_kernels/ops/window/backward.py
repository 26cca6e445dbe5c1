"""Triton backward of window attention: one packed gradient, deterministic, without atomics.

Sizes: as in forward.py. A window that fits one tile takes one launch: a program owns a head of a
window and computes the softmax and delta = sum(P * dP) again, so that neither the output nor the
log-sum-exp is read. Larger windows take two: programs that own rows write dQ and delta, then
programs that own columns write dK and dV.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# The bodies of kernels are Triton's language.

import triton
import triton.language as tl

from .._tiles import Tiles
from .._triton import exponential, scaled, units
from .addresses import (
    find_head,
    head_offset,
    load_tokens,
    product,
    store_tokens,
    token_offsets,
)
from .forward import WHOLE_WINDOWS

# In one launch; other windows take two. The scores and their gradients take the registers of four
# warps.
TILES = Tiles("window_backward", *WHOLE_WINDOWS, num_stages=1)


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
    """Write dqkv (B, Y, X, 3, H, D) of windows that fit BLOCK tokens."""
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
