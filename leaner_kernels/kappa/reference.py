"""Condition numbers in float64 with torch.linalg: the specification, and the fallback off CUDA."""

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
PART = 256  # columns per partial sum of products
# Above this fraction of the largest singular value, no float32 solver mistakes rounding for one.
RANK_RTOL = 1e-6


def condition_report(
    a: Tensor, lengths: Tensor | None, spectrum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return kappa, sigma_max, sigma_min and resolved of (B, N, M), each (B,), and the spectrum.

    The spectrum is (B, min(N, M)) singular values, descending, zero past those of the valid rows;
    (B, 0) without ``spectrum``. Gradients of finite matrices are finite, and the gradient of a
    kappa that is not resolved is zero.
    """
    rows, cols = a.shape[-2:]
    size = min(rows, cols)
    if lengths is not None:
        a = a.masked_fill((torch.arange(rows, device=a.device) >= lengths[:, None])[..., None], 0)
    # LAPACK rejects a whole batch if one matrix is not finite.
    if a.dtype == torch.float64:
        finite = a.isfinite().flatten(1).all(-1)
        sigma = torch.linalg.svdvals(a.masked_fill(~finite[:, None, None], 0))
        # LAPACK's reflections are one sum over the whole depth: off by 2,909 EPS at 65,536.
        uncertainty = EPS * max(100.0, max(rows, cols) / 2)
    else:
        squares = gram(a.mT if rows > cols else a)
        # An element that is not finite makes the diagonal not finite; squares of finite floats are
        # finite.
        finite = squares.diagonal(dim1=-2, dim2=-1).sum(-1).isfinite()
        lam = torch.linalg.eigvalsh(squares.masked_fill_(~finite[:, None, None], 0)).flip(-1)
        # Rounding can push the eigenvalue of a rank-deficient matrix below zero. The slope of the
        # root at zero is infinite, and a mask after the root would turn its gradient into nan.
        positive = lam > 0
        sigma = lam.masked_fill(~positive, 1).sqrt().masked_fill(~positive, 0)
        # With equal rows, the smallest eigenvalue should be zero, but is up to 13 EPS of the
        # largest at a size of 128, and 43 at 1,024: an error of eigvalsh's sweeps, not of the sums.
        uncertainty = (50 * EPS * max(1.0, size / 128) ** 0.5) ** 0.5
    sigma_max, sigma_min = sigma[:, 0], sigma[:, -1]
    if lengths is not None:
        # Rows of zeros add singular values of zero, which come last.
        rank = lengths.long().clamp(0, size)[:, None]
        sigma = sigma.masked_fill(torch.arange(size, device=a.device) >= rank, 0)
        sigma_min = sigma.gather(-1, (rank - 1).clamp(min=0))[:, 0]
        finite = finite & (rank[:, 0] > 0)
    resolved = finite & (sigma_min > sigma_max * uncertainty)
    kappa = (sigma_max / sigma_min.masked_fill(~resolved, 1)).masked_fill(~resolved, float("inf"))
    kappa, sigma_max, sigma_min = (
        t.masked_fill(~finite, float("nan")) for t in (kappa, sigma_max, sigma_min)
    )
    sigma = sigma.masked_fill(~finite[:, None], float("nan")) if spectrum else sigma[:, :0]
    return kappa, sigma_max, sigma_min, resolved, sigma


def gram(a: Tensor) -> Tensor:
    """Return (B, N, N), float64: A A^T of (B, N, M) float32, whose products are exact.

    Rounding errors of the sums limit the smallest eigenvalue, and grow with the length of a sum:
    parts of at most PART columns are therefore added pairwise, depth first, so that few are in
    memory at a time.
    """
    cols = a.shape[-1]
    if cols <= PART:
        a = a.double()
        return a @ a.mT
    half = cols // 2
    return gram(a[..., :half]).add_(gram(a[..., half:]))


def numerical_rank(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of singular values above RANK_RTOL of the largest, and kappa of these.

    ``sigma`` is descending. Both results are nan if the matrix is not finite, and kappa also if it
    is zero.
    """
    largest = sigma[..., 0]
    above = sigma > RANK_RTOL * sigma[..., :1]
    smallest = sigma.masked_fill(~above, float("inf")).amin(dim=-1)
    rank = above.sum(dim=-1).double().masked_fill(largest.isnan(), float("nan"))
    return rank, (largest / smallest).masked_fill(rank == 0, float("nan"))


def effective_rank(sigma: Tensor) -> Tensor:
    """Return exp of the entropy of the normalised singular values."""
    p = sigma / sigma.sum(dim=-1, keepdim=True)
    # -p log p is 0 at 0 as at 1, but its slope at 0 is infinite.
    return torch.special.entr(p.masked_fill(p == 0, 1)).sum(dim=-1).exp()


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
