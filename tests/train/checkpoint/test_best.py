"""The best weights on the held-out items: kept beside the last, found again, taken by default."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.train.launch import TINY, rows, whole_tensors
from train import vit
from train.checkpoint.best import BestWeights
from train.checkpoint.weights import BEST, metadata
from train.export import load
from train.loop import evaluation, parallel
from train.loop import train as loop
from train.loop.train import StoppedError

pytestmark = pytest.mark.slow

EPOCH = 4  # steps
# Held-out accuracies of four evaluations: the second is the best, the third its equal.
ACCURACIES = [0.5, 0.8, 0.8, 0.1]
ARGS = [*TINY, "--batch-size", 352, "--eval-every", 1, "--ckpt-every", EPOCH, "--keep", 9]


@pytest.fixture
def world():
    with parallel.init_distributed() as world:
        yield world


def kept(world, folder: Path, score: str, scores: list[float]) -> tuple[BestWeights, float, float]:
    """Offer weights 1, 2, ... of these scores; return the best, and the model's then and now."""
    model = nn.Linear(1, 1, bias=False)
    best = BestWeights(model, folder, world, score, print)
    for step, value in enumerate(scores, 1):
        nn.init.constant_(model.weight, step)
        reached = {f"held_out_{score}": value}
        if best.is_beaten_by(reached):
            best.keep(step, reached, metadata({}, step, {}, None, reached))
    with best.in_place():
        then = model.weight.item()
    return best, then, model.weight.item()


@pytest.mark.parametrize(
    ("score", "scores"),
    [("loss", [float("nan"), 0.2, 0.2, float("inf"), 0.3]), ("accuracy", [0.3, 0.5, 0.5, 0.1, 0])],
)
def test_the_best_are_the_first_of_the_smallest_loss_or_the_largest_share(
    world, tmp_path, score, scores
):
    best, then, now = kept(world, tmp_path, score, scores)
    assert (best.step, then, now) == (2, 2.0, 5.0)
    assert best.scores == {f"held_out_{score}": scores[1]}
    again = BestWeights(best.model, tmp_path, world, score, print)
    again.take_up(tmp_path / "checkpoints" / "step-00000009", 9)
    assert (again.step, again.scores) == (best.step, best.scores)


def test_without_an_evaluation_the_model_stays_as_it_is(world, tmp_path):
    best, then, now = kept(world, tmp_path, "loss", [])
    assert best.step is None
    assert then == now


def test_a_full_disk_keeps_the_best_that_are_there_and_training_goes_on(
    world, tmp_path, monkeypatch
):
    best, *_ = kept(world, tmp_path, "loss", [0.5])
    lines = []
    best.log = lines.append

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        best.keep(2, {"held_out_loss": 0.1}, {})
    assert lines == [
        f"best weights of step 2 not kept, training goes on: {best.path} not written: "
        "[Errno 28] No space left on device"
    ]
    assert (best.step, best.scores) == (1, {"held_out_loss": 0.5})
    assert best.is_beaten_by({"held_out_loss": 0.4})


def test_weights_with_a_score_that_is_not_finite_are_never_the_best(world, tmp_path):
    best = BestWeights(nn.Linear(1, 1), tmp_path, world, "accuracy", print)
    nan = {"held_out_accuracy": 0.9, "held_out_loss": float("nan")}
    assert not best.is_beaten_by(nan)
    good = {"held_out_accuracy": 0.1, "held_out_loss": 2.0}
    assert best.is_beaten_by(good)
    best.keep(1, good, metadata({}, 1, {}, None, good))
    assert not best.is_beaten_by(nan)


@pytest.fixture
def scored(monkeypatch):
    """Let the evaluations of runs have these accuracies, each once, and losses that get worse."""
    accuracies = list(ACCURACIES)

    def score(*args: object, **named: object) -> dict[str, float]:
        real = evaluation_score(*args, **named)
        return real | {"accuracy": accuracies.pop(0), "loss": 10.0 - len(accuracies)}

    evaluation_score = evaluation.score
    monkeypatch.setattr(evaluation, "score", score)
    return accuracies


def train_here(*args: object) -> None:
    vit.main([str(arg) for arg in (*ARGS, *args)])


def assert_best_is_of_step(out: Path, step: int) -> None:
    best = load_file(out / BEST)
    there = whole_tensors(out / "checkpoints" / f"step-{step:08d}")["model"]
    assert best.keys() == there.keys()
    assert all(torch.equal(best[name], there[name]) for name in there)


