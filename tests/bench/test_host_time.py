"""The host's time: a row for each call and pass, measured here on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from bench import host_time
from bench.harness import command


def test_each_pass_of_each_call_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_time, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(command, "need_gpu", lambda _: None)
    path = tmp_path / "host.json"
    host_time.main(["--seconds", "0", "--gpu", str(path)])
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert len(rows) == len(host_time.cases()) * len(host_time.PASSES) + 3 == 15
    assert len({(row["call"], row["pass"]) for row in rows}) == 15
    assert all(0 < row["ours_us"] < 1e5 and 0 < row["pytorch_us"] < 1e5 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 15
