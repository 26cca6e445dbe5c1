"""Resize learned position embeddings to another image size."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

# Names of the parameters in the models here and in timm's.
POSITIONS = "pos_embed", "patch_pos"


def resizing(kept: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor] | None:
    """Return a function that resizes positions from one shape to another, or None.

    Args:
        kept: shape of positions that were learned: (1, N, D) of patches with a class token before
            them or without, or (1, Y, X, D) of a grid.
        shape: shape of those that are wanted.

    Returns:
        A function that interpolates the grid, which must be square where a shape does not say, as
        timm does.
    """
    if len(kept) != len(shape):
        return None
    if len(shape) == 3 and kept[2] == shape[2]:
        # With or without a class token before them.
        for first in (0, 1):
            sides = math.isqrt(kept[1] - first), math.isqrt(shape[1] - first)
            if all(s * s == n[1] - first for s, n in zip(sides, (kept, shape))):
                return partial(_resized_tokens, first=first, side=sides[0], to=sides[1])
    if len(shape) == 4 and kept[3] == shape[3] and kept[0] == shape[0]:
        return lambda whole: _resized(whole.permute(0, 3, 1, 2), shape[1:3]).permute(0, 2, 3, 1)
    return None


def _resized_tokens(whole: Tensor, first: int, side: int, to: int) -> Tensor:
    grid = whole[:, first:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    resized = _resized(grid, (to, to)).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([whole[:, :first], resized], dim=1)


def _resized(grid: Tensor, size: tuple[int, int]) -> Tensor:
    """Return positions (B, D, Y, X) of another size, as timm resizes them."""
    return F.interpolate(grid, size=size, mode="bicubic", antialias=True, align_corners=False)
