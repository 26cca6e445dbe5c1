"""Triton forward of window attention: output, statistics and the capture of sampled maps.

Sizes: B batch, Y by X map, H heads, D head dimension, N tokens of a window, S sampled maps.
Mapping: one program owns HEADS heads of windows, and ROWS of their rows; it walks over the keys
with the online softmax, which for windows of up to COLS tokens is one step.
"""

# pyright: reportOperatorIssue=false
# The bodies of kernels are Triton's language.

import triton
import triton.language as tl

from leaner_kernels.ops._triton import (
    SHIFT,
    exponential,
    nats,
    parts_of,
    product_of_parts,
    scaled,
    units,
)
from leaner_kernels.ops.window.addresses import (
    find_heads,
    load_tokens,
    of_tokens,
    product,
    store_tokens,
    token_offsets,
    tokens_inside,
    transposed,
    zeros_of_tile,
    zeros_of_tokens,
)


@triton.jit(do_not_specialize=["B", "count", "H", "windows_y", "windows_x"])
def window_fwd_kernel(
    qkv_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    sample_ptr,
    stride_b,
    stride_y,
    stride_x,
    stride_k,
    stride_v,
    stride_h,
    B,
    count,
    H,
    windows_y,
    windows_x,
    scale,
    WINDOW_Y: tl.constexpr,
    WINDOW_X: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STATS: tl.constexpr,
    CAPTURE: tl.constexpr,
):
    """Write the output (B, Y, X, H, D) and lse (B, H, Y, X), or what STATS and CAPTURE name."""
    N: tl.constexpr = WINDOW_Y * WINDOW_X
    num_tiles = tl.cdiv(N, ROWS)
    tile = tl.program_id(0) % num_tiles
    out_b, wy, wx, h, exists = find_heads(
        tl.program_id(0) // num_tiles, count, H, windows_y, windows_x, HEADS
    )
    b = out_b
    if CAPTURE:
        # One head to a program, so that one that is not wanted leaves at once.
        b = tl.load(sample_ptr + out_b).to(tl.int64)
        if (b < 0) | (b >= B):
            return
    first = tile * ROWS
    y, x = wy * WINDOW_Y, wx * WINDOW_X
    start = b * stride_b + y * stride_y + x * stride_x + h * stride_h
    inside = tokens_inside(first, exists, N, ROWS, HEADS)
    rows = token_offsets(first, stride_y, stride_x, WINDOW_X, ROWS)
    q = load_tokens(qkv_ptr, of_tokens(start, HEADS) + rows, inside, D, BLOCK_D)
    k_ptr, v_ptr = qkv_ptr + stride_k, qkv_ptr + stride_v
    acc = zeros_of_tile(ROWS, BLOCK_D, HEADS)
    row_max = zeros_of_tokens(ROWS, HEADS) + float("-inf")
    row_sum = zeros_of_tokens(ROWS, HEADS)
    row_centred = zeros_of_tokens(ROWS, HEADS)  # sum of p (s - row_max): the entropy without
    row_square = zeros_of_tokens(ROWS, HEADS)  # cancelling two large numbers; and sum of p^2

    for col in range(0, N, COLS):
        cols = of_tokens(start, HEADS) + token_offsets(col, stride_y, stride_x, WINDOW_X, COLS)
        seen = tokens_inside(col, exists, N, COLS, HEADS)
        k = load_tokens(k_ptr, cols, seen, D, BLOCK_D)
        s, factor = product(q, transposed(k)), scale * units(q.dtype)
        if STATS and N % COLS == 0:
            s = scaled(s, factor)
        else:
            # Only an entropy minds, and what a mask chose is not joined with a subtraction.
            s = tl.where(col + tl.arange(0, COLS) < N, s * factor, float("-inf"))
        # The first column of a step is inside the window, so the maximum is finite.
        new_max = tl.maximum(row_max, tl.max(s, axis=-1))
        alpha = exponential(row_max - new_max, q.dtype)
        p = exponential(s - tl.expand_dims(new_max, -1), q.dtype)
        if STATS:
            shift = tl.where(row_max == float("-inf"), 0.0, row_max - new_max)
            centred = tl.where(s == float("-inf"), 0.0, s - tl.expand_dims(new_max, -1))
            row_centred = alpha * (row_centred + row_sum * shift) + tl.sum(p * centred, axis=-1)
            row_square = alpha * alpha * row_square + tl.sum(p * p, axis=-1)
        row_sum = alpha * row_sum + tl.sum(p, axis=-1)
        row_max = new_max
        v = load_tokens(v_ptr, cols, seen, D, BLOCK_D)
        acc *= tl.expand_dims(alpha, -1)
        if CAPTURE:
            # P rounded once moves a condition number of 1e5 by a tenth or more (docs/kappa.md).
            high, middle, low = parts_of(p * SHIFT, v.dtype)
            acc += product_of_parts(high, middle, low, v)
        else:
            acc += product(p.to(v.dtype), v)

    a = acc * tl.expand_dims(1.0 / row_sum, -1)
    if CAPTURE:
        a *= 1.0 / SHIFT
    size_x = (windows_x * WINDOW_X).to(tl.int64)
    size_yx = windows_y * WINDOW_Y * size_x
    out = (out_b * size_yx + y * size_x + x) * H * D + h * D
    out_rows = token_offsets(first, size_x * H * D, H * D, WINDOW_X, ROWS)
    store_tokens(out_ptr, a, of_tokens(out, HEADS) + out_rows, inside, D, BLOCK_D)
    if not CAPTURE:
        map_rows = token_offsets(first, size_x, 1, WINDOW_X, ROWS)
        lse_start = (b * H + h) * size_yx + y * size_x + x
        lse = row_max * nats(q.dtype) + tl.log(row_sum)
        tl.store(lse_ptr + of_tokens(lse_start, HEADS) + map_rows, lse, mask=inside)
    if STATS:
        entropy = tl.log(row_sum) - nats(q.dtype) * row_centred / row_sum
        total = tl.sum(tl.where(inside, entropy, 0.0), axis=-1)
        norm = row_square / (row_sum * row_sum)
        square = tl.sum(a * a, axis=-1)
        # A maximum passes nan over; a sum does not, and a diverged model must show.
        max_logit = tl.max(tl.where(inside, row_max, float("-inf")), axis=-1) * nats(q.dtype)
        max_logit = tl.where(total == total, max_logit, float("nan"))
        # (B, H, tiles of every window, 4)
        part = ((b * H + h) * windows_y + wy) * windows_x + wx
        written = exists if HEADS > 1 else None
        partial = partial_ptr + (part * num_tiles + tile) * 4
        tl.store(partial, max_logit, mask=written)
        tl.store(partial + 1, total, mask=written)
        tl.store(partial + 2, tl.sum(tl.where(inside, norm, 0.0), axis=-1), mask=written)
        tl.store(partial + 3, tl.sum(tl.where(inside, square, 0.0), axis=-1), mask=written)
