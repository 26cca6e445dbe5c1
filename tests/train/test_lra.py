"""The script for long-range tasks: recipes, published files, what it refuses."""

import json
import os
import pickle
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from tests.train.launch import rows
from tests.train.published import (
    cifar,
    write_cifar,
    write_lists,
    write_pairs,
    write_pathfinder,
    write_reviews,
)
from train import lra
from train.config import flags
from train.data.longrange.files import read_cifar
from train.data.longrange.listops import ListLimits
from train.data.longrange.tasks import baseline
from train.loop import train as loop
from train.lra import LraSettings

TINY = ["--heads", "2", "--depth", "1", "--head-dim", "8", "--kappa-every", "0", "--workers", "0"]


@pytest.fixture
def few(tmp_path):
    """Flags of the quick recipe with little to learn, kept in a folder of the test."""
    sizes = ["--sizes", "64,24,32", "--batch-size", "16", "--steps", "2"]
    return [*TINY, *sizes, "--cache", str(tmp_path / "data")]


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Write CIFAR-10 of a few images, which is taken for the published one by its MD5."""

    def write(folder, count: int):
        sums = write_cifar(folder, count)
        for part in ("train_list", "test_list"):
            known = [[name, sums[name]] for name, _ in getattr(CIFAR10, part)]
            monkeypatch.setattr(CIFAR10, part, known)
        meta = CIFAR10.meta | {"md5": sums["batches.meta"]}
        monkeypatch.setattr(CIFAR10, "meta", meta)

    return write


def task_of(*args: object) -> tuple:
    return lra.make_task(flags.parse("lra.py", "", [str(arg) for arg in args], LraSettings))


def test_without_flags_short_lists_are_learned(tmp_path, monkeypatch):
    # Flat lists of few digits are learned in seconds.
    monkeypatch.setattr(lra, "QUICK_LIMITS", ListLimits(2, 3, 3, 6))
    lra.main(
        [
            *("--sizes", "3000,200,400", "--steps", "160", "--depth", "1", "--kappa-every", "100"),
            *("--cache", str(tmp_path), "--out", str(tmp_path / "run")),
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
def test_listops_follows_the_published_recipe(tmp_path, model, params, heads):
    few = ["--sizes", "96,4,4", "--cache", tmp_path]
    task, settings = task_of("--task", "listops", "--model", model, *few)
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
    assert (tokens.shape, tokens.dtype) == ((2, 2048), torch.int64)
    assert (lengths.dtype, labels.dtype) == (torch.int32, torch.int64)
    assert ((tokens != 0).sum(1) == lengths).all()
    assert lengths.min() > 500
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [96, 4, 4]
    assert (task.best_of, task.tokens_per_item) == ("accuracy", 2048)
    assert settings.cycle_momentum


def test_text_is_bytes_after_the_padding(tmp_path):
    write_reviews(tmp_path, 10)
    task, settings = task_of("--task", "text", "--data", tmp_path, "--batch-size", 2)
    assert (task.facts["params"], settings.steps, settings.warmup) == (370_562, 20_000, 0.4)
    # Every tenth of 20 training reviews is held out; sorted, the second review of a class is 1.
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [18, 2, 20]
    tokens, lengths, labels = task.train.__getitems__([(0, 0)])
    assert tokens.shape == (1, 1024)
    assert bytes((tokens[0, : lengths[0]] - 1).tolist()) == b"train 1 bad bad bad bad "
    assert labels.tolist() == [0]
    assert task.facts["baseline_constant_class"] == 0.5


def test_pairs_are_read_once_and_batched_together(tmp_path):
    write_pairs(tmp_path, ["alpha", "b'beta'", "gamma " * 900, "delta"])
    task, _ = task_of("--task", "retrieval", "--data", tmp_path, "--batch-size", 2)
    assert task.facts["params"] == 395_138
    tokens, lengths, labels = task.train.__getitems__([(0, 1), (0, 0)])
    assert (tokens.shape, lengths.shape) == ((2, 2, 4096), (2, 2))
    assert lengths.tolist() == [[7, 4000], [5, 7]]
    assert bytes((tokens[1, 0, :5] - 1).tolist()) == b"alpha"
    assert labels.tolist() == [1, 0]
    assert len(task.train.corpus) == 4
    built = task.build()
    assert torch.isfinite(task.loss(built, (tokens, lengths, labels), 0))


def test_images_are_grey_as_published(tmp_path, small_cifar):
    small_cifar(tmp_path, 20)
    task, settings = task_of("--task", "image", "--data", tmp_path, "--batch-size", 2)
    assert (task.facts["params"], settings.batch_size, settings.steps) == (174_986, 2, 35_000)
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [90, 10, 20]
    tokens, lengths, labels = task.held_out.__getitems__([(0, 0)])
    images, classes = cifar(4, 20)  # the last batch, of which 10 are trained on
    red, green, blue = images[10].astype(np.float64).reshape(3, 1024) / 255
    grey = np.floor((0.2989 * red + 0.587 * green + 0.114 * blue) * 255.5)
    # float32 rounds a few values over a whole number.
    assert np.abs(tokens[0].numpy() - grey).max() <= 1
    assert (tokens[0].numpy() == grey).mean() > 0.99
    assert (lengths.tolist(), labels.tolist()) == ([1024], [classes[10]])
    inner = read_cifar(tmp_path / "cifar-10-batches-py")
    assert np.array_equal(inner["dev"][0], tokens[0])


class Trap:
    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_that_is_not_the_published_one_is_not_opened(tmp_path, small_cifar):
    small_cifar(tmp_path, 2)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(pickle.dumps({"data": Trap(str(tmp_path / "ran")), "labels": [1]}))
    with pytest.raises(ValueError, match="must contain CIFAR-10's published files") as error:
        read_cifar(tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_published_pathfinder_images_are_read(tmp_path):
    images = write_pathfinder(tmp_path, 11)
    task, _ = task_of("--task", "pathfinder", "--data", tmp_path, "--batch-size", 2)
    assert task.facts["params"] == 173_954
    assert [len(part) for part in (task.train, task.held_out, task.test)] == [8, 1, 1]
    tokens, _, labels = task.train.__getitems__([(0, 1)])
    assert np.array_equal(tokens[0], images[2].ravel())
    assert labels.tolist() == [0]


def test_baselines_are_learned_on_the_training_items():
    cues = np.array([1, 1, 1, 2, 2, 3])
    labels = np.array([5, 5, 4, 7, 7, 5])
    test_cues, test_labels = np.array([1, 2, 2, 3]), np.array([5, 7, 5, 4])
    assert baseline(labels, test_labels) == 0.5
    assert baseline(labels, test_labels, cues, test_cues) == 0.5
    assert baseline(labels, test_labels[:2], cues, test_cues[:2]) == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "text"], "--task text needs --data, the folder aclImdb"),
        (["--data", "lists", "--recipe", "quick"], "--recipe quick needs .* got listops and lists"),
        (["--data", "generated", "--model", "nystromformer_small"], "the 16 tokens .* got 2000"),
        (["--data", "lists"], "--data must be generated or .* got lists"),
        (["--recipe", "quick", "--model", "vit_base"], "must be one of nystromformer_small"),
    ],
)
def test_what_does_not_fit_is_refused(few, args, message):
    with pytest.raises(ValueError, match=message):
        task_of(*few, *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--length", "33"], "--length must be at most the 16 tokens"),
        (["--landmarks", "12"], "--landmarks must divide the 16 tokens"),
        (["--task", "text", "--data", ".", "--model", "nystromformer_listops"], "of 257 tokens"),
        (["--heads", "2,2,2", "--depth", "2"], "--heads must be one value or one per layer, got 3"),
        (["--batch-size", "9", "--accum", "2"], "--batch-size must be .* got 9"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line_before_data_is_opened(
    args, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(lra, "open_task", None)
    with pytest.raises(SystemExit, match="2"):
        lra.main([*args, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_the_cycle_of_momentum_is_of_the_published_recipes_alone(few):
    published = ["--recipe", "paper", "--sizes", "64,24,32"]
    assert [
        task_of(*few, *args)[1].cycle_momentum
        for args in ([], ["--cycle-momentum"], published, [*published, "--no-cycle-momentum"])
    ] == [False, True, True, False]


FILES = {
    "text": lambda folder: write_reviews(folder, 2),
    "retrieval": lambda folder: write_pairs(folder, ["a", "b"]),
    "image": lambda folder: write_cifar(folder, 2),
    "listops": lambda folder: write_lists(folder, [("[MIN 1 2 ]", 1)] * 3),
    "pathfinder": lambda folder: write_pathfinder(folder, 12),
}
HEAD = b"Source\tTarget\n"


@pytest.mark.parametrize(
    ("task", "spoil", "content", "message"),
    [
        ("text", "aclImdb/test/pos", None, "got none in .*test/pos"),
        ("retrieval", "new_aan_pairs.eval.tsv", None, "eval"),
        ("retrieval", "new_aan_pairs.eval.tsv", b"", "got none of dev"),
        ("image", "cifar-10-batches-py/test_batch", None, "contain CIFAR-10's"),
        ("listops", "basic_val.tsv", None, "basic_val"),
        ("listops", "basic_val.tsv", HEAD, "got none of dev"),
        ("listops", "basic_val.tsv", HEAD + b"[SM 1 2 ]\t12\n", "line 2 must have .*not in list"),
        ("listops", "basic_val.tsv", HEAD + b"[MAX 1 2 }\t2\n", "line 2 must have .*'}'"),
        ("listops", "basic_val.tsv", HEAD + b"[MAX 1 2 ]\n", "line 2 must have .*Target"),
        ("listops", "basic_val.tsv", HEAD + b"( )\t1\n", "an empty list"),
        ("listops", "basic_val.tsv", b"\xff" * 9, "basic_val.tsv line 0 must have"),
        ("listops", "basic_val.tsv", HEAD + b"1 " * 70_000, "field limit"),
        ("pathfinder", "metadata/0.npy", None, "metadata"),
        ("pathfinder", "metadata/0.npy", b"imgs/0 sample_0.png 0 7", "class 0 or 1"),
        ("pathfinder", "imgs/0/sample_0.png", b"no image", "sample_0.png, which is no readable"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_missing_or_damaged_file_is_named(tmp_path, task, spoil, content, message):
    FILES[task](tmp_path)
    path = tmp_path / spoil
    if content is not None:
        path.write_bytes(content)
    elif path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.unlink()
    with pytest.raises(ValueError, match=message):
        task_of("--task", task, "--data", tmp_path)
