"""Attention between the channels of a head, as in XCiT and DaViT, with its statistics.

Limits: head dimension 1 to 64 on a GPU (128 elsewhere), because several D x D products of a head
stay in registers; the last axis contiguous, because loads are vectors along it. Anything else
raises a ValueError: no silent copy.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._ops import ops
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
from ..dispatcher import on_cpu, upcast
from ..operator import Operator, Shapes, register, run_with_stats
from ..statistics import AttentionStats, per_head
from ..transforms import Products
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
    qkv, temperature, eps = _check_cross_covariance(qkv, temperature, eps)
    if qkv.device.type == "cuda":
        return ops.cross_covariance_attention(qkv, temperature, eps)[0]
    return _on_cpu(CrossCovarianceAttention, qkv, temperature, eps)


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
    qkv, temperature, eps = _check_cross_covariance(qkv, temperature, eps)
    operator = ops.cross_covariance_attention_with_stats
    return run_with_stats(operator, (qkv, temperature), sample, eps)


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
    qkv, scale = _check_channel(qkv, scale)
    if qkv.device.type == "cuda":
        return ops.channel_attention(qkv, scale)[0]
    return _on_cpu(ChannelAttention, qkv, scale)


def channel_attention_with_stats(
    qkv: Tensor, *, scale: float | None = None, sample: Tensor | None = None
) -> AttentionStats:
    """Compute ``channel_attention`` with statistics, and capture sampled entries.

    Arguments and errors are those of ``channel_attention``; ``sample`` and the result are those of
    ``cross_covariance_attention_with_stats``.
    """
    qkv, scale = _check_channel(qkv, scale)
    return run_with_stats(ops.channel_attention_with_stats, (qkv,), sample, scale)


@on_cpu
def _on_cpu(operator: type[Operator], qkv: Tensor, *args: Any) -> Tensor:
    """Return (B, N, H, D) by operations that PyTorch can differentiate."""
    args = tuple(upcast(t) if isinstance(t, Tensor) else t for t in args)
    return operator.attend(upcast(qkv), *args)[0].to(qkv.dtype).contiguous()


def _check_channel(qkv: Tensor, scale: float | None) -> tuple[Tensor, float]:
    (qkv,) = autocast(qkv)
    check_tensor("qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ArgumentError(f"qkv must be (B, N, 3, H, D), got {tuple(qkv.shape)}")
    check_narrow_layout("qkv", qkv, qkv.stride(1))
    return qkv, scale_or_default(scale, qkv.shape[-1])


def _check_cross_covariance(
    qkv: Tensor, temperature: Tensor, eps: float
) -> tuple[Tensor, Tensor, float]:
    qkv, _ = _check_channel(qkv, None)
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
    return qkv, temperature.flatten(), float(eps)


# --- The operator --------------------------------------------------------------------------------


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D)."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _packed(*gradients: Tensor) -> Tensor:
    return torch.stack([gradient.transpose(1, 2) for gradient in gradients], dim=2)


def _results(s: Tensor, values: Tensor) -> Any:
    a, p, lse = reference.attend(s, values)
    return a.transpose(1, 2), lse, partial(per_head, p, s, a)


class ChannelAttention(Operator):
    """Attention between the channels of a head; the projection is (B, N, 3, H, D)."""

    name, kernels = "channel_attention", "covariance.kernels:channel"
    inputs, differentiable, cast = "Tensor qkv", 1, 1
    numbers, gradients = "float scale", "Tensor dqkv"

    @staticmethod
    def shapes(qkv: Tensor, *_: Any) -> Shapes:
        batch, tokens, _three, heads, dim = qkv.shape
        out, lse = (batch, tokens, heads, dim), (batch, heads, dim)
        return Shapes(out, lse, (batch, heads), (tokens, heads * dim))

    @staticmethod
    def attend(qkv: Tensor, scale: float) -> Any:
        q, k, v = split_qkv(qkv)
        return _results(reference.channel_scores(k, v, scale), q)

    @staticmethod
    def differentiate(grad: Tensor, qkv: Tensor, scale: float) -> tuple[Tensor, ...]:
        q, k, v = split_qkv(qkv)
        p = torch.softmax(reference.channel_scores(k, v, scale), dim=-1)
        ds, dq = reference.attend_backward(grad.transpose(1, 2), p, q)
        dk, dv = reference.channel_backward(ds, k, v, scale)
        return (_packed(dq, dk, dv),)

    @staticmethod
    def flops(qkv: Tensor, *_: Any) -> Products:
        batch, tokens, _three, heads, dim = qkv.shape
        product = 2 * batch * heads * dim**2 * tokens
        return Products(product, product)


class CrossCovarianceAttention(ChannelAttention):
    """The same of channels of unit length, with a temperature (H,) for each head."""

    name, kernels = "cross_covariance_attention", "covariance.kernels:cross_covariance"
    inputs, differentiable = "Tensor qkv, Tensor temperature", 2
    numbers, gradients = "float eps", "Tensor dqkv, Tensor dtemperature"

    @staticmethod
    def attend(qkv: Tensor, temperature: Tensor, eps: float) -> Any:
        q, k, v = split_qkv(qkv)
        return _results(reference.cross_covariance_scores(q, k, temperature, eps), v)

    @staticmethod
    def differentiate(
        grad: Tensor, qkv: Tensor, temperature: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        q, k, v = split_qkv(qkv)
        p = torch.softmax(reference.cross_covariance_scores(q, k, temperature, eps), dim=-1)
        ds, dv = reference.attend_backward(grad.transpose(1, 2), p, v)
        dq, dk, dtau = reference.cross_covariance_backward(ds, q, k, temperature, eps)
        return _packed(dq, dk, dv), dtau


register(CrossCovarianceAttention)
register(ChannelAttention)
