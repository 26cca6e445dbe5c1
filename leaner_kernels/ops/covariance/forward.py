"""Triton forward of attention between channels: output, statistics and the capture of samples.

Sizes: B batch, H heads, N tokens, D head dimension, S sampled entries. Mapping: one program owns
one head of one batch entry. It walks over the tokens once for the D x D products (and the lengths
of the channels), keeps the softmax in registers, and walks over them again for the output. The
statistics of a head are therefore complete in its program.

The rows and columns of the scores and the values are the parts q, k and v of a packed projection in
some order: ROWS, COLS and VALUES are their indices. Capture is a separate specialisation, launched
over the S sampled entries in addition to the ordinary launch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import triton
import triton.language as tl

from .._epilogue import store_statistics, sums_of_entropies
from .._tiles import Tiles, rule
from .._triton import (
    PRECISION,
    SHIFT,
    head_of,
    load_rows,
    parts_of,
    product_apart,
    product_of_parts,
    scaled,
    store_rows,
)

# The D x D products of wider heads do not all fit in registers. By default, ptxas spills some of
# heads of 32 to fit one more program of a small launch of a capture.
TILES = Tiles(
    "covariance_forward",
    rule(dim=16, BLOCK_N=128, num_warps=4, num_stages=3),
    rule(dim=32, BLOCK_N=64, num_warps=4, num_stages=3, maxnreg=255),
    rule(dim=64, BLOCK_N=32, num_warps=4, num_stages=3, maxnreg=255),
    rule(dim=32, size=4, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(dim=64, size=4, BLOCK_N=16, num_warps=8, num_stages=2, maxnreg=255),
)


@triton.jit
def products_over_tokens(
    x_ptr, y_ptr, stride_x, stride_y, N,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Return X^T Y (BLOCK_D, BLOCK_D) and, with ``SQUARES``, the squared lengths of channels."""
    products = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    # The sum over the tokens of a tile crosses warps, so that it is taken once, at the end.
    x_squares = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    y_squares = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_N):
        x = load_rows(x_ptr, start, stride_x, N, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
        y = load_rows(y_ptr, start, stride_y, N, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
        products += product_apart(tl.trans(x), y)  # (BLOCK_D, BLOCK_D)
        if SQUARES:
            wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
            x_squares += wide_x * wide_x
            y_squares += wide_y * wide_y
    return products, tl.sum(x_squares, axis=0), tl.sum(y_squares, axis=0)


@triton.jit
def row_softmax(s, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return e^(s - row maximum), zero outside D x D, its row sums, the row maxima and entropies.

    P is the first divided by the second. Undivided, its largest elements are 1, where float16 has
    its full precision.
    """
    channels = tl.arange(0, BLOCK_D)
    if D < BLOCK_D:
        s = tl.where((channels < D)[None, :], s, float("-inf"))
    row_max = tl.max(s, axis=1)  # (BLOCK_D,)
    centred = s - row_max[:, None]  # (BLOCK_D, BLOCK_D)
    weights = tl.exp(centred)
    row_sum = tl.sum(weights, axis=1)  # (BLOCK_D,)
    if D < BLOCK_D:
        centred = tl.where((channels < D)[None, :], centred, 0.0)
        weights = tl.where((channels < D)[:, None], weights, 0.0)
    entropy = tl.log(row_sum) - tl.sum(weights * centred, axis=1) / row_sum  # (BLOCK_D,)
    return weights, row_sum, row_max, entropy


@triton.jit
def inverse_lengths(squares, eps):
    """Return 1 / max(length, eps) and whether a channel is longer than ``eps``."""
    # Correctly rounded: there are few lengths, and each is a factor of all scores of its channel.
    lengths = tl.sqrt_rn(squares)
    return tl.div_rn(1.0, tl.maximum(lengths, eps)), lengths >= eps


@triton.jit(do_not_specialize=["B", "H", "N"])
def _covariance_fwd_kernel(
    qkv_view,
    temperature_ptr,
    sample_ptr,
    out_ptr,
    lse_ptr,
    stats_ptr,
    B,
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
    CAPTURE: tl.constexpr,
):
    head = tl.program_id(0)
    out_b, h = head // H, head % H
    b = out_b
    if CAPTURE:
        b = tl.load(sample_ptr + out_b)
        if (b < 0) | (b >= B):
            return
    start = head_of(qkv_view, b.to(tl.int64), h.to(tl.int64))
    stride_part = tl.cast(qkv_view.stride_part, tl.int64)
    s, row_squares, col_squares = products_over_tokens(  # s (BLOCK_D, BLOCK_D)
        start + ROWS * stride_part, start + COLS * stride_part, qkv_view.stride_n,
        qkv_view.stride_n, N, BLOCK_N, D, BLOCK_D, NORMALISE,
    )  # fmt: skip
    if NORMALISE:
        row_inverse, _ = inverse_lengths(row_squares, eps)  # (BLOCK_D,)
        col_inverse, _ = inverse_lengths(col_squares, eps)
        temperature = tl.load(temperature_ptr + h).to(tl.float32)
        s = scaled(s * row_inverse[:, None] * col_inverse[None, :], temperature)
    else:
        s = scaled(s, scale)
    weights, row_sum, row_max, entropy = row_softmax(s, D, BLOCK_D)
    inverse_sum = 1.0 / row_sum  # (BLOCK_D,)
    weights *= SHIFT
    high, middle, low = parts_of(weights, qkv_view.ptr.dtype.element_ty)  # (BLOCK_D, BLOCK_D)

    value_ptr = start + VALUES * stride_part
    out_ptr += (out_b.to(tl.int64) * N * H + h) * D
    square = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, N, BLOCK_N):
        values = load_rows(value_ptr, first, qkv_view.stride_n, N, BLOCK_N, D, BLOCK_D)
        values = tl.trans(values)  # (BLOCK_D, BLOCK_N)
        if CAPTURE:
            # P rounded once changes a condition number of 1e5 by a tenth or more (docs/kappa.md).
            a = product_of_parts(high, middle, low, values)  # (BLOCK_D, BLOCK_N)
        else:
            a = tl.dot(high, values, input_precision=PRECISION)  # (BLOCK_D, BLOCK_N)
        a = tl.trans(a * (inverse_sum * (1.0 / SHIFT))[:, None])  # (BLOCK_N, BLOCK_D)
        store_rows(out_ptr, a, first, H * D, N, BLOCK_N, D, BLOCK_D)
        if stats_ptr is not None:
            square += tl.sum(a * a, axis=1)  # (BLOCK_N,)

    channels = tl.arange(0, BLOCK_D)
    if not CAPTURE:
        lse = row_max + tl.log(row_sum)  # (BLOCK_D,)
        tl.store(lse_ptr + head.to(tl.int64) * D + channels, lse, mask=channels < D)
    if stats_ptr is not None:
        p = weights * (inverse_sum * (1.0 / SHIFT))[:, None]  # (BLOCK_D, BLOCK_D)
        sums = sums_of_entropies(row_max, entropy, p * p, square, channels < D)
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), D, 1.0)
