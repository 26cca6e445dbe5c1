"""Outlook attention: weighted sums of pixels in the windows of a map, without unfolding them.

Limits: head dimension 1 to 128, because a pixel's head is one vector of registers; the last axes
contiguous, because loads are vectors along them; kernel size 1 to 7 and stride 1 to 4, because the
kernels unroll over the places of a pixel in its windows; one batch entry within 2**31 elements,
because offsets inside it are 32-bit. Anything else raises a ValueError: no silent copy.
"""

import math
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
from ..dispatcher import on_cpu, upcast
from ..route import (
    Operator,
    Products,
    Shapes,
    compute,
    compute_stats,
    register,
    repeat,
    stats_of,
)
from ..statistics import AttentionStats, per_head
from . import reference
from .reference import Window, num_windows

__all__ = ["check_window", "outlook_attention", "outlook_attention_with_stats"]

MAX_KERNEL_SIZE = 7
MAX_STRIDE = 4
MAX_EXTENT = 2**31


def outlook_attention(
    value: Tensor,
    logits: Tensor,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: int = 1,
    scale: float | None = None,
) -> Tensor:
    """Sum the outputs of all windows that contain a pixel, at the place of the pixel in each.

    Window (i, j) holds the pixels (i * stride - padding + a_y, j * stride - padding + a_x), a in
    K x K in row-major order. With ``P = softmax(scale * logits)`` along the last axis, place a of a
    window gets the sum over its places b of ``P[a, b]`` times the value at b. Pixels outside the
    map are zeros as values and are dropped as results. This fuses unfold, product and fold into one
    pass.

    Args:
        value: (B, Y, X, H, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D from 1 to 128.
        logits: (B, y, x, H, K * K, K * K), dtype and device of ``value``, any strides whose last
            axis is contiguous; y = (Y + 2 * padding - K) // stride + 1, at least 1, and x likewise.
        kernel_size: K, pixels along the side of a window, 1 to 7.
        stride: pixels from a window to the next, 1 to 4, at most ``kernel_size``.
        padding: pixels by which the first window is outside, 0 to ``kernel_size - 1``.
        scale: multiplies the logits, a number; ``D ** -0.5`` when omitted.

    Returns:
        (B, Y, X, H, D), contiguous, in ``value.dtype``; zero at a pixel that no window contains.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported.

    The backward is deterministic. On CUDA, second derivatives and forward mode are computed by
    PyTorch, with all scores in memory.

    Numerics: float32 softmax, products and sums, rounded once.
    Source: Yuan et al. 2021, VOLO, section 3.1 (arXiv:2106.13112).
    """
    value, logits = autocast(value, logits)
    kind = "outlook_attention", kernel_size, stride, padding, scale
    signature = signature_of((value, logits, None), kind)
    if signature and (results := repeat(OutlookAttention, signature, (value, logits))):
        out, *_ = results
        return out
    window = _check(value, logits, kernel_size, stride, padding)
    call = OutlookCall(value, logits, *window, scale_or_default(scale, value.shape[-1]))
    if value.device.type != "cuda":
        return decomposition(call)
    out, *_ = compute(OutlookAttention, signature, call)
    return out


