"""Condition numbers of the attention block, and the prediction for Gaussian heads.

The block is A = [A_1 ... A_h], the outputs of all heads side by side before the output projection:
N tokens by h * d columns. kappa(A) = sigma_max / sigma_min over the min(N, h * d) singular values.
Half-precision outputs would yield rounding noise (docs/kappa.md), so that half-precision input is
rejected; ``attention_with_stats`` captures float32 heads.
"""

import math
import sys
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..ops._checks import ArgumentError, check_range, check_tensor, shown
from . import native, reference


class ConditionNumber(NamedTuple):
    """kappa and its ingredients, float64, one per matrix.

    Attributes:
        kappa: sigma_max / sigma_min; inf if not resolved, nan if the input is not finite.
        sigma_max: the largest singular value.
        sigma_min: the smallest of the min(N, M) singular values, as computed.
        resolved: boolean; False if kappa exceeds the limit of the precision.
    """

    kappa: Tensor
    sigma_max: Tensor
    sigma_min: Tensor
    resolved: Tensor


class ConditionReport(NamedTuple):
    """``ConditionNumber`` and measures of the number of directions that a matrix uses, float64.

    Attributes:
        effective_rank: exp of the entropy of the normalised singular values (Roy and Vetterli
            2007); at most min(N, M).
        stable_rank: squared Frobenius norm over squared largest singular value.
        rank: the number of singular values above 1e-6 of the largest, as in
            ``torch.linalg.matrix_rank``; float32 distinguishes these from rounding errors.
        kappa_to_rank: the ratio of the largest to the smallest of these.
    """

    kappa: Tensor
    sigma_max: Tensor
    sigma_min: Tensor
    resolved: Tensor
    effective_rank: Tensor
    stable_rank: Tensor
    rank: Tensor
    kappa_to_rank: Tensor


class HeadReport(NamedTuple):
    """Evidence for or against the assumption that heads are independent and isotropic.

    Attributes:
        correlation: (..., H, H), RV coefficient of each pair of heads, in [0, 1], 1 for a head and
            itself.
        correlation_gaussian: its approximate value for independent Gaussian heads, d / (N + d).
        isotropy: (..., H), (tr C)^2 / (d tr C^2) of the covariance C of each head over the tokens:
            1 if all directions are equal, 1 / d if there is only one.
        isotropy_gaussian: its approximate value for Gaussian heads, (N - 1) / (N + d).
        mean_share: (...), the share of ||A||^2 that is the mean over tokens, 1 / N for Gaussian
            heads. It affects the condition number, but not covariances and correlations.
    """

    correlation: Tensor
    correlation_gaussian: float
    isotropy: Tensor
    isotropy_gaussian: float
    mean_share: Tensor


def condition_number(
    a: Tensor, *, samples: Literal["each", "pooled"] = "each", lengths: Tensor | None = None
) -> ConditionNumber:
    """Compute the condition number of each matrix, or of all stacked as one batch of tokens.

    Args:
        a: (..., N, M), float32 or float64, on any device.
        samples: "each" gives one kappa per matrix; "pooled" stacks the leading axes along the
            tokens, (prod(...) * N, M), and gives one.
        lengths: (...), int32 or int64: the number of leading rows of each matrix that count, at
            most N; all when None. A matrix without rows has a kappa of nan. Only with "each".

    Returns:
        ConditionNumber of float64 tensors of shape (...), or () for "pooled".

    Raises:
        ValueError: if a shape, dtype or ``samples`` is not supported.

    Numerics: float32 input is solved by the eigenvalues of its float64 Gram matrix on the smaller
    side, k = min(N, M), summed in parts. The relative error is at most 2e-3 at kappa = 1e6 and
    grows with kappa squared, to 20% at the limit, 9.4e6. Above k = 128 the error grows and the
    square of the limit falls with sqrt(k / 128) (5.6e6 at 1,024). float64 input is solved by its
    singular values, and resolved up to 4.5e13; above a depth of 200, up to 9e15 / max(N, M). A
    kappa that is not resolved has a gradient of zero. On CUDA, if ``backend`` is "cuda", the native
    library solves float32 input of k <= 512 that needs no gradient, without synchronising (error
    1e-3 at 1e6, resolved up to 9.4e6). On GPUs with slow float64 it computes in pairs of floats,
    and resolves up to 2.3e6 (error 2e-3 at 1e6 if many of the smallest singular values differ by
    the rounding of float32 alone).
    Source: arXiv:2505.20802, section 3.
    """
    _check_matrices(a)
    if samples == "pooled":
        if lengths is not None:
            raise ArgumentError('lengths need samples="each"')
        a = a.reshape(-1, a.shape[-1])
    elif samples != "each":
        raise ValueError(f'samples must be "each" or "pooled", got {shown(samples)}')
    return ConditionNumber(*_report(a, lengths, spectrum=False)[:4])


