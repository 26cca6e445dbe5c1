"""The kernels of attention between channels in Triton, and their launches: one each, no atomics.

Sizes: B batch, H heads, N tokens, D head dimension, S sampled entries. One program owns one head of
one batch entry. Forward: it walks over the tokens once for the D x D products (and the lengths of
the channels), keeps the softmax in registers, and walks over them again for the output. Backward:
it walks over the tokens for the scores and for the gradient of P, keeps both D x D derivatives in
registers, and walks over the tokens again to write the gradients of the three parts. It reads the
inputs only, and is bitwise deterministic.

The rows and columns of the scores and the values are the parts q, k and v of a packed projection in
some order: ROWS, COLS and VALUES are their indices. Capture is a separate specialisation, launched
over the S sampled entries in addition to the ordinary launch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._checks import MAX_ROW_STRIDE
from .._epilogue import store_statistics, sums_of_entropies
from .._launch_cache import Launch, Scratch, View, check_tile
from .._tiles import Tiles, block_dim, rule
from .._triton import (
    PRECISION,
    SHIFT,
    head_of,
    load_rows,
    narrow,
    parts_of,
    product_apart,
    product_of_parts,
    scaled,
    store_rows,
)
from ..route import Results

# With ``num_stages``, Triton pipelines the loops over tokens: it copies the next tiles into shared
# memory, in flight while the products of the current one run, and places the waits and the barriers
# between the two. So no barrier is written in this file.
#
# The D x D products of wider heads do not all fit in registers. By default, ptxas spills some of
# heads of 32 to fit one more program of a small launch of a capture.
FORWARD_TILES = Tiles(
    "covariance_forward",
    rule(dim=16, BLOCK_N=128, num_warps=4, num_stages=3),
    rule(dim=32, BLOCK_N=64, num_warps=4, num_stages=3, maxnreg=255),
    rule(dim=64, BLOCK_N=32, num_warps=4, num_stages=3, maxnreg=255),
    rule(dim=32, size=4, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(dim=64, size=4, BLOCK_N=16, num_warps=8, num_stages=2, maxnreg=255),
)


@triton.jit
def products_over_tokens(
    x_ptr,
    y_ptr,
    stride_x,
    stride_y,
    N,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """Return X^T Y (BLOCK_D, BLOCK_D) and, with ``SQUARES``, the squared lengths of channels."""
    # Tokens are the inner dimension of the product: the whole result stays in registers.
    products = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    # The sum over the tokens of a tile crosses warps, so that it is taken once, at the end.
    x_squares = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    y_squares = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_N):
        x = load_rows(x_ptr, start, stride_x, N, D, [BLOCK_N, BLOCK_D])  # (BLOCK_N, BLOCK_D)
        y = load_rows(y_ptr, start, stride_y, N, D, [BLOCK_N, BLOCK_D])  # (BLOCK_N, BLOCK_D)
        # A fresh accumulator for each tile, since one over all tokens would drift.
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
    # Products of the padding are zero, no small scores: they must not count as visible columns.
    if D < BLOCK_D:
        s = tl.where((channels < D)[None, :], s, float("-inf"))
    row_max = tl.max(s, axis=1)  # (BLOCK_D,)
    centred = s - row_max[:, None]  # (BLOCK_D, BLOCK_D)
    weights = tl.exp(centred)
    row_sum = tl.sum(weights, axis=1)  # (BLOCK_D,)
    if D < BLOCK_D:
        # 0 * -inf would be nan in the entropy. Rows of the padding must not reach the output.
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
    # 64-bit: twice the distance between parts may not fit 32 bits.
    stride_part = tl.cast(qkv_view.stride_part, tl.int64)
    # First walk over the tokens: no output is known before the last of them.
    s, row_squares, col_squares = products_over_tokens(  # s (BLOCK_D, BLOCK_D)
        x_ptr=start + ROWS * stride_part,
        y_ptr=start + COLS * stride_part,
        stride_x=qkv_view.stride_n,
        stride_y=qkv_view.stride_n,
        N=N,
        BLOCK_N=BLOCK_N,
        D=D,
        BLOCK_D=BLOCK_D,
        SQUARES=NORMALISE,
    )
    if NORMALISE:
        row_inverse, _ = inverse_lengths(row_squares, eps)  # (BLOCK_D,)
        col_inverse, _ = inverse_lengths(col_squares, eps)
        # The channels are divided here, where they are D x D numbers, and not in the N x D inputs.
        temperature = tl.load(temperature_ptr + h).to(tl.float32)
        s = scaled(s * row_inverse[:, None] * col_inverse[None, :], temperature)
    else:
        s = scaled(s, scale)
    weights, row_sum, row_max, entropy = row_softmax(s, D, BLOCK_D)
    inverse_sum = 1.0 / row_sum  # (BLOCK_D,)
    # Shifted up, so that the smaller parts of P stay in the range of float16.
    weights *= SHIFT
    high, middle, low = parts_of(weights, qkv_view.ptr.dtype.element_ty)  # (BLOCK_D, BLOCK_D)

    value_ptr = start + VALUES * stride_part
    out_ptr += (out_b.to(tl.int64) * N * H + h) * D
    square = tl.zeros([BLOCK_N], tl.float32)
    # Second walk: P is the left operand of every product, and stays on chip; the values stream by.
    for first in range(0, N, BLOCK_N):
        values = load_rows(value_ptr, first, qkv_view.stride_n, N, D, [BLOCK_N, BLOCK_D])
        values = tl.trans(values)  # (BLOCK_D, BLOCK_N)
        if CAPTURE:
            # P rounded once changes a condition number of 1e5 by a tenth or more (docs/kappa.md).
            out = product_of_parts(high, middle, low, values)  # (BLOCK_D, BLOCK_N)
        else:
            out = tl.dot(high, values, input_precision=PRECISION)  # (BLOCK_D, BLOCK_N)
        # P was not divided (``row_softmax``): its product is.
        out = tl.trans(out * (inverse_sum * (1.0 / SHIFT))[:, None])  # (BLOCK_N, BLOCK_D)
        store_rows(out_ptr, out, first, H * D, N, D)
        if stats_ptr is not None:
            square += tl.sum(out * out, axis=1)  # (BLOCK_N,)

    channels = tl.arange(0, BLOCK_D)
    if not CAPTURE:
        lse = row_max + tl.log(row_sum)  # (BLOCK_D,)
        tl.store(lse_ptr + head.to(tl.int64) * D + channels, lse, mask=channels < D)
    if stats_ptr is not None:
        # This program has all rows of the head: the sums are complete, without ``join``.
        p = weights * (inverse_sum * (1.0 / SHIFT))[:, None]  # (BLOCK_D, BLOCK_D)
        sums = sums_of_entropies(row_max, entropy, p * p, square, channels < D)
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), D, 1.0)


BACKWARD_TILES = Tiles(
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
    # ``matrix`` is the left operand, the same for every tile, as P is in the forward.
    gradient = tl.trans(tl.dot(matrix, tl.trans(other), input_precision=PRECISION))
    if NORMALISE:
        # A channel's length has a gradient too: what points along the channel is taken away.
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
    # First walk: the scores again, so that the forward need not keep P.
    s, row_squares, col_squares = products_over_tokens(  # s (BLOCK_D, BLOCK_D)
        x_ptr=row_ptr,
        y_ptr=col_ptr,
        stride_x=qkv_view.stride_n,
        stride_y=qkv_view.stride_n,
        N=N,
        BLOCK_N=BLOCK_N,
        D=D,
        BLOCK_D=BLOCK_D,
        SQUARES=NORMALISE,
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
    # Second walk: dP = dO^T V, which has no lengths to measure.
    dp, _, _ = products_over_tokens(  # (BLOCK_D, BLOCK_D)
        x_ptr=do_ptr,
        y_ptr=start + VALUES * stride_part,
        stride_x=do_view.stride_n,
        stride_y=qkv_view.stride_n,
        N=N,
        BLOCK_N=BLOCK_N,
        D=D,
        BLOCK_D=BLOCK_D,
        SQUARES=False,
    )
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
    # Third walk: dS and P are complete, so that one pass writes all three parts. Each program owns
    # its head of dqkv: nothing is added to memory.
    for first in range(0, N, BLOCK_N):
        do = load_rows(do_ptr, first, do_view.stride_n, N, D, [BLOCK_N, BLOCK_D])
        dvalues = tl.trans(tl.dot(p_narrow, tl.trans(do), input_precision=PRECISION))
        store_rows(dqkv_ptr + VALUES * width, dvalues, first, 3 * width, N, D)
        row_tile = load_rows(row_ptr, first, qkv_view.stride_n, N, D, [BLOCK_N, BLOCK_D])
        col_tile = load_rows(col_ptr, first, qkv_view.stride_n, N, D, [BLOCK_N, BLOCK_D])
        drows = _through_scores(  # (BLOCK_N, BLOCK_D)
            row_tile, col_tile, to_rows, row_scale, row_along, NORMALISE
        )
        dcols = _through_scores(
            col_tile, row_tile, tl.trans(to_cols), col_scale, col_along, NORMALISE
        )
        store_rows(dqkv_ptr + ROWS * width, drows, first, 3 * width, N, D)
        store_rows(dqkv_ptr + COLS * width, dcols, first, 3 * width, N, D)


# --- Launches ------------------------------------------------------------------------------------


class QkvView(NamedTuple):
    """A packed projection as kernels take it: strides of entry, token, part and head."""

    ptr: Tensor
    stride_b: int
    stride_n: int
    stride_part: int
    stride_h: int


class Covariance(NamedTuple):
    """The launches of one of the two operators.

    Attributes:
        rows: which part of a packed projection (0 q, 1 k, 2 v) gives the scores' rows.
        cols: which gives their columns.
        values: which is averaged.
        normalise: divide each channel by its length, and multiply by a temperature.
    """

    rows: int
    cols: int
    values: int
    normalise: bool

    def prepare_forward(self, call: Any, results: Results) -> Launch:
        """Return what fills the output, ``lse`` (B, H, D) and any statistics."""
        arguments = self._arguments(FORWARD_TILES, call) | {
            "out_ptr": results.out,
            "lse_ptr": results.lse,
            "stats_ptr": results.stats,
            "sample_ptr": None,
            "B": len(call.qkv),
            "CAPTURE": False,
        }
        return Launch(_covariance_fwd_kernel, (len(results.out) * arguments["H"],), arguments)

    def prepare_capture(self, call: Any, results: Results) -> Launch:
        """Return what fills the heads (S, N, H * D) of sampled entries."""
        assert results.heads is not None
        arguments = self._arguments(FORWARD_TILES, call) | {
            "out_ptr": results.heads,
            "lse_ptr": None,
            "stats_ptr": None,
            "sample_ptr": results.sample,
            "B": len(call.qkv),
            "CAPTURE": True,
        }
        return Launch(_covariance_fwd_kernel, (len(results.heads) * arguments["H"],), arguments)

    def prepare_backward(self, grad: Tensor, call: Any, saved: Results, gradients: Any) -> Launch:
        """Return what fills dqkv, and dtemperature if there is a temperature."""
        if grad.stride(1) > MAX_ROW_STRIDE:
            grad = grad.contiguous()
        arguments = self._arguments(BACKWARD_TILES, call) | {
            "do_view": View(grad, grad.stride(0), grad.stride(2), grad.stride(1)),
            "dqkv_ptr": gradients.dqkv,
            "dtemperature_ptr": None,
        }
        grid, scratch = (len(call.qkv) * arguments["H"],), ()
        if self.normalise:
            # One for each batch entry, summed in a fixed order.
            shape = len(call.qkv), arguments["H"]
            arguments["dtemperature_ptr"] = call.qkv.new_empty(shape, dtype=torch.float32)
            scratch = (Scratch("dtemperature_ptr", "dtemperature", _sum_over_batch),)
        return Launch(_covariance_bwd_kernel, grid, arguments, scratch)

    def _arguments(self, tiles: Tiles, call: Any) -> dict[str, Any]:
        """Return the arguments that both kernels take."""
        _, tokens, _three, heads, dim = call.qkv.shape
        stride_b, stride_n, stride_part, stride_h, _ = call.qkv.stride()
        tile = tiles.tile(call.qkv.device, size=call.qkv.element_size(), dim=block_dim(dim))
        # As dqkv has them, which is contiguous whatever qkv is.
        check_tile("rows of qkv's gradient", tokens, 3 * heads * dim)
        # A kernel uses one of the two numbers.
        number = call.eps if self.normalise else call.scale
        return {
            **tile.arguments,
            "qkv_view": QkvView(call.qkv, stride_b, stride_n, stride_part, stride_h),
            "temperature_ptr": call.temperature.contiguous() if self.normalise else None,
            "H": heads,
            "N": tokens,
            "eps": number,
            "scale": number,
            "D": dim,
            "BLOCK_D": block_dim(dim),
            "ROWS": self.rows,
            "COLS": self.cols,
            "VALUES": self.values,
            "NORMALISE": self.normalise,
        }


def _sum_over_batch(partial: Tensor, dtemperature: Tensor) -> None:
    dtemperature.copy_(partial.sum(dim=0))


cross_covariance = Covariance(rows=0, cols=1, values=2, normalise=True)
channel = Covariance(rows=1, cols=2, values=0, normalise=False)