def outlook_attention_with_stats(
    value: Tensor,
    logits: Tensor,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: int = 1,
    scale: float | None = None,
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``outlook_attention`` with statistics of every head, and capture sampled maps.

    Arguments and errors are those of ``outlook_attention``, and ``sample``: (S,) int32 on the
    device of ``value``, the batch entries whose heads are captured. A negative index leaves its
    slot of ``heads`` unwritten. So does an index past the batch on a GPU; the CPU rejects it.

    Returns:
        AttentionStats with lse (B, H, y, x, K * K); max_logit, entropy and prob_norm (B, H) over
        all softmax rows of all windows, including places outside the map, which the model computes
        too; head_norm (B, H) of the summed map; heads (S, Y * X, H * D), pixels in row-major order,
        from float32 products and sums throughout.
    """
    value, logits = autocast(value, logits)
    kind = "outlook_attention_with_stats", kernel_size, stride, padding, scale
    signature = signature_of((value, logits, sample), kind)
    if signature and (results := repeat(OutlookAttention, signature, (value, logits), sample)):
        return stats_of(results, sample)
    window = _check(value, logits, kernel_size, stride, padding)
    call = OutlookCall(value, logits, *window, scale_or_default(scale, value.shape[-1]))
    return compute_stats(OutlookAttention, signature, call, sample)


def check_window(kernel_size: int, stride: int, padding: int) -> Window:
    """Return all three; raise ValueError unless they are integers that the kernels support."""
    limits = {
        "kernel_size": (kernel_size, 1, MAX_KERNEL_SIZE),
        "stride": (stride, 1, MAX_STRIDE),
        "padding": (padding, 0, MAX_KERNEL_SIZE - 1),
    }
    for name, (number, low, high) in limits.items():
        if not isinstance(number, int) or not low <= number <= high:
            raise ArgumentError(
                f"{name} must be a whole number in [{low}, {high}], got {shown(number)}"
            )
    if stride > kernel_size or padding >= kernel_size:
        raise ArgumentError(
            "windows must cover every pixel and overlap the map: stride <= kernel_size and "
            f"padding < kernel_size, got {kernel_size=}, {stride=}, {padding=}"
        )
    return kernel_size, stride, padding


def _check(value: Tensor, logits: Tensor, kernel_size: int, stride: int, padding: int) -> Window:
    """Return the window; raise ValueError unless the kernels support the tensors."""
    window = check_window(kernel_size, stride, padding)
    check_tensor("value", value)
    check_tensor("logits", logits)
    if value.dim() != 5:
        raise ArgumentError(f"value must be (B, Y, X, H, D), got {tuple(value.shape)}")
    check_layout("value", value)
    batch, y, x, heads, _ = value.shape
    if min(y, x) < 1 or min(y, x) + 2 * padding < kernel_size:
        raise ArgumentError(f"a map of {y} x {x} contains no window: {kernel_size=}, {padding=}")
    places = kernel_size**2
    wanted = batch, num_windows(y, window), num_windows(x, window), heads, places, places
    if tuple(logits.shape) != wanted:
        raise ArgumentError(
            f"logits must be (B, y, x, H, K * K, K * K) = {wanted}, got {tuple(logits.shape)}"
        )
    if logits.dtype != value.dtype or logits.device != value.device:
        raise ArgumentError(
            f"logits must be {value.dtype} on {value.device} as value is, "
            f"got {logits.dtype} on {logits.device}"
        )
    for name, t in (("value", value), ("logits", logits)):
        check_layout(name, t)
        extent = sum((n - 1) * stride for n, stride in zip(t.shape[1:], t.stride()[1:]))
        # The gradient or output of an expanded tensor is larger than its memory.
        extent = max(extent, math.prod(t.shape[1:]) - 1)
        if extent >= MAX_EXTENT:
            raise ArgumentError(
                f"{name} must have each batch entry within {MAX_EXTENT} elements, got {extent + 1}"
            )
    return window


# --- The operator --------------------------------------------------------------------------------


class OutlookCall(NamedTuple):
    """A checked call: a map (B, Y, X, H, D), logits of its windows, and numbers."""

    value: Tensor
    logits: Tensor
    kernel_size: int
    stride: int
    padding: int
    scale: float

    @property
    def window(self) -> Window:
        """Return kernel size, stride and padding."""
        return self.kernel_size, self.stride, self.padding


class OutlookGradients(NamedTuple):
    """The gradients of a map and of the logits."""

    dvalue: Tensor
    dlogits: Tensor


class OutlookAttention(Operator):
    """Attention whose weights come from each pixel alone: a map (B, Y, X, H, D) and logits."""

    name, kernels, cast = "outlook_attention", "outlook.kernels", 2
    tensors: Mapping[str, str] = {"value": "Tensor", "logits": "Tensor"}
    numbers: Mapping[str, str] = {
        "kernel_size": "int",
        "stride": "int",
        "padding": "int",
        "scale": "float",
    }
    Arguments, Gradients = OutlookCall, OutlookGradients
    pointers: Mapping[str, str] = {
        "v_view": "value",
        "logits_view": "logits",
        "sample_ptr": "sample",
        "out_ptr": "out",
        "lse_ptr": "lse",
        "stats_ptr": "stats",
        "do_view": "grad",
        "dv_ptr": "dvalue",
        "dlogits_ptr": "dlogits",
    }

    @staticmethod
    def shapes(arguments: OutlookCall) -> Shapes:
        batch, y, x, heads, dim = arguments.value.shape
        _, windows_y, windows_x, *_ = arguments.logits.shape
        return Shapes(
            out=(batch, y, x, heads, dim),
            rows=(batch, heads, windows_y, windows_x, arguments.kernel_size**2),
            per_head=(batch, heads),
            heads=(y * x, heads * dim),
        )

    @staticmethod
    def reference_forward(call: OutlookCall) -> Any:
        p, lse, s = reference.probabilities(call.logits, call.scale)
        a = reference.forward(p, call.value, call.window)
        return a, lse, partial(per_head, p, s, a, rows=(1, 2, 4), outputs=(1, 2, 4))

    @staticmethod
    def reference_backward(grad: Tensor, call: OutlookCall) -> tuple[Tensor, ...]:
        p, _, _ = reference.probabilities(call.logits, call.scale)
        return reference.backward(grad, call.value, p, call.scale, call.window)

    @staticmethod
    def flops(arguments: OutlookCall) -> Products:
        return Products(2 * arguments.logits.numel() * arguments.value.shape[-1], 0)


register(OutlookAttention)


@on_cpu
def decomposition(call: OutlookCall) -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    p = torch.softmax(call.scale * upcast(call.logits), dim=-1)
    return reference.forward(p, upcast(call.value), call.window).to(call.value.dtype)
