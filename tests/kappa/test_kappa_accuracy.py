"""A kappa that is called resolved is right, however long the matrix; gradients stay finite."""

import math
import random

import pytest
import torch
from torch import Tensor

from leaner_kernels import condition_number, condition_report
from leaner_kernels.kappa.reference import EPS

SINGULAR = "equal rows", "a sum of rows"
KINDS = (
    *("one small", "graded", "half small", "one large", "Gaussian", "token mean"),
    *("nearly equal rows", *SINGULAR),
)


def allowed_units(size: int) -> float:
    """The error that docs/kappa.md states, in rounding units of sigma_max squared."""
    return 18 * max(1.0, size / 128) ** 0.5


def limit(size: int) -> float:
    """The kappa up to which docs/kappa.md calls it resolved."""
    return (50 * EPS * max(1.0, size / 128) ** 0.5) ** -0.5


def make(kind: str, size: int, depth: int, kappa: Tensor, generator: torch.Generator) -> Tensor:
    """(B, size, depth) float32 of about this kappa, (B, 1), where the kind has one."""
    batch = len(kappa)
    if kind == "a sum of rows":
        # Of so few bits that the sum is exact; all positive, so that rounding has one direction.
        a = torch.randint(1 << 20, 1 << 21, (batch, size, depth), generator=generator).float()
        a[:, -1] = (a[:, 0] + a[:, 1]) / 2
        return a
    a = torch.randn(batch, size, depth, generator=generator)
    if kind == "equal rows":
        a[:, size // 2] = a[:, 0]
    elif kind == "nearly equal rows" and size > 1:
        a[:, -1] = a[:, (size - 1) // 2] + (a[:, -1] / kappa).float()
    elif kind == "token mean":
        a = torch.randn(batch, 1, depth, generator=generator) + (a / kappa[..., None]).float()
    elif kind in ("one small", "half small", "one large", "graded"):
        sigma = torch.ones(batch, size, dtype=torch.float64)
        if kind == "graded":
            sigma = kappa ** -torch.linspace(0, 1, size, dtype=torch.float64)
        else:
            small = {"one small": size - 1, "half small": size // 2, "one large": 1}[kind]
            sigma[:, small:] = 1 / kappa
        across = torch.linalg.qr(a.mT.double()).Q.mT
        turned = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
        a = ((torch.linalg.qr(turned).Q * sigma[:, None]) @ across).float()
    return a


def truth(kind: str, a: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The extreme singular values of (B, N, M), from QR in float64 or from how it was made."""
    a = a.double()
    size = min(a.shape[-2:])
    last = torch.full((len(a), 1), size - 1)
    if lengths is not None:
        a = a.masked_fill((torch.arange(a.shape[-2]) >= lengths[:, None])[..., None], 0)
        last = (lengths.long().clamp(max=size) - 1)[:, None]
    tall = a.mT if a.shape[-2] < a.shape[-1] else a
    sigma = torch.linalg.svdvals(torch.linalg.qr(tall, mode="r").R)
    smallest = sigma.gather(-1, last)[:, 0]
    return sigma[:, 0], torch.zeros_like(smallest) if kind in SINGULAR else smallest


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def made(kind: str, size: int, depth: int, kappa: float) -> tuple[Tensor, Tensor, Tensor]:
    """(1, size, depth) float32 and its extreme singular values."""
    wanted = torch.full((1, 1), kappa, dtype=torch.float64)
    a = make(kind, size, depth, wanted, torch.Generator().manual_seed(0))
    return a, *truth(kind, a, None)


def test_random_matrices_are_as_right_as_the_documentation_says() -> None:
    """Shapes, lengths and kappa are drawn, most kappa from where it gets difficult."""
    resolved = matrices = 0
    for seed in range(81):
        kind, choice = KINDS[seed % len(KINDS)], random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        size = round(math.exp(choice.uniform(math.log(3), math.log(128))))
        depth = round(math.exp(choice.uniform(math.log(size), math.log(1 << 14))))
        batch = max(1, min(64, (1 << 16) // (size * depth)))
        exponents = (5.5, 7.5) if choice.random() < 0.75 else (0.0, 5.5)
        kappa = torch.empty(batch, 1, dtype=torch.float64).uniform_(*exponents, generator=generator)
        a = make(kind, size, depth, 10**kappa, generator)
        a = a.mT.contiguous() if choice.random() < 0.5 else a
        lengths = None
        if choice.random() < 0.25 and kind not in SINGULAR:
            lengths = torch.randint(1, a.shape[-2] + 1, (batch,), generator=generator)
            lengths = lengths.to(torch.int32)
        largest, smallest = truth(kind, a, lengths)
        found, true = condition_number(a, lengths=lengths), largest / smallest
        assert not (found.resolved & (smallest == 0)).any()
        assert (found.resolved | (true > 0.8 * limit(size))).all()
        # Below that, the truth itself is not right to so many units.
        units = (found.sigma_min**2 - smallest**2).abs() / largest**2 / EPS
        assert (units[true > 100] <= allowed_units(size)).all()
        error = (found.kappa / true - 1).abs()
        assert (error[found.resolved] <= 0.2).all()
        assert (error[found.resolved & (true <= 1e6)] <= 2e-3).all()
        matrices, resolved = matrices + batch, resolved + int(found.resolved.sum())
    assert matrices > 1000
    assert 0.3 < resolved / matrices < 0.9


@pytest.mark.parametrize(("size", "depth"), [(64, 4096), (64, 16384), (16, 65536), (4, 65536)])
@pytest.mark.parametrize("samples", ["each", "pooled"])
def test_long_matrices_are_right_or_not_resolved(size: int, depth: int, samples: str) -> None:
    """As one sum they were up to 87% low, and called resolved."""
    for kappa in (1e6, 5e6, 2e7, 5e7):
        a, largest, smallest = made("one small", size, depth, kappa)
        if samples == "pooled":
            a = a.mT.reshape(8, depth // 8, size)
        found = condition_number(a, samples=samples)
        units = (found.sigma_min**2 - smallest**2).abs() / largest**2 / EPS
        assert units.item() <= allowed_units(size)
        if kappa <= 5e6:
            assert found.resolved
        if found.resolved:
            allowed = 2e-3 if kappa <= 1e6 else 0.2
            assert abs(found.kappa.item() * smallest / largest - 1) <= allowed


@pytest.mark.parametrize("kind", SINGULAR)
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
