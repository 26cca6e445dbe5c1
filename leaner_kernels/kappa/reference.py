"""Condition numbers in float64 on torch.linalg: the specification, and what runs today."""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def condition_number(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return kappa, sigma_max, sigma_min and resolved of (..., N, M), each (...)."""
    finite = a.isfinite().all(dim=-1).all(dim=-1)
    # LAPACK refuses a whole batch for one matrix that is not finite.
    safe = a.double().masked_fill(~finite[..., None, None], 0)
    if a.dtype == torch.float64:
        sigma = torch.linalg.svdvals(safe)
        sigma_max, sigma_min = sigma[..., 0], sigma[..., -1]
        uncertainty = sigma_max * EPS / 0.01
    else:
        tall = a.shape[-2] > a.shape[-1]
        gram = safe.mT @ safe if tall else safe @ safe.mT
        # Rounding can push the eigenvalue of a rank-deficient matrix below zero.
        lam = torch.linalg.eigvalsh(gram).clamp(min=0)
        sigma_max, sigma_min = lam[..., -1].sqrt(), lam[..., 0].sqrt()
        # Where two rows are equal, rounding alone puts the smallest eigenvalue at up to 15 EPS.
        uncertainty = sigma_max * (EPS / 0.02) ** 0.5
    resolved = finite & (sigma_min > uncertainty)
    kappa = (sigma_max / sigma_min).masked_fill(~resolved, float("inf"))
    kappa, sigma_max, sigma_min = (
        t.masked_fill(~finite, float("nan")) for t in (kappa, sigma_max, sigma_min)
    )
    return kappa, sigma_max, sigma_min, resolved


def singular_values(a: Tensor) -> Tensor:
    """Return (..., min(N, M)) singular values, descending; nan where a matrix is not finite."""
    finite = a.isfinite().all(dim=-1).all(dim=-1)[..., None]
    safe = a.double().masked_fill(~finite[..., None], 0)
    return torch.linalg.svdvals(safe).masked_fill(~finite, float("nan"))


def effective_rank(sigma: Tensor) -> Tensor:
    """Return exp of the entropy of the normalised singular values."""
    p = sigma / sigma.sum(dim=-1, keepdim=True)
    return torch.special.entr(p).sum(dim=-1).exp()


def head_correlation(heads: Tensor, num_heads: int) -> Tensor:
    """Return the RV coefficient ||A_i^T A_j||^2 / (||A_i^T A_i|| ||A_j^T A_j||) of all pairs."""
    a = heads.double()
    a = (a - a.mean(dim=-2, keepdim=True)).unflatten(-1, (num_heads, -1)).movedim(-2, -3)
    products = a.mT.unsqueeze(-3) @ a.unsqueeze(-4)
    squared = products.square().sum(dim=(-2, -1))
    own = squared.diagonal(dim1=-2, dim2=-1).sqrt()
    return squared / (own[..., :, None] * own[..., None, :])
