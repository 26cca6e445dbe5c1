"""JSON with one record a line, and the results of this repository, which have that form."""

import json
import subprocess
from pathlib import Path

import pytest

from models.json_rows import json_rows, main

ROOT = Path(__file__).resolve().parents[2]


def test_each_record_is_a_line():
    value = {
        "commit": {"id": "a"},
        "rows": [{"a": 1, "of": {"b": [1, 2]}}, {"a": None}],
        "none": [],
    }
    assert json_rows(value).splitlines() == [
        "{",
        ' "commit": {"id": "a"},',
        ' "rows": [',
        '  {"a": 1, "of": {"b": [1, 2]}},',
        '  {"a": null}',
        " ],",
        ' "none": []',
        "}",
    ]


def test_records_inside_of_a_record_are_lines_too():
    lines = json_rows([{"run": "a", "kappa": [{"step": 0}, {"step": 1}]}]).splitlines()
    assert lines[4:6] == ['   {"step": 0},', '   {"step": 1}']


def test_a_long_object_has_a_line_for_each_entry_and_a_list_of_numbers_one():
    numbers = list(range(100))
    lines = json_rows({"versions": dict.fromkeys("abc", "x" * 80), "numbers": numbers}).splitlines()
    assert len(lines) == 8
    assert json.loads("{" + lines[-2] + "}") == {"numbers": numbers}


def test_the_command_rewrites_files_and_refuses_others_in_one_line(tmp_path, capsys):
    value = {"rows": [{"a": 1.5}, {"a": None}]}
    (tmp_path / "whole.json").write_text(json.dumps(value, indent=4))
    (tmp_path / "half.json").write_text('{"rows": [')
    main([str(tmp_path / "whole.json")])
    assert (tmp_path / "whole.json").read_text() == json_rows(value)
    for name in ("half.json", "none.json"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / name)])
        assert "cannot be read as JSON" in capsys.readouterr().err.splitlines()[-1]


def committed() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return listed.stdout.split()


@pytest.mark.parametrize("path", committed())
def test_a_committed_result_has_a_record_a_line(path):
    text = (ROOT / path).read_text("utf-8")
    assert text == json_rows(json.loads(text)), f"run python -m models.json_rows {path}"
