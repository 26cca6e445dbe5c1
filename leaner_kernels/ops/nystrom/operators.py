"""The operator of Nyström attention: what it returns, and how the CPU computes it."""

from functools import partial
from typing import Any

from torch import Tensor

from .._operators import (
    ByReference,
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    at_first_call,
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


def _attend(*args):
    a, k1, _, scores = reference.attend(*args)
    statistics = partial(reference.statistics, a, k1, scores)
    return a.transpose(1, 2), scores[0].logsumexp(dim=-1), statistics


def _gradients(grad, *args):
    return reference.backward(grad.transpose(1, 2), *args)


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


register(
    "nystrom_attention",
    inputs="Tensor query, Tensor key, Tensor value",
    params="Tensor? key_lengths, int num_landmarks, float scale, int iterations, bool whole_batch",
    shapes=_shapes,
    cpu=ByReference(_attend, _gradients),
    cuda=at_first_call(__package__),
    flops=_flops,
    sharding=Sharding(dict.fromkeys(("query", "key", "value"), (0, 1)), (0, 2)),
    vmap=VmapAxes((0, 0, 0), params=(0,)),
    vmap_loop="whole_batch",  # the maximum is taken over the samples of one example
)
