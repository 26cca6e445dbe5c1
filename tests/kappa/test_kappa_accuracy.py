"""A kappa that is called resolved is right, however long the matrix; gradients stay finite."""

import math

import pandas as pd
import pytest
import torch
from torch import Tensor

from bench.kappa import accuracy
from leaner_kernels import condition_number, condition_report


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def made(kind: str, size: int, depth: int, kappa: float) -> tuple[Tensor, Tensor, Tensor]:
    """(1, size, depth) float32 as in the study, and its extreme singular values."""
    a = accuracy.make(
        kind,
        size,
        depth,
        torch.full((1, 1), kappa, dtype=torch.float64),
        torch.Generator().manual_seed(0),
    )
    return a, *accuracy.truth(kind, a, None)


def test_random_matrices_are_as_right_as_the_documentation_says() -> None:
    """A sample of what bench/results/kappa_accuracy.json holds."""
    batches = (accuracy.draw(seed, numbers=1 << 16) for seed in range(80))
    rows = pd.concat([accuracy.measure(batch) for batch in batches])
    found = accuracy.summary(rows, "all").loc["all"]
    assert found.matrices > 1500
    assert 0.3 < found.resolved / found.matrices < 0.9
    assert found.singular > 100
    assert found.singular_resolved == 0
    assert found.hidden == 0
    assert found.allowed <= 1
    assert found.to_1e6 <= 2e-3
    assert found["any"] <= 0.2


@pytest.mark.parametrize(("size", "depth"), [(64, 4096), (64, 16384), (16, 65536), (4, 65536)])
@pytest.mark.parametrize("samples", ["each", "pooled"])
def test_long_matrices_are_right_or_not_resolved(size: int, depth: int, samples: str) -> None:
    """As one sum they were up to 87% low, and called resolved."""
    for kappa in (1e6, 5e6, 2e7, 5e7):
        a, largest, smallest = made("one small", size, depth, kappa)
        if samples == "pooled":
            a = a.mT.reshape(8, depth // 8, size)
        found = condition_number(a, samples=samples)
        units = (found.sigma_min**2 - smallest**2).abs() / largest**2 / accuracy.EPS
        assert units.item() <= accuracy.allowed_units(size)
        if kappa <= 5e6:
            assert found.resolved
        if found.resolved:
            allowed = 2e-3 if kappa <= 1e6 else 0.2
            assert abs(found.kappa.item() * smallest / largest - 1) <= allowed


@pytest.mark.parametrize("kind", accuracy.SINGULAR)
def test_long_singular_matrices_are_not_resolved(kind: str) -> None:
    a, _, _ = made(kind, 3, 100_000, 1.0)
    for matrices in (a, a.mT.contiguous()):
        found = condition_report(matrices)
        assert not found.resolved
        assert found.kappa == math.inf


def gradient(a: Tensor, field: str = "kappa", lengths: Tensor | None = None) -> Tensor:
    a = a.clone().requires_grad_()
    found = condition_report(a, lengths=lengths)
    value = getattr(found, field)
    value.masked_fill(~found.resolved, 0).sum().backward()
    assert a.grad is not None
    return a.grad


@pytest.mark.parametrize("field", ["kappa", "sigma_min", "effective_rank", "stable_rank"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_resolved_has_no_gradient(
    dtype: torch.dtype, shape: tuple[int, int], field: str
) -> None:
    a = gaussian(7, *shape, dtype=dtype)
    expected = gradient(a, field)
    assert expected.flatten(1).abs().amax(1).min() > 0
    a[0, 1] = a[0, 0]
    a[0, :, 1] = a[0, :, 0]
    a[1, 2] = a[1, :, 2] = 0
    a[2] = 0
    a[3, 1, 1], a[4, 2, 2] = math.nan, math.inf
    found = gradient(a, field)
    # The ranks of a matrix of zeros are 0 / 0.
    assert (found[: 3 if field in ("kappa", "sigma_min") else 2] == 0).all()
    torch.testing.assert_close(found[5:], expected[5:])


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_past_the_length_have_no_gradient(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    a, lengths = gaussian(5, *shape, dtype=dtype), torch.tensor([6, 2, 1, 0, 3])
    a[4, 1] = a[4, 0]
    for field in ("kappa", "effective_rank"):
        found = gradient(a, field, lengths)
        for b in range(3):
            alone = gradient(a[b : b + 1, : lengths[b]], field)
            torch.testing.assert_close(found[b, : lengths[b]], alone[0])
            assert (found[b, lengths[b] :] == 0).all()
        assert (found[3:] == 0).all()


def test_the_gradient_is_that_of_finite_differences() -> None:
    a = gaussian(2, 5, 7, dtype=torch.float64).requires_grad_()
    lengths = torch.tensor([5, 3])
    for fields in (slice(0, 3), slice(4, 6)):
        assert torch.autograd.gradcheck(
            lambda a, fields=fields: tuple(condition_report(a, lengths=lengths)[fields]), a
        )


@pytest.mark.parametrize("shape", [(2, 12, 700), (2, 700, 12)])
def test_the_gradient_passes_through_the_parts(shape: tuple[int, int, int]) -> None:
    """Of float32 input, against that of float64 input, which no Gram matrix is made of."""
    a = gaussian(*shape)
    torch.testing.assert_close(gradient(a), gradient(a.double()).float())
