"""The operator of outlook attention: schemas, results, the reference on the CPU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatcher import on_cpu, upcast
from ..operator import Operator, Shapes, register
from ..statistics import per_head
from ..transforms import Products
from . import reference


class OutlookAttention(Operator):
    """Attention whose weights come from each pixel alone: a map (B, Y, X, H, D) and logits."""

    name, kernels = "outlook_attention", "outlook.launch"
    inputs, differentiable, cast = "Tensor value, Tensor logits", 2, 2
    numbers = "int kernel_size, int stride, int padding, float scale"
    gradients = "Tensor dvalue, Tensor dlogits"

    @staticmethod
    def shapes(value: Tensor, logits: Tensor, kernel_size: int, *_: Any) -> Shapes:
        batch, y, x, heads, dim = value.shape
        lse = batch, heads, *logits.shape[1:3], kernel_size**2
        return Shapes((batch, y, x, heads, dim), lse, (batch, heads), (y * x, heads * dim))

    @staticmethod
    def attend(value, logits, kernel_size: int, stride: int, padding: int, scale: float) -> Any:
        p, lse, s = reference.probabilities(logits, scale)
        a = reference.attend(p, value, (kernel_size, stride, padding))
        return a, lse, partial(per_head, p, s, a, rows=(1, 2, 4), outputs=(1, 2, 4))

    @staticmethod
    def differentiate(
        grad: Tensor, value, logits, kernel_size: int, stride: int, padding: int, scale: float
    ) -> tuple[Tensor, ...]:
        p, _, _ = reference.probabilities(logits, scale)
        return reference.backward(grad, value, p, scale, (kernel_size, stride, padding))

    @staticmethod
    def flops(value: Tensor, logits: Tensor, *_: Any) -> Products:
        return Products(2 * logits.numel() * value.shape[-1], 0)


register(OutlookAttention)


@on_cpu
def decomposition(value: Tensor, logits: Tensor, window: reference.Window, scale: float) -> Tensor:
    """Return (B, Y, X, H, D) by operations that PyTorch can differentiate."""
    p = torch.softmax(scale * upcast(logits), dim=-1)
    return reference.attend(p, upcast(value), window).to(value.dtype)
