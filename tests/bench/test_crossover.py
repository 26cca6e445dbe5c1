"""The crossover: rules from measured rows alone, and none where PyTorch does not win."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench import crossover
from bench.crossover import SHAPES, Shape
from bench.harness import command
from leaner_kernels.ops.attention import dispatch

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "bench/results/crossover-h200.json"
LIBRARY = ROOT / "leaner_kernels/ops/attention/library.toml"


def test_rules_come_from_measured_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lengths, at which PyTorch takes twice and half as long forward and backward."""
    row = {"kind": "dense", "head_dim": 64, "causal": False, "ours_forward": 1, "ours_both": 1}
    rows = [
        {**row, "library_forward": None, "tokens": tokens, "library_both": times}
        for tokens, times in ((256, 2.0), (512, 0.5))
    ]
    path = tmp_path / "sweep.json"
    command.write(path, rows, machine_info={"gpu": {"compute_capability": "9.0"}})
    crossover.main([str(path)])
    (section,) = tomllib.loads(capsys.readouterr().out)["gpus"]
    assert (section["capabilities"], section["source"]) == ([90], "bench/results/sweep.json")
    common = {"varlen": False, "causal": False, "head_dim": 64}
    assert section["rules"] == [
        {**common, "backward": False, "tokens": []},
        {**common, "backward": True, "tokens": [[512, 0]]},
    ]


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


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path, message in (
        (other, "other.json: not written by bench.crossover"),
        (tmp_path / "none.json", "none.json: No such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            crossover.main([str(path)])


def test_the_committed_rules_are_those_of_the_committed_sweep() -> None:
    assert crossover.section(SWEEP) in LIBRARY.read_text("utf-8")
    rows = json.loads(SWEEP.read_text("utf-8"))["rows"]
    fields = "kind", "head_dim", "causal", "tokens"
    many = {shape for shape in SHAPES if not shape.programs and not shape.float32}
    assert {Shape(*(row[name] for name in fields)) for row in rows} == many
    assert max(row["difference"] for row in rows) < 0.02  # ours against PyTorch's


def test_few_programs_and_float32_have_sections_of_their_own(tmp_path: Path) -> None:
    """PyTorch wins with up to 16 programs, and in float32."""
    row = {"kind": "dense", "head_dim": 64, "causal": False, "tokens": 197, "ours_forward": 1}
    row |= {"ours_both": 1, "library_both": 1}
    path = tmp_path / "sweep.json"
    groups = ((64, False, 1.0), (0, True, 0.5), (0, False, 1.0), (16, False, 0.5))
    rows = [
        {**row, "programs": programs, "float32": float32, "library_forward": time}
        for programs, float32, time in groups
    ]
    command.write(path, rows, machine_info={"gpu": {"compute_capability": "9.0"}})
    text = crossover.section(path)
    sections = [
        (section.get("programs"), section.get("float32", False), section["rules"][0]["tokens"])
        for section in tomllib.loads(text)["gpus"]
    ]
    assert sections == [
        ([1, 16], False, [[197, 0]]),
        ([17, 263], False, []),
        (None, False, []),
        (None, True, [[197, 0]]),
    ]
    by_capability, _ = dispatch.read_rules(text)
    assert [section.programs for section in by_capability[90]] == [(1, 16), (17, 263), None, None]


@pytest.mark.parametrize("shape", [Shape("dense", 16, False, 32, programs) for programs in (8, 32)])
def test_a_shape_of_few_programs_has_as_many(shape: Shape) -> None:
    assert shape.case.batch * shape.case.heads == shape.programs


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
