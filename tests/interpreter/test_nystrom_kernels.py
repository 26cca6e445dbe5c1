"""The Triton kernels of Nyström attention, run one after another by Triton's interpreter."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.error_budget import assert_within_budget
from tests.nystrom_cases import (
    CASES,
    NAMES,
    STATISTICS,
    Inputs,
    NystromTestCase,
    make_inputs,
    name_results,
    peers_of,
    reference_results,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, in a process of its own", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from leaner_kernels.ops.nystrom import launch, reference
from leaner_kernels.ops.operator import Results
from tests.interpreter.rounding import in_float32_first, in_half_arithmetic


def run_kernels(inputs: Inputs) -> dict[str, Tensor]:
    """Launch forward with statistics, capture and backward as the CUDA operators do."""
    batch, heads, tokens, dim = inputs.query.shape
    out = inputs.query.new_empty(batch, tokens, heads, dim)
    lse = torch.empty(batch, heads, tokens)
    stats = torch.empty(len(STATISTICS), batch, heads)
    captured = torch.empty(len(inputs.sample), tokens, heads * dim)
    lengths, *numbers = inputs.params
    tensors = *inputs.tensors, lengths
    launch.forward(tensors, numbers, Results(out, lse, stats, captured, inputs.sample))
    grads = tuple(t.new_empty(t.shape) for t in inputs.tensors)
    launch.backward(inputs.grad, tensors, numbers, lse, grads)
    return name_results(inputs, out, lse, (stats, captured), grads)


def check(case: NystromTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    results = run_kernels(inputs)
    assert results.keys() == exact.keys()
    for name, actual in results.items():
        assert_within_budget(actual, peers[name], exact[name])


@in_float32_first
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: NystromTestCase, dtype: torch.dtype) -> None:
    check(case, dtype)


@in_half_arithmetic
def test_sums_over_many_tokens_stay_within_the_error_budget(dtype: torch.dtype) -> None:
    """One accumulator of a tensor core for all of them would drift."""
    check(NystromTestCase("many tokens", 1, 1024, 1, 16, 16, scale=0.1, iterations=1), dtype)


def test_a_landmark_reads_no_further_than_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of nothing but padding were what a long segment took its time for."""
    loads = 0
    load = InterpreterBuilder.create_masked_load

    def counted(*args: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    counts = []
    for segment in (32, 1024):
        inputs = make_inputs(
            NystromTestCase("padded", 1, 2 * segment, 1, 16, 2, (20,)), torch.float32
        )
        loads = 0
        launch.landmarks_forward(*inputs.tensors, inputs.lengths, 2, 0.3)
        counts.append(loads)
    assert counts[0] == counts[1]


def test_the_kernels_are_deterministic() -> None:
    case = NystromTestCase("twice", 1, 32, 1, 16, 4, (20,), iterations=1)
    inputs = make_inputs(case, torch.float16)
    first, second = run_kernels(inputs), run_kernels(inputs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_length_out_of_range_acts_as_the_nearest_end() -> None:
    """On a GPU nobody reads the lengths to check them."""
    case = NystromTestCase("wrong", 2, 8, 1, 8, 2, (1, 8), iterations=1)
    inputs = make_inputs(case, torch.float32)
    expected = run_kernels(inputs)
    outside = inputs._replace(lengths=torch.tensor([-3, 1 << 30], dtype=torch.int32))
    for name, value in run_kernels(outside).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scores_far_below_those_of_padding_have_finite_gradients(dtype: torch.dtype) -> None:
    inputs = make_inputs(NystromTestCase("far below", 1, 8, 1, 4, 2, iterations=1), dtype)
    inputs.query.abs_().add_(10)
    inputs.key.abs_().add_(10).neg_()
    assert reference_results(inputs, torch.float64)["max_logit"].max() < -110
    results = run_kernels(inputs)
    assert all(results[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("factor", [2.0**13, 2.0**-9])
def test_gradients_of_landmarks_may_be_outside_half_precision(factor: float) -> None:
    """Inputs and gradients are inside it; sums over tokens, and shares of a landmark, are not."""
    inputs = make_inputs(
        NystromTestCase("far", 1, 64, 1, 16, 4, scale=0.1, iterations=2), torch.float16
    )
    inputs = inputs._replace(grad=inputs.grad.abs() * factor)
    k1 = reference.attend(*(t.double() for t in inputs.tensors), *inputs.params).k1
    dcore = k1.mT @ inputs.grad.double().transpose(1, 2)
    assert dcore.abs().max() > 65504 or factor < 1
    exact, found = reference_results(inputs, torch.float64), run_kernels(inputs)
    for name in ("dq", "dk", "dv"):
        largest = exact[name].abs().max()
        assert 2**-13 < largest < 65504
        error = (found[name].double() - exact[name]).abs().max()
        assert error <= 2**-9 * largest, name
