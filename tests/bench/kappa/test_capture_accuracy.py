"""The picture of hooks against captured heads, drawn from what was measured."""

import json
import sys

import pytest

from bench.kappa import capture_accuracy


def test_the_picture_is_drawn_from_the_committed_results(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(capture_accuracy, "draw", lambda rows, path: drawn.append((rows, path)))
    capture_accuracy.main(["--plot", str(tmp_path / "hooks.png")])
    ((rows, path),) = drawn
    assert path == tmp_path / "hooks.png"
    assert rows == json.loads(capture_accuracy.RESULTS.read_text())["rows"]
    assert rows[0].keys() == {"heads", "layer", "truth", *capture_accuracy.READINGS}


def test_the_last_layer_is_printed_as_a_table_and_all_are_written(tmp_path, monkeypatch, capsys):
    kept = json.loads(capture_accuracy.RESULTS.read_text())["rows"]
    monkeypatch.setattr(capture_accuracy, "photograph", lambda: None)
    monkeypatch.setattr(
        capture_accuracy, "measure", lambda _, heads, __: [r for r in kept if r["heads"] == heads]
    )
    capture_accuracy.main(["--json", str(tmp_path / "rows.json")])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == kept
    lines = capsys.readouterr().out.splitlines()
    last = [row for row in kept if row["layer"] == 3]
    assert lines[0].startswith("| heads | exact κ | captured |")
    assert lines[2:] == [
        f"| {r['heads']} | {r['truth']:,.0f} | {r['captured']:,.0f} | {r['hook']:,.0f} |"
        for r in last
    ]


def test_without_the_photograph_one_line_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="scikit-learn: pip install scikit-learn"):
        capture_accuracy.main([])


def test_every_way_of_reading_is_in_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    pytest.importorskip("pandas", reason="the plot needs pandas")
    row = {"truth": 1e5, "captured": 1.001e5, "split": 1.002e5, "single": 9e4, "hook": 2e4}
    capture_accuracy.draw([row, {**row, "truth": 2e5}], tmp_path / "hooks.png")
    assert (tmp_path / "hooks.png").read_bytes().startswith(b"\x89PNG")
    for name in capture_accuracy.READINGS:
        missing = {k: v for k, v in row.items() if k != name}
        with pytest.raises(KeyError, match=name):
            capture_accuracy.draw([missing], tmp_path / "no.png")