def test_a_run_keeps_and_reports_both_and_what_follows_takes_the_best(scored, tmp_path, capsys):
    out = tmp_path / "run"
    train_here("--epochs", 4, "--out", out)
    said = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    # The step of a score is that of the row in which it is.
    scored_rows = [row for row in rows(out / "metrics.jsonl") if "held_out_accuracy" in row]
    best = max(scored_rows, key=lambda row: row["held_out_accuracy"])
    assert (best["step"], scored_rows[-1]["step"]) == (2 * EPOCH - 1, 4 * EPOCH - 1)
    assert summary["best_step"] == best["step"]
    assert summary["best_held_out_loss"] == best["held_out_loss"] == 8.0
    assert (summary["best_held_out_accuracy"], summary["held_out_accuracy"]) == (0.8, 0.1)
    assert f"best weights ({BEST}): step {best['step']}, held-out loss 8, accuracy 80.0%" in said
    last = f"last weights (model.safetensors): step {4 * EPOCH - 1}, held-out loss 10, accuracy"
    assert f"{last} 10.0%" in said
    shown = (out / "page.html").read_text()
    assert f"best 80.0% at step {best['step']}; final 10.0% at step {4 * EPOCH - 1}" in shown
    assert f"of step {best['step']}, in {BEST}" in shown
    assert_best_is_of_step(out, 2 * EPOCH)

    _, info = load(out)
    assert (info.path.name, info.step, info.accuracy) == (BEST, best["step"], 0.8)
    last, info = load(out, last=True)
    assert (info.path.name, info.step, info.loss) == ("model.safetensors", 4 * EPOCH - 1, 10.0)
    _, info = load(out / "checkpoints" / f"step-{2 * EPOCH:08d}")
    assert info.step == best["step"]
    there = whole_tensors(out / "checkpoints" / f"step-{4 * EPOCH:08d}")["model"]
    assert all(torch.equal(tensor, there[name]) for name, tensor in last.state_dict().items())


def test_a_resume_keeps_the_known_best(scored, tmp_path):
    train_here("--epochs", 3, "--out", tmp_path)
    best = (tmp_path / BEST).read_bytes()
    # A resume evaluates what its checkpoint was written ahead of.
    scored[:] = [0.8, 0.3]
    train_here("--epochs", 4, "--out", tmp_path, "--resume", "auto")
    assert json.loads((tmp_path / "summary.json").read_text())["best_step"] == 2 * EPOCH - 1
    assert (tmp_path / BEST).read_bytes() == best


@pytest.mark.parametrize(("from_epoch", "step"), [(3, 2 * EPOCH - 1), (1, 2 * EPOCH - 1)])
def test_a_resume_in_another_folder_takes_the_best_along_unless_it_is_newer(
    scored, tmp_path, from_epoch, step
):
    train_here("--epochs", 3, "--out", tmp_path / "a")
    scored[:] = {3: [0.7, 0.3], 1: [0.5, 0.6, 0.4, 0.3]}[from_epoch]
    path = tmp_path / "a" / "checkpoints" / f"step-{from_epoch * EPOCH:08d}"
    train_here("--epochs", 4, "--out", tmp_path / "b", "--resume", path)
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["best_step"] == step
    assert summary["best_held_out_accuracy"] == {3: 0.8, 1: 0.6}[from_epoch]
    kept = (tmp_path / "b" / BEST).read_bytes() == (tmp_path / "a" / BEST).read_bytes()
    assert kept == (from_epoch == 3)


def test_an_average_of_the_weights_changes_nothing_about_the_best(scored, tmp_path):
    # Two evaluations a time: of the weights, and of their average, which scores better.
    scored[:] = [0.5, 0.9, 0.7, 0.9, 0.6, 0.9]
    train_here("--epochs", 3, "--out", tmp_path, "--ema", 0.9)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["best_step"], summary["best_held_out_accuracy"]) == (2 * EPOCH - 1, 0.7)
    assert_best_is_of_step(tmp_path, 2 * EPOCH)


def test_a_run_that_is_not_finished_has_its_best_and_one_begun_anew_forgets_it(
    scored, tmp_path, monkeypatch
):
    out = tmp_path / "run"

    def stop(run: object) -> bool:
        if run.progress.step == 3 * EPOCH:
            raise StoppedError
        return False

    with monkeypatch.context() as patch:
        patch.setattr(loop, "any_rank_must_stop", stop)
        train_here("--epochs", 4, "--out", out)
    assert not (out / "summary.json").exists()
    assert load(out)[1].step == 2 * EPOCH - 1
    assert load(out, last=True)[1].step == 3 * EPOCH - 1
    for path in (out / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    scored[:] = [0.7]
    train_here("--epochs", 1, "--out", out)
    assert json.loads((out / "summary.json").read_text())["best_held_out_accuracy"] == 0.7
