"""Attention inside the windows of a map; the kernels' addressing partitions and reverses it.

Limits: head dimension 1 to 128, because one tile of K and of V must fit on chip; the last axis
contiguous, because loads are vectors along it; the windows fill the map, because a token outside
every window would have no output. Anything else raises a ValueError: no silent copy.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._ops import ops
from .._checks import (
    ArgumentError,
    autocast,
    check_layout,
    check_tensor,
    scale_or_default,
    shown,
)
from ..dispatcher import on_cpu, upcast
from ..operator import Operator, Shapes, register, run_with_stats
from ..statistics import AttentionStats, per_head
from ..transforms import Products
from . import reference

__all__ = ["check_window", "window_attention", "window_attention_with_stats"]


def window_attention(
    qkv: Tensor, window_size: int | tuple[int, int], *, scale: float | None = None
) -> Tensor:
    """Compute softmax attention in each window of a map: tokens attend only within their window.

    Args:
        qkv: (B, Y, X, 3, H, D), float32, float16 or bfloat16 (on the CPU also float64), any
            strides whose last axis is contiguous; D from 1 to 128.
        window_size: rows and columns of a window, or one number for both; they divide Y and X. A
            window may have any number of tokens; kernels are fastest up to 64.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.

    Returns:
        (B, Y, X, H, D), contiguous, in ``qkv.dtype``.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported.

    On a GPU, nothing is copied before or after the kernel, and the backward writes one packed
    gradient, which is bitwise deterministic. The gradient of float32, of windows of more than 64
    tokens and of D above 64, second derivatives and forward mode are computed by PyTorch there, in
    float32 (in TF32 if the user allows it), with all scores in memory.

    Numerics: float32 scores, softmax and sums; probabilities rounded to ``qkv.dtype`` before V.
    Source: Ding et al. 2022, DaViT (arXiv:2204.03645), after Liu et al. 2021 (arXiv:2103.14030)
    without shift and position bias.
    """
    (qkv,) = autocast(qkv)
    window = _check(qkv, window_size)
    scale = scale_or_default(scale, qkv.shape[-1])
    if qkv.device.type != "cuda":
        return _on_cpu(qkv, window, scale)
    return ops.window_attention(qkv, *window, scale)[0]


def window_attention_with_stats(
    qkv: Tensor,
    window_size: int | tuple[int, int],
    *,
    scale: float | None = None,
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``window_attention`` with statistics of every head, and capture sampled maps.

    Arguments and errors are those of ``window_attention``, and ``sample``: (S,) int32 on the device
    of ``qkv``, the batch entries whose heads are captured. A negative index leaves its slot of
    ``heads`` unwritten. So does an index past the batch on a GPU; the CPU rejects it.

    Returns:
        AttentionStats with lse (B, H, Y, X), the other statistics (B, H) over all windows of the
        map, and heads (S, Y * X, H * D), tokens in row-major order of the map.

    Numerics of ``heads``: as in ``attention_with_stats``.
    """
    (qkv,) = autocast(qkv)
    window = _check(qkv, window_size)
    scale = scale_or_default(scale, qkv.shape[-1])
    return run_with_stats(ops.window_attention_with_stats, (qkv,), sample, *window, scale)


def check_window(window_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a window; raise ValueError unless both are positive integers."""
    both = window_size if isinstance(window_size, tuple | list) else (window_size, window_size)
    if len(both) != 2 or any(not isinstance(n, int) or n < 1 for n in both):
        raise ArgumentError(
            f"window_size must be one or two whole numbers of at least 1, got {shown(window_size)}"
        )
    return both[0], both[1]


def _check(qkv: Tensor, window_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a window; raise ValueError if a kernel cannot compute it."""
    check_tensor("qkv", qkv)
    if qkv.dim() != 6 or qkv.shape[3] != 3:
        raise ArgumentError(f"qkv must be (B, Y, X, 3, H, D), got {tuple(qkv.shape)}")
    check_layout("qkv", qkv)
    window, size = check_window(window_size), qkv.shape[1:3]
    if min(size) < 1 or size[0] % window[0] or size[1] % window[1]:
        raise ArgumentError(
            f"windows of {window[0]} x {window[1]} must fill the map, got {size[0]} x {size[1]}"
        )
    return window


@on_cpu
def _on_cpu(qkv: Tensor, window: tuple[int, int], scale: float) -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    return WindowAttention.attend(upcast(qkv), *window, scale)[0].to(qkv.dtype).contiguous()


# --- The operator --------------------------------------------------------------------------------


class WindowAttention(Operator):
    """Attention inside the windows of a packed map (B, Y, X, 3, H, D)."""

    name, kernels = "window_attention", "window.kernels"
    inputs, differentiable, cast = "Tensor qkv", 1, 1
    numbers = "int window_y, int window_x, float scale"
    gradients = "Tensor dqkv"

    @staticmethod
    def shapes(qkv: Tensor, *_: Any) -> Shapes:
        batch, y, x, _three, heads, dim = qkv.shape
        out = batch, y, x, heads, dim
        return Shapes(out, (batch, heads, y, x), (batch, heads), (y * x, heads * dim))

    @staticmethod
    def attend(qkv: Tensor, window_y: int, window_x: int, scale: float) -> Any:
        window, size = (window_y, window_x), (qkv.shape[1], qkv.shape[2])
        q, k, v = (reference.partition(t, window) for t in qkv.unbind(3))
        p, lse, s = reference.probabilities(q, k, scale)
        a = p @ v
        lse = reference.reverse(lse[..., None], size, window)[..., 0].permute(0, 3, 1, 2)
        statistics = partial(per_head, p, s, a, rows=(1, 3), outputs=(1, 3, 4))
        return reference.reverse(a, size, window), lse, statistics

    @staticmethod
    def differentiate(
        grad: Tensor, qkv: Tensor, window_y: int, window_x: int, scale: float
    ) -> tuple[Tensor, ...]:
        window, size = (window_y, window_x), (qkv.shape[1], qkv.shape[2])
        g, q, k, v = (reference.partition(t, window) for t in (grad, *qkv.unbind(3)))
        p, _, _ = reference.probabilities(q, k, scale)
        gradients = reference.backward(g, q, k, v, p, scale)
        return (torch.stack([reference.reverse(t, size, window) for t in gradients], dim=3),)

    @staticmethod
    def flops(qkv: Tensor, *others: Any) -> Products:
        batch, y, x, _, heads, dim = qkv.shape
        rows, cols, _ = others[-3:]
        product = 2 * batch * heads * y * x * rows * cols * dim
        return Products(product, product)


register(WindowAttention)
