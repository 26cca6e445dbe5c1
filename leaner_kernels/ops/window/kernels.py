"""The kernels of window attention in Triton, and their launches.

Sizes: B batch, Y by X map, H heads, D head dimension, N tokens of a window, S sampled maps.
Forward: one program owns ROWS rows of a head of a window. It walks over the keys with the online
softmax, which is one step for windows of up to COLS tokens. Programs are ordered by map, window and
head, so that neighbours read neighbouring memory. Backward: a program owns a head of a window and
recomputes the softmax and delta = sum(P * dP), so that neither the output nor the log-sum-exp is
read, and without atomics: the gradient is deterministic. PyTorch computes the gradients of windows
that fit no tile, which are in float32 or have more than 64 tokens or dimensions of a head.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# The bodies of kernels are Triton's language.

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._epilogue import NUM_SUMS, join, store_part, sums_of_rows
from .._launch_cache import Launch, MapView, Scratch, check_tile
from .._tiles import Tile, Tiles, block_dim, rule
from .._triton import (
    PRECISION,
    SHIFT,
    add_product,
    exponential,
    nats,
    parts_of,
    product_of_parts,
    scaled,
    softmax_step,
    units,
)
from ..route import Results
from . import WindowCall

# ROWS and COLS are the size of a tile of scores, reduced to the window. In half precision, a window
# of up to 64 tokens is one tile. A program has one head: with several, Triton assigns whole heads
# to warps, and several warps would compute the same one. Each warp has 16 rows.
#
# One stage: a window of one tile is a single step, so there is no next one to copy ahead of time.
# The other programs on the SM hide the loads. No barrier is written here either: Triton places
# those that operands in shared memory need.
WHOLE_WINDOWS = (  # for kernels that fill the registers of four warps
    rule(dim=32, tokens=64, ROWS=64, COLS=64, num_warps=4),
    rule(dim=64, tokens=64, ROWS=64, COLS=64, num_warps=8),
)
LARGE_WINDOWS = (
    rule(dim=32, ROWS=32, COLS=64, num_warps=4),
    rule(dim=64, ROWS=32, COLS=64, num_warps=8),
    rule(dim=128, ROWS=32, COLS=32, num_warps=8),
    rule(dim=32, size=4, ROWS=32, COLS=32, num_warps=8),
    rule(dim=64, size=4, ROWS=16, COLS=16, num_warps=4),
    rule(dim=128, size=4, ROWS=16, COLS=16, num_warps=8),
)
FORWARD_TILES = Tiles(
    "window_forward",
    rule(dim=64, tokens=16, ROWS=16, COLS=16, num_warps=1),
    rule(dim=64, tokens=32, ROWS=32, COLS=32, num_warps=2),
    rule(dim=64, tokens=64, ROWS=64, COLS=64, num_warps=4),
    *LARGE_WINDOWS,
    num_stages=1,
)
CAPTURE_TILES = Tiles("window_capture", *WHOLE_WINDOWS, *LARGE_WINDOWS, num_stages=1)


@triton.jit
def find_head(index, H, windows_y, windows_x):
    """Return map, row and column of the window, and head."""
    window = index // H
    h = index % H
    # Heads change fastest, then windows along a row of the map: neighbouring programs read
    # neighbouring memory.
    x = window % windows_x
    y = window // windows_x % windows_y
    b = window // windows_x // windows_y
    # 64-bit: offsets into the map are computed from these.
    return b.to(tl.int64), y.to(tl.int64), x.to(tl.int64), h.to(tl.int64)


@triton.jit
def head_offset(view, b, y, x, h):
    """Return the offset of a head of the window whose first token is at ``y`` and ``x``."""
    return b * view.stride_b + y * view.stride_y + x * view.stride_x + h * view.stride_h


@triton.jit
def token_offsets(start, stride_y, stride_x, WINDOW_X: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of tokens from ``start`` on relative to their window's first, (BLOCK,)."""
    tokens = start + tl.arange(0, BLOCK)
    # A window is no matrix in memory: WINDOW_X pixels lie together, then a row of the map follows.
    # WINDOW_X is a constant: the compiler divides by it with a multiplication and a shift.
    y = (tokens // WINDOW_X).to(tl.int64)
    x = (tokens % WINDOW_X).to(tl.int64)
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


@triton.jit(do_not_specialize=["B", "H", "windows_y", "windows_x"])
def window_fwd_kernel(
    qkv_view,
    out_ptr,
    lse_ptr,
    parts_ptr,
    sample_ptr,
    B,
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
    STATS: tl.constexpr,
    CAPTURE: tl.constexpr,
):
    """Write the output (B, Y, X, H, D) and lse (B, H, Y, X), or what STATS and CAPTURE name."""
    N: tl.constexpr = WINDOW_Y * WINDOW_X
    num_tiles = tl.cdiv(N, ROWS)
    # Tiles of one head of a window are neighbours in the grid: they read the same K and V.
    tile = tl.program_id(0) % num_tiles
    out_b, wy, wx, h = find_head(tl.program_id(0) // num_tiles, H, windows_y, windows_x)
    b = out_b
    if CAPTURE:
        # A program has one head, so that those of an unwanted entry return at once.
        b = tl.load(sample_ptr + out_b).to(tl.int64)
        if (b < 0) | (b >= B):
            return
    first = tile * ROWS
    y, x = wy * WINDOW_Y, wx * WINDOW_X  # the window's first pixel
    start = head_offset(qkv_view, b, y, x, h)
    # Rows past the window are loaded as zeros, computed like the others, and never stored.
    inside = first + tl.arange(0, ROWS) < N
    rows = token_offsets(first, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, ROWS)
    q = load_tokens(qkv_view.ptr, start + rows, inside, D, BLOCK_D)  # (ROWS, BLOCK_D)
    # K and V of a token are at fixed distances from its Q: all three share ``start`` and offsets.
    k_ptr = qkv_view.ptr + qkv_view.stride_k
    v_ptr = qkv_view.ptr + qkv_view.stride_v
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_max = tl.zeros([ROWS], tl.float32) + float("-inf")
    row_sum = tl.zeros([ROWS], tl.float32)
    row_centred = tl.zeros([ROWS], tl.float32)  # sum of p (s - row_max): no large terms cancel
    row_square = tl.zeros([ROWS], tl.float32)  # sum of p^2

    for col in range(0, N, COLS):
        cols = start + token_offsets(col, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, COLS)
        visible = col + tl.arange(0, COLS) < N
        k = load_tokens(k_ptr, cols, visible, D, BLOCK_D)  # (COLS, BLOCK_D)
        s = product(q, tl.trans(k))  # (ROWS, COLS)
        factor = scale * units(q.dtype)
        if STATS and N % COLS == 0:
            s = scaled(s, factor)  # (ROWS, COLS)
        else:
            # Only the entropy needs a rounded product, and the compiler does not fuse a masked one.
            s = tl.where(col + tl.arange(0, COLS) < N, s * factor, float("-inf"))
        # The first column of a step is inside the window, so the maximum is finite.
        p, alpha, row_max, row_sum, row_centred, row_square = softmax_step(
            s=s,
            row_max=row_max,
            row_sum=row_sum,
            row_centred=row_centred,
            row_square=row_square,
            DTYPE=q.dtype,
            STATS=STATS,
        )
        # V is first needed here: by now K is dead, and its registers are free.
        v = load_tokens(v_ptr, cols, visible, D, BLOCK_D)  # (COLS, BLOCK_D)
        # The sum so far was relative to the old maximum; in a window of one step it is zero.
        acc *= alpha[:, None]
        if CAPTURE:
            # P rounded once changes a condition number of 1e5 by a tenth or more (docs/kappa.md).
            high, middle, low = parts_of(p * SHIFT, v.dtype)
            acc += product_of_parts(high, middle, low, v)  # (ROWS, BLOCK_D)
        else:
            acc = add_product(acc, p.to(v.dtype), v)  # (ROWS, BLOCK_D)

    # One division per row; every row has a visible key, so that its sum is positive.
    out = acc * (1.0 / row_sum)[:, None]  # (ROWS, BLOCK_D)
    if CAPTURE:
        out *= 1.0 / SHIFT
    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    # The output is contiguous, (B, Y, X, H, D), whatever the strides of qkv.
    out_start = (out_b * size_yx + y * size_x + x) * H * D + h * D
    out_rows = token_offsets(first, size_x * H * D, H * D, WINDOW_X, ROWS)
    store_tokens(out_ptr, out, out_start + out_rows, inside, D, BLOCK_D)
    if not CAPTURE:
        # lse is (B, H, Y, X), in the order of the map: the window's tokens are WINDOW_X at a time.
        map_rows = token_offsets(first, size_x, 1, WINDOW_X, ROWS)
        lse_start = (b * H + h) * size_yx + y * size_x + x
        lse = row_max * nats(q.dtype) + tl.log(row_sum)  # (ROWS,)
        tl.store(lse_ptr + lse_start + map_rows, lse, mask=inside)
    if STATS:
        sums = sums_of_rows(
            row_max=row_max,
            row_sum=row_sum,
            row_centred=row_centred,
            row_square=row_square,
            out_square=tl.sum(out * out, axis=1),
            inside=inside,
            nats=nats(q.dtype),
        )
        # (B, H, tiles of every window): ``join`` divides the means by the number of rows.
        part = ((b * H + h) * windows_y + wy) * windows_x + wx
        store_part(parts_ptr, sums, part * num_tiles + tile, 1, nats(q.dtype))


# Windows that need one launch. The scores and their gradients fill the registers of four warps.
BACKWARD_TILES = Tiles("window_backward", *WHOLE_WINDOWS, num_stages=1)


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
    # The whole window is one tile: each of the four operands is read once, and the softmax needs no
    # running maximum.
    inside = tl.arange(0, BLOCK) < N
    start = head_offset(qkv_view, b, y, x, h)
    tokens = start + token_offsets(0, qkv_view.stride_y, qkv_view.stride_x, WINDOW_X, BLOCK)
    q = load_tokens(qkv_view.ptr, tokens, inside, D, BLOCK_D)  # (BLOCK, BLOCK_D)
    k = load_tokens(qkv_view.ptr + qkv_view.stride_k, tokens, inside, D, BLOCK_D)
    v = load_tokens(qkv_view.ptr + qkv_view.stride_v, tokens, inside, D, BLOCK_D)
    start = head_offset(do_view, b, y, x, h)
    tokens = start + token_offsets(0, do_view.stride_y, do_view.stride_x, WINDOW_X, BLOCK)
    do = load_tokens(do_view.ptr, tokens, inside, D, BLOCK_D)  # (BLOCK, BLOCK_D)

    # P again, by the arithmetic of the forward.
    s = scaled(product(q, tl.trans(k)), scale * units(q.dtype))  # (BLOCK, BLOCK)
    s = tl.where(tl.arange(0, BLOCK) < N, s, float("-inf"))
    p = exponential(s - tl.max(s, axis=1)[:, None], q.dtype)  # (BLOCK, BLOCK)
    # A row outside the window contributes nothing: its gradient was loaded as zero.
    p *= (1.0 / tl.sum(p, axis=1))[:, None]
    dp = product(do, tl.trans(v))  # (BLOCK, BLOCK)

    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    start = (b * size_yx + y * size_x + x) * 3 * H * D + h * D
    tokens = start + token_offsets(0, size_x * 3 * H * D, 3 * H * D, WINDOW_X, BLOCK)
    # dV first: dO is dead after it, which leaves its registers to dS. Likewise Q after dK.
    dv = product(tl.trans(p.to(v.dtype)), do)  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr + 2 * H * D, dv, tokens, inside, D, BLOCK_D)
    # delta = sum(P dP) equals sum(dO O): the output need not be read.
    delta = tl.sum(p * dp, axis=1)  # (BLOCK,)
    ds = (p * (dp - delta[:, None])).to(q.dtype)  # (BLOCK, BLOCK)
    # ``scale`` multiplies the finished sums: dS is of the scaled scores.
    dk = product(tl.trans(ds), q) * scale  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr + H * D, dk, tokens, inside, D, BLOCK_D)
    dq = product(ds, k) * scale  # (BLOCK, BLOCK_D)
    store_tokens(dqkv_ptr, dq, tokens, inside, D, BLOCK_D)


