"""Outlook attention on the CPU: the reference, in float32 for half-precision inputs."""

from functools import partial

import torch
from torch import Tensor

from .._operators import on_cpu, upcast
from . import reference


def attend(value, logits, kernel_size, stride, padding, scale):
    """Return (B, Y, X, H, D), lse (B, H, y, x, K * K) and what computes the statistics."""
    p, lse, s = reference.probabilities(logits, scale)
    a = reference.attend(p, value, (kernel_size, stride, padding))
    return a, lse, partial(reference.statistics, p, s, a)


def differentiate(grad, value, logits, kernel_size, stride, padding, scale):
    """Return dvalue (B, Y, X, H, D) and dlogits (B, y, x, H, K * K, K * K)."""
    p, _, _ = reference.probabilities(logits, scale)
    return reference.backward(grad, value, p, scale, (kernel_size, stride, padding))


@on_cpu
def decomposition(value: Tensor, logits: Tensor, window: reference.Window, scale: float) -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    p = torch.softmax(scale * upcast(logits), dim=-1)
    return reference.attend(p, upcast(value), window).to(value.dtype)
