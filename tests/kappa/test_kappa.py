"""Condition numbers against spectra that are known."""

import math

import pytest
import torch
from torch import Tensor

from leaner_kernels import (
    condition_number,
    condition_report,
    gaussian_condition_number,
    head_report,
    singular_values,
)


def matrix_of(sigma: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return a float64 matrix with the given min(rows, cols) singular values."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(n, len(sigma), dtype=torch.float64, generator=generator))[0]
        for n in (rows, cols)
    )
    return (u * sigma) @ v.mT


def graded(size: int, kappa: float) -> Tensor:
    return torch.logspace(0, -math.log10(kappa), size, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(197, 1024), (1024, 197), (64, 64), (17, 256), (1, 5), (5, 1)])
@pytest.mark.parametrize("kappa", [1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_kappa_of_a_known_spectrum_in_float32(
    shape: tuple[int, int], kappa: float, scale: float
) -> None:
    kappa = 1.0 if min(shape) == 1 else kappa
    a = (scale * matrix_of(graded(min(shape), kappa), *shape)).float()
    found = condition_number(a)
    assert found.resolved
    assert abs(found.kappa / kappa - 1) < 1e-3
    assert abs(found.sigma_max / scale - 1) < 1e-6
    assert abs(found.sigma_min / scale * kappa - 1) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_precision_cannot_tell_is_not_resolved(dtype: torch.dtype) -> None:
    past = 1e9 if dtype == torch.float32 else 1e15
    a = matrix_of(graded(20, past), 20, 50).to(dtype)
    low_rank = matrix_of(torch.ones(5, dtype=torch.float64), 20, 50).to(dtype)
    for matrix in (a, low_rank, torch.zeros(20, 50, dtype=dtype)):
        found = condition_number(matrix)
        assert not found.resolved
        assert found.kappa == math.inf


def test_one_bad_matrix_leaves_the_others_alone() -> None:
    a = torch.randn(4, 6, 9)
    expected = condition_number(a).kappa
    a[1, 2, 3], a[2, 0, 0] = math.nan, math.inf
    found = condition_number(a)
    assert found.kappa[1:3].isnan().all()
    assert found.resolved.tolist() == [True, False, False, True]
    torch.testing.assert_close(found.kappa[[0, 3]], expected[[0, 3]])
    sigma = singular_values(a)
    assert sigma[1:3].isnan().all()
    assert not sigma[[0, 3]].isnan().any()


def test_pooled_tokens_make_one_matrix() -> None:
    a = torch.randn(3, 2, 5, 11)
    found = condition_number(a, samples="pooled")
    assert found.kappa.shape == ()
    torch.testing.assert_close(found.kappa, torch.linalg.cond(a.reshape(30, 11).double()))
    assert condition_number(a).kappa.shape == (3, 2)


@pytest.mark.parametrize(
    ("tokens", "width", "expected"),
    [(197, 64, 3.651), (197, 128, 9.304), (197, 192, 155.6), (197, 768, 3.052), (4, 1, 3.0)],
)
def test_gaussian_prediction(tokens: int, width: int, expected: float) -> None:
    assert gaussian_condition_number(tokens, width) == pytest.approx(expected, rel=2e-3)
    assert gaussian_condition_number(width, tokens) == gaussian_condition_number(tokens, width)


def test_report_of_independent_heads() -> None:
    torch.manual_seed(0)
    report = head_report(torch.randn(3, 400, 8 * 16), num_heads=8)
    assert report.correlation.shape == (3, 8, 8)
    off = report.correlation[:, ~torch.eye(8, dtype=torch.bool)]
    assert off.mean() == pytest.approx(report.correlation_gaussian, rel=0.1)
    torch.testing.assert_close(
        report.correlation.diagonal(dim1=-2, dim2=-1), torch.ones(3, 8, dtype=torch.float64)
    )
    assert report.isotropy.mean() == pytest.approx(report.isotropy_gaussian, rel=0.05)
    assert report.mean_share.mean() == pytest.approx(1 / 400, rel=0.2)


def test_report_of_heads_that_copy_each_other() -> None:
    """A rotated copy within the head is still a copy."""
    torch.manual_seed(0)
    head = torch.randn(50, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4))[0]
    report = head_report(torch.cat([head, 3 * head @ rotation], dim=-1), num_heads=2)
    torch.testing.assert_close(report.correlation, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: condition_number(torch.randn(5)), r"got \(5,\)"),
        (lambda: condition_number(torch.randn(0, 5)), r"not empty, got \(0, 5\)"),
        (lambda: condition_number(torch.randn(5, 5).bfloat16()), "got torch.bfloat16: in half"),
        (lambda: condition_number(torch.randn(5, 5), samples="all"), "got 'all'"),
        (lambda: singular_values(torch.randn(5, 5).half()), "got torch.float16"),
        (lambda: gaussian_condition_number(0, 4), "at least 1, got 0 and 4"),
        (lambda: head_report(torch.randn(5, 6), 4), "divide the width 6, got 4"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_report_holds_the_condition_number_and_the_ranks() -> None:
    torch.manual_seed(0)
    a = torch.randn(2, 3, 12, 20)
    found = condition_report(a)
    expected = condition_number(a)
    for field in expected._fields:
        assert torch.equal(getattr(found, field), getattr(expected, field))
    p = singular_values(a) / singular_values(a).sum(-1, keepdim=True)
    torch.testing.assert_close(found.effective_rank, torch.special.entr(p).sum(-1).exp())
    torch.testing.assert_close(found.stable_rank, (p / p[..., :1]).square().sum(-1))
    assert (found.rank == 12).all()
    torch.testing.assert_close(found.kappa_to_rank, found.kappa)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_without_a_kappa_has_one_to_its_rank(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 12, dtype=torch.float64)).Q for n in (40, 20))
    sigma = torch.tensor([1.0, 0.1, 1e-3, *[1e-8] * 9], dtype=torch.float64)
    a = ((u * sigma) @ v.mT).to(dtype)
    a = torch.stack([a, 3 * a, torch.zeros_like(a), torch.full_like(a, math.nan)])
    found = condition_report(a)
    assert found.kappa[:2].isinf().all()
    assert (found.rank[:3] == torch.linalg.matrix_rank(a[:3], rtol=1e-6)).all()
    assert found.rank[:3].tolist() == [3, 3, 0]
    assert found.kappa_to_rank[:2].tolist() == pytest.approx([1e3, 1e3], rel=1e-4)
    assert found.kappa_to_rank[2:].isnan().all()
    assert found.rank[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_only_the_rows_within_the_length_count(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(4, *shape, dtype=dtype)
    lengths = torch.tensor([5, 12, 1, 0])
    for matrix, length in zip(a, lengths):
        matrix[length:] = math.nan
    found = condition_report(a, lengths=lengths)
    for b in range(3):
        expected = condition_report(a[b, : lengths[b]])
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[b], wanted)
    assert found.kappa[3].isnan()
    assert not found.resolved[3]


def test_lengths_of_another_kind_are_refused() -> None:
    a = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"lengths must be \(2,\) int32 or int64, got \(3,\)"):
        condition_number(a, lengths=torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match='lengths need samples="each"'):
        condition_number(a, samples="pooled", lengths=torch.ones(2, dtype=torch.int32))
