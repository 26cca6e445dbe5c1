"""Printed gains against the size of the sets that they were measured on."""

import pytest

from models import papers
from studies import printed_tables


def test_standard_errors_are_those_of_two_shares() -> None:
    # 0.003 over sqrt((0.801 * 0.199 + 0.804 * 0.196) / 50000) = 0.00251787.
    assert printed_tables.standard_errors(80.1, 80.4, 50_000) == pytest.approx(1.19148, rel=1e-5)
    assert printed_tables.standard_errors(80.4, 80.1, 50_000) < 0


def test_every_printed_accuracy_of_images_and_of_the_long_range_arena_is_there() -> None:
    found = printed_tables.gains()
    rows = {row for row, variant in papers.ROWS if variant == "lean"}
    language = {"gpt2_tinystories"}  # a loss
    assert {gain["row"] for gain in found} == rows - language
    assert all(gain["items"] >= 277 for gain in found)
    by_row = {(gain["row"], gain["measure"]): gain["z"] for gain in found}
    assert by_row["nystromformer_listops", "accuracy"] == pytest.approx(0.2, abs=0.05)


def test_the_section_is_printed(capsys) -> None:
    printed_tables.main([])
    assert capsys.readouterr().out == printed_tables.section()
