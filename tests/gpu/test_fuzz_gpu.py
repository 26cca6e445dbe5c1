"""The calls of ``tests/fuzz`` on a GPU: within the budget, reading nothing outside, or refused.

Every new shape may compile a kernel, so time is limited, not the number of cases: past
``FUZZ_SECONDS`` of the environment (30) the tests that remain end after one case each.
"""

import os
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.fuzz import oracles
from tests.fuzz.profiles import SHORT
from tests.fuzz.strategies import FUNCTIONS, Limits, valid_cases

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
# Few head dimensions, so that most cases find their kernels compiled.
LIMITS = Limits(
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    sizes=(1, 5, 8, 16, 33, 65),
    dims=(10, 32, 64),
    layouts=("inside", "permuted", "expanded", "padded"),
    values=("normal", "small", "equal", "zeros", "whole"),
)
# One head dimension and one dtype, of strides that all rounds share.
PLAIN = LIMITS._replace(dtypes=(torch.float16,), dims=(32,), layouts=("inside",))


class Clock:
    """What is left of the time, from the first case on."""

    def __init__(self) -> None:
        self.end: float | None = None
        self.began: dict[str, set[str]] = {}

    def over(self, test: str, case: str) -> bool:
        """Whether a test that has run a case must stop; a case that it began may be repeated."""
        self.end = self.end or time.monotonic() + SECONDS
        began = self.began.setdefault(test, set())
        if began and case not in began and time.monotonic() > self.end:
            return True
        began.add(case)
        return False


clock = Clock()


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(SHORT, max_examples=8)
@given(st.data(), st.integers(0, 5))
def test_results_on_a_gpu_stay_within_the_budget_whatever_lies_around(function, data, seed):
    case = data.draw(valid_cases(function, data.draw(st.sampled_from([PLAIN, LIMITS]))))
    if clock.over(function, repr(case)):
        return
    found = {}
    for guard in (float("nan"), 0.0):
        made = case.make("cuda", guard)
        grad = oracles.grad_of(case, made, seed)
        found[guard] = oracles.written(case, made, oracles.run(case, made, grad))
    around, zeros = found.values()
    for name, result in zeros.items():
        assert result.is_cuda
        assert torch.equal(around[name], result), name
    made = case.make()
    oracles.judge(zeros, oracles.truth_of(case, made, oracles.grad_of(case, made, seed)))
