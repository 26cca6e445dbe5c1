"""Storage that is full, read-only, gone, slow, or refuses one rank, while a run writes to it.

Training goes on, says so in a line, leaves earlier checkpoints alone, and saves again when it can.
"""

import errno
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leaner_kernels.monitor.writers import JsonLines
from tests.train.forked import on_two_ranks
from tests.train.launch import TINY, assert_same_run, rows
from train import export, vit
from train.checkpoint import checkpoints as saving
from train.checkpoint.checkpoints import Checkpoints, find_damage, newest_first
from train.logs.report import Report
from train.loop import parallel
from train.loop.optimizer import make_optimizer

RUN = [*TINY, "--deterministic", "--ema", 0.9, "--ckpt-every", 2, "--keep", 9, "--steps", 8]


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in (*RUN, *args)])


@pytest.fixture(scope="module", autouse=True)
def no_plots() -> Iterator[None]:
    """Half of the time of a run this short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "draw", lambda report: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of eight steps that nothing happens to."""
    out = tmp_path_factory.mktemp("whole")
    train_here("--out", out)
    return out


def command(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)


@pytest.fixture
def mounted(tmp_path) -> Iterator[Callable[..., Path]]:
    """Mounts something, and takes it away at the end; skips where that is not allowed."""
    made: list[Path] = []

    def mount(*options: object) -> Path:
        place = tmp_path / f"mount {len(made)}"
        place.mkdir()
        done = command("mount", *options, place)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        made.append(place)
        return place

    yield mount
    for place in reversed(made):
        if os.path.ismount(place):
            assert command("umount", "--lazy", place).returncode == 0


@pytest.fixture
def at(monkeypatch) -> Callable[[int, Callable[[], None]], None]:
    """Does something when a checkpoint of some step is about to be saved."""
    actions: dict[int, Callable[[], None]] = {}
    save = Checkpoints.save

    def save_after(checkpoints: Checkpoints, step: int, *args: object) -> None:
        if step in actions:
            checkpoints.wait()
            actions.pop(step)()
        save(checkpoints, step, *args)

    monkeypatch.setattr(Checkpoints, "save", save_after)
    return actions.__setitem__


def intact(out: Path) -> list[str]:
    """The checkpoints of a run, each of which must be whole."""
    found = newest_first(out / "checkpoints")
    assert [(path.name, find_damage(path)) for path in found if find_damage(path)] == []
    return [path.name for path in reversed(found)]


def not_saved(captured: str) -> list[str]:
    return re.findall(r"checkpoint of step (\d+) not saved, training goes on: \[Errno", captured)


