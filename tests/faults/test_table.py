"""The page shows what was measured, and nothing else."""

import pytest

from tests.faults import table


def test_the_page_shows_the_committed_results():
    page = table.PAGE.read_text()
    assert table.filled(page, table.committed()) == page, "run python -m tests.faults.table"


def test_the_same_fault_in_the_same_place_is_one_row_with_all_its_tries():
    first = table.outcome(fault="a", where="x", ended="stopped cleanly")
    other = table.outcome(fault="b", where="x", ended="stopped cleanly")
    more = table.outcome(fault="a", where="x", ended="stopped cleanly", tries=2)
    rows = table.grouped([first, other, more, first | {"where": "y"}])
    assert [(r["fault"], r["where"], r["tries"]) for r in rows] == [
        ("a", "x", 3),
        ("a", "y", 1),
        ("b", "x", 1),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"), [({"ended": "fine"}, "ended must be one of"), ({"tries": 0}, "tries")]
)
def test_an_outcome_has_one_of_the_agreed_endings_and_a_try(wrong, message):
    with pytest.raises(ValueError, match=message):
        table.outcome(**{"fault": "a", "where": "x", "ended": "stopped cleanly"} | wrong)
