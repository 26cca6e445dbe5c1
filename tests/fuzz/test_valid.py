"""Calls that must work: their numbers, what they leave alone, and what they may not read."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.fuzz import oracles
from tests.fuzz.profiles import fuzzed
from tests.fuzz.strategies import EXTREMES, FUNCTIONS, Block, FuzzCase, Limits, valid_cases

every_function = pytest.mark.parametrize("function", FUNCTIONS)
seeds = st.integers(0, 5)


def bits(t: Tensor) -> list[int]:
    """Return the bytes of all memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).tolist()


@every_function
@fuzzed()
@given(st.data(), seeds)
def test_results_and_gradients_stay_within_the_error_budget(function, data, seed):
    case = data.draw(valid_cases(function))
    made = case.make()
    grad = oracles.grad_of(case, made, seed)
    before = {name: bits(t) for name, t in tensors(made).items()}
    found = oracles.run(case, made, grad)
    for name, t in tensors(made).items():
        assert bits(t) == before[name], f"{name} was written to"
        for result, value in found.items():
            assert value.numel() == 0 or value.data_ptr() != t.data_ptr(), f"{result} is {name}"
    assert_described(case, made, found)
    oracles.judge(oracles.written(case, made, found), oracles.truth_of(case, made, grad))


def tensors(made: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in made.items() if isinstance(t, Tensor)}


def assert_described(case: FuzzCase, made: dict[str, Any], found: dict[str, Tensor]) -> None:
    """Assert dtypes and devices; shapes are compared with the reference's."""
    first = next(iter(made.values()))
    for name, result in found.items():
        assert result.device == first.device, name
        statistic = name in oracles.STATISTICS
        like = torch.float32 if statistic else made.get(name[1:], first).dtype
        assert result.dtype == like, f"{name} is {result.dtype}"
    if case.function.removesuffix("_with_stats") not in ("attention", "nystrom_attention"):
        assert found["out"].is_contiguous()


@every_function
@fuzzed(0.7)
@given(st.data(), seeds)
def test_nothing_outside_a_view_is_read(function, data, seed):
    case = data.draw(valid_cases(function, Limits(layouts=("inside", "permuted", "padded"))))
    guarded, other = case.make(guard=float("nan")), case.make(guard=0.0)
    grad = oracles.grad_of(case, other, seed)
    found, wanted = (
        oracles.written(case, made, oracles.run(case, made, grad)) for made in (guarded, other)
    )
    for name, result in wanted.items():
        assert torch.equal(found[name], result), name


@every_function
@fuzzed(0.7)
@given(st.data(), st.sampled_from(EXTREMES))
def test_what_is_not_finite_stays_in_its_batch_entry(function, data, extreme):
    limits = Limits(layouts=("plain", "inside", "padded"), values=("normal",))
    case = data.draw(valid_cases(function, limits))
    if "init" in case.arguments:
        # With "batch" what a sample gives depends on the samples beside it.
        case.arguments["init"] = "matrix"
    name = data.draw(st.sampled_from(sorted(oracles.LEAVES)).filter(case.arguments.__contains__))
    block = case.arguments[name]
    if not isinstance(block, Block) or name in ("attn_mask", "temperature") or not block.shape:
        return
    calm = case.make()
    wild = FuzzCase(function, case.arguments | {name: block._replace(extreme=extreme)}).make()
    grad = oracles.grad_of(case, calm)
    for_each = {k: v for k, v in oracles.run(case, wild, grad).items() if k != "heads"}
    truth = oracles.run(case, calm, grad)
    assert all(for_each[k].shape == truth[k].shape for k in for_each)
    others = len(block.shape) > 3 and block.shape[0] > 1
    for result in ("out", "lse", *(f"d{leaf}" for leaf in ("query", "key", "value", "qkv"))):
        if others and result in for_each:
            assert torch.equal(for_each[result][:-1], truth[result][:-1]), result
