"""The native solver on a GPU: matrices few and small enough for compute-sanitizer."""

import pytest
import torch

from leaner_kernels import condition_number
from leaner_kernels.kappa import backend, condition_report, reference
from tests.gpu.draws import randn

pytestmark = pytest.mark.skipif(backend() != "cuda", reason="needs the native library on a GPU")


@pytest.mark.parametrize(
    "shape",
    [(3, 197, 256), (2, 128, 33), (4, 65, 65), (2, 300, 280), (5, 7, 9), (2, 1, 1)],
    ids=str,
)
def test_a_gpu_agrees_with_lapack(shape: tuple[int, ...]) -> None:
    a = torch.randn(*shape)
    found = condition_report(a.cuda())
    sigma = torch.linalg.svdvals(a.double())
    torch.testing.assert_close(found.kappa.cpu(), sigma[:, 0] / sigma[:, -1], rtol=1e-8, atol=0)
    stable = sigma.square().sum(-1) / sigma[:, 0].square()
    torch.testing.assert_close(found.stable_rank.cpu(), stable, rtol=1e-5, atol=0)
    assert found.resolved.all()


def test_lengths_zeros_and_numbers_that_are_not_finite() -> None:
    a = torch.randn(6, 40, 30)
    a[1] = 0
    a[2, 3, 4], a[3, 0, 0] = torch.nan, torch.inf
    lengths = torch.tensor([40, 40, 40, 40, 0, 11], dtype=torch.int32)
    kappa, sigma_max, sigma_min, resolved, _ = reference.condition_report(a, lengths, False)
    found = condition_number(a.cuda(), lengths=lengths.cuda())
    torch.testing.assert_close(found.kappa.cpu(), kappa, rtol=1e-8, atol=0, equal_nan=True)
    torch.testing.assert_close(found.sigma_max.cpu(), sigma_max, equal_nan=True)
    torch.testing.assert_close(found.sigma_min.cpu(), sigma_min, equal_nan=True)
    assert torch.equal(found.resolved.cpu(), resolved)


def test_strides_need_no_copy() -> None:
    whole = randn(6, 50, 90)
    a = whole[1::2, 4:, 10:80]
    assert torch.equal(condition_number(a).kappa, condition_number(a.contiguous()).kappa)


def test_repeats_are_bitwise_equal() -> None:
    a = randn(8, 100, 120)
    first = condition_number(a)
    for _ in range(3):
        again = condition_number(a)
        assert torch.equal(again.kappa, first.kappa)
        assert torch.equal(again.sigma_min, first.sigma_min)
