"""Nyström attention as Nyströmformer's authors run it: the specification, in any float dtype.

Letters: B batch, H heads, N tokens, D head dimension, m landmarks. Q, K and V are (B, H, N, D); a
landmark is the mean of N / m consecutive tokens. K1 (N, m), K2 (m, m) and K3 (m, N) are softmax
matrices; Z is an iterated pseudo-inverse of K2.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """The factors of the output K1 (Z (K3 V)), and the scores of the three matrices."""

    out: Tensor
    k1: Tensor
    core: Tensor
    scores: tuple[Tensor, Tensor, Tensor]


def padded(t: Tensor, key_lengths: Tensor | None) -> Tensor | None:
    """Return the boolean (B, 1, N, 1) of tokens of ``t`` at or past a length, or None."""
    if key_lengths is None:
        return None
    return (torch.arange(t.shape[2], device=t.device) >= key_lengths[:, None])[:, None, :, None]


def hide(t: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Return ``t`` with padded tokens zero: they count, in the landmarks and as rows of K1."""
    past = padded(t, key_lengths)
    return t if past is None else t.masked_fill(past, 0)


def landmarks(t: Tensor, m: int) -> Tensor:
    """Return (B, H, m, D), the means of segments of N / m tokens, float32 of half precision."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return t.unflatten(2, (m, t.shape[2] // m)).mean(dim=3, dtype=dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    m: int,
    scale: float,
    iterations: int,
    whole_batch: bool,
) -> Parts:
    """Return the output and its parts, by operations that PyTorch can differentiate."""
    q, k, v = (hide(t, key_lengths) for t in (q, k, v))
    q_land, k_land = landmarks(q, m), landmarks(k, m)
    s1, s2, s3 = (scale * (x @ y.mT) for x, y in ((q, k_land), (q_land, k_land), (q_land, k)))
    past = padded(k, key_lengths)
    if past is not None:
        s3 = s3.masked_fill(past.mT, float("-inf"))
    k1, k2, k3 = (torch.softmax(s, dim=-1) for s in (s1, s2, s3))
    z = iterates(k2, iterations, whole_batch)[-1]
    core = z @ (k3 @ v)
    return Parts(k1 @ core, k1, core, (s1, s2, s3))


def largest_sum(k2: Tensor, whole_batch: bool) -> Tensor:
    """Return the largest column sum of each K2, or of all of them, as (B, H, 1, 1) or a scalar."""
    sums = k2.sum(dim=-2, keepdim=True)
    return sums.amax() if whole_batch and sums.numel() else sums.amax(dim=-1, keepdim=True)


def iterates(k2: Tensor, iterations: int, whole_batch: bool) -> list[Tensor]:
    """Return the approximations of the inverse of K2, the last one best."""
    steps = [k2.mT / largest_sum(k2, whole_batch)]
    for _ in range(iterations):
        z = steps[-1]
        _, _, c = polynomial(k2 @ z)
        steps.append((13 * z - z @ c) / 4)
    return steps


def polynomial(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, B = A (7 - A) and C = A (15 - B): a step from Z with A = K2 Z is Z (13 - C) / 4."""
    b = 7 * a - a @ a
    return a, b, 15 * a - a @ b


def iterates_backward(dz: Tensor, k2: Tensor, steps: list[Tensor], whole_batch: bool) -> Tensor:
    """Return the gradient of K2 from that of the last of its ``iterates``."""
    dk2 = torch.zeros_like(k2)
    for z in reversed(steps[:-1]):
        a, b, c = polynomial(k2 @ z)
        dc = z.mT @ dz / -4
        db = -a.mT @ dc
        da = 15 * dc - dc @ b.mT + 7 * db - db @ a.mT - a.mT @ db
        dz = (13 * dz - dz @ c.mT) / 4 + k2.mT @ da
        dk2 = dk2 + da @ z.mT
    first, largest = steps[0], largest_sum(k2, whole_batch)
    over = (-3, -2, -1) if whole_batch else (-2, -1)
    along = (dz * first).sum(dim=(0, *over) if whole_batch else over, keepdim=True) / largest
    # Columns that share the maximum share its gradient, as they do in PyTorch's amax.
    sums = k2.sum(dim=-2, keepdim=True)
    at_maximum = (sums == largest).to(k2.dtype)
    count = at_maximum.sum() if whole_batch else at_maximum.sum(dim=-1, keepdim=True)
    return dk2 + dz.mT / largest - along * at_maximum / count
