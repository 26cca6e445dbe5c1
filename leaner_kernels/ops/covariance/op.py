"""The operators of attention between channels: schemas, results, the reference on the CPU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..operator import Operator, Shapes, register
from ..statistics import per_head
from ..transforms import Products
from . import reference


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

    name, kernels = "channel_attention", "covariance.launch:channel"
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

    name, kernels = "cross_covariance_attention", "covariance.launch:cross_covariance"
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
