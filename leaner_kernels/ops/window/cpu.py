"""Window attention on the CPU: the reference, in float32 for half-precision inputs."""

from functools import partial

import torch

from . import reference


def attend(qkv, rows, cols, scale):
    """Return (B, Y, X, H, D), lse (B, H, Y, X) and what computes the statistics."""
    window, size = (rows, cols), qkv.shape[1:3]
    q, k, v = (reference.partition(t, window) for t in qkv.unbind(3))
    p, lse, s = reference.probabilities(q, k, scale)
    a = p @ v
    lse = reference.reverse(lse[..., None], size, window)[..., 0].permute(0, 3, 1, 2)
    return reference.reverse(a, size, window), lse, partial(reference.statistics, p, s, a)


def differentiate(grad, qkv, rows, cols, scale):
    """Return dqkv (B, Y, X, 3, H, D)."""
    window, size = (rows, cols), qkv.shape[1:3]
    g, q, k, v = (reference.partition(t, window) for t in (grad, *qkv.unbind(3)))
    p, _, _ = reference.probabilities(q, k, scale)
    found = reference.backward(g, q, k, v, p, scale)
    return (torch.stack([reference.reverse(t, size, window) for t in found], dim=3),)
