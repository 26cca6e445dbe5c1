"""Weights in a safetensors file, whatever the ranks; and checkpoints that change their number."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.train.forked import on_two_ranks
from tests.train.launch import SHARD, TINY, whole_tensors
from train import export, vit
from train.checkpoint.checkpointer import Checkpointer, find_damage, newest_first
from train.checkpoint.weights import export_weights, metadata
from train.config import flags
from train.loop import parallel
from train.loop.optimizer import ShardAdamW, local, make_optimizer
from train.vit import ImageSettings

ABOUT = metadata({"model": "vit_digits", "heads": [2, 2]}, 3, {}, None, {})
DETAILS = {"settings": {"model": "vit_digits"}}


def task_of(*args: object):
    """What the script would train."""
    settings = flags.parse("vit.py", "", [str(arg) for arg in (*TINY, *args)], ImageSettings)
    return vit.make_task(settings)[0]


def sharded(world: parallel.DistributedContext, seed: int) -> nn.Module:
    return parallel.make_model(task_of().build, world, seed=seed, bf16=False)


def trained(world: parallel.DistributedContext, seed: int) -> tuple[nn.Module, ShardAdamW]:
    """A sharded model with the moments of one step, each gradient one: the same on any ranks."""
    model = sharded(world, seed)
    optimizer = make_optimizer(model, lr=0.1, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def world():
    with parallel.init_distributed() as world:
        yield world


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


def test_a_plain_model_of_the_same_recipe_loads_the_file_and_computes_the_same(world, tmp_path):
    model = sharded(world, seed=3)
    path = tmp_path / "model.safetensors"
    export_weights(model, path, ABOUT)
    plain = task_of().build()
    plain.load_state_dict(tensors(path), strict=True)
    x = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), model.eval()(x))
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    assert about["format"] == "pt"
    assert about["model"] == "vit_digits"
    assert json.loads(about["settings"])["heads"] == [2, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


class Tied(nn.Module):
    """Two names for one tensor, one that is not contiguous, half precision, and a counter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.norm = nn.BatchNorm1d(4, dtype=torch.bfloat16)


