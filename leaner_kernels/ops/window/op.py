"""The operator of window attention: schemas, results, the reference on the CPU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..operator import Operator, Shapes, register
from ..statistics import per_head
from ..transforms import Products
from . import reference


class WindowAttention(Operator):
    """Attention inside the windows of a packed map (B, Y, X, 3, H, D)."""

    name, kernels = "window_attention", "window.launch"
    inputs, differentiable, cast = "Tensor qkv", 1, 1
    numbers = "int window_y, int window_x, float scale"
    gradients = "Tensor dqkv"

    @staticmethod
    def shapes(qkv: Tensor, *_: Any) -> Shapes:
        batch, y, x, _three, heads, dim = qkv.shape
        out = batch, y, x, heads, dim
        return Shapes(out, (batch, heads, y, x), (batch, heads), (y * x, heads * dim))

    @staticmethod
    def attend(qkv: Tensor, window_y: int, window_x: int, scale: float) -> Any:
        window, size = (window_y, window_x), (qkv.shape[1], qkv.shape[2])
        q, k, v = (reference.partition(t, window) for t in qkv.unbind(3))
        p, lse, s = reference.probabilities(q, k, scale)
        a = p @ v
        lse = reference.reverse(lse[..., None], size, window)[..., 0].permute(0, 3, 1, 2)
        statistics = partial(per_head, p, s, a, rows=(1, 3), outputs=(1, 3, 4))
        return reference.reverse(a, size, window), lse, statistics

    @staticmethod
    def differentiate(
        grad: Tensor, qkv: Tensor, window_y: int, window_x: int, scale: float
    ) -> tuple[Tensor, ...]:
        window, size = (window_y, window_x), (qkv.shape[1], qkv.shape[2])
        g, q, k, v = (reference.partition(t, window) for t in (grad, *qkv.unbind(3)))
        p, _, _ = reference.probabilities(q, k, scale)
        gradients = reference.backward(g, q, k, v, p, scale)
        return (torch.stack([reference.reverse(t, size, window) for t in gradients], dim=3),)

    @staticmethod
    def flops(qkv: Tensor, *others: Any) -> Products:
        batch, y, x, _, heads, dim = qkv.shape
        rows, cols, _ = others[-3:]
        product = 2 * batch * heads * y * x * rows * cols * dim
        return Products(product, product)


register(WindowAttention)
