"""Outlook attention on the CPU: the reference, in float32 for half-precision inputs."""

from typing import Any

import torch
from torch import Tensor

from .._operators import on_cpu, upcast
from . import reference


def forward(
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    stats: list[Tensor] | None,
    sample: Tensor | None,
) -> None:
    """Fill ``out`` (B, Y, X, H, D), ``lse`` (B, H, y, x, K * K) and any ``stats``."""
    value, logits = map(upcast, inputs)
    *window, scale = params
    p, lse_of_rows, s = reference.probabilities(logits, scale)
    a = reference.attend(p, value, tuple(window))
    out.copy_(a)
    lse.copy_(lse_of_rows)
    if stats is None:
        return
    for slot, statistic in zip(stats, reference.statistics(p, s, a)):
        slot.copy_(statistic)
    if sample is not None:
        wanted = sample >= 0
        stats[4][wanted] = a[sample[wanted]].flatten(1, 2).flatten(2).float()


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    lse: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Fill dvalue (B, Y, X, H, D) and dlogits (B, y, x, H, K * K, K * K)."""
    value, logits = map(upcast, inputs)
    *window, scale = params
    p, _, _ = reference.probabilities(logits, scale)
    partial = reference.backward(upcast(grad), value, p, scale, tuple(window))
    for slot, gradient in zip(grads, partial, strict=True):
        slot.copy_(gradient)


@on_cpu
def decomposition(value: Tensor, logits: Tensor, window: reference.Window, scale: float) -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    p = torch.softmax(scale * upcast(logits), dim=-1)
    return reference.attend(p, upcast(value), window).to(value.dtype)
