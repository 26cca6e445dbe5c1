"""The criterion itself: what it allows, and that it is the same on every machine."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import attention_cases
from tests.attention_cases import (
    CASES,
    NAMES,
    AttentionTestCase,
    Inputs,
    make_inputs,
    peers_of,
    reference_results,
)
from tests.error_budget import assert_within_budget
from tests.random_rounding import RandomRounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_operation_is_off_by_half_a_unit_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 1000, dtype=torch.float64)
    with RandomRounding(dtype, 0):
        found = x * y
    off = ((found - x * y) / (x * y)).abs() / torch.finfo(dtype).eps
    assert 0.4 < off.max() <= 0.5


def test_a_sum_is_off_by_the_size_of_its_terms() -> None:
    """Where they cancel, a rounding of the result would be none."""
    terms = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(100, 32)
    sums = Tensor.sum, lambda t, dim: t @ torch.ones(t.shape[dim], 1, dtype=t.dtype)
    for add in sums:
        with RandomRounding(torch.bfloat16, 0):
            found = add(terms, 1)
        off = found.abs() / 64 / torch.finfo(torch.float32).eps
        assert 0.9 < off.max() <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 11, 12, 14, 18)], ids=lambda c: c.name)
def test_plain_pytorch_is_within_the_budget(case: AttentionTestCase, dtype: torch.dtype) -> None:
    """What is allowed is what PyTorch itself makes, in each formulation."""
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    wide = reference_results(inputs, torch.float32)
    for fused in (False, True):
        plain = reference_results(inputs, dtype, fused=fused)
        for name in plain:
            is_float32 = name in attention_cases.FLOAT32_RESULTS
            actual = wide[name] if is_float32 else plain[name]
            assert_within_budget(actual, peers[name], exact[name])


def _rounded(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


def _in_parts(t: Tensor, parts: int) -> Tensor:
    """Return the sum of ``parts`` bfloat16 numbers that is nearest."""
    found = torch.zeros_like(t)
    for _ in range(parts):
        found = found + _rounded(t - found)
    return found


# What a kernel would make of captured heads, from exponentials and values, wrong one way each. The
# comments hold error over budget: with one plain computation in float32 as the only peer, as it was
# once, on an AMD EPYC 7003; and with this one.
WRONG = {
    "outputs rounded to bfloat16 once too often": lambda e, v: _rounded(e @ v),  # 3,080; 2,430
    "probabilities of one part": lambda e, v: _in_parts(e, 1) @ v,  # 1,650; 1,300
    "probabilities of two parts": lambda e, v: _in_parts(e, 2) @ v,  # 2.7; 2.2
    "the last key left out": lambda e, v: e[..., :-1] @ v[..., :-1, :],  # 703,000; 554,000
    "a tile that was not rescaled": lambda e, v: (
        e @ v + 0.01 * (e[..., :8] @ v[..., :8, :])
    ),  # 12,200; 9,610
}


def heads_of(inputs: Inputs, attend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    q, k, v = (t.float() for t in inputs[:3])
    s = inputs.scale * (q @ k.mT)
    e = torch.exp(s - s.amax(dim=-1, keepdim=True))
    a = attend(e, v) / e.sum(dim=-1, keepdim=True)
    return a[inputs.sample[inputs.sample >= 0]].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_really_worse_is_past_the_budget(name: str) -> None:
    inputs = make_inputs(CASES[NAMES.index("inner tokens of TNT")], torch.bfloat16)
    exact = reference_results(inputs, torch.float64)["heads"]
    peers = peers_of(inputs, torch.bfloat16)["heads"]
    assert_within_budget(heads_of(inputs, Tensor.matmul), peers, exact)
    assert_within_budget(heads_of(inputs, lambda e, v: _in_parts(e, 3) @ v), peers, exact)
    with pytest.raises(AssertionError, match="past the budget"):
        assert_within_budget(heads_of(inputs, WRONG[name]), peers, exact)
