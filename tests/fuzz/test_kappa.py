"""Condition numbers, penalties and reports of random matrices, against singular values."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import leaner_kernels
from tests.fuzz.profiles import fuzzed
from tests.fuzz.strategies import EXTREMES, VALUES, Block

LAYOUTS = ("plain", "inside", "permuted", "expanded", "padded", "gaps")
MATRICES = {
    "condition_number": {},
    "condition_report": {},
    "singular_values": {},
    "head_report": {"num_heads": 1},
    "conditioning_penalty": {},
}


@st.composite
def matrices(draw: Any, extremes: bool = False) -> Block:
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    shape = *lead, draw(st.integers(1, 12)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    extreme = draw(st.sampled_from(EXTREMES)) if extremes else None
    layout = draw(st.sampled_from(LAYOUTS[: 3 if extremes else None]))
    return Block(
        shape, dtype, layout, draw(st.sampled_from(VALUES)), draw(st.integers(0, 9)), extreme
    )


@fuzzed(6)
@given(matrices(), st.data())
def test_condition_numbers_are_those_of_the_singular_values(block, data):
    a = block.make()
    lengths = data.draw(st.none() | st.just("some"))
    if lengths is not None:
        count = math.prod(a.shape[:-2])
        numbers = data.draw(st.lists(st.integers(0, a.shape[-2]), min_size=count, max_size=count))
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        lengths = torch.tensor(numbers, dtype=dtype).view(a.shape[:-2])
    found = leaner_kernels.condition_report(a, lengths=lengths)
    assert all(t.shape == a.shape[:-2] for t in found)
    number = leaner_kernels.condition_number(a, lengths=lengths)
    for one, other in zip(number, found):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
    rows = [a.shape[-2]] * max(1, math.prod(a.shape[:-2])) if lengths is None else lengths.flatten()
    flat = a.reshape(-1, *a.shape[-2:])
    for i, (matrix, count) in enumerate(zip(flat, map(int, rows), strict=True)):
        values = (t.reshape(-1)[i] for t in found)
        kappa, largest, least, resolved, effective, stable, rank, kappa_to_rank = values
        if count == 0:
            assert kappa.isnan()
            assert rank.isnan()
            continue
        sigma = torch.linalg.svdvals(matrix[:count].double())
        torch.testing.assert_close(largest, sigma[0], rtol=1e-6, atol=0)
        if not sigma[0]:
            assert kappa.isinf()
            assert effective.isnan()
            assert stable.isnan()
            assert rank == 0
            assert kappa_to_rank.isnan()
            continue
        if resolved:
            torch.testing.assert_close(kappa, sigma[0] / sigma[-1], rtol=0.02, atol=0)
        else:
            assert kappa.isinf()
            assert sigma[-1] <= 2e-7 * sigma[0]
        assert 1 - 1e-9 <= stable <= len(sigma) * (1 + 1e-6)
        assert 1 - 1e-9 <= effective <= len(sigma) * (1 + 1e-3)
        assert least <= largest
        # Where a singular value lies on the limit either count is right.
        assert (sigma > 1.2e-6 * sigma[0]).sum() <= rank <= (sigma > 0.8e-6 * sigma[0]).sum()
        torch.testing.assert_close(
            kappa_to_rank, sigma[0] / sigma[int(rank) - 1], rtol=0.02, atol=0
        )


@fuzzed(2)
@given(matrices(extremes=True))
def test_a_matrix_that_is_not_finite_leaves_the_others_alone(block):
    calm, wild = block._replace(extreme=None).make(), block.make()
    for function, params in MATRICES.items():
        before, after = (getattr(leaner_kernels, function)(a, **params) for a in (calm, wild))
        if not block.shape[:-2]:
            continue
        for one, other in zip(*(flattened(r) for r in (before, after)), strict=True):
            assert torch.equal(one[:-1].nan_to_num(-1), other[:-1].nan_to_num(-1)), function


def flattened(result: Any) -> list[Tensor]:
    """Return the tensors of a result that have a number for each matrix."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return [t for each in result for t in flattened(each)]
    return []


@fuzzed(2)
@given(matrices())
def test_the_penalty_and_its_gradient_are_finite(block):
    heads = block.make().requires_grad_()
    penalty = leaner_kernels.conditioning_penalty(heads)
    (grad,) = torch.autograd.grad(penalty.sum(), heads)
    assert penalty.isfinite().all()
    assert (penalty > -1e-6).all()
    # The bound of the gradient: of numbers near the smallest it is past the largest.
    root = heads.detach().double().norm() / min(heads.shape[-2:]) ** 0.5
    if 1 / (2 * root * 1e-4) < torch.finfo(heads.dtype).max:
        assert grad.isfinite().all()


@fuzzed(2)
@given(matrices(), st.integers(1, 6), st.booleans())
def test_the_report_on_heads_stays_within_its_ranges(block, num_heads, divides):
    block = block._replace(
        shape=(*block.shape[:-1], block.shape[-1] * (num_heads if divides else 1))
    )
    heads = block.make()
    if heads.shape[-1] % num_heads:
        with pytest.raises(ValueError, match="num_heads must divide"):
            leaner_kernels.head_report(heads, num_heads)
        return
    report = leaner_kernels.head_report(heads, num_heads)
    for name in ("correlation", "isotropy", "mean_share"):
        values = getattr(report, name)
        values = values[~values.isnan()]
        assert (values >= 0).all(), name
        assert (values <= 1 + 1e-6).all(), name
