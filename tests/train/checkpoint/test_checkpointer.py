"""Checkpoints by themselves: what is kept, and that reading one runs no code."""

import hashlib
import io
import json
import os
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.train.launch import SHARD, manifest_of, whole_tensors
from train.checkpoint import staging
from train.checkpoint.checkpointer import (
    Checkpointer,
    find_damage,
    read_train_state,
)
from train.checkpoint.weights import open_weights
from train.loop import parallel
from train.loop.optimizer import ShardAdamW, local, make_optimizer

SETTINGS: dict[str, Any] = {"settings": {}}


class Model(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw every parameter."""
        for p in self.parameters():
            nn.init.normal_(local(p), generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def world():
    with parallel.init_distributed() as world:
        yield world


@pytest.fixture(params=["one", "fsdp"])
def made(world, tmp_path, request):
    """A model after one step, its optimizer, and a place for checkpoints."""
    model = parallel.make_model(Model, world, seed=0, bf16=False, mode=request.param)
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.01)
    step(model, optimizer)
    said: list[str] = []
    return model, optimizer, Checkpointer(tmp_path / "c", world, keep=2, log=said.append), said


def step(model: nn.Module, optimizer: ShardAdamW) -> None:
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def names(checkpointer: Checkpointer) -> list[str]:
    """What is in the folder of checkpoints."""
    return sorted(path.name for path in checkpointer.folder.iterdir())


def state(model: nn.Module, optimizer: ShardAdamW) -> list[torch.Tensor]:
    """Copies of every weight and moment."""
    states = (optimizer.state[share] for share in optimizer.shares.values())
    moments = [tensor for state in states for tensor in state.values()]
    return [t.detach().clone() for t in [*map(local, model.parameters()), *moments]]


def test_a_checkpoint_holds_the_moment_of_its_call_and_training_goes_on(made):
    model, optimizer, checkpointer, said = made
    before = state(model, optimizer)
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
        with torch.no_grad():
            for p in model.parameters():
                local(p).fill_(7.0)
        step(model, optimizer)
    assert (said, checkpointer.saved_step) == ([], 1)
    path = checkpointer.find("auto")
    assert path is not None
    checkpointer.load(path, model, optimizer, {})
    for now, then in zip(state(model, optimizer), before, strict=True):
        assert torch.equal(now, then)


def test_the_global_generator_continues(made):
    model, optimizer, checkpointer, _ = made
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
    first = torch.rand(9)
    checkpointer.load(checkpointer.find("auto"), model, optimizer, {})
    assert torch.equal(torch.rand(9), first)


def test_a_checkpoint_that_lost_a_file_does_not_push_out_a_whole_one(made):
    model, optimizer, checkpointer, _ = made
    with checkpointer:
        for number in (1, 2):
            checkpointer.save(number, model, optimizer, {}, SETTINGS)
        checkpointer.wait()
        (checkpointer.folder / "step-00000002" / SHARD).unlink()
        checkpointer.save(3, model, optimizer, {}, SETTINGS)
        checkpointer.wait()
        assert names(checkpointer) == [*(f"step-0000000{n}" for n in (1, 2, 3))]
        checkpointer.save(4, model, optimizer, {}, SETTINGS)
    assert names(checkpointer) == ["step-00000003", "step-00000004"]


def test_a_failed_save_leaves_the_others_and_a_later_one_works_again(made, monkeypatch):
    model, optimizer, checkpointer, said = made

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with checkpointer:
        for number in (1, 2):
            checkpointer.save(number, model, optimizer, {}, SETTINGS)
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for number in (3, 4, 5):
                checkpointer.save(number, model, optimizer, {}, SETTINGS)
            checkpointer.wait()
        assert names(checkpointer) == ["step-00000001", "step-00000002"]
        assert checkpointer.saved_step == 2
        checkpointer.save(6, model, optimizer, {}, SETTINGS)
    assert names(checkpointer) == ["step-00000002", "step-00000006"]
    assert said == [
        f"checkpoint of step {number} not saved, training goes on: "
        "[Errno 28] No space left on device"
        for number in (3, 4, 5)
    ]


def test_one_that_cannot_take_the_place_of_another_leaves_it_there(made, monkeypatch):
    model, optimizer, checkpointer, said = made
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
        checkpointer.wait()
        before = manifest_of(checkpointer.folder / "step-00000001")
        rename = Path.rename

        def refuse(path, target):
            if path.name == ".step-00000001":
                raise OSError(5, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
    assert manifest_of(checkpointer.folder / "step-00000001") == before
    assert len(said) == 1


def places(checkpointer: Checkpointer) -> list[int]:
    return [segment.data_ptr() for segment in checkpointer.staging._segments]


@pytest.mark.parametrize("averages", [False, True])
def test_a_prepared_save_takes_no_more_memory(made, averages):
    model, optimizer, checkpointer, said = made
    average = {n: p.detach().clone() for n, p in model.named_parameters()} if averages else {}
    with checkpointer:
        checkpointer.prepare(model, optimizer, average)
        checkpointer.staging.join()
        before = places(checkpointer)
        checkpointer.staging._add_segment = None
        for number in (1, 2):
            checkpointer.save(number, model, optimizer, average, SETTINGS)
            step(model, optimizer)
        assert places(checkpointer) == before != []
    assert said == []
    assert find_damage(checkpointer.folder / "step-00000002") is None


def test_leaving_a_checkpointer_ends_its_thread(made, monkeypatch):
    monkeypatch.setattr(staging, "_REST", 1e6)
    model, optimizer, checkpointer, said = made
    with Checkpointer(checkpointer.folder, checkpointer.world, keep=1, log=said.append) as other:
        other.prepare(model, optimizer, {})
    assert "checkpoint memory" not in {thread.name for thread in threading.enumerate()}
    assert said == []


EMPTY = torch.empty


def refuse(*args: Any, **options: Any) -> torch.Tensor:
    """Allocate nothing for a copy of the state, but what everybody else wants."""
    if "pin_memory" in options:
        raise RuntimeError("DefaultCPUAllocator:\n can't allocate memory")
    return EMPTY(*args, **options)


SHORT: dict[str, tuple[Callable[..., Any], str]] = {
    "available_memory": (lambda: 100, "a copy of the state takes 0.0 GB of this machine's memory"),
    "torch.empty": (refuse, "no memory for a copy of the state (DefaultCPUAllocator: can't"),
}


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("name", SHORT)
def test_without_memory_a_checkpoint_is_written_while_training_waits(
    made, name, prepared, monkeypatch
):
    model, optimizer, checkpointer, said = made
    fails, words = SHORT[name]
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
    with (
        Checkpointer(checkpointer.folder, checkpointer.world, keep=3, log=said.append) as other,
        monkeypatch.context() as patch,
    ):
        patch.setattr(f"train.checkpoint.staging.{name}", fails)
        if prepared:
            other.prepare(model, optimizer, {})
            other.staging.join()
        for number in (2, 3):
            other.save(number, model, optimizer, {}, SETTINGS)
            assert other._pending is None
            assert other.saved_step == number
    one, *others = (manifest_of(path)["files"] for path in sorted(other.folder.iterdir()))
    assert len(others) == 2
    assert all(files[SHARD] == one[SHARD] for files in others)
    (line,) = said
    assert words in line
    assert line.endswith("training waits while a checkpoint is written")


@pytest.fixture
def saved(made):
    """A checkpoint to tamper with."""
    model, optimizer, checkpointer, _ = made
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
    return checkpointer.folder / "step-00000001"


def seal(checkpoint: Path) -> None:
    """Write the manifest anew, as who tampers with a checkpoint would."""
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest_of(checkpoint)))
    assert find_damage(checkpoint) is None


def test_a_pipe_or_a_folder_in_place_of_a_file_is_not_read(saved):
    for name in (SHARD, "manifest.json"):
        for make in (os.mkfifo, os.mkdir):
            moved = (saved / name).rename(saved / "moved")
            make(saved / name)
            assert find_damage(saved).startswith(
                (f"{name} is no", f"{name}: is no", f"{name}: Is a")
            )
            (os.rmdir if (saved / name).is_dir() else os.unlink)(saved / name)
            moved.rename(saved / name)
    assert find_damage(saved) is None


DIGEST = hashlib.sha256(b"x").hexdigest()
ENTRY = {"bytes": 1, "sha256": DIGEST}
FILES = {"state.json": ENTRY, SHARD: ENTRY}


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 100_000,
        "[]",
        {"files": []},
        *({"files": {k: v for k, v in FILES.items() if k != name}} for name in FILES),
        *({"files": FILES | {name: ENTRY}} for name in ("../elsewhere", "/etc/passwd", "zero\0")),
        {"files": FILES | {"state.json": [1, DIGEST]}},
        {"files": FILES | {"state.json": {"bytes": "1", "sha256": DIGEST}}},
        {"files": FILES | {"state.json": {"bytes": 1, "sha256": None}}},
    ],
    ids=lambda manifest: str(manifest)[:40],
)
def test_a_manifest_that_no_run_writes_is_damage(tmp_path, manifest):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    for name in FILES:
        (folder / name).write_text("x")
    (tmp_path / "elsewhere").write_text("x")
    assert find_damage(folder)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("[" * 100_000, "is not JSON"),
        ("[1]", r"must be an object, got \[1\]"),
        ({"step": True}, "has an invalid step, got True"),
        ({"ranks": 0}, "has an invalid ranks, got 0"),
        ({"settings": ["x" * 99]}, "has an invalid settings, got .*[.]{3}"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_state_that_no_run_writes_is_refused_in_one_line(saved, made, state, message):
    model, optimizer, checkpointer, _ = made
    if isinstance(state, dict):
        state = json.dumps(read_train_state(saved) | state)
    (saved / "state.json").write_text(state)
    seal(saved)
    for read in (read_train_state, lambda path: checkpointer.load(path, model, optimizer, {})):
        with pytest.raises(ValueError, match=rf"state\.json {message}") as caught:
            read(saved)
        assert "\n" not in str(caught.value)


RAN = "ran"


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (RAN,)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which code that should not run would leave a file."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Evil()))
    (tmp_path / RAN).rmdir()  # it would
    return tmp_path


def headed(header: bytes, data: bytes = b"") -> bytes:
    """A file as safetensors writes it, of any header."""
    return len(header).to_bytes(8, "little") + header + data


def with_offsets(info: str) -> bytes:
    """A shard whose place in its tensor is said so."""
    tensors = {"model.blocks.0.weight": torch.zeros(8, 8)}
    return safetensors.torch.save(tensors, metadata={"DCP_SHARDING_INFO": info})


def torch_saved() -> bytes:
    stream = io.BytesIO()
    torch.save(Evil(), stream)
    return stream.getvalue()


SHARDS = {
    "pickle": pickle.dumps(Evil()),
    "torch.save": torch_saved(),
    "empty": b"",
    "long header": b"\xff" * 64,
    "nested": headed(b"[" * 100_000),
    "cut": headed(b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
    "dtype": headed(b'{"x": {"dtype": "F3", "shape": [], "data_offsets": [0, 4]}}', bytes(4)),
    "offsets nested": with_offsets("[" * 100_000),
    "offsets of nothing": with_offsets("{}"),
    "offsets of letters": with_offsets('{"model.blocks.0.weight": {"saved_offsets": "ab"}}'),
}


@pytest.mark.parametrize("content", SHARDS)
def test_a_shard_that_no_run_writes_is_refused_in_one_line_and_no_code_runs(
    saved, made, here, content
):
    model, optimizer, checkpointer, _ = made
    (saved / SHARD).write_bytes(SHARDS[content])
    seal(saved)
    for read in (
        lambda: checkpointer.load(saved, model, optimizer, {}),
        lambda: open_weights(saved, "--checkpoint").load(model, set()),
        lambda: whole_tensors(saved),
    ):
        with pytest.raises(ValueError, match=re.escape(str(saved))) as caught:
            read()
        assert "cannot load" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (here / RAN).exists()


def test_another_model_is_refused_with_what_differs(made, world):
    model, optimizer, checkpointer, _ = made
    with checkpointer:
        checkpointer.save(1, model, optimizer, {}, SETTINGS)
    average = {"blocks.0.weight": model.blocks[0].weight.detach().clone()}
    with pytest.raises(ValueError, match=r"cannot load .*average\.blocks\.0\.weight"):
        checkpointer.load(checkpointer.folder / "step-00000001", model, optimizer, average)
