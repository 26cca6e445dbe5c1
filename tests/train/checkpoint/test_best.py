"""The best weights on the held-out items: kept beside the last, found again, taken by default."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.train.launch import TINY, whole_tensors
from train import vit
from train.checkpoint.best import BestWeights
from train.checkpoint.weights import BEST, metadata
from train.export import load
from train.loop import evaluation, parallel
from train.loop import train as loop
from train.loop.train import StoppedError

pytestmark = pytest.mark.slow

EPOCH = 4  # steps
# Held-out losses of four evaluations: the second is the best, the third its equal.
LOSSES = [0.5, 0.2, 0.2, 0.9]
ARGS = [*TINY, "--batch-size", 352, "--eval-every", 1, "--ckpt-every", EPOCH, "--keep", 9]


@pytest.fixture
def world():
    with parallel.world() as world:
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
    again.take_up()
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


@pytest.fixture
def scored(monkeypatch):
    """Let the evaluations of runs have these losses, each loss once."""
    losses = list(LOSSES)

    def score(*args: object, **named: object) -> dict[str, float]:
        real = evaluation_score(*args, **named)
        return real | {"loss": losses.pop(0)}

    evaluation_score = evaluation.score
    monkeypatch.setattr(evaluation, "score", score)
    return losses


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
    assert summary["best_step"] == 2 * EPOCH
    assert (summary["best_held_out_loss"], summary["held_out_loss"]) == (0.2, 0.9)
    assert "best_held_out_accuracy" in summary
    assert f"best weights ({BEST}): step {2 * EPOCH}, held-out loss 0.2, accuracy" in said
    assert f"last weights (model.safetensors): step {4 * EPOCH}, held-out loss 0.9" in said
    assert_best_is_of_step(out, 2 * EPOCH)

    _, info = load(out)
    assert (info.path.name, info.step, info.loss) == (BEST, 2 * EPOCH, 0.2)
    last, info = load(out, last=True)
    assert (info.path.name, info.step, info.loss) == ("model.safetensors", 4 * EPOCH, 0.9)
    there = whole_tensors(out / "checkpoints" / f"step-{4 * EPOCH:08d}")["model"]
    assert all(torch.equal(tensor, there[name]) for name, tensor in last.state_dict().items())


def test_a_resume_keeps_the_known_best(scored, tmp_path):
    train_here("--epochs", 3, "--out", tmp_path)
    best = (tmp_path / BEST).read_bytes()
    # A resume evaluates what its checkpoint was written ahead of.
    scored[:] = [0.2, 0.3]
    train_here("--epochs", 4, "--out", tmp_path, "--resume", "auto")
    assert json.loads((tmp_path / "summary.json").read_text())["best_step"] == 2 * EPOCH
    assert (tmp_path / BEST).read_bytes() == best


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
    assert load(out)[1].step == 2 * EPOCH
    assert load(out, last=True)[1].step == 3 * EPOCH
    for path in (out / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    scored[:] = [0.7]
    train_here("--epochs", 1, "--out", out)
    assert json.loads((out / "summary.json").read_text())["best_held_out_loss"] == 0.7
