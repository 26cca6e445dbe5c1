"""The operators of attention between channels: what they return, and how the CPU computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._operators import (
    ByReference,
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    at_first_call,
    register,
)
from . import reference


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D)."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _shapes(qkv: Tensor, *_) -> Shapes:
    batch, tokens, _, heads, dim = qkv.shape
    return Shapes(
        (batch, tokens, heads, dim), (batch, heads, dim), (batch, heads), (tokens, heads * dim)
    )


def _results(s: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Callable[[], Any]]:
    a, p, lse = reference.attend(s, values)
    return a.transpose(1, 2), lse, partial(reference.statistics, p, s, a)


def _packed(*gradients: Tensor) -> Tensor:
    return torch.stack([each.transpose(1, 2) for each in gradients], dim=2)


def _cross_covariance(qkv, temperature, eps):
    q, k, v = split_qkv(qkv)
    return _results(reference.cross_covariance_scores(q, k, temperature, eps), v)


def _cross_covariance_gradients(grad, qkv, temperature, eps):
    q, k, v = split_qkv(qkv)
    p = torch.softmax(reference.cross_covariance_scores(q, k, temperature, eps), dim=-1)
    ds, dv = reference.attend_backward(grad.transpose(1, 2), p, v)
    dq, dk, dtau = reference.cross_covariance_backward(ds, q, k, temperature, eps)
    return _packed(dq, dk, dv), dtau


def _channel(qkv, scale):
    q, k, v = split_qkv(qkv)
    return _results(reference.channel_scores(k, v, scale), q)


def _channel_gradients(grad, qkv, scale):
    q, k, v = split_qkv(qkv)
    p = torch.softmax(reference.channel_scores(k, v, scale), dim=-1)
    ds, dq = reference.attend_backward(grad.transpose(1, 2), p, q)
    dk, dv = reference.channel_backward(ds, k, v, scale)
    return (_packed(dq, dk, dv),)


def _flops(qkv: Tensor, *rest: Any) -> Products:
    batch, tokens, _, heads, dim = qkv.shape
    product = 2 * batch * heads * dim**2 * tokens
    return Products(product, product)


register(
    "cross_covariance_attention",
    inputs="Tensor qkv, Tensor temperature",
    params="float eps",
    shapes=_shapes,
    cpu=ByReference(_cross_covariance, _cross_covariance_gradients),
    cuda=at_first_call(__package__, "cross_covariance"),
    flops=_flops,
    sharding=Sharding({"qkv": (0, 3), "temperature": (None, 0)}, (0, 2)),
    # Into heads: the temperature has one for each, and so has its gradient.
    vmap=VmapAxes((3, 0), out=2, lse=1, per_head=1, heads=2, sample=None),
    autocast=1,
)
register(
    "channel_attention",
    inputs="Tensor qkv",
    params="float scale",
    shapes=_shapes,
    cpu=ByReference(_channel, _channel_gradients),
    cuda=at_first_call(__package__, "channel"),
    flops=_flops,
    sharding=Sharding({"qkv": (0, 3)}, (0, 2)),
)
