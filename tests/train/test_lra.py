"""The script for ListOps: recipes, which weights are tested, what it refuses."""

import json
import os
import re
import signal

import pytest

from tests.train.launch import rows
from train import lra
from train.config import flags
from train.data.listops import ListLimits
from train.loop import train as loop
from train.lra import LraSettings

TINY = ["--heads", "2", "--depth", "1", "--head-dim", "8", "--kappa-every", "0", "--workers", "0"]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Flags of the quick recipe with little to learn, kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [*TINY, "--sizes", "64,24,32", "--batch-size", "16", "--steps", "2"]


def task_of(*args: object) -> tuple:
    return lra.make_task(flags.parse("lra.py", "", [str(arg) for arg in args], LraSettings))


def test_without_flags_short_lists_are_learned(tmp_path, monkeypatch):
    # Flat lists of few digits are learned in seconds.
    monkeypatch.setitem(lra.LIMITS, "quick", ListLimits(2, 3, 3, 6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lra.main(
        [
            *("--sizes", "3000,200,400", "--steps", "160", "--depth", "1", "--kappa-every", "100"),
            *("--out", str(tmp_path / "run")),
        ]
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["task"], summary["model"]) == ("listops", "nystromformer_small")
    assert summary["test_accuracy"] > summary["baseline_first_operator"] + 0.1
    assert summary["baseline_first_operator"] > summary["baseline_constant_class"]
    assert [row["layer"] for row in summary["kappa"]] == ["blocks.0.attn"]
    evaluated = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if "held_out_accuracy" in r]
    assert len(evaluated) > 1


def test_a_signal_before_an_evaluation_does_not_change_which_weights_are_tested(
    few, tmp_path, monkeypatch
):
    offered = []
    monkeypatch.setattr(loop, "offer", lambda _, scores: offered.append(scores["held_out_loss"]))
    step = loop.optimizer_step

    def stopped_in_the_second(run, *args):
        is_second = run.progress.step == 1
        if is_second and run.report.folder.name == "stopped" and not offered[5:]:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(run, *args)

    monkeypatch.setattr(loop, "optimizer_step", stopped_in_the_second)
    args = [*few, "--steps", "4", "--eval-every", "0.25", "--resume", "auto"]
    for out in ("whole", "stopped", "stopped"):
        lra.main([*args, "--out", str(tmp_path / out)])
    assert len(offered) == 8
    assert offered[:4] == offered[4:]


@pytest.mark.parametrize(
    ("model", "params", "heads"),
    [("nystromformer_listops", 209_802, [2, 2]), ("nystromformer_listops_lean", 192_906, [4])],
)
def test_a_model_of_the_paper_follows_the_published_recipe(
    tmp_path, monkeypatch, model, params, heads
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task, settings = task_of("--model", model, "--sizes", "96,4,4")
    assert (task.facts["params"], task.facts["heads"]) == (params, heads)
    assert (settings.recipe, settings.batch_size, settings.steps) == ("paper", 32, 5000)
    assert settings.warmup * settings.steps == 1000
    # As OneCycleLR, which test_schedule.py compares with.
    assert settings.schedule == "linear"
    assert (settings.warmup_lr, settings.min_lr) == pytest.approx((1e-4 / 25, 1e-4 / 25e4))
    assert (settings.lr, settings.eps, settings.weight_decay) == (1e-4, 1e-6, 0)
    assert (settings.dropout, settings.clip_grad, settings.betas) == (0.1, 0, (0.9, 0.999))
    # Every 50 steps, of which an epoch of these 96 lists has 3.
    assert settings.eval_every * 3 == pytest.approx(50)
    tokens, lengths, labels = task.train.__getitems__([(0, 5), (0, 0)])
    assert (tokens.shape, len(labels)) == ((2, 2048), 2)
    assert lengths.min() > 500
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [96, 4, 4]
    assert (task.best_of, task.tokens_per_item) == ("accuracy", 2048)
    # Of the published recipe alone.
    assert settings.cycle_momentum
    assert not task_of("--sizes", "96,4,4")[1].cycle_momentum


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipe", "paper", "--model", "nystromformer_small"], "of 2048 tokens, .* takes 16"),
        (["--model", "nystromformer_image"], "of 2048 tokens, got .* takes 1024"),
        (["--landmarks", "12"], "--landmarks must divide the 16 tokens"),
        (["--data", "lists"], "--data: invalid choice: 'lists'"),
        (["--model", "vit_base"], "must be one of nystromformer_small"),
        (["--heads", "2,2,2", "--depth", "2"], "--heads must be one value or one per layer, got 3"),
        (["--batch-size", "9", "--accum", "2"], "--batch-size must be .* got 9"),
        (["--kappa-penalty", "0.1"], "--kappa-penalty needs sequences without padding"),
    ],
)
def test_what_does_not_fit_is_one_line_before_lists_are_generated(
    args, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(lra, "open_lists", None)
    with pytest.raises(SystemExit, match="2"):
        lra.main([*args, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1
