"""Matrices of known spectra, as hard as they come for a condition number."""

import math

import torch
from torch import Tensor

KINDS = ("graded", "one small", "one large", "two clusters", "even")


def spectrum(kind: str, size: int, kappa: float) -> Tensor:
    """Singular values from 1 down to 1 / kappa."""
    if kind == "graded":
        return torch.logspace(0, -math.log10(kappa), size, dtype=torch.float64)
    sigma = torch.ones(size, dtype=torch.float64)
    if kind == "one small":
        sigma[-1] = 1 / kappa
    elif kind == "one large":
        sigma[1:] = 1 / kappa
    elif kind == "two clusters":
        sigma[size // 2 :] = torch.linspace(2, 1, size - size // 2, dtype=torch.float64) / kappa
        sigma[-1] = 1 / kappa
    elif kind == "even":
        sigma = torch.linspace(1, 1 / kappa, size, dtype=torch.float64)
    return sigma


def matrices(sigma: Tensor, rows: int, cols: int, seed: int, batch: int) -> Tensor:
    """(batch, rows, cols) float32 with these singular values, but for their rounding to float32."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(batch, n, len(sigma), generator=generator).double())[0]
        for n in (rows, cols)
    )
    return ((u * sigma) @ v.mT).float()
