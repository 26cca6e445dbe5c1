"""Runs side by side, from what they left."""

import json
from pathlib import Path

import pytest

from train import compare


def row(layer: str, kappa: float | None, step: int) -> dict:
    reason = None if kappa is not None else "not resolved"
    return {"step": step, "layer": layer, "kappa": kappa, "reason": reason}


def write_run(folder: Path, kappas: list[float | None], **summary: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"unit": "images"} | summary))
    rows = [row(f"b{at}", 1.0, 0) for at in range(len(kappas))]
    rows += [row(f"b{at}", kappa, 5) for at, kappa in enumerate(kappas)]
    (folder / "kappa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def compared(capsys, *args: object) -> list[str]:
    compare.main([str(arg) for arg in args])
    return capsys.readouterr().out.splitlines()


def test_the_table_has_what_the_summaries_and_the_newest_kappas_say(tmp_path, capsys):
    one = write_run(tmp_path / "one", [2.0, 8.0], params=2_430_922, held_out_accuracy=0.5)
    two = write_run(tmp_path / "two", [3.0, None], throughput=1234.5, peak_memory_bytes=2**31)
    titles, first, second = compared(capsys, one, two)
    assert titles.split() == ["run", "parameters", "memory", "throughput", "accuracy", "κ"]
    assert first.split() == ["one", "2.43", "M", "–", "–", "50.00%", "4"]
    assert second.split() == ["two", "–", "2.00", "GiB", "1,234", "images/s", "–", "≥", "3"]


def test_markdown_has_as_many_cells_in_every_line_and_names_are_escaped(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [2.0], params=1e6) for name in ("a|b", "c")]
    lines = compared(capsys, *runs, "--markdown")
    assert lines[1] == "| --- | ---: | ---: |"
    assert lines[2].startswith("| a\\|b | 1 M |")
    assert {line.replace("\\|", "").count("|") for line in lines} == {4}


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, capsys):
    runs = [write_run(tmp_path / name / "run", [2.0], params=1) for name in ("a", "b")]
    _, first, second = compared(capsys, *runs)
    assert (first.split()[0], second.split()[0]) == tuple(map(str, runs))


def test_a_page_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "one", [2.0], params=1)
    rows = [r | {"kappa_gaussian": 1.5, "heads": 2, "head_dim": 8} for r in (row("b0", 2.0, 0),)]
    (run / "kappa.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    compared(capsys, run, "--page", tmp_path / "page.html")
    assert "one" in (tmp_path / "page.html").read_text("utf-8")


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_text("{")
    for name, said in {
        "gone": "no such folder",
        "empty": "is no run: it has neither summary.json nor kappa.jsonl",
        "broken": "summary.json is no JSON",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            compare.main([str(tmp_path / name)])
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
