"""Attention inside the windows of a map; the kernels' addressing partitions and reverses it.

Limits: head dimension 1 to 128, because one tile of K and of V must fit on chip; the last axis
contiguous, because loads are vectors along it; the windows fill the map, because a token outside
every window would have no output. Anything else raises a ValueError: no silent copy.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    ArgumentError,
    autocast,
    check_layout,
    check_tensor,
    scale_or_default,
    shown,
)
from .._launch_cache import signature_of
from ..dispatcher import on_cpu
from ..route import (
    Operator,
    Products,
    Shapes,
    compute,
    compute_stats,
    register,
    repeat,
    stats_of,
    upcast_call,
)
from ..statistics import AttentionStats, per_head
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
    signature = signature_of((qkv, None), ("window_attention", scale), window_size)
    if signature and (results := repeat(WindowAttention, signature, (qkv,))):
        out, *_ = results
        return out
    call = _checked(qkv, window_size, scale)
    if qkv.device.type != "cuda":
        return _on_cpu(call)
    out, *_ = compute(WindowAttention, signature, call)
    return out


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
    kind = "window_attention_with_stats", scale
    signature = signature_of((qkv, sample), kind, window_size)
    if signature and (results := repeat(WindowAttention, signature, (qkv,), sample)):
        return stats_of(results, sample)
    call = _checked(qkv, window_size, scale)
    return compute_stats(WindowAttention, signature, call, sample)


def check_window(window_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a window; raise ValueError unless both are positive integers."""
    both = window_size if isinstance(window_size, tuple | list) else (window_size, window_size)
    if len(both) != 2 or any(not isinstance(n, int) or n < 1 for n in both):
        raise ArgumentError(
            f"window_size must be one or two whole numbers of at least 1, got {shown(window_size)}"
        )
    return both[0], both[1]


def _checked(qkv: Tensor, window_size: int | tuple[int, int], scale: float | None) -> "WindowCall":
    """Return the call; raise ValueError if a kernel cannot compute it."""
    check_tensor("qkv", qkv)
    if qkv.dim() != 6 or qkv.shape[3] != 3:
        raise ArgumentError(f"qkv must be (B, Y, X, 3, H, D), got {tuple(qkv.shape)}")
    check_layout("qkv", qkv)
    window_y, window_x = check_window(window_size)
    _, y, x, _three, _, dim = qkv.shape
    if min(y, x) < 1 or y % window_y or x % window_x:
        raise ArgumentError(f"windows of {window_y} x {window_x} must fill the map, got {y} x {x}")
    return WindowCall(qkv, window_y, window_x, scale_or_default(scale, dim))


@on_cpu
def _on_cpu(call: "WindowCall") -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    out, *_ = WindowAttention.reference_forward(upcast_call(call))
    return out.to(call.qkv.dtype).contiguous()


# --- The operator --------------------------------------------------------------------------------


class WindowCall(NamedTuple):
    """A checked call: a packed map (B, Y, X, 3, H, D), the sides of a window, and the scale."""

    qkv: Tensor
    window_y: int
    window_x: int
    scale: float

    @property
    def window(self) -> tuple[int, int]:
        """Return rows and columns of a window."""
        return self.window_y, self.window_x

    @property
    def size(self) -> tuple[int, int]:
        """Return rows and columns of the map."""
        return self.qkv.shape[1], self.qkv.shape[2]


class WindowGradients(NamedTuple):
    """The gradient of a packed map."""

    dqkv: Tensor


class WindowAttention(Operator):
    """Attention inside the windows of a packed map (B, Y, X, 3, H, D)."""

    name, kernels = "window_attention", "window.kernels"
    tensors: Mapping[str, str] = {"qkv": "Tensor"}
    numbers: Mapping[str, str] = {"window_y": "int", "window_x": "int", "scale": "float"}
    Arguments, Gradients = WindowCall, WindowGradients
    pointers: Mapping[str, str] = {
        "qkv_view": "qkv",
        "sample_ptr": "sample",
        "out_ptr": "out",
        "lse_ptr": "lse",
        "do_view": "grad",
        "dqkv_ptr": "dqkv",
    }

    @staticmethod
    def shapes(arguments: WindowCall) -> Shapes:
        batch, y, x, _three, heads, dim = arguments.qkv.shape
        return Shapes(
            out=(batch, y, x, heads, dim),
            rows=(batch, heads, y, x),
            per_head=(batch, heads),
            heads=(y * x, heads * dim),
        )

    @staticmethod
    def reference_forward(call: WindowCall) -> Any:
        q, k, v = (reference.partition(t, call.window) for t in call.qkv.unbind(3))
        p, lse, s = reference.probabilities(q, k, call.scale)
        a = p @ v
        lse = reference.reverse(lse[..., None], call.size, call.window)[..., 0].permute(0, 3, 1, 2)
        statistics = partial(per_head, p, s, a, rows=(1, 3), outputs=(1, 3, 4))
        return reference.reverse(a, call.size, call.window), lse, statistics

    @staticmethod
    def reference_backward(grad: Tensor, call: WindowCall) -> tuple[Tensor, ...]:
        g, q, k, v = (reference.partition(t, call.window) for t in (grad, *call.qkv.unbind(3)))
        p, _, _ = reference.probabilities(q, k, call.scale)
        gradients = reference.backward(g, q, k, v, p, call.scale)
        maps = [reference.reverse(t, call.size, call.window) for t in gradients]
        return (torch.stack(maps, dim=3),)

    @staticmethod
    def flops(arguments: WindowCall) -> Products:
        batch, y, x, _three, heads, dim = arguments.qkv.shape
        keys = arguments.window_y * arguments.window_x
        product = 2 * batch * heads * y * x * keys * dim
        return Products(product, product)


register(WindowAttention)
