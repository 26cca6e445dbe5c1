"""The crossover: rules from measured rows alone, and none where PyTorch does not win."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench import crossover
from bench.crossover import SHAPES, Shape
from bench.harness import command

SWEEP = crossover.ROOT / "bench/results/crossover-h200.json"
OTHERS = """# A head.

[[gpus]]
capabilities = [80]
source = "predicted"
rules = [{ varlen = false, causal = false, backward = true, head_dim = 64, tokens = [[9, 0]] }]
"""


def written(path: Path, capability: str = "9.0") -> Path:
    """Write a sweep of two lengths, at which PyTorch takes so many times as long as ours."""
    row = {"kind": "dense", "head_dim": 64, "causal": False, "ours_forward": 1, "ours_both": 1}
    rows = [
        {**row, "library_forward": 2.0, "tokens": tokens, "library_both": times}
        for tokens, times in ((256, 2.0), (512, 0.5))
    ]
    command.write(path, rows, machine_info={"gpu": {"compute_capability": capability}})
    return path


def test_the_rules_of_the_measured_gpu_are_replaced(tmp_path: Path) -> None:
    output = tmp_path / "library.toml"
    output.write_text(OTHERS)
    sweep = written(tmp_path / "sweep.json")
    for _ in range(2):
        crossover.main([str(sweep), "-o", str(output)])
    sections = tomllib.loads(output.read_text())["gpus"]
    assert [section["capabilities"] for section in sections] == [[90], [80]]
    assert sections[0]["source"] == "bench/results/sweep.json"
    common = {"varlen": False, "causal": False, "head_dim": 64}
    assert sections[0]["rules"] == [
        {**common, "backward": False, "tokens": []},
        {**common, "backward": True, "tokens": [[512, 0]]},
    ]
    assert sections[1] == tomllib.loads(OTHERS)["gpus"][0]
    assert output.read_text().startswith("# A head.\n")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({64: 2.0, 128: 0.5, 256: 2.0, 512: 0.9, 1024: 0.8}, [[128, 128], [512, 0]]),
        ({64: 0.5, 128: 0.5, 256: 1.1}, [[64, 128]]),
        ({64: 1.0, 128: 0.98}, []),  # a difference within the spread of two runs
    ],
)
def test_runs_of_lengths_that_pytorch_wins(times: dict[int, float], expected: Any) -> None:
    assert crossover.ranges(times) == expected


def test_files_of_two_gpus_and_other_files_are_refused(tmp_path: Path) -> None:
    one, two = (written(tmp_path / f"{c}.json", c) for c in ("9.0", "8.0"))
    other = tmp_path / "other.json"
    other.write_text("{}")
    for paths, message in (
        ([one, two], r"must be of one GPU, got compute capabilities \['8.0', '9.0'\]"),
        ([other], "other.json: not written by bench.crossover"),
        ([tmp_path / "none.json"], "none.json: No such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            crossover.main([str(path) for path in paths])


def test_the_committed_rules_are_those_of_the_committed_sweep(tmp_path: Path) -> None:
    output = tmp_path / "library.toml"
    output.write_text(crossover.LIBRARY.read_text("utf-8"))
    crossover.main([str(SWEEP), "-o", str(output)])
    assert output.read_text() == crossover.LIBRARY.read_text("utf-8")
    rows = json.loads(SWEEP.read_text("utf-8"))["rows"]
    assert {Shape(*(row[name] for name in Shape._fields)) for row in rows} == set(SHAPES)
    assert max(row["difference"] for row in rows) < 0.02  # ours against PyTorch's


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_a_shape_is_measured_on_both_sides(kind: str, monkeypatch: Any) -> None:
    """On a CPU, where PyTorch has no varlen attention."""
    monkeypatch.setattr(crossover, "DEVICE", "cpu")
    monkeypatch.setattr(crossover, "TOKENS_OF_A_BATCH", 64)
    row = crossover.measure_shape(Shape(kind, 16, True, 32))
    assert (row["kind"], row["batch"], row["heads"]) == (kind, 2, 16)
    assert min(row["ours_forward"], row["ours_both"]) > 0
    if kind == "dense":
        assert row["library_both"] > 0
        assert row["difference"] < 0.02  # bfloat16, of values up to 3
    else:
        assert (row["library_both"], row["library_refuses"]) == (None, "runs on CUDA only")