def condition_report(a: Tensor, *, lengths: Tensor | None = None) -> ConditionReport:
    """Compute the condition number and ranks of each matrix from all its singular values.

    Args:
        a: (..., N, M), float32 or float64, on any device.
        lengths: as in ``condition_number``.

    Returns:
        ConditionReport of tensors of shape (...).

    Raises:
        ValueError: if a shape or dtype is not supported.

    Numerics: as ``condition_number``; the native library computes the singular values of the ranks
    with a relative error of 1e-6.
    """
    _check_matrices(a)
    *condition, sigma = _report(a, lengths, spectrum=True)
    rank, kappa_to_rank = reference.numerical_rank(sigma)
    return ConditionReport(
        *condition,
        effective_rank=reference.effective_rank(sigma),
        stable_rank=(sigma / sigma[..., :1]).square().sum(-1),
        rank=rank,
        kappa_to_rank=kappa_to_rank,
    )


def backend(device: torch.device | str | int | None = None) -> str:
    """Return the name of the solver of float32 matrices on a device.

    Args:
        device: the current CUDA device when None, or the CPU without CUDA.

    Returns:
        "cuda" for the native library, or "torch" for torch.linalg.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return "torch"
    index = torch.cuda.current_device() if device.index is None else device.index
    return "cuda" if native.runs_on(index) else "torch"


def singular_values(a: Tensor) -> Tensor:
    """Compute all min(N, M) singular values of each matrix, descending.

    Args:
        a: (..., N, M), float32 or float64.

    Returns:
        (..., min(N, M)), float64; nan if the matrix is not finite.

    Raises:
        ValueError: if a shape or dtype is not supported.

    Numerics: torch.linalg.svdvals in float64, one matrix after the other; meant for reports, not
    for every training step.
    """
    _check_matrices(a)
    finite = a.isfinite().all(dim=-1).all(dim=-1)[..., None]
    sigma = torch.linalg.svdvals(a.double().masked_fill(~finite[..., None], 0))
    return sigma.masked_fill(~finite, math.nan)


def gaussian_condition_number(tokens: int, width: int) -> float:
    """Return the condition number of a large (tokens, width) matrix of Gaussian entries.

    Args:
        tokens: N, at least 1.
        width: M = heads * head_dim, at least 1.

    Returns:
        (sqrt(M) + sqrt(N)) / |sqrt(M) - sqrt(N)|; inf if M = N.

    Raises:
        ValueError: if a size is below 1.

    Source: arXiv:2505.20802, theorem 3.2 (the Marchenko-Pastur edges).
    """
    sizes = tokens, width
    if any(not isinstance(n, Real) or not 1 <= n <= sys.float_info.max for n in sizes):
        raise ValueError(
            f"tokens and width must be at least 1, got {shown(tokens)} and {shown(width)}"
        )
    if tokens == width:
        return math.inf
    long, short = math.sqrt(max(tokens, width)), math.sqrt(min(tokens, width))
    return (long + short) / (long - short)


def head_report(heads: Tensor, num_heads: int) -> HeadReport:
    """Measure how far captured heads are from independent, isotropic Gaussian ones.

    Args:
        heads: (..., N, H * d), float32 or float64: ``AttentionStats.heads``.
        num_heads: H, which must divide the last axis.

    Returns:
        HeadReport: see there for shapes.

    Raises:
        ValueError: if a shape, dtype or head count is not supported.

    Source: RV coefficient: Robert and Escoufier 1976; isotropy: the statistic of John 1971; the
    Gaussian prediction: arXiv:2505.20802.
    """
    _check_matrices(heads)
    tokens, width = heads.shape[-2:]
    if not isinstance(num_heads, Integral) or num_heads < 1 or width % num_heads:
        raise ArgumentError(f"num_heads must divide the width {width}, got {shown(num_heads)}")
    head_dim = width // num_heads
    return HeadReport(
        correlation=reference.head_correlation(heads, num_heads),
        correlation_gaussian=head_dim / (tokens + head_dim),
        isotropy=reference.head_isotropy(heads, num_heads),
        isotropy_gaussian=(tokens - 1) / (tokens + head_dim),
        mean_share=reference.mean_share(heads),
    )


def _report(a: Tensor, lengths: Tensor | None, spectrum: bool) -> tuple[Tensor, ...]:
    lead = a.shape[:-2]
    if lengths is not None:
        check_tensor("lengths", lengths)
        if lengths.shape != lead or lengths.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"lengths must be {tuple(lead)} int32 or int64, got {tuple(lengths.shape)} "
                f"{lengths.dtype}"
            )
        if lengths.is_meta != a.is_meta:
            raise ArgumentError(
                "lengths and matrices must both be meta tensors or neither, got "
                f"{lengths.device} and {a.device}"
            )
        check_range("lengths", lengths, 0, a.shape[-2])
        lengths = lengths.reshape(-1).to(a.device)
    matrices = a.reshape(-1, *a.shape[-2:])
    if matrices.is_cuda and native.takes(matrices):
        if lengths is not None:
            lengths = lengths.to(torch.int32).contiguous()
        found = ops.condition_report(matrices, lengths, spectrum)
    else:
        found = reference.condition_report(matrices, lengths, spectrum)
    return tuple(t.reshape(lead + t.shape[1:]) for t in found)


def _check_matrices(a: Tensor) -> None:
    check_tensor("matrices", a)
    if a.dim() < 2 or 0 in a.shape:
        raise ArgumentError(f"matrices must be (..., N, M) and not empty, got {tuple(a.shape)}")
    if a.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            f"matrices must be float32 or float64, got {a.dtype}: in half precision, rounding "
            "noise determines the condition number; capture heads with attention_with_stats"
        )
