"""What a run measures of kappa, a probe and a penalty."""

import json
import shutil
from pathlib import Path

import pytest

from tests.train.launch import TINY, rows, run, tensors_of, torchrun
from train import lra, vit

pytestmark = pytest.mark.slow

RUN = [*map(str, TINY), "--deterministic", "--steps", "6"]


def train_here(*args: object) -> None:
    vit.main([*RUN, *map(str, args)])


def test_a_probe_changes_no_bit_of_a_run(tmp_path):
    train_here("--out", tmp_path / "plain")
    train_here("--out", tmp_path / "probed", "--kappa-probe", 2)
    plain, probed = (rows(tmp_path / name / "metrics.jsonl") for name in ("plain", "probed"))
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in plain] == [row[name] for row in probed]
    last = Path("checkpoints", "step-00000006")
    assert tensors_of(tmp_path / "plain" / last) == tensors_of(tmp_path / "probed" / last)
    assert rows(tmp_path / "plain" / "kappa.jsonl") == rows(tmp_path / "probed" / "kappa.jsonl")
    assert not (tmp_path / "plain" / "kappa_probe.jsonl").exists()


def test_the_first_and_the_last_step_are_sampled_whatever_lies_between(tmp_path):
    train_here("--out", tmp_path, "--kappa-every", 4, "--steps", 7, "--resume", "auto")
    assert {row["step"] for row in rows(tmp_path / "kappa.jsonl")} == {0, 4, 6}
    assert {r["step"] for r in json.loads((tmp_path / "summary.json").read_text())["kappa"]} == {6}
    train_here("--out", tmp_path, "--kappa-every", 4, "--steps", 10, "--resume", "auto")
    assert {row["step"] for row in rows(tmp_path / "kappa.jsonl")} == {0, 4, 6, 8, 9}


def test_qk_clip_keeps_logits_down_and_a_resumed_run_clips_alike(tmp_path):
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    args = ["--lr", 0.03, "--warmup", 0, "--steps", 12, "--kappa-every", 1, "--ckpt-every", 6]
    train_here(*args, "--out", plain)
    args += ["--qk-clip", 0.5, "--resume", "auto"]
    train_here(*args, "--out", whole)
    # What an update adds is clipped after the next forward.
    largest = [
        max(row["max_logit"] for row in rows(f / "kappa.jsonl")[-4:]) for f in (plain, whole)
    ]
    assert largest[1] < 0.5 * largest[0]
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000012")
    train_here(*args, "--out", cut)
    assert json.loads((cut / "summary.json").read_text())["resumed_at"] == [6]
    assert rows(whole / "kappa.jsonl") == rows(cut / "kappa.jsonl")


@pytest.mark.slow
def test_ranks_share_the_items_of_a_probe_and_the_penalty(tmp_path):
    args = [*RUN, "--kappa-penalty", 1, "--kappa-probe", 2]
    run(*args, "--out", tmp_path / "one")
    run(*args, "--out", tmp_path / "two", torchrun=torchrun(2))
    one, two = (rows(tmp_path / name / "kappa_probe.jsonl") for name in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in two]
    # Of the same 16 items; later the penalty is of other items.
    for alone, shared in zip(one[:2], two[:2]):
        assert shared["kappa"] == pytest.approx(alone["kappa"], rel=1e-3)
    assert all(row["kappa_penalty"] > 0 for row in rows(tmp_path / "two" / "metrics.jsonl"))


def test_a_penalty_lowers_kappa_and_is_written_beside_the_loss(tmp_path):
    for name, weight in (("plain", 0), ("penalty", 1)):
        train_here(
            "--out", tmp_path / name, "--kappa-penalty", weight, "--kappa-probe", 9, "--steps", 20
        )
    plain, penalty = (rows(tmp_path / name / "metrics.jsonl") for name in ("plain", "penalty"))
    assert "kappa_penalty" not in plain[0]
    # The first loss is of the same weights, and has no penalty in it.
    assert penalty[0]["loss"] == plain[0]["loss"]
    assert 0 < penalty[-1]["kappa_penalty"] < penalty[0]["kappa_penalty"]
    ends = [
        rows(tmp_path / name / "kappa_probe.jsonl")[-1]["kappa"] for name in ("penalty", "plain")
    ]
    assert ends[0] < ends[1]


@pytest.mark.parametrize(
    ("main", "args", "message"),
    [
        (lra.main, ["--kappa-penalty", "1"], "needs sequences without padding"),
        (
            vit.main,
            ["--model", "xcit_digits", "--kappa-penalty", "1"],
            "no attention module between tokens",
        ),
        (vit.main, ["--model", "xcit_digits", "--qk-clip", "1"], "no attention module between"),
        (vit.main, ["--kappa-penalty", "-1"], "must be a number in"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, capsys, main, args, message):
    with pytest.raises(SystemExit, match="2"):
        main([*args, "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
