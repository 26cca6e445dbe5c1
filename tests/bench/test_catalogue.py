"""bench/README.md, and the sentence that a legend has for each peer."""

import re

from bench import catalogue
from bench.catalogue import IN_ORDER


def test_the_page_is_made_of_todays_cases_and_peers():
    assert catalogue.README.read_text("utf-8") == catalogue.page(), "run python -m bench.catalogue"


def test_the_page_names_every_case_with_its_size_and_every_peer_with_a_sentence():
    text = catalogue.page()
    for case in IN_ORDER:
        assert f"| `{case.name}` | {catalogue.size(case.facts())} |" in text
        assert all(catalogue.sentences(case).values()), case.name
    rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", text, re.MULTILINE)
    assert dict(rows)["leaner_kernel"] == "This project's kernel, never dispatched to a library"
    assert len(rows) > len(IN_ORDER) + 60


def test_a_name_that_stands_for_two_things_has_both_sentences():
    cases = [case for case in IN_ORDER if case.name in ("cpu_window", "cpu_channel", "cpu_vit")]
    assert catalogue.legend(cases)["sdpa"].count("; or ") == 2


def test_the_command_writes_the_page_and_keeps_what_is_above_its_mark(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text(f"# Mine\n{catalogue.MARK}old", "utf-8")
    monkeypatch.setattr(catalogue, "README", path)
    catalogue.main([])
    text = path.read_text("utf-8")
    assert text.startswith(f"# Mine\n{catalogue.MARK}\n## Commands")
    assert "| `vit_base` | 128·16·197·64 bfloat16 |" in text


def test_a_window_is_part_of_a_size():
    (case,) = (case for case in IN_ORDER if case.name == "long_2048_sliding")
    assert catalogue.size(case.facts()) == "16·16·2048·64 bfloat16 causal window 256"
