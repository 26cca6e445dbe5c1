"""The picture of hooks against captured heads, drawn from what was measured."""

import json

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
