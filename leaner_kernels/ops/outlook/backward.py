"""Triton backward of outlook attention: one launch, every gradient gathered by its owner.

Sizes and cells as in the forward. Mapping: the first programs of a head own a tile of windows each
and write the gradient of their logits. The others own a tile of cells each and write the gradient
of the values there, a sum over the windows that contain a pixel. Probabilities are recomputed: rows
from their logits, columns with the log-sum-exp of the forward. No sum crosses programs: there are
no atomics, and the result is bitwise deterministic.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: tuples of tiles, constants, branches decided early.

import triton
import triton.language as tl

from .._tiles import Tiles
from .._triton import exponential, head_of, scaled, units
from .forward import RULES, load_pixels, store_pixels

TILES = Tiles("outlook_backward", *RULES, num_warps=4, num_stages=1)


@triton.jit
def _logits_gradient(
    v_ptr, logits_ptr, do_ptr, dlogits_ptr, v_view, logits_view, do_view, first, H, Y, X,
    WINDOWS_Y, WINDOWS_X, scale,
    K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the logits of windows ``first`` to ``first + BLOCK``."""
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    windows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_COLS)
    seen = windows < WINDOWS_Y * WINDOWS_X
    i, j = windows // WINDOWS_X, windows % WINDOWS_X  # (BLOCK,)
    top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
    factor = scale * units(DTYPE)
    real = seen[:, None] & (cols < K * K)[None, :]  # (BLOCK, BLOCK_COLS)
    # With HELD the values of a window stay in registers for all its rows.
    values = ()
    if HELD:
        for place in tl.static_range(K * K):
            v = load_pixels(v_ptr, v_view, top, left, place, seen, Y, X, K, D, BLOCK_D)
            values += (v,)
    for row in range(K * K):
        do = load_pixels(do_ptr, do_view, top, left, row, seen, Y, X, K, D, BLOCK_D)
        dp = tl.zeros([BLOCK, BLOCK_COLS], tl.float32)
        if HELD:
            for place in tl.static_range(K * K):
                product = tl.sum(do * values[place], axis=1)  # (BLOCK,)
                # One column at a time: registers cannot be indexed at run time.
                dp = tl.where((cols == place)[None, :], product[:, None], dp)
        else:
            for place in range(K * K):
                v = load_pixels(v_ptr, v_view, top, left, place, seen, Y, X, K, D, BLOCK_D)
                product = tl.sum(do * v, axis=1)  # (BLOCK,)
                dp = tl.where((cols == place)[None, :], product[:, None], dp)
        offsets = i * logits_view.stride_y + j * logits_view.stride_x + row * logits_view.stride_a
        s = tl.load(logits_ptr + offsets[:, None] + cols[None, :], mask=real, other=0.0)
        s = tl.where((cols < K * K)[None, :], scaled(s.to(tl.float32), factor), float("-inf"))
        e = exponential(s - tl.max(s, axis=1)[:, None], DTYPE)  # (BLOCK, BLOCK_COLS)
        p = e / tl.sum(e, axis=1)[:, None]  # (BLOCK, BLOCK_COLS)
        ds = p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scale  # (BLOCK, BLOCK_COLS)
        rows = windows * (H * K * K * K * K) + row * (K * K)
        tl.store(dlogits_ptr + rows[:, None] + cols[None, :], ds.to(DTYPE), mask=real)


@triton.jit
def _value_gradient(
    logits_ptr, do_ptr, lse_ptr, dv_ptr, logits_view, do_view, first, H, Y, X, WINDOWS_Y,
    WINDOWS_X, CELLS_X, CELLS, scale,
    K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, REACH: tl.constexpr,
    PLACES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the values in cells ``first`` to ``first + BLOCK``."""
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    cells = first + tl.arange(0, BLOCK)
    cell_y, cell_x = cells // CELLS_X, cells % CELLS_X  # (BLOCK,)
    accs = ()
    for _ in tl.static_range(STRIDE * STRIDE):
        accs += (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
    for t in tl.static_range(REACH * REACH):
        i, j = cell_y - t // REACH, cell_x - t % REACH
        seen = (cells < CELLS) & (i >= 0) & (i < WINDOWS_Y) & (j >= 0) & (j < WINDOWS_X)  # (BLOCK,)
        top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
        # Row ``row`` of a window is the gradient at its pixel ``row``; this cell's value is one of
        # its columns.
        for row in tl.range(K * K, loop_unroll_factor=K):
            do = load_pixels(do_ptr, do_view, top, left, row, seen, Y, X, K, D, BLOCK_D)
            lse_ptrs = lse_ptr + (i * WINDOWS_X + j) * (K * K) + row
            lse = tl.load(lse_ptrs, mask=seen, other=0.0)  # (BLOCK,)
            ptrs = logits_ptr + (
                i * logits_view.stride_y + j * logits_view.stride_x + row * logits_view.stride_a
            )
            sums = ()
            for r in tl.static_range(STRIDE * STRIDE):
                if PLACES[t][r] < 0:
                    sums += (accs[r],)
                else:
                    s = tl.load(ptrs + PLACES[t][r], mask=seen, other=0.0).to(tl.float32)
                    p = exponential((s * scale - lse) * units(DTYPE), DTYPE)  # (BLOCK,)
                    sums += (accs[r] + p[:, None] * do,)  # (BLOCK, BLOCK_D)
            accs = sums
    store_pixels(dv_ptr, accs, cells, cell_y, cell_x, H, Y, X, CELLS, STRIDE, PADDING, D, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        *("B", "H", "Y", "X", "WINDOWS_Y", "WINDOWS_X", "CELLS_X", "CELLS"),
        *("WINDOW_PARTS", "PARTS"),
    ]
)
def _outlook_bwd_kernel(
    v_view,
    logits_view,
    do_view,
    lse_ptr,
    dv_ptr,
    dlogits_ptr,
    B,
    H,
    Y,
    X,
    WINDOWS_Y,
    WINDOWS_X,
    CELLS_X,
    CELLS,
    WINDOW_PARTS,
    PARTS,
    scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    REACH: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    program = tl.program_id(0)
    part, head = program % PARTS, (program // PARTS).to(tl.int64)
    b, h = head // H, head % H
    v_ptr = head_of(v_view, b, h)
    logits_ptr = head_of(logits_view, b, h)
    do_ptr = head_of(do_view, b, h)
    lse_ptr += head * WINDOWS_Y * WINDOWS_X * (K * K)
    if part < WINDOW_PARTS:
        dlogits_ptr += (b * WINDOWS_Y * WINDOWS_X * H + h) * (K * K * K * K)
        _logits_gradient(
            v_ptr, logits_ptr, do_ptr, dlogits_ptr,
            v_view, logits_view, do_view,
            part * BLOCK, H, Y, X, WINDOWS_Y, WINDOWS_X, scale,
            K, STRIDE, PADDING, D, BLOCK_D, BLOCK_COLS, BLOCK, HELD,
        )  # fmt: skip
    else:
        dv_ptr += (b * Y * X * H + h) * D
        _value_gradient(
            logits_ptr, do_ptr, lse_ptr, dv_ptr,
            logits_view, do_view,
            (part - WINDOW_PARTS) * BLOCK, H, Y, X, WINDOWS_Y, WINDOWS_X, CELLS_X, CELLS, scale,
            K, STRIDE, PADDING, REACH, PLACES, D, BLOCK_D, BLOCK,
        )  # fmt: skip
