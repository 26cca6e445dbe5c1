"""The operator of Nyström attention: what it returns, and how the CPU computes it."""

from typing import Any

from torch import Tensor

from .._operators import (
    Implementation,
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    on_cpu,
    register,
    upcast,
)
from . import reference


def _shapes(
    query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None, *params: Any
) -> Shapes:
    batch, heads, tokens, dim = query.shape
    return Shapes(
        (batch, tokens, heads, dim),
        (batch, heads, tokens),
        (batch, heads),
        (tokens, heads * dim),
    )


class _Cpu:
    """The reference, in float32 for half-precision inputs."""

    @staticmethod
    def forward(inputs, params, out, lse, stats, sample) -> None:
        q, k, v = map(upcast, inputs)
        a, k1, _, scores = reference.attend(q, k, v, *params)
        out.copy_(a.transpose(1, 2))
        lse.copy_(scores[0].logsumexp(dim=-1))
        if stats is None:
            return
        for slot, statistic in zip(stats[:4], reference.statistics(a, k1, scores), strict=True):
            slot.copy_(statistic)
        if sample is not None:
            wanted = sample >= 0
            stats[4][wanted] = a[sample[wanted]].transpose(1, 2).flatten(2).to(stats[4].dtype)

    @staticmethod
    def backward(grad, inputs, params, lse, grads) -> None:
        g, q, k, v = map(upcast, (grad, *inputs))
        partial = reference.backward(g.transpose(1, 2), q, k, v, *params)
        for slot, gradient in zip(grads, partial, strict=True):
            slot.copy_(gradient)


@on_cpu
def decomposition(query: Tensor, key: Tensor, value: Tensor, *params: Any) -> Tensor:
    """Return (B, N, H, D) by operations that PyTorch can differentiate."""
    out = reference.attend(upcast(query), upcast(key), upcast(value), *params).out
    return out.transpose(1, 2).to(query.dtype).contiguous()


def _flops(query: Tensor, *others: Any) -> Products:
    batch, heads, tokens, dim = query.shape
    m, _, iterations, _ = others[-4:]
    tall = 2 * batch * heads * tokens * m * dim
    square = 2 * batch * heads * m**2
    # Two scores and K3 V are tall; one score and Z (K3 V) square; four products in an iteration.
    return Products(tall, 3 * tall + square * (2 * dim + 4 * iterations * m))


def _cuda() -> Implementation:
    from . import launch

    return launch


register(
    "nystrom_attention",
    inputs="Tensor query, Tensor key, Tensor value",
    params="Tensor? key_lengths, int num_landmarks, float scale, int iterations, bool whole_batch",
    shapes=_shapes,
    cpu=_Cpu(),
    cuda=_cuda,
    flops=_flops,
    sharding=Sharding(dict.fromkeys(("query", "key", "value"), (0, 1)), (0, 2)),
    vmap=VmapAxes((0, 0, 0), params=(0,)),
    vmap_loop="whole_batch",  # the maximum is taken over the samples of one example
)