# --- Launches ------------------------------------------------------------------------------------


class QkvView(NamedTuple):
    """A packed map as kernels take it: from q, K is ``stride_k`` away and V ``stride_v``."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_k: int
    stride_v: int
    stride_h: int


def prepare_forward(call: WindowCall, results: Results) -> Launch:
    """Return what fills the output, ``lse`` (B, H, Y, X) and any statistics."""
    arguments, tile = _arguments(call), _tile(FORWARD_TILES, call)
    programs = _programs(call, len(call.qkv), tile["ROWS"])
    parts, scratch = None, ()
    if results.stats is not None:
        heads, (y, x) = arguments["H"], call.size
        shape = len(call.qkv), heads, programs // (len(call.qkv) * heads), NUM_SUMS
        parts = results.out.new_empty(shape, dtype=torch.float32)
        scratch = (Scratch("parts_ptr", "stats", partial(join, num_rows=y * x)),)
    arguments |= {
        "B": len(call.qkv),
        "out_ptr": results.out,
        "lse_ptr": results.lse,
        "parts_ptr": parts,
        "sample_ptr": None,
        "STATS": parts is not None,
        "CAPTURE": False,
    }
    return Launch(window_fwd_kernel, (programs,), arguments | tile.arguments, scratch)


def prepare_capture(call: WindowCall, results: Results) -> Launch:
    """Return what fills the heads (S, Y * X, H * D) of sampled maps."""
    assert results.heads is not None
    tile = _tile(CAPTURE_TILES, call)
    programs = _programs(call, len(results.heads), tile["ROWS"])
    arguments = {
        "B": len(call.qkv),
        "out_ptr": results.heads,
        "lse_ptr": None,
        "parts_ptr": None,
        "sample_ptr": results.sample,
        "STATS": False,
        "CAPTURE": True,
    }
    arguments |= _arguments(call) | tile.arguments
    return Launch(window_fwd_kernel, (programs,), arguments)


def prepare_backward(
    grad: Tensor, call: WindowCall, saved: Results, gradients: Any
) -> Launch | None:
    """Return what fills dqkv (B, Y, X, 3, H, D); None where the kernel does not take the call."""
    tile = choose(BACKWARD_TILES, call)
    if tile is None:
        return None
    arguments = _arguments(call) | tile.options
    arguments |= {
        "do_view": MapView(grad, *_map_strides(grad)),
        "dqkv_ptr": gradients.dqkv,
        "BLOCK": tile["ROWS"],
    }
    programs = _programs(call, len(call.qkv), tile["ROWS"])
    return Launch(window_bwd_kernel, (programs,), arguments)


def choose(tiles: Tiles, call: WindowCall) -> Tile | None:
    """Return a kernel's tile, cut to the window; None where the kernel does not take the call."""
    tokens = call.window_y * call.window_x
    size, dim = call.qkv.element_size(), block_dim(call.qkv.shape[-1])
    rule = tiles.find(call.qkv.device, size=size, dim=dim, tokens=tokens)
    block = block_dim(tokens)
    return None if rule is None else rule.tile.at_most(ROWS=block, COLS=block)