def as_written(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def fill(ballast: Path) -> None:
    """Leave nothing free on a disk."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    assert shutil.disk_usage(ballast).free == 0


def test_a_full_disk_costs_the_checkpoints_of_that_time_alone(whole, mounted, at, capsys, outcome):
    disk = mounted("-t", "tmpfs", "-o", "size=64M", "tmpfs")
    ballast, before = disk / "ballast", {}

    def look_and_fill() -> None:
        before.update(as_written(disk / "run" / "checkpoints" / "step-00000002"))
        fill(ballast)

    at(4, look_and_fill)
    at(6, ballast.unlink)
    train_here("--out", disk / "run")
    captured = capsys.readouterr()
    assert not_saved(captured.out) == ["4"]
    assert captured.out.count(f"[Errno {errno.ENOSPC}] No space left on device") >= 1
    assert "Traceback" not in captured.out + captured.err
    assert intact(disk / "run") == ["step-00000002", "step-00000006", "step-00000008"]
    assert as_written(disk / "run" / "checkpoints" / "step-00000002") == before
    assert_same_run(disk / "run", whole, resumed=False)
    ended = "training went on, earlier checkpoints intact"
    outcome(fault="disk full for a while", where="steps 4 and 5", tries=1, ended=ended)


def test_a_disk_that_stays_full_leaves_a_run_to_take_up_again(
    whole, mounted, at, capsys, outcome, tmp_path
):
    disk = mounted("-t", "tmpfs", "-o", "size=64M", "tmpfs")

    at(6, lambda: fill(disk / "ballast"))
    with pytest.raises(SystemExit, match="finished at step 8, but nothing of it could be saved"):
        train_here("--out", disk / "run")
    captured = capsys.readouterr()
    assert not_saved(captured.out) == ["6", "8"]
    assert captured.out.count("weights not exported: ") == 2
    assert not (disk / "run" / "summary.json").exists()
    assert "Traceback" not in captured.out + captured.err
    assert intact(disk / "run") == ["step-00000002", "step-00000004"]
    assert not [*(disk / "run").glob("*.safetensors"), *(disk / "run").glob(".*.safetensors")]

    (disk / "ballast").unlink()
    train_here("--out", disk / "run", "--resume", "auto")
    assert "resumed from" in capsys.readouterr().out
    assert_same_run(disk / "run", whole)
    outcome(fault="disk full", where="step 6 to the end", tries=1, ended="resumed, same bits")


def test_a_disk_that_turns_read_only_leaves_earlier_checkpoints_and_later_works_again(
    whole, mounted, at, capsys, monkeypatch, outcome
):
    disk = mounted("-t", "tmpfs", "-o", "size=64M", "tmpfs")
    # A disk that fails turns read-only under open files; mount wants them closed.
    monkeypatch.setattr("train.loop.setup.lock_folder", lambda *_: nullcontext())
    logs, opened = [], JsonLines._open
    monkeypatch.setattr(JsonLines, "_open", lambda log: [logs.append(log), opened(log)])

    def remount(mode: str) -> None:
        for log in logs:
            log._close()
        done = command("mount", "-o", f"remount,{mode}", disk)
        assert done.returncode == 0, done.stderr

    at(4, lambda: remount("ro"))
    at(6, lambda: remount("rw"))
    train_here("--out", disk / "run", "--timeout", 0)
    captured = capsys.readouterr()
    assert not_saved(captured.out) == ["4"]
    assert captured.out.count(f"[Errno {errno.EROFS}] Read-only file system") >= 3
    for name in ("metrics.jsonl", "kappa.jsonl"):
        assert captured.out.count(f"{name} not written, training goes on: ") == 1
    assert "Traceback" not in captured.out + captured.err
    assert intact(disk / "run") == ["step-00000002", "step-00000006", "step-00000008"]
    assert_same_run(disk / "run", whole, resumed=False)
    ended = "training went on, earlier checkpoints intact"
    outcome(fault="disk read-only", where="steps 4 and 5", tries=1, ended=ended)


def test_a_disk_that_vanishes_is_said_and_what_it_held_is_as_it_was(
    whole, mounted, at, tmp_path, capsys, outcome
):
    source = tmp_path / "source"
    source.mkdir()
    disk = mounted("--bind", source)
    at(6, lambda: command("umount", "--lazy", disk).check_returncode())
    train_here("--out", disk / "run")
    captured = capsys.readouterr()
    folder = disk / "run" / "checkpoints"
    assert f"{folder} is gone with its checkpoints; it is made anew" in captured.out
    assert "Traceback" not in captured.out + captured.err
    assert intact(source / "run") == ["step-00000002", "step-00000004"]
    # The same place without the disk: nothing of the work is lost.
    assert intact(disk / "run") == ["step-00000006", "step-00000008"]
    for name in ("metrics.jsonl", "kappa.jsonl"):
        assert rows(disk / "run" / name) == rows(whole / name)
    train_here("--out", source / "run", "--resume", "auto")
    assert_same_run(source / "run", whole)
    ended = "training went on, earlier checkpoints intact"
    outcome(fault="disk unmounted", where="step 6", tries=1, ended=ended)


def test_weights_that_do_not_fit_are_one_line_and_what_was_there_stays(
    mounted, whole, capsys, outcome
):
    disk = mounted("-t", "tmpfs", "-o", "size=256k", "tmpfs")
    out = disk / "model.safetensors"
    out.write_text("the one before")
    with pytest.raises(SystemExit, match="2"):
        export.main([str(whole), str(out)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model.safetensors not written: " in error
    assert "No space left on device" in error
    assert [p.name for p in disk.iterdir()] == ["model.safetensors"]
    assert out.read_text() == "the one before"
    outcome(fault="disk full", where="export of weights", tries=1, ended="refused, one line")


def test_a_disk_that_stalls_does_not_hold_up_the_steps_between_saves(
    whole, tmp_path, monkeypatch, capsys, outcome
):
    write = saving.pieces_of_shard
    stalled = []

    def stall(parts):
        written = [path.name for path in (tmp_path / "checkpoints").glob(".step-*")]
        if written == [".step-00000004"]:
            deadline = time.monotonic() + 60
            # Until the rows of two more steps are there: training did not wait.
            while len(rows(tmp_path / "metrics.jsonl")) < 6:
                assert time.monotonic() < deadline, "training waits for the disk"
                time.sleep(0.01)
            stalled.extend(written)
        return write(parts)

    monkeypatch.setattr(saving, "pieces_of_shard", stall)
    train_here("--out", tmp_path)
    assert stalled == [".step-00000004"]
    assert "not saved" not in capsys.readouterr().out
    assert len(intact(tmp_path)) == 4
    assert_same_run(tmp_path, whole, resumed=False)
    ended = "training went on, earlier checkpoints intact"
    outcome(fault="disk stalls", where="step 4 to step 6", tries=1, ended=ended)


class Model(nn.Module):
    """Two sharded layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw every parameter."""
        for p in self.parameters():
            nn.init.ones_(p)


def work(rank: int, folder: Path) -> dict[str, Any]:
    """Save three times; rank 1 cannot write the second, and at the end does not see the files."""
    said: list[str] = []
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with parallel.world() as world:
        model = parallel.make_model(Model, world, seed=0, bf16=False)
        optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.01)
        with Checkpoints(folder / "c", world, keep=9, log=said.append) as checkpoints:
            for step in (1, 2, 3):
                if rank == 1 and step == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
                checkpoints.save(step, model, optimizer, {}, {"settings": {}})
                checkpoints.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        found = checkpoints.find("auto")
        if rank == 1:
            os.chroot(folder / "nothing")
        try:
            checkpoints.find("auto")
        except ValueError as error:
            refused = str(error)
    return {"said": said, "found": str(found), "refused": refused}


def test_what_one_rank_of_two_cannot_write_or_read_is_told_by_both(tmp_path, outcome):
    if os.geteuid() != 0:
        pytest.skip("only root can take the files away from one rank")
    (tmp_path / "nothing").mkdir()
    found = on_two_ranks(__name__, tmp_path)
    newest = tmp_path / "c" / "step-00000003"
    assert [rank["found"] for rank in found] == [str(newest)] * 2
    message = "checkpoint of step 2 not saved, training goes on: [Errno 27] File too large"
    assert [rank["said"] for rank in found] == [[message], []]
    for rank in found:
        assert rank["refused"] == (
            f"--resume {newest} cannot be read by rank 1: No such file or directory"
        )
    assert [path.name for path in newest_first(tmp_path / "c")] == [newest.name, "step-00000001"]
    assert [find_damage(path) for path in newest_first(tmp_path / "c")] == [None, None]
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "latest",
        "step-00000001",
        "step-00000003",
    }
    ended = "training went on, earlier checkpoints intact"
    outcome(fault="disk full for one rank of two", where="the second save", tries=1, ended=ended)
    outcome(
        fault="files that one rank of two does not see",
        where="start",
        tries=1,
        ended="refused, one line",
    )
