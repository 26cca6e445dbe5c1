"""The script for the Long-Range Arena: recipes, which weights are tested, what it refuses."""

import csv
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train.launch import rows
from train import lra, predict
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
    monkeypatch.setattr(lra, "QUICK", ListLimits(2, 3, 3, 6))
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
    monkeypatch.setattr(
        loop, "save_if_best", lambda _, scores: offered.append(scores["held_out_loss"])
    )
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


MODELS = {
    "text": (370_562, 20_000, 8000, 1024),
    "retrieval": (395_138, 30_000, 800, 4096),
    "image": (174_986, 35_000, 175, 1024),
    "pathfinder": (173_954, 62_400, 312, 1024),
}


def write_task(folder: Path, task: str) -> Path:
    """Write a small table or small folders of pictures of a task."""
    folder.mkdir()
    rows = 40
    words = [f"{'good' if row % 2 else 'bad'} words, number {row}" for row in range(rows)]
    if task in ("text", "retrieval"):
        columns = {"text": words} if task == "text" else {"text1": words, "text2": words[::-1]}
        columns["label"] = [row % 2 for row in range(rows)]
        with (folder / "train.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[*columns], *zip(*columns.values())])
        return folder
    for name in "abcdefghij"[: 10 if task == "image" else 2]:
        (folder / name).mkdir()
        for place in range(10):
            pixels = np.full((32, 32), 20 * "abcdefghij".index(name) + place, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")
    return folder


@pytest.mark.parametrize("task", MODELS)
def test_each_task_is_that_of_its_model_with_the_published_recipe(task, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_task(tmp_path / "data", task)
    params, steps, warmup, tokens = MODELS[task]
    model = f"nystromformer_{task}"
    of_model, settings = task_of("--model", model, "--data", data)
    assert settings.task == task
    assert (of_model.facts["params"], settings.steps) == (params, steps)
    assert settings.warmup * settings.steps == pytest.approx(warmup)
    assert (settings.lr, settings.landmarks, settings.cycle_momentum) == (1e-4, 64, True)
    assert settings.batch_size == (256 if task in ("image", "pathfinder") else 32)
    assert of_model.facts["tokens"] == tokens
    assert of_model.facts["held_out"].endswith("of each class for dev and test")
    by_task, _ = task_of("--task", task, "--data", data)
    assert by_task.facts == of_model.facts
    figure = "figure9_depth1_heads4"
    if task == "text":
        assert task_of("--model", figure, "--data", data)[1].task == "text"


@pytest.mark.parametrize("task", MODELS)
def test_each_task_trains_resumes_and_predicts(task, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, out = write_task(tmp_path / "data", task), tmp_path / "run"
    flags_ = ["--task", task, "--data", str(data), "--batch-size", "4", "--out", str(out)]
    flags_ += ["--model", f"nystromformer_{task}_lean", "--kappa-every", "0", "--eval-every", "0"]
    if task in ("text", "retrieval"):
        flags_ += ["--length", "64"]
    for steps in ("1", "2"):
        lra.main([*flags_, "--steps", steps, "--resume", "auto"])
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["task"], summary["steps"], summary["resumed_at"]) == (task, 2, [1])
    assert 0 <= summary["test_accuracy"] <= 1
    inputs = {"text": ["good words"], "retrieval": ["good words", "bad words"]}
    capsys.readouterr()
    predict.main([str(out), *inputs.get(task, [str(data)])])
    said = capsys.readouterr().out
    assert re.search(r": \w+ \d+\.\d%, \w+ \d+\.\d%", said)
    if task not in inputs:
        assert f"of {100 if task == 'image' else 20} pictures" in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--recipe", "paper", "--model", "nystromformer_small"],
            "--length must be at most the 16 tokens of --model nystromformer_small, got 2000",
        ),
        (["--model", "nystromformer_image"], "--task image needs --data: a folder or hf:NAME"),
        (["--task", "text"], "--task text needs --data: a folder or hf:NAME"),
        (
            ["--model", "nystromformer_text_lean", "--task", "listops"],
            "--model nystromformer_text_lean is for --task text, got --task listops",
        ),
        (
            ["--model", "nystromformer_small", "--task", "pathfinder", "--data", "x"],
            "--model nystromformer_small is for --task listops, got --task pathfinder",
        ),
        (
            ["--recipe", "quick", "--data", "x"],
            "--recipe quick needs generated lists, got .*data x",
        ),
        (["--sizes", "1,2,3", "--data", "x"], "--sizes needs --data generated, got x"),
        (["--length", "9"], "--length must be 16 where no text of tables is read, got 9"),
        (["--task", "image", "--data", "x", "--length", "9"], "--length must be 1024 .* got 9"),
        (
            ["--task", "retrieval", "--data", "x", "--text-column", "a"],
            "--text-column must be given 2 times for --task retrieval and --data x, got 1",
        ),
        (
            ["--task", "text", "--data", "x", "--length", "5000"],
            "--length must be at most the 4096 tokens of --model nystromformer_text, got 5000",
        ),
        (
            ["--task", "text", "--data", "nowhere"],
            "--data must be a folder or hf:NAME, got nowhere",
        ),
        (["--landmarks", "12"], "--landmarks must divide the 16 tokens"),
        (["--data", "lists"], "--data must be a folder or hf:NAME, got lists"),
        (["--model", "vit_base"], "must be one of nystromformer_small"),
        (["--heads", "2,2,2", "--depth", "2"], r"one value or 2 \(one per layer\), got 3"),
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
