"""Outcomes of other projects' cases: what is known, what fails, and the counts of them."""

import re
from types import SimpleNamespace

import pytest

from tests.peers import outcomes


def settled(call, judge=lambda found: None, known=""):
    node = SimpleNamespace(user_properties=[])
    error = None
    try:
        outcomes.settle(node, "timm", "backward", call, judge, known)
    except AssertionError as caught:
        error = str(caught)
    ((name, row),) = node.user_properties
    assert name == outcomes.PROPERTY
    return row["outcome"], row["why"], error


def raising(error):
    def call(*_):
        raise error

    return call


def test_a_result_is_equal_or_fails_unless_it_is_known_to_differ():
    assert settled(lambda: 1) == ("equal", "", None)
    assert settled(lambda: 1, raising(AssertionError("far"))) == ("different", "", "far")
    assert settled(lambda: 1, raising(AssertionError("far")), "why") == ("different", "why", None)
    assert settled(lambda: 1, known="why") == ("equal", "", None)


def test_a_refusal_counts_when_its_reason_is_known_and_one_line():
    known = outcomes.ArgumentError("query must have a head dimension up to 128, got 192")
    assert settled(raising(known)) == ("refused", "a varlen head dimension above 128", None)
    for unknown in (ValueError("no"), TypeError("f() got 'x'"), ValueError(f"{known}\nmore")):
        outcome, _, error = settled(raising(unknown))
        assert outcome == "different"
        assert "no reason of the table" in error
    with pytest.raises(RuntimeError):
        settled(raising(RuntimeError("a crash is no refusal")))


def test_failed_or_not_a_case_is_counted_by_group_and_reason():
    counts = outcomes.Counts()
    equal = {"source": "timm", "group": "a", "outcome": "equal", "why": ""}
    refused = equal | {"outcome": "refused", "why": "softcap"}
    different = equal | {"group": "b", "outcome": "different"}
    for row in (equal, refused, equal, different):
        report = SimpleNamespace(when="call", user_properties=[(outcomes.PROPERTY, row)])
        counts.pytest_runtest_logreport(report)
    assert counts.table() == [
        "| timm | a | equal |  | 2 |",
        "| timm | a | refused | softcap | 1 |",
        "| timm | b | different |  | 1 |",
        "2 equal, 1 refused, 1 different",
    ]


def test_a_reason_matches_no_other_reasons_message():
    assert all(re.compile(pattern) for pattern in outcomes.REASONS)
    assert len(set(outcomes.REASONS.values())) == len(outcomes.REASONS)
