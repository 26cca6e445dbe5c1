"""Outcomes of other projects' cases: what is known, what fails, and the table that counts them."""

import json
import re
from types import SimpleNamespace

import pytest

from bench import compatibility, frames
from tests.peers import outcomes
from tests.peers.flash_grid import CASES


@pytest.fixture(scope="module")
def committed():
    return frames.read(frames.RESULTS / "peers-cpu.json")


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


def test_a_run_with_a_failure_is_written_and_not_rendered(tmp_path):
    recorder = outcomes.Recorder(tmp_path / "peers.json")
    row = {"source": "timm", "group": "backward", "outcome": "equal", "why": ""}
    for failed in (False, True):
        recorder.pytest_runtest_logreport(
            SimpleNamespace(
                failed=failed,
                when="call",
                nodeid="test_it",
                user_properties=[
                    (outcomes.PROPERTY, row | {"outcome": "different"} if failed else row)
                ],
            )
        )
    recorder.pytest_sessionfinish()
    written = json.loads(recorder.path.read_text("utf-8"))
    assert [(each["outcome"], each["cases"]) for each in written["peers"]] == [
        ("different", 1),
        ("equal", 1),
    ]
    with pytest.raises(SystemExit, match="not to be published, failed: test_it"):
        frames.read(recorder.path)


def test_a_group_has_its_counts_and_reasons_in_one_row():
    names = "source", "group", "outcome", "why", "cases"
    made = (
        ("timm", "a", "equal", "", 3),
        ("timm", "a", "refused", "softcap", 2),
        ("timm", "b", "different", "known", 1),
    )
    found = compatibility.peers([{"peers": [dict(zip(names, row)) for row in made]}])
    assert frames.markdown(found).splitlines()[2:] == [
        "| timm | a | 5 | 3 | 2: softcap | |",
        "| timm | b | 1 | 0 | | 1: known |",
    ]


# What is committed.


def test_the_committed_counts_are_of_all_cases_with_reasons_of_the_table(committed):
    assert {row["source"] for row in committed["peers"]} == {
        "PyTorch",
        "FlashAttention",
        "transformers",
        "timm",
    }
    counted = [row["cases"] for row in committed["peers"] if row["group"] == "output, kvpacked"]
    assert sum(counted) == len(CASES)
    refused = {row["why"] for row in committed["peers"] if row["outcome"] == "refused"}
    assert refused <= set(outcomes.REASONS.values())
    assert all(row["why"] for row in committed["peers"] if row["outcome"] != "equal")


def test_a_reason_matches_no_other_reasons_message():
    assert all(re.compile(pattern) for pattern in outcomes.REASONS)
    assert len(set(outcomes.REASONS.values())) == len(outcomes.REASONS)
