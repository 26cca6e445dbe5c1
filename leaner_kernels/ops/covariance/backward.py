"""Triton backward of attention between channels: one launch, no atomics, bitwise deterministic.

Sizes and parts as in forward.py. Mapping: one program owns one head of one batch entry. It walks
over the tokens for the scores and for the gradient of P, keeps both D x D derivatives in registers,
and walks over the tokens again to write the gradients of the three parts. It reads the inputs only:
the forward keeps neither P nor its output.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import triton
import triton.language as tl

from .._tiles import Tiles, rule
from .._triton import PRECISION, head_of, load_rows, narrow, scaled, store_rows
from .forward import (
    inverse_lengths,
    products_over_tokens,
    row_softmax,
)

TILES = Tiles(
    "covariance_backward",
    rule(dim=32, BLOCK_N=64, num_warps=4, num_stages=3),
    rule(dim=64, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(dim=32, size=4, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(dim=64, size=4, BLOCK_N=16, num_warps=8, num_stages=1),
    maxnreg=255,
)


@triton.jit
def _through_scores(own, other, matrix, scale, along, NORMALISE: tl.constexpr):
    """Return the gradient of a tile of the rows or columns of the scores, (BLOCK_N, BLOCK_D)."""
    gradient = tl.trans(tl.dot(matrix, tl.trans(other), input_precision=PRECISION))
    if NORMALISE:
        return gradient * scale[None, :] - own.to(tl.float32) * along[None, :]
    else:
        return gradient * scale


@triton.jit(do_not_specialize=["H", "N"])
def _covariance_bwd_kernel(
    do_view,
    qkv_view,
    temperature_ptr,
    dqkv_ptr,
    dtemperature_ptr,
    H,
    N,
    eps,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VALUES: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    stride_part = tl.cast(qkv_view.stride_part, tl.int64)
    start = head_of(qkv_view, b, h)
    row_ptr, col_ptr = start + ROWS * stride_part, start + COLS * stride_part
    do_ptr = head_of(do_view, b, h)
    s, row_squares, col_squares = products_over_tokens(  # s (BLOCK_D, BLOCK_D)
        row_ptr, col_ptr, qkv_view.stride_n, qkv_view.stride_n, N, BLOCK_N, D, BLOCK_D, NORMALISE
    )
    if NORMALISE:
        row_inverse, row_varies = inverse_lengths(row_squares, eps)  # (BLOCK_D,)
        col_inverse, col_varies = inverse_lengths(col_squares, eps)
        cosines = s * row_inverse[:, None] * col_inverse[None, :]  # (BLOCK_D, BLOCK_D)
        temperature = tl.load(temperature_ptr + h).to(tl.float32)
        s = scaled(cosines, temperature)
    else:
        s = scaled(s, scale)
    weights, row_sum, _, _ = row_softmax(s, D, BLOCK_D)
    p = weights / row_sum[:, None]  # (BLOCK_D, BLOCK_D)
    dp, _, _ = products_over_tokens(  # (BLOCK_D, BLOCK_D)
        do_ptr, start + VALUES * stride_part, do_view.stride_n, qkv_view.stride_n, N,
        BLOCK_N, D, BLOCK_D, False,
    )  # fmt: skip
    ds = p * (dp - tl.sum(p * dp, axis=1)[:, None])  # (BLOCK_D, BLOCK_D)

    DTYPE: tl.constexpr = qkv_view.ptr.dtype.element_ty
    if NORMALISE:
        weighted = ds * cosines
        tl.store(dtemperature_ptr + head, tl.sum(weighted))
        # A channel shorter than eps is divided by a constant: its length has no gradient.
        along = temperature * row_inverse * row_inverse * tl.sum(weighted, axis=1)
        row_along = tl.where(row_varies, along, 0.0)  # (BLOCK_D,)
        along = temperature * col_inverse * col_inverse * tl.sum(weighted, axis=0)
        col_along = tl.where(col_varies, along, 0.0)
        # The length inside each product. A length of zero meets only zeros, and its inverse would
        # dominate the common divisor of ``narrow``.
        inner = tl.where(col_squares > 0, col_inverse, 0.0)
        to_rows, row_factor = narrow(ds * inner[None, :], DTYPE)
        inner = tl.where(row_squares > 0, row_inverse, 0.0)
        to_cols, col_factor = narrow(ds * inner[:, None], DTYPE)
        # The length outside each product.
        row_scale = temperature * row_factor * row_inverse
        col_scale = temperature * col_factor * col_inverse
    else:
        to_rows, factor = narrow(ds, DTYPE)
        to_cols = to_rows
        row_scale, col_scale = scale * factor, scale * factor
        row_along, col_along = 0.0, 0.0
    p_narrow = tl.trans(p.to(DTYPE))  # (BLOCK_D, BLOCK_D)

    # dqkv is contiguous, (B, N, 3, H, D).
    width = H * D
    dqkv_ptr += b * N * 3 * width + h * D
    for first in range(0, N, BLOCK_N):
        do = load_rows(do_ptr, first, do_view.stride_n, N, BLOCK_N, D, BLOCK_D)
        dvalues = tl.trans(tl.dot(p_narrow, tl.trans(do), input_precision=PRECISION))
        store_rows(dqkv_ptr + VALUES * width, dvalues, first, 3 * width, N, BLOCK_N, D, BLOCK_D)
        x = load_rows(row_ptr, first, qkv_view.stride_n, N, BLOCK_N, D, BLOCK_D)
        y = load_rows(col_ptr, first, qkv_view.stride_n, N, BLOCK_N, D, BLOCK_D)
        dx = _through_scores(x, y, to_rows, row_scale, row_along, NORMALISE)  # (BLOCK_N, BLOCK_D)
        dy = _through_scores(y, x, tl.trans(to_cols), col_scale, col_along, NORMALISE)
        store_rows(dqkv_ptr + ROWS * width, dx, first, 3 * width, N, BLOCK_N, D, BLOCK_D)
        store_rows(dqkv_ptr + COLS * width, dy, first, 3 * width, N, BLOCK_N, D, BLOCK_D)
