"""The Triton kernels of attention between channels, run by Triton's interpreter on the CPU."""

import os

import pytest
import torch
from torch import Tensor

from tests.covariance_cases import (
    CASES,
    CHANNEL,
    CROSS,
    NAMES,
    STATISTICS,
    CovarianceTestCase,
    Inputs,
    make_inputs,
    name_results,
    peers_of,
    reference_results,
)
from tests.error_budget import assert_within_budget

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from leaner_kernels import condition_number
from leaner_kernels.ops.covariance import cross_covariance_attention, launch
from leaner_kernels.ops.operator import Results
from tests.interpreter.rounding import in_float32_first


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Launch forward with statistics, capture and backward as the CUDA operators do."""
    kernels = launch.cross_covariance if inputs.case.operator == CROSS else launch.channel
    batch, tokens, _, heads, dim = inputs.qkv.shape
    out, lse = inputs.qkv.new_empty(batch, tokens, heads, dim), torch.empty(batch, heads, dim)
    stats = torch.empty(len(STATISTICS), batch, heads)
    captured = torch.empty(len(inputs.sample), tokens, heads * dim)
    kernels.forward(
        inputs.tensors, (inputs.param,), Results(out, lse, stats, captured, inputs.sample)
    )
    grads = tuple(t.new_empty(t.shape) for t in inputs.tensors)
    kernels.backward(inputs.grad, inputs.tensors, (inputs.param,), lse, grads)
    return name_results(inputs, out, lse, (stats, captured), grads)


@in_float32_first
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: CovarianceTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    results = run_kernels(inputs)
    assert results.keys() == exact.keys()
    for name, actual in results.items():
        assert_within_budget(actual, peers[name], exact[name])


def test_the_capture_shows_condition_numbers_that_half_precision_hides() -> None:
    inputs = make_inputs(CovarianceTestCase("kappa", CROSS, 1, 150, 4, 32), torch.float16)
    inputs = inputs._replace(temperature=torch.full((4,), 0.1))
    qkv, temperature = (t.double() for t in inputs.tensors)
    exact = cross_covariance_attention(qkv, temperature).flatten(2)
    wanted = condition_number(exact).kappa
    assert wanted.item() > 1e5
    captured = condition_number(run_kernels(inputs)["heads"]).kappa.double()
    torch.testing.assert_close(captured[-1:], wanted, rtol=0.01, atol=0)
    rounded = condition_number(exact.half().float()).kappa.double()
    assert rounded.item() < wanted.item() / 2


@pytest.mark.parametrize(
    ("operator", "q", "k", "v", "grad"),
    [
        (CROSS, 2.0**11, 2.0**-12, 2.0**9, 1.0),
        (CROSS, 2.0**-14, 1.0, 2.0**-9, 2.0**-12),
        (CHANNEL, 2.0**11, 1.0, 1.0, 2.0**6),
    ],
    ids=["cross, past 65504", "cross, under 6e-8", "channel, past 65504"],
)
def test_what_the_scores_pass_on_may_be_outside_half_precision(
    operator: str, q: float, k: float, v: float, grad: float
) -> None:
    """Inputs and gradients are inside it, and so must be what is between them."""
    inputs = make_inputs(
        CovarianceTestCase("far", operator, 1, 196, 1, 16, scale=2e-3), torch.float16
    )
    factors = torch.tensor([q, k, v], dtype=torch.float16)[:, None, None]
    inputs = inputs._replace(qkv=inputs.qkv * factors, grad=inputs.grad * grad)
    exact, found = reference_results(inputs, torch.float64), run_kernels(inputs)
    largest = {name: exact[name].abs().max() for name in ("dq", "dk", "dv")}
    held = [name for name, size in largest.items() if 2**-13 < size < 65504]
    assert len(held) >= 2
    for name in held:
        error = (found[name].double() - exact[name]).abs().max()
        assert error <= 2**-9 * largest[name], name


@pytest.mark.parametrize("operator", [CROSS, CHANNEL])
def test_the_backward_is_deterministic(operator: str) -> None:
    inputs = make_inputs(CovarianceTestCase("twice", operator, 2, 70, 2, 16), torch.float16)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
