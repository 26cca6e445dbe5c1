"""The operator of Nyström attention: schemas, results, the reference on the CPU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatcher import on_cpu, upcast
from ..operator import Operator, Shapes, register
from ..statistics import largest, per_head
from ..transforms import Products
from . import reference


def per_head_of(k1: Tensor, scores: tuple[Tensor, ...], a: Tensor) -> Tensor:
    """Return the statistics of K1, but for the largest score, which is that of all three."""
    stats = per_head(k1, scores[0], a)
    stats[0] = torch.stack([largest(s, (2, 3)) for s in scores]).amax(dim=0)
    return stats


class NystromAttention(Operator):
    """Attention by way of landmarks; query, key and value are (B, H, N, D), out (B, N, H, D)."""

    name, kernels = "nystrom_attention", "nystrom.launch"
    inputs = "Tensor query, Tensor key, Tensor value, Tensor? key_lengths"
    differentiable, cast = 3, 3
    numbers = "int num_landmarks, float scale, int iterations, bool whole_batch"
    gradients = "Tensor dquery, Tensor dkey, Tensor dvalue"

    @staticmethod
    def shapes(query: Tensor, *_: Any) -> Shapes:
        batch, heads, tokens, dim = query.shape
        out, lse = (batch, tokens, heads, dim), (batch, heads, tokens)
        return Shapes(out, lse, (batch, heads), (tokens, heads * dim))

    @staticmethod
    def attend(*args: Any) -> Any:
        a, k1, _, scores = reference.attend(*args)
        statistics = partial(per_head_of, k1, scores, a)
        return a.transpose(1, 2), scores[0].logsumexp(dim=-1), statistics

    @staticmethod
    def differentiate(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        return reference.backward(grad.transpose(1, 2), *args)

    @staticmethod
    def flops(query: Tensor, *others: Any) -> Products:
        batch, heads, tokens, dim = query.shape
        m, _, iterations, _ = others[-4:]
        tall = 2 * batch * heads * tokens * m * dim
        square = 2 * batch * heads * m**2
        # Two scores and K3 V are tall; a score and Z (K3 V) square; four products an iteration.
        return Products(tall, 3 * tall + square * (2 * dim + 4 * iterations * m))


register(NystromAttention)


@on_cpu
def decomposition(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """Return (B, N, H, D) by operations that PyTorch can differentiate."""
    out = reference.attend(upcast(query), upcast(key), upcast(value), *others).out
    return out.transpose(1, 2).to(query.dtype).contiguous()
