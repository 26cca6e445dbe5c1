"""The operators of attention between channels: what they return, and how the CPU computes them."""

from typing import Any

import torch
from torch import Tensor

from .._operators import (
    Implementation,
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    register,
    upcast,
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


def _fill(
    s: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    stats: list[Tensor] | None,
    sample: Tensor | None,
) -> None:
    a, p, row_lse = reference.attend(s, values)
    out.copy_(a.transpose(1, 2))
    lse.copy_(row_lse)
    if stats is None:
        return
    for slot, statistic in zip(stats[:4], reference.statistics(p, s, a), strict=True):
        slot.copy_(statistic)
    if sample is not None:
        wanted = sample >= 0
        stats[4][wanted] = a[sample[wanted]].transpose(1, 2).flatten(2).to(stats[4].dtype)


def _copy_packed(gradients: tuple[Tensor, Tensor, Tensor], dqkv: Tensor) -> None:
    # One at a time: autograd lets nothing be written to what unbind gives.
    for i, gradient in enumerate(gradients):
        dqkv.select(2, i).copy_(gradient.transpose(1, 2))


class _CrossCovarianceCpu:
    @staticmethod
    def forward(inputs, params, out, lse, stats, sample) -> None:
        qkv, temperature = map(upcast, inputs)
        q, k, v = split_qkv(qkv)
        s = reference.cross_covariance_scores(q, k, temperature, *params)
        _fill(s, v, out, lse, stats, sample)

    @staticmethod
    def backward(grad, inputs, params, lse, grads) -> None:
        g, qkv, temperature = map(upcast, (grad, *inputs))
        q, k, v = split_qkv(qkv)
        p = torch.softmax(reference.cross_covariance_scores(q, k, temperature, *params), dim=-1)
        ds, dv = reference.attend_backward(g.transpose(1, 2), p, v)
        dq, dk, dtau = reference.cross_covariance_backward(ds, q, k, temperature, *params)
        _copy_packed((dq, dk, dv), grads[0])
        grads[1].copy_(dtau)


class _ChannelCpu:
    @staticmethod
    def forward(inputs, params, out, lse, stats, sample) -> None:
        q, k, v = split_qkv(upcast(*inputs))
        _fill(reference.channel_scores(k, v, *params), q, out, lse, stats, sample)

    @staticmethod
    def backward(grad, inputs, params, lse, grads) -> None:
        g, qkv = map(upcast, (grad, *inputs))
        q, k, v = split_qkv(qkv)
        p = torch.softmax(reference.channel_scores(k, v, *params), dim=-1)
        ds, dq = reference.attend_backward(g.transpose(1, 2), p, q)
        dk, dv = reference.channel_backward(ds, k, v, *params)
        _copy_packed((dq, dk, dv), *grads)


def _flops(qkv: Tensor, *rest: Any) -> Products:
    batch, tokens, _, heads, dim = qkv.shape
    product = 2 * batch * heads * dim**2 * tokens
    return Products(product, product)


def _cross_covariance_cuda() -> Implementation:
    from . import launch

    return launch.cross_covariance


def _channel_cuda() -> Implementation:
    from . import launch

    return launch.channel


register(
    "cross_covariance_attention",
    inputs="Tensor qkv, Tensor temperature",
    params="float eps",
    shapes=_shapes,
    cpu=_CrossCovarianceCpu(),
    cuda=_cross_covariance_cuda,
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
    cpu=_ChannelCpu(),
    cuda=_channel_cuda,
    flops=_flops,
    sharding=Sharding({"qkv": (0, 3)}, (0, 2)),
)
