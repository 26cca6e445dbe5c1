"""Calls that must be refused are, in one line; and whatever is passed, nothing else happens."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import leaner_kernels
from tests.fuzz.profiles import fuzzed
from tests.fuzz.refusals import NO_COUNTS, NO_FLAGS, NO_NUMBERS, NO_TENSORS, broken_cases, outcome
from tests.fuzz.strategies import FUNCTIONS, Limits, cases, valid_cases


def refusal(function: str, made: dict[str, Any]) -> str | None:
    """Return the one line of a ValueError, None where the call was taken; let others through."""
    return outcome(lambda: getattr(leaner_kernels, function)(**made))[1]


@pytest.mark.parametrize("function", FUNCTIONS)
@fuzzed(4)
@given(st.data())
def test_a_broken_argument_is_refused_in_one_line(function, data):
    case = data.draw(broken_cases(function))
    words = refusal(function, case.make())
    assert words is not None, f"{case.wrong} was taken"
    # It begins with the name of an argument.
    assert words[0].islower(), words


@pytest.mark.parametrize("function", FUNCTIONS)
@fuzzed(2)
@given(st.data())
def test_any_mixture_of_arguments_gives_a_result_or_one_line(function, data):
    small = Limits(sizes=(1, 2, 3, 4, 8), dims=(1, 2, 8))
    case, *others = (data.draw(cases(function, small)) for _ in range(3))
    arguments = dict(case.arguments)
    for other in others:
        for name in data.draw(st.lists(st.sampled_from(sorted(other.arguments)), max_size=3)):
            arguments[name] = other.arguments[name]
    made = case._replace(arguments=arguments).make()
    for name in data.draw(st.lists(st.sampled_from(sorted(made)), max_size=1)):
        made[name] = data.draw(st.sampled_from([*NO_TENSORS, *NO_NUMBERS, *NO_COUNTS, *NO_FLAGS]))
    refusal(function, made)


@pytest.mark.parametrize("function", FUNCTIONS)
@fuzzed(0.5)
@given(st.data())
def test_swapping_two_arguments_gives_a_result_or_one_line(function, data):
    case = data.draw(valid_cases(function, Limits(sizes=(1, 2, 3), dims=(1, 2, 8))))
    names = st.sampled_from(sorted(case.arguments))
    one, other = data.draw(names), data.draw(names)
    made = case.make()
    made[one], made[other] = made[other], made[one]
    refusal(function, made)
