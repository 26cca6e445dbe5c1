"""The picture of hooks against captured heads, drawn from what was measured."""

import json

from bench.kappa import capture_accuracy


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
