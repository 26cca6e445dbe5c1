"""Device helpers of attention between channels: from tokens to scores, and from scores to P."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import triton
import triton.language as tl

from .._triton import load_rows, product_apart


@triton.jit
def products_over_tokens(
    x_ptr, y_ptr, stride_x, stride_y, N,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Return X^T Y (BLOCK_D, BLOCK_D) and, with ``SQUARES``, the squared lengths of channels."""
    products = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    # Summed over the tokens of a tile at the end, once, because that crosses warps.
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
    """Return e^(s - its row's maximum), zero outside D x D, the row sums and maxima, and entropies.

    P is the first divided by the second: undivided its largest elements are 1, where float16 has
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
    # Correctly rounded: there are few, and each is in every score of its channel.
    lengths = tl.sqrt_rn(squares)
    return tl.div_rn(1.0, tl.maximum(lengths, eps)), lengths >= eps
