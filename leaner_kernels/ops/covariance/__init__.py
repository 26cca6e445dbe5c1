"""Attention between the channels of a head, as in XCiT and DaViT, with its statistics.

Limits: head dimension 1 to 64 on a GPU (128 elsewhere), because several D x D products of a head
stay in registers; the last axis contiguous, because loads are vectors along it. Anything else
raises a ValueError: no silent copy.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    DTYPES,
    LARGEST,
    ArgumentError,
    autocast,
    check_narrow_layout,
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

__all__ = [
    "channel_attention",
    "channel_attention_with_stats",
    "cross_covariance_attention",
    "cross_covariance_attention_with_stats",
]

# Its square, in float32, divides scores of two channels of zeros.
SMALLEST_EPS = 1e-15


def cross_covariance_attention(qkv: Tensor, temperature: Tensor, *, eps: float = 1e-12) -> Tensor:
    """Attend between channels by their cosines over the tokens, as XCiT does.

    With q_i, k_i and v_i the channels of a head, vectors over its N tokens: channel i of the output
    is ``sum_j softmax_j(temperature * cos(q_i, k_j)) v_j``, with D x D scores whatever N is.

    Args:
        qkv: (B, N, 3, H, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D from 1 to 64, on the CPU to 128.
        temperature: (H,) or (H, 1, 1), of any of these dtypes, which may differ from that of
            ``qkv``; an autocast region does not cast it.
        eps: the smallest divisor of a channel, at least 1e-15.

    Returns:
        (B, N, H, D), contiguous, in ``qkv.dtype``.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported.

    On CUDA, second derivatives and forward mode are computed by PyTorch.

    Numerics: float32 lengths, scores, softmax and sums; only the probabilities are rounded to
    ``qkv.dtype``, before V: Q and K enter their product unchanged, and their lengths divide it.
    Source: El-Nouby et al. 2021, section 3.2 (arXiv:2106.09681).
    """
    (qkv,) = autocast(qkv)
    tensors = qkv, _one_axis(temperature)
    signature = signature_of((*tensors, None), ("cross_covariance_attention", eps))
    if signature and (results := repeat(CrossCovarianceAttention, signature, tensors)):
        out, *_ = results
        return out
    call = _checked_cross_covariance(qkv, temperature, eps)
    return _output(CrossCovarianceAttention, signature, call)


def cross_covariance_attention_with_stats(
    qkv: Tensor, temperature: Tensor, *, eps: float = 1e-12, sample: Tensor | None = None
) -> AttentionStats:
    """Compute ``cross_covariance_attention`` with statistics, and capture sampled entries.

    Arguments and errors are those of ``cross_covariance_attention``, and ``sample``: (S,) int32 on
    the device of ``qkv``, the batch entries whose heads are captured. A negative index leaves its
    slot of ``heads`` unwritten. So does an index past the batch on a GPU; the CPU rejects it.

    Returns:
        AttentionStats: out (B, N, H, D); lse (B, H, D), one for each channel's row of scores;
            max_logit, entropy, prob_norm and head_norm (B, H), over the D rows of the head; heads
            (S, N, H * D), None without ``sample``.

    Numerics: as ``cross_covariance_attention``; for ``heads`` the probabilities enter the product
    with V as the sum of two float16 or three bfloat16 numbers, and the float32 sum is stored.
    """
    (qkv,) = autocast(qkv)
    tensors = qkv, _one_axis(temperature)
    kind = "cross_covariance_attention_with_stats", eps
    signature = signature_of((*tensors, sample), kind)
    if signature and (results := repeat(CrossCovarianceAttention, signature, tensors, sample)):
        return stats_of(results, sample)
    call = _checked_cross_covariance(qkv, temperature, eps)
    return compute_stats(CrossCovarianceAttention, signature, call, sample)


def channel_attention(qkv: Tensor, *, scale: float | None = None) -> Tensor:
    """Attend between channels by their products over the tokens, as DaViT does.

    With q_i, k_i and v_i the channels of a head, vectors over its N tokens: channel i of the output
    is ``sum_j softmax_j(scale * k_i . v_j) q_j``, with D x D scores whatever N is.

    Args:
        qkv: (B, N, 3, H, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D from 1 to 64, on the CPU to 128.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.

    Returns:
        (B, N, H, D), contiguous, in ``qkv.dtype``.

    Raises:
        ValueError: if a shape, dtype, stride or device is not supported.

    On CUDA, second derivatives and forward mode are computed by PyTorch.

    Numerics: float32 scores, softmax and sums; probabilities rounded to ``qkv.dtype`` before Q.
    Source: Ding et al. 2022, section 3.3 (arXiv:2204.03645), with the roles of Q, K and V
    of its published code.
    """
    (qkv,) = autocast(qkv)
    signature = signature_of((qkv, None), ("channel_attention", scale))
    if signature and (results := repeat(ChannelAttention, signature, (qkv,))):
        out, *_ = results
        return out
    return _output(ChannelAttention, signature, _checked_channel(qkv, scale))


def channel_attention_with_stats(
    qkv: Tensor, *, scale: float | None = None, sample: Tensor | None = None
) -> AttentionStats:
    """Compute ``channel_attention`` with statistics, and capture sampled entries.

    Arguments and errors are those of ``channel_attention``; ``sample`` and the result are those of
    ``cross_covariance_attention_with_stats``.
    """
    (qkv,) = autocast(qkv)
    signature = signature_of((qkv, sample), ("channel_attention_with_stats", scale))
    if signature and (results := repeat(ChannelAttention, signature, (qkv,), sample)):
        return stats_of(results, sample)
    call = _checked_channel(qkv, scale)
    return compute_stats(ChannelAttention, signature, call, sample)


def _output(operator: type[Operator], signature: Any, call: Any) -> Tensor:
    """Return the output of a checked call."""
    if call.qkv.device.type != "cuda":
        return _on_cpu(operator, call)
    out, *_ = compute(operator, signature, call)
    return out


@on_cpu
def _on_cpu(operator: type[Operator], call: Any) -> Tensor:
    """Return (B, N, H, D) by operations that PyTorch can differentiate."""
    out, *_ = operator.reference_forward(upcast_call(call))
    return out.to(call.qkv.dtype).contiguous()


def _checked_channel(qkv: Tensor, scale: float | None) -> "ChannelCall":
    """Return the call; raise ValueError if a kernel cannot compute it."""
    check_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv must be (B, N, 3, H, D), got {tuple(qkv.shape)}")
    check_narrow_layout("qkv", qkv, qkv.stride(1))
    return ChannelCall(qkv, scale_or_default(scale, qkv.shape[-1]))


def _one_axis(temperature: Any) -> Any:
    """Return (H, 1, 1) as (H,); anything else unchanged, for the checks."""
    # A nested tensor has no shape.
    if not isinstance(temperature, Tensor) or temperature.is_nested:
        return temperature
    return temperature.flatten() if temperature.shape[1:] == (1, 1) else temperature


def _checked_cross_covariance(
    qkv: Tensor, temperature: Tensor, eps: float
) -> "CrossCovarianceCall":
    """Return the call; raise ValueError if a kernel cannot compute it."""
    _checked_channel(qkv, None)
    check_tensor("temperature", temperature)
    heads = qkv.shape[3]
    if temperature.shape not in ((heads,), (heads, 1, 1)):
        raise ArgumentError(
            f"temperature must be ({heads},) or ({heads}, 1, 1), got {tuple(temperature.shape)}"
        )
    allowed = DTYPES if qkv.device.type == "cuda" else (*DTYPES, torch.float64)
    if temperature.dtype not in allowed or temperature.device != qkv.device:
        raise ArgumentError(
            f"temperature must be floating point on {qkv.device}, "
            f"got {temperature.dtype} on {temperature.device}"
        )
    if not isinstance(eps, int | float) or not SMALLEST_EPS <= eps <= LARGEST:
        raise ArgumentError(
            f"eps must be a number of at least {SMALLEST_EPS:.2g}, got {shown(eps)}"
        )
    # Products do not promote dtypes: convert to that of the sums.
    if temperature.dtype == torch.float64 and qkv.dtype != torch.float64:
        temperature = temperature.float()
    return CrossCovarianceCall(qkv, temperature.flatten(), float(eps))


# --- The operator --------------------------------------------------------------------------------


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D)."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _packed(*gradients: Tensor) -> Tensor:
    return torch.stack([gradient.transpose(1, 2) for gradient in gradients], dim=2)


def _results(s: Tensor, values: Tensor) -> Any:
    a, p, lse = reference.forward(s, values)
    return a.transpose(1, 2), lse, partial(per_head, p, s, a)


class ChannelCall(NamedTuple):
    """A checked call: a projection (B, N, 3, H, D) and the scale."""

    qkv: Tensor
    scale: float


class ChannelGradients(NamedTuple):
    """The gradient of a projection."""

    dqkv: Tensor


class ChannelAttention(Operator):
    """Attention between the channels of a head; the projection is (B, N, 3, H, D)."""

    name, kernels = "channel_attention", "covariance.kernels:channel"
    tensors: Mapping[str, str] = {"qkv": "Tensor"}
    numbers: Mapping[str, str] = {"scale": "float"}
    Arguments: Any = ChannelCall
    Gradients: Any = ChannelGradients
    pointers: Mapping[str, str] = {
        "qkv_view": "qkv",
        "temperature_ptr": "temperature",
        "sample_ptr": "sample",
        "out_ptr": "out",
        "lse_ptr": "lse",
        "stats_ptr": "stats",
        "do_view": "grad",
        "dqkv_ptr": "dqkv",
    }

    @staticmethod
    def shapes(arguments: Any) -> Shapes:
        batch, tokens, _three, heads, dim = arguments.qkv.shape
        return Shapes(
            out=(batch, tokens, heads, dim),
            rows=(batch, heads, dim),
            per_head=(batch, heads),
            heads=(tokens, heads * dim),
        )

    @staticmethod
    def reference_forward(call: ChannelCall) -> Any:
        q, k, v = split_qkv(call.qkv)
        return _results(reference.channel_scores(k, v, call.scale), q)

    @staticmethod
    def reference_backward(grad: Tensor, call: ChannelCall) -> tuple[Tensor, ...]:
        q, k, v = split_qkv(call.qkv)
        p = torch.softmax(reference.channel_scores(k, v, call.scale), dim=-1)
        ds, dq = reference.backward(grad.transpose(1, 2), p, q)
        dk, dv = reference.channel_backward(ds, k, v, call.scale)
        return (_packed(dq, dk, dv),)

    @staticmethod
    def flops(arguments: Any) -> Products:
        batch, tokens, _three, heads, dim = arguments.qkv.shape
        product = 2 * batch * heads * dim**2 * tokens
        return Products(product, product)


class CrossCovarianceCall(NamedTuple):
    """A checked call: a projection (B, N, 3, H, D), temperature (H,), the smallest divisor."""

    qkv: Tensor
    temperature: Tensor
    eps: float


class CrossCovarianceGradients(NamedTuple):
    """The gradients of a projection and a temperature."""

    dqkv: Tensor
    dtemperature: Tensor


class CrossCovarianceAttention(ChannelAttention):
    """The same of channels of unit length, with a temperature (H,) for each head."""

    name, kernels = "cross_covariance_attention", "covariance.kernels:cross_covariance"
    tensors: Mapping[str, str] = {"qkv": "Tensor", "temperature": "Tensor"}
    numbers: Mapping[str, str] = {"eps": "float"}
    Arguments: Any = CrossCovarianceCall
    Gradients: Any = CrossCovarianceGradients

    @staticmethod
    def reference_forward(call: CrossCovarianceCall) -> Any:
        q, k, v = split_qkv(call.qkv)
        s = reference.cross_covariance_scores(q, k, call.temperature, call.eps)
        return _results(s, v)

    @staticmethod
    def reference_backward(grad: Tensor, call: CrossCovarianceCall) -> tuple[Tensor, ...]:
        q, k, v = split_qkv(call.qkv)
        s = reference.cross_covariance_scores(q, k, call.temperature, call.eps)
        p = torch.softmax(s, dim=-1)
        ds, dv = reference.backward(grad.transpose(1, 2), p, v)
        scores = ds, q, k, call.temperature, call.eps
        dq, dk, dtau = reference.cross_covariance_backward(*scores)
        return _packed(dq, dk, dv), dtau


register(CrossCovarianceAttention)
register(ChannelAttention)
