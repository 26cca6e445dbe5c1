"""What a run begins with: the weights of another, and what it leaves as it is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.forked import on_two_ranks
from tests.train.launch import TINY
from tests.train.trained import bert, gpt, train_text
from train import vit
from train.checkpoint.shards import whole_of
from train.config import flags
from train.loop import parallel
from train.loop.initial import freeze, frozen_names, initial
from train.loop.optimizer import make_optimizer
from train.vit import ImageSettings

NAMES = ["pos_embed", "blocks.1.a", "blocks.10.a", "norm.weight", "head.weight", "head.bias"]


def train(out: Path, *args: object) -> dict[str, torch.Tensor]:
    vit.main([*TINY, "--out", str(out), *map(str, args)])
    return load_file(out / "model.safetensors")


def task_of(*args: object) -> Any:
    settings = flags.parse("vit.py", "", [*TINY, *map(str, args)], ImageSettings)
    return vit.make_task(settings)[0]


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("before") / "run"
    train(folder, "--steps", 2)
    return folder


def test_prefixes_end_at_a_dot():
    assert frozen_names("blocks.1", NAMES) == {"blocks.1.a"}
    assert frozen_names("blocks.,pos_embed", NAMES) == {"blocks.1.a", "blocks.10.a", "pos_embed"}
    assert frozen_names("all-but-head", NAMES) == set(NAMES[:4])
    assert frozen_names(None, NAMES) == set()
    for given, said in (
        ("block", "begin with pos_embed, blocks, norm, head; got 'block'"),
        ("blocks,", "got ''"),
        (",".join(NAMES), "leaves nothing to train"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            frozen_names(given, NAMES)


def test_frozen_parameters_stay_and_the_others_learn(before, tmp_path, capsys):
    args = ["--steps", 2, "--init-from", before, "--freeze", "all-but-head", "--ckpt-every", 1]
    after = train(tmp_path / "run", *args, "--weight-decay", 0.5, "--lr", 0.1)
    was = load_file(before / "model.safetensors")
    changed = {name for name in was if not torch.equal(was[name], after[name])}
    assert changed == {"head.weight", "head.bias"}
    said = capsys.readouterr().out
    assert re.search(
        r"initial weights from .*model_best.safetensors, step 2: \d+ of \d+ tensors", said
    )
    assert re.search(r"trained params +│ 1,930 ", said)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["trained_params"] == 1930


def test_a_run_that_goes_on_needs_no_initial_weights_and_the_same_freeze(before, tmp_path, capsys):
    args = ["--out", str(tmp_path / "run"), "--resume", "auto", "--init-from"]
    vit.main([*TINY, *args, str(before), "--steps", "1", "--freeze", "blocks"])
    vit.main([*TINY, *args, "gone", "--steps", "2", "--freeze", "blocks"])
    assert "resumed from" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        vit.main([*TINY, *args, "gone", "--steps", "3", "--freeze", "head"])
    assert "needs --freeze blocks as it was saved with, got head" in capsys.readouterr().err


def test_a_head_of_other_classes_is_new(before):
    task = task_of("--init-from", before)
    task.about["classes"] = [*"012345678", "nine"]
    found = initial(str(before), task, task.build())
    assert found.fresh == {"head.weight": "of other classes", "head.bias": "of other classes"}
    assert len(found.lines()) == 2
    assert "new, of other classes: head.weight, head.bias" in found.lines()


def test_positions_of_another_size_are_interpolated_as_timm_does(before):
    timm = pytest.importorskip("timm")
    task = task_of("--init-from", before)
    arguments = task.build.keywords | {"image_size": 12}
    model = task.build.func(**arguments)
    found = initial(str(before), task, model)
    found.weights.copy_into(model, found.changes)
    was = load_file(before / "model.safetensors")
    expected = timm.layers.resample_abs_pos_embed(
        was["pos_embed"], [6, 6], num_prefix_tokens=0, verbose=False
    )
    assert torch.allclose(model.pos_embed, expected)
    assert torch.equal(model.head.weight, was["head.weight"])
    assert "resized: pos_embed" in found.lines()


def test_weights_of_another_family_are_refused(before, tmp_path, capsys):
    text = train_text(bert, tmp_path)
    for source, said in ((text, "of the family bert, not of vit"), (tmp_path, "intact checkpoint")):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            train(tmp_path / "a", "--init-from", source, "--heads", 4, "--steps", 1)
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_text_begins_with_weights_of_another_context(tmp_path):
    before = train_text(gpt, tmp_path / "a")
    more = ["--context", 24, "--lr", 0, "--init-from", before]
    after = load_file(train_text(gpt, tmp_path / "b", *more) / "model.safetensors")
    was = load_file(before / "model.safetensors")
    assert torch.equal(after["pos_embed"][:16], was["pos_embed"])
    assert not after["pos_embed"][16:].any()
    assert torch.equal(after["head.weight"], was["head.weight"])


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Take weights, freeze all but the head and do a step, on two ranks."""
    with parallel.world() as world:
        task = task_of()
        model = parallel.make_model(task.build, world, seed=9, bf16=False)
        found = initial(str(folder / "run"), task, model)
        found.weights.copy_into(model, found.changes)
        names = [name for name, _ in model.named_parameters()]
        freeze(model, frozen_names("all-but-head", names))
        optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
        task.loss(model, (torch.rand(4, 1, 8, 8), torch.arange(4)), 0).backward()
        optimizer.step()
        was = load_file(folder / "run" / "model.safetensors")
        now = {name: whole_of(p.detach()) for name, p in model.named_parameters()}
        held = sum(len(group["params"]) for group in optimizer.param_groups)
    return {"changed": sorted(n for n in now if not torch.equal(now[n], was[n])), "held": held}


@pytest.mark.slow
def test_two_ranks_take_weights_and_train_the_head_alone(tmp_path):
    train(tmp_path / "run", "--steps", 2)
    for found in on_two_ranks(__name__, tmp_path):
        assert found == {"changed": ["head.bias", "head.weight"], "held": 2}
