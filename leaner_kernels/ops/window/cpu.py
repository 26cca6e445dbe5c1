"""Window attention on the CPU: the reference, in float32 for half-precision inputs."""

from typing import Any

from torch import Tensor

from .._operators import upcast
from . import reference


def forward(
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    out: Tensor,
    lse: Tensor,
    stats: list[Tensor] | None,
    sample: Tensor | None,
) -> None:
    """Fill ``out`` (B, Y, X, H, D), ``lse`` (B, H, Y, X) and any ``stats``."""
    (qkv,), (rows, cols, scale) = inputs, params
    window = rows, cols
    size = qkv.shape[1], qkv.shape[2]
    q, k, v = _partitioned(qkv, window)
    p, lse_of_rows, s = reference.probabilities(q, k, scale)
    a = p @ v
    heads = reference.reverse(a, size, window)
    out.copy_(heads)
    lse.copy_(reference.reverse(lse_of_rows[..., None], size, window)[..., 0].permute(0, 3, 1, 2))
    if stats is None:
        return
    for slot, value in zip(stats, reference.statistics(p, s, a)):
        slot.copy_(value)
    if sample is not None:
        wanted = sample >= 0
        stats[4][wanted] = heads[sample[wanted]].flatten(1, 2).flatten(2).float()


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, ...],
    params: tuple[Any, ...],
    lse: Tensor,
    grads: tuple[Tensor, ...],
) -> None:
    """Fill dqkv (B, Y, X, 3, H, D)."""
    (qkv,), (rows, cols, scale) = inputs, params
    window = rows, cols
    size = qkv.shape[1], qkv.shape[2]
    q, k, v = _partitioned(qkv, window)
    p, _, _ = reference.probabilities(q, k, scale)
    partial = reference.backward(reference.partition(upcast(grad), window), q, k, v, p, scale)
    # One at a time: autograd lets nothing be written to what unbind gives.
    for i, value in enumerate(partial):
        grads[0].select(3, i).copy_(reference.reverse(value, size, window))


def _partitioned(qkv: Tensor, window: tuple[int, int]) -> list[Tensor]:
    return [reference.partition(t, window) for t in upcast(qkv).unbind(3)]
