"""Dropout masks that are a pure function of a seed and a position, on every device."""

import torch
from torch import Tensor


def draw_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return (1,) int64 from PyTorch's generator of the device, or None without dropout."""
    if dropout_p == 0:
        return None
    return torch.randint(torch.iinfo(torch.int64).max, (1,), device=device)


def keep_mask(
    seed: Tensor, batch: int, heads: int, rows: int, cols: int, p: float, first: int = 0
) -> Tensor:
    """Return the dropout mask (B, H, N, M): a pure function of the seed and the position.

    Philox 4x32-10 (Salmon et al. 2011), counter (column, row, batch * H + head, 0): the same bits
    as the GPU kernels draw. A score is kept when the top 31 bits reach ``p * 2**31``. With
    ``first``, the entries are those from ``first`` on of a larger batch.
    """
    low = 0xFFFFFFFF
    axes = (cols, 1), (rows, cols), (batch * heads, rows * cols)
    index = torch.arange(batch * heads * rows * cols, device=seed.device)
    c0, c1, c2 = (index // step % size for size, step in axes)
    c2 = c2 + first * heads
    c3 = torch.zeros_like(index)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        b, a = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c1 = (b >> 32) & low ^ c1 ^ k0, b & low
        c2, c3 = (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return ((c0 >> 1) >= int(p * 2**31)).view(batch, heads, rows, cols)
