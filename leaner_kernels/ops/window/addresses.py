"""Where the windows of a map lie, and their tiles of tokens: what every kernel uses.

Sizes: B batch, Y by X map, H heads, D head dimension; N tokens of a window. Heads of windows are
counted by map, window and head, so that neighbours read neighbouring memory.
"""

import triton
import triton.language as tl

from .._triton import PRECISION


@triton.jit
def find_head(index, H, windows_y, windows_x):
    """Return map, row and column of the window, and head."""
    window = index // H
    h, x = index % H, window % windows_x
    y, b = window // windows_x % windows_y, window // windows_x // windows_y
    return b.to(tl.int64), y.to(tl.int64), x.to(tl.int64), h.to(tl.int64)


@triton.jit
def head_offset(view, b, y, x, h):
    """Return how far a head of the window whose first token is at ``y`` and ``x`` lies."""
    return b * view.stride_b + y * view.stride_y + x * view.stride_x + h * view.stride_h


@triton.jit
def token_offsets(start, stride_y, stride_x, WINDOW_X: tl.constexpr, BLOCK: tl.constexpr):
    """Return (BLOCK,): how far tokens from ``start`` on lie from their window's first."""
    tokens = start + tl.arange(0, BLOCK)
    y, x = (tokens // WINDOW_X).to(tl.int64), (tokens % WINDOW_X).to(tl.int64)
    return y * stride_y + x * stride_x


@triton.jit
def load_tokens(ptr, offsets, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load (BLOCK, BLOCK_D) from ``offsets`` (BLOCK,), zero where not inside."""
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None]
    if D < BLOCK_D:
        mask = mask & (dims < D)
    return tl.load(ptr + offsets[:, None] + dims, mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, tile, offsets, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store (BLOCK, BLOCK_D) in the dtype of ``ptr``, where inside."""
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None]
    if D < BLOCK_D:
        mask = mask & (dims < D)
    tl.store(ptr + offsets[:, None] + dims, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b):
    """Return a @ b."""
    return tl.dot(a, b, input_precision=PRECISION)