def _tile(tiles: Tiles, call: WindowCall) -> Tile:
    tile = choose(tiles, call)
    assert tile is not None  # these tables have a rule for every call
    return tile


def _arguments(call: WindowCall) -> dict[str, Any]:
    """Return the arguments that every kernel takes."""
    _, y, x, _three, heads, dim = call.qkv.shape
    stride_b, stride_y, stride_x, part, stride_h, _ = call.qkv.stride()
    # Offsets are 64-bit, but for that of the next pixel of dqkv.
    check_tile("pixels of qkv's gradient", 2, 3 * heads * dim)
    return {
        # Doubled here, and not in the kernels, where it might not fit 32 bits.
        "qkv_view": QkvView(call.qkv, stride_b, stride_y, stride_x, part, 2 * part, stride_h),
        "H": heads,
        "windows_y": y // call.window_y,
        "windows_x": x // call.window_x,
        "scale": call.scale,
        "WINDOW_Y": call.window_y,
        "WINDOW_X": call.window_x,
        "D": dim,
        "BLOCK_D": block_dim(dim),
    }


def _map_strides(grad: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of entry, row, column and head of (B, Y, X, H, D)."""
    stride_b, stride_y, stride_x, stride_h, _ = grad.stride()
    return stride_b, stride_y, stride_x, stride_h


def _programs(call: WindowCall, maps: int, rows: int) -> int:
    """Return the number of programs of ``rows`` for the heads of all windows of ``maps`` maps."""
    _, y, x, _three, heads, _ = call.qkv.shape
    tokens = call.window_y * call.window_x
    windows = (y // call.window_y) * (x // call.window_x)
    return maps * windows * heads * -(-tokens // rows)