def test_tied_turned_and_half_precision_tensors_are_stored_whole_in_float32(world, tmp_path):
    model = Tied()
    model.norm.num_batches_tracked.fill_(7)
    export_weights(model, tmp_path / "tied.safetensors", ABOUT)
    stored = tensors(tmp_path / "tied.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32, torch.int64}
    other = Tied()
    other.load_state_dict(stored, strict=True)
    assert_same(other.state_dict(), model.state_dict())


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    """A run of two steps with an average."""
    out = tmp_path_factory.mktemp("two")
    args = [*TINY, "--steps", 2, "--ckpt-every", 1, "--ema", 0.5, "--out", out]
    vit.main([str(arg) for arg in args])
    return out


def test_what_a_run_writes_at_its_end_is_what_its_checkpoint_holds(run_of_two, tmp_path):
    saved = whole_tensors(run_of_two / "checkpoints" / "step-00000002")
    for name, kept in {"model": saved["model"], "model_ema": saved["average"]}.items():
        assert_same(tensors(run_of_two / f"{name}.safetensors"), kept)


def test_what_holds_no_weights_is_refused_in_one_line(run_of_two, tmp_path):
    shutil.copytree(run_of_two / "checkpoints" / "step-00000002", tmp_path / "damaged")
    (tmp_path / "damaged" / SHARD).unlink()
    for path, message in (
        (tmp_path / "damaged", rf"got .*damaged: {SHARD}: No such file"),
        (tmp_path / "nowhere", r"got .*nowhere: manifest.json: No such file"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            export.load(path)
        assert "\n" not in str(refused.value)


def state_of(model: nn.Module, optimizer: ShardAdamW) -> dict[str, torch.Tensor]:
    """What this rank holds of every weight and moment."""
    state = {}
    for name, p in model.named_parameters():
        state[name] = local(p).detach().clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{name} {moment}"] = optimizer.state[optimizer.shares[name]][moment].clone()
    return state


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Export and save on two ranks, and load there what one rank saved."""
    with parallel.init_distributed() as world:
        model, optimizer = trained(world, seed=1)
        export_weights(model, folder / "two.safetensors", ABOUT)
        with Checkpointer(folder / "by two", world, keep=1, log=print) as checkpointer:
            checkpointer.save(1, model, optimizer, {}, DETAILS)
        other, fresh = trained(world, seed=2)
        found = Checkpointer(folder / "by one", world, keep=1, log=print)
        found.load(found.find("auto"), other, fresh, {})
        state = state_of(other, fresh)
        same = state.keys() == state_of(model, optimizer).keys()
        differ = [n for n, t in state_of(model, optimizer).items() if not torch.equal(t, state[n])]
    return {"rank": rank, "same names": same, "differ": differ}


@pytest.mark.slow
def test_two_ranks_export_what_one_does_and_each_loads_what_the_other_saved(world, tmp_path):
    model, optimizer = trained(world, seed=1)
    export_weights(model, tmp_path / "one.safetensors", ABOUT)
    with Checkpointer(tmp_path / "by one", world, keep=1, log=print) as checkpointer:
        checkpointer.save(1, model, optimizer, {}, DETAILS)

    for rank, found in enumerate(on_two_ranks(__name__, tmp_path)):
        assert found == {"rank": rank, "same names": True, "differ": []}
    one, two = (tmp_path / f"{n}.safetensors" for n in ("one", "two"))
    assert_same(tensors(two), tensors(one))

    before = state_of(model, optimizer)
    other, fresh = trained(world, seed=2)
    said: list[str] = []
    found = Checkpointer(tmp_path / "by two", world, keep=1, log=said.append)
    path = found.find("auto")
    assert find_damage(path) is None
    assert len([*path.glob("shard-*.safetensors")]) == 2
    found.load(path, other, fresh, {})
    assert_same(state_of(other, fresh), before)
    assert said == ["resuming on 1 ranks from a checkpoint of 2 ranks"]
    assert_same(whole_tensors(path)["model"], tensors(one))


def test_a_run_loads_by_its_folder_its_file_and_its_checkpoint(run_of_two, tmp_path):
    x = torch.rand(4, 1, 8, 8)
    logits = []
    for path in (run_of_two, run_of_two / "model.safetensors", run_of_two / "checkpoints"):
        path = newest_first(path)[0] if path.name == "checkpoints" else path
        model, info = export.load(path)
        assert not model.training
        assert (info.family, info.task, info.step) == ("vit", "images", 1)
        assert (info.image_size, info.channels, info.classes) == (8, 1, tuple("0123456789"))
        assert (len(info.mean), info.pixels, info.settings["ema"]) == (1, "digit", 0.5)
        summary = json.loads((run_of_two / "summary.json").read_text())
        assert info.accuracy == summary["held_out_accuracy"]
        assert info.loss == summary["held_out_loss"]
        with torch.no_grad():
            logits.append(model(x))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    averaged, info = export.load(run_of_two / "model_ema.safetensors")
    assert info.loss == summary["held_out_ema_loss"] != summary["held_out_loss"]
    assert not torch.equal(averaged(x), logits[0])


def hostile(folder: Path, run: Path, **changes: Any) -> Path:
    """A file like a run's, some of whose metadata is another."""
    with safe_open(run / "model.safetensors", framework="pt") as file:
        found = file.metadata()
    about = json.loads(found["about"])
    for name, value in changes.items():
        if name in found:
            found[name] = value
        elif name in about:
            about[name] = value
        else:
            about["arguments"][name] = value
    if "about" not in changes:
        found["about"] = json.dumps(about)
    path = folder / "hostile.safetensors"
    save_file(tensors(run / "model.safetensors"), path, metadata=found)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"about": "{}"},
        {"about": "[" * 200_000},
        {"step": "nine" * 1000},
        {"family": "os.system"},
        {"arguments": 3},
        {"depth": 10**9},
        {"depth": 3},
        {"embed_dim": 10**12},
        {"heads": [16] * 10**6},
        {"device": "cuda"},
        {"pool": "x" * 10**6},
        {"images": {"size": 8, "channels": 1, "mean": [0.5], "std": [0], "pixels": "digit"}},
        {"images": {"size": 4, "channels": 1, "mean": [0.5], "std": [1], "pixels": "digit"}},
        {"classes": 7},
        {"scores": '{"held_out_loss": "low"}'},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_metadata_that_no_run_writes_is_refused_in_one_line(run_of_two, tmp_path, changes):
    path = hostile(tmp_path, run_of_two, **changes)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        export.load(path)
    assert len(str(refused.value)) < 700
    assert str(refused.value).isprintable()
