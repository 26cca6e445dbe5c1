"""Operators beside softmax attention, on the CPU: their error budget and their registration."""

from itertools import product

import pytest
import torch

from tests import registration
from tests.error_budget import assert_all_within_budget
from tests.operator_cases import (
    CASES,
    CPU_CASES,
    FORMULATIONS,
    NYSTROM,
    Inputs,
    OperatorTestCase,
    call,
    every_case,
    identify,
    leaves_of,
    make_inputs,
    name_results,
    named,
    peers_of,
    reference_results,
    run_operator,
    written_out,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*product(every_case(), DTYPES), *product(CPU_CASES, DTYPES[:1])],
    ids=identify,
)
def test_results_stay_within_the_error_budget(case: OperatorTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs, dtype)
    leaves = [t.requires_grad_() for t in leaves_of(inputs, inputs.tensors)]
    out = call(inputs, *leaves)
    out = out.transpose(1, 2) if inputs.operator == NYSTROM else out
    assert out.dtype == dtype
    assert out.is_contiguous()
    gradients = torch.autograd.grad(out, leaves, inputs.grad)
    plain = name_results(inputs, (out, torch.empty(0)), gradients)
    plain.pop("lse")
    with_stats = run_operator(inputs)
    assert with_stats.keys() == exact.keys()
    assert_all_within_budget(with_stats, peers, exact)
    assert_all_within_budget(plain, peers, exact)


@pytest.mark.parametrize(
    "case", [case for case in every_case() if case not in CASES["nystrom"]], ids=identify
)
def test_written_out_derivatives_are_autograds(case: OperatorTestCase) -> None:
    """Errors of these would widen the budgets that are drawn by them."""
    inputs = make_inputs(case, torch.float64)
    exact = reference_results(inputs, torch.float64)
    written = written_out(inputs.operator), *FORMULATIONS.get(inputs.operator, ())
    for differentiate in written:
        found = reference_results(inputs, torch.float64, differentiate)
        torch.testing.assert_close(found, exact)


def samples() -> registration.Samples:
    found: registration.Samples = {}
    for inputs in map(small, SMALL):
        name, tensors, numbers = inputs.operator, inputs.tensors, inputs.numbers
        plain, with_stats, backward = (
            getattr(torch.ops.leaner_kernels, name + suffix).default
            for suffix in ("", "_with_stats", "_backward")
        )
        saved = *(t if t is None else t.detach() for t in tensors), plain(*tensors, *numbers)[1]
        saved = *saved[:-1], saved[-1].detach()
        found |= {
            name: (plain, (*tensors, *numbers)),
            f"{name}_with_stats": (with_stats, (*tensors, inputs.sample, *numbers)),
            f"{name}_with_stats, no sample": (with_stats, (*tensors, None, *numbers)),
            f"{name}_backward": (backward, (inputs.grad, *saved, *numbers)),
        }
    return found


SMALL = (
    named("covariance", "cross, fewer tokens than channels"),
    named("covariance", "channel, channels of zeros"),
    named("window", "flat windows"),
    named("outlook", "windows at every pixel"),
)


def small(case: OperatorTestCase) -> Inputs:
    """Return contiguous inputs that have gradients, and a sample whose slots are all written."""
    inputs = make_inputs(case, torch.float32)
    sample = torch.tensor([len(inputs.grad) - 1, 0], dtype=torch.int32)
    tensors = tuple(t if t is None else t.contiguous() for t in inputs.tensors)
    for leaf in leaves_of(inputs, tensors):
        leaf.nan_to_num_().requires_grad_()
    return inputs._replace(tensors=tensors, sample=sample)


test_opcheck, test_fake_equals_real = registration.tests_of(samples())


@pytest.mark.parametrize("case", [*SMALL, named("nystrom", "whole batch, padded")], ids=identify)
def test_autocast_narrows_what_a_function_takes_and_rounds_nothing_in_between(
    case: OperatorTestCase,
) -> None:
    """Temperatures stay as they are."""
    inputs = small(case)
    leaves = leaves_of(inputs, inputs.tensors)
    halves = [t.bfloat16() if t.dim() > 1 else t for t in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(inputs, *leaves)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, call(inputs, *halves))
