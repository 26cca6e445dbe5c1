"""Where the windows of a map lie, and tiles of one head or of several: what every kernel uses.

Sizes: B batch, Y by X map, H heads, D head dimension; N tokens of a window. Heads of windows are
counted by map, window and head, so that neighbours read neighbouring memory. A tile is (HEADS,
ROWS, COLS), and (ROWS, COLS) where HEADS is 1, since Triton gives warps whole heads: several would
compute the same one. So axes count from the last, and what is said of (HEADS,) is a scalar there.
"""

import triton
import triton.language as tl

from leaner_kernels.ops._triton import PRECISION


@triton.jit
def find_heads(first, count, H, windows_y, windows_x, HEADS: tl.constexpr):
    """Return map, row and column of the window, head and whether it exists, (HEADS,) each."""
    index = first * HEADS
    if HEADS > 1:
        index += tl.arange(0, HEADS)
    window = index // H
    h, x = index % H, window % windows_x
    y, b = window // windows_x % windows_y, window // windows_x // windows_y
    return b.to(tl.int64), y.to(tl.int64), x.to(tl.int64), h.to(tl.int64), index < count


@triton.jit
def of_tokens(t, HEADS: tl.constexpr):
    """Return (HEADS,) as what adds to tokens, (HEADS, BLOCK)."""
    return t[:, None] if HEADS > 1 else t


@triton.jit
def token_offsets(start, stride_y, stride_x, WINDOW_X: tl.constexpr, BLOCK: tl.constexpr):
    """Return (BLOCK,): how far tokens from ``start`` on lie from their window's first."""
    tokens = start + tl.arange(0, BLOCK)
    y, x = (tokens // WINDOW_X).to(tl.int64), (tokens % WINDOW_X).to(tl.int64)
    return y * stride_y + x * stride_x


@triton.jit
def tokens_inside(start, exists, N: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Return (HEADS, BLOCK): which tokens from ``start`` on are in a window that exists."""
    inside = start + tl.arange(0, BLOCK) < N
    # There are as many programs as heads where each owns one.
    return inside & exists[:, None] if HEADS > 1 else inside


@triton.jit
def load_tokens(ptr, offsets, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load (HEADS, BLOCK, BLOCK_D) from ``offsets`` (HEADS, BLOCK), zero where not inside."""
    dims = tl.arange(0, BLOCK_D)
    mask = tl.expand_dims(inside, -1)
    if D < BLOCK_D:
        mask = mask & (dims < D)
    return tl.load(ptr + tl.expand_dims(offsets, -1) + dims, mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, tile, offsets, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store (HEADS, BLOCK, BLOCK_D) in the dtype of ``ptr``, where inside."""
    dims = tl.arange(0, BLOCK_D)
    mask = tl.expand_dims(inside, -1)
    if D < BLOCK_D:
        mask = mask & (dims < D)
    ptrs = ptr + tl.expand_dims(offsets, -1) + dims
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def product(a, b):
    """Return a @ b, (HEADS, I, J)."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def transposed(a):
    """Return (HEADS, J, I) of (HEADS, I, J)."""
    return tl.permute(a, (0, 2, 1)) if len(a.shape) == 3 else tl.permute(a, (1, 0))


@triton.jit
def zeros_of_tokens(BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Return zeros (HEADS, BLOCK)."""
    return tl.zeros([HEADS, BLOCK] if HEADS > 1 else [BLOCK], tl.float32)


@triton.jit
def zeros_of_tile(BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr):
    """Return zeros (HEADS, BLOCK, BLOCK_D)."""
    return tl.zeros([HEADS, BLOCK, BLOCK_D] if HEADS > 1 else [BLOCK, BLOCK_D], tl.float32)
