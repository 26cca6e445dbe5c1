"""Attention inside the windows of a map, as DaViT writes it: the specification, in any dtype.

Letters: B batch, Y by X map, H heads, D head dimension; W windows of a map, N tokens of a window,
both in row-major order.
"""

import torch
from torch import Tensor

Window = tuple[int, int]


def partition(t: Tensor, window: Window) -> Tensor:
    """Return (B, W, H, N, D) from the map (B, Y, X, H, D)."""
    batch, y, x, heads, dim = t.shape
    rows, cols = window
    count = y // rows, x // cols
    t = t.reshape(batch, count[0], rows, count[1], cols, heads, dim).permute(0, 1, 3, 5, 2, 4, 6)
    return t.reshape(batch, count[0] * count[1], heads, rows * cols, dim)


def reverse(t: Tensor, size: tuple[int, int], window: Window) -> Tensor:
    """Return the map (B, Y, X, H, D) of this size from (B, W, H, N, D)."""
    batch, _, heads, _, dim = t.shape
    (y, x), (rows, cols) = size, window
    t = t.reshape(batch, y // rows, x // cols, heads, rows, cols, dim)
    return t.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, y, x, heads, dim)


def probabilities(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return P (B, W, H, N, N), lse (B, W, H, N) and the scores S, all of partitioned inputs."""
    s = scale * (query @ key.mT)
    return torch.softmax(s, dim=-1), torch.logsumexp(s, dim=-1), s


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, p: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of partitioned inputs.

    Written out because autograd cannot run inside a dispatcher kernel; gradcheck ties it to the
    forward above.
    """
    dp = grad @ value.mT
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad
