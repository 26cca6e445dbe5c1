"""The native solver's core against LAPACK, compiled for the host: the code that runs on the GPU."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.kappa.spectra import KINDS, matrices, spectrum
from tests.native.host import solve_serially

BATCH = 26
EXAMPLES = 400  # of BATCH matrices, each in both arithmetics: more than 10,000
ARITHMETICS = pytest.mark.parametrize("two_float", [False, True], ids=["double", "two_float"])
LIMIT = {False: 9.4e6, True: 2.3e6}  # kappa is resolved up to here


def allowed_error(kind: str, two_float: bool) -> float:
    """Of kappa at 1e6; the error grows with the square of kappa.

    Pairs of floats, whose smallest singular value comes from its vector, are better than float64
    but where many of the smallest differ by the rounding of the matrix to float32.
    """
    if not two_float:
        return 1e-3
    return 2e-3 if kind == "one large" else 1e-5


@hypothesis.settings(deadline=None, max_examples=EXAMPLES, database=None)
@hypothesis.given(
    rows=st.integers(2, 32),
    cols=st.integers(2, 32),
    kind=st.sampled_from(KINDS),
    exponent=st.floats(0, 6),
    scale=st.sampled_from([1e-30, 1.0, 1e15]),
    seed=st.integers(0, 1 << 30),
)
def test_kappa_agrees_with_lapack(
    rows: int, cols: int, kind: str, exponent: float, scale: float, seed: int
) -> None:
    a = scale * matrices(spectrum(kind, min(rows, cols), 10**exponent), rows, cols, seed, BATCH)
    sigma = torch.linalg.svdvals(a.double())
    true = sigma[:, 0] / sigma[:, -1]
    for two_float in (False, True):
        found, values = solve_serially(a, two_float)
        assert found.resolved.all()
        error = (found.kappa / true - 1).abs().max().item()
        assert error < allowed_error(kind, two_float) * max(1e-3, (true.max().item() / 1e6) ** 2)
        torch.testing.assert_close(found.sigma_max, sigma[:, 0], rtol=1e-10, atol=0)
        torch.testing.assert_close(found.sigma_max / found.kappa, found.sigma_min)
        # The spectrum is found to 1e-6; in squares, rounding is that of the largest.
        unit = 2.0**-40 if two_float else 2.0**-46
        allowed = unit * sigma[:, :1] ** 2 + 4e-6 * sigma**2
        assert ((values**2 - sigma**2).abs() <= allowed).all()


@ARITHMETICS
@pytest.mark.parametrize("shape", [(197, 256), (256, 197), (130, 130)])
@pytest.mark.parametrize("kind", ["graded", "one small", "one large"])
def test_kappa_of_large_matrices(kind: str, shape: tuple[int, int], two_float: bool) -> None:
    a = matrices(spectrum(kind, min(shape), 1e6), *shape, seed=0, batch=1)
    found, _ = solve_serially(a, two_float)
    assert found.resolved.all()
    error = (found.kappa / torch.linalg.cond(a.double()) - 1).abs().max().item()
    assert error < allowed_error(kind, two_float)


@ARITHMETICS
@pytest.mark.parametrize("kappa", [1e8, 1e10, math.inf])
@pytest.mark.parametrize("kind", ["graded", "one small", "two clusters"])
@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (24, 24), (60, 80)])
def test_what_precision_cannot_tell_is_not_resolved(
    shape: tuple[int, int], kind: str, kappa: float, two_float: bool
) -> None:
    sigma = spectrum(kind, min(shape), kappa if kappa < math.inf else 1e30)
    found, _ = solve_serially(matrices(sigma, *shape, seed=1, batch=BATCH), two_float)
    assert not found.resolved.any()
    assert (found.kappa == math.inf).all()
    assert (found.sigma_min < found.sigma_max / LIMIT[two_float]).all()


@ARITHMETICS
def test_a_resolved_kappa_is_right_up_to_the_limit(two_float: bool) -> None:
    for kind in ("graded", "one small", "one large", "two clusters"):
        for kappa in torch.logspace(6, 8, 9).tolist():
            a = matrices(spectrum(kind, 40, kappa), 40, 100, seed=2, batch=BATCH)
            found, _ = solve_serially(a, two_float)
            true = torch.linalg.cond(a.double())
            error = (found.kappa / true - 1).abs()[found.resolved]
            assert (error < 0.15).all(), (kind, kappa)
            assert found.resolved[true < 0.85 * LIMIT[two_float]].all(), (kind, kappa)


@ARITHMETICS
def test_zeros_and_numbers_that_are_not_finite(two_float: bool) -> None:
    a = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0))
    expected, _ = solve_serially(a, two_float)
    a[1] = 0
    a[2, 4, 6], a[3, 0, 0], a[4, 2, 3] = math.nan, math.inf, -math.inf
    found, values = solve_serially(a, two_float)
    assert found.resolved.tolist() == [True, False, False, False, False, True]
    assert found.kappa[1] == math.inf
    assert found.sigma_max[1] == found.sigma_min[1] == 0
    assert (values[1] == 0).all()
    for number in (found.kappa, found.sigma_max, found.sigma_min, values):
        assert number[2:5].isnan().all()
        assert not number[[0, 1, 5]].isnan().any()
    for index in (0, 5):
        assert found.kappa[index] == expected.kappa[index]


@ARITHMETICS
@pytest.mark.parametrize(("rows", "cols"), [(12, 40), (40, 12), (20, 20)])
def test_only_the_rows_within_the_length_count(rows: int, cols: int, two_float: bool) -> None:
    a = torch.randn(5, rows, cols, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([rows, 7, 1, 0, rows + 5], dtype=torch.int32)
    # What lies past the length must not even be read as a number.
    for matrix, length in zip(a, lengths):
        matrix[length:] = math.nan
    found, values = solve_serially(a, two_float, lengths)
    assert found.kappa[3].isnan()
    assert not found.resolved[3]
    for b in (0, 1, 2, 4):
        sigma = torch.linalg.svdvals(a[b, : lengths[b]].double())
        torch.testing.assert_close(found.kappa[b], sigma[0] / sigma[-1], rtol=1e-9, atol=0)
        torch.testing.assert_close(values[b, : len(sigma)], sigma, rtol=1e-6, atol=0)
        assert (values[b, len(sigma) :] == 0).all()


@ARITHMETICS
@hypothesis.settings(deadline=None, max_examples=150, database=None)
@hypothesis.given(
    size=st.integers(2, 12), spread=st.floats(0, 30), noise=st.floats(0, 20), seed=st.integers(0)
)
def test_rows_of_hugely_different_scale_are_never_taken_for_well_conditioned(
    size: int, spread: float, noise: float, seed: int, two_float: bool
) -> None:
    """Nearly diagonal: where pivots vanish and vectors of neighbours are easily confused."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    shape = (BATCH, size, size)
    scales = 10 ** (spread * (torch.rand(BATCH, size, generator=generator) - 0.5))
    a = torch.diag_embed(scales) + 10**-noise * torch.randn(shape, generator=generator)
    found, _ = solve_serially(a, two_float)
    true = torch.linalg.cond(a.double())
    error = (found.kappa / true - 1).abs()[found.resolved]
    assert (error < 0.2).all()
    assert found.resolved[true < 0.5 * LIMIT[two_float]].all()
    assert not found.kappa.isnan().any()


def test_a_vector_of_another_eigenvalue_is_seen() -> None:
    """Corrections of a vector that belongs to the second eigenvalue overflow a float."""
    a = torch.tensor(
        [
            [1.65e14, -1.966e-12, -1.27e-11, -1.193e-12],
            [7.479e-13, 1228, 6.808e-12, 4.076e-12],
            [-1.338e-12, 1.427e-11, 5.846, 1.085e-11],
            [4.747e-12, 1.19e-11, -1.9e-12, 1.071e-9],
        ]
    )
    for two_float in (False, True):
        found, _ = solve_serially(a[None], two_float)
        assert not found.resolved
        assert found.kappa == math.inf
