"""Condition numbers in float64 on torch.linalg: the specification, and what runs off CUDA."""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps


def condition_report(
    a: Tensor, lengths: Tensor | None, spectrum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return kappa, sigma_max, sigma_min and resolved of (B, N, M), each (B,), and the spectrum.

    The spectrum is (B, min(N, M)) singular values, descending, zero past those of the valid rows;
    (B, 0) unless it is asked for.
    """
    rows, cols = a.shape[-2:]
    if lengths is not None:
        a = a.masked_fill((torch.arange(rows, device=a.device) >= lengths[:, None])[..., None], 0)
    # LAPACK refuses a whole batch for one matrix that is not finite.
    if a.dtype == torch.float64:
        finite = a.isfinite().flatten(1).all(-1)
        sigma = torch.linalg.svdvals(a.masked_fill(~finite[:, None, None], 0))
        uncertainty = EPS / 0.01
    else:
        a = a.double()
        gram = a.mT @ a if rows > cols else a @ a.mT
        # An element that is not finite makes one of the diagonal so; a float's square is finite.
        finite = gram.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()
        lam = torch.linalg.eigvalsh(gram.masked_fill_(~finite[:, None, None], 0))
        # Rounding can push the eigenvalue of a rank-deficient matrix below zero.
        sigma = lam.clamp(min=0).sqrt().flip(-1)
        # Where two rows are equal, rounding alone puts the smallest eigenvalue at up to 15 EPS.
        uncertainty = (EPS / 0.02) ** 0.5
    sigma_max, sigma_min = sigma[:, 0], sigma[:, -1]
    if lengths is not None:
        # Rows of zeros add singular values of zero, which come last.
        rank = lengths.long().clamp(0, min(rows, cols))[:, None]
        sigma = sigma.masked_fill(torch.arange(sigma.shape[-1], device=a.device) >= rank, 0)
        sigma_min = sigma.gather(-1, (rank - 1).clamp(min=0))[:, 0]
        finite = finite & (rank[:, 0] > 0)
    resolved = finite & (sigma_min > sigma_max * uncertainty)
    kappa = (sigma_max / sigma_min).masked_fill(~resolved, float("inf"))
    kappa, sigma_max, sigma_min = (
        t.masked_fill(~finite, float("nan")) for t in (kappa, sigma_max, sigma_min)
    )
    sigma = sigma.masked_fill(~finite[:, None], float("nan")) if spectrum else sigma[:, :0]
    return kappa, sigma_max, sigma_min, resolved, sigma


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
    a = _centred(heads, num_heads)
    products = a.mT.unsqueeze(-3) @ a.unsqueeze(-4)
    squared = products.square().sum(dim=(-2, -1))
    own = squared.diagonal(dim1=-2, dim2=-1).sqrt()
    return squared / (own[..., :, None] * own[..., None, :])


def head_isotropy(heads: Tensor, num_heads: int) -> Tensor:
    """Return (tr C)^2 / (d tr C^2) of each head's covariance over tokens, (..., H)."""
    a = _centred(heads, num_heads)
    covariance = a.mT @ a
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace.square() / (covariance.shape[-1] * covariance.square().sum((-2, -1)))


def mean_share(heads: Tensor) -> Tensor:
    """Return the share of the squared Frobenius norm that is the mean over tokens, (...)."""
    a = heads.double()
    return a.shape[-2] * a.mean(-2).square().sum(-1) / a.square().sum((-2, -1))


def _centred(heads: Tensor, num_heads: int) -> Tensor:
    """Return (..., H, N, d), float64: each head less its mean over the tokens."""
    a = heads.double()
    return (a - a.mean(dim=-2, keepdim=True)).unflatten(-1, (num_heads, -1)).movedim(-2, -3)
