"""Storage that is full, read-only, gone, slow, or refuses one rank, while a run writes to it.

Training goes on, says so in a line, leaves earlier checkpoints alone, and saves again when it can.
"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.train.launch import TINY, assert_same_run, rows
from train import vit
from train.checkpoint.checkpointer import Checkpointer, find_damage, newest_first
from train.logs.report import Report

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
    save = Checkpointer.save

    def save_after(checkpointer: Checkpointer, step: int, *args: object) -> None:
        if step in actions:
            checkpointer.wait()
            actions.pop(step)()
        save(checkpointer, step, *args)

    monkeypatch.setattr(Checkpointer, "save", save_after)
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


def test_a_full_disk_costs_the_checkpoints_of_that_time_alone(whole, mounted, at, capsys):
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


def test_a_disk_that_stays_full_leaves_a_run_to_take_up_again(whole, mounted, at, capsys, tmp_path):
    disk = mounted("-t", "tmpfs", "-o", "size=64M", "tmpfs")

    at(6, lambda: fill(disk / "ballast"))
    with pytest.raises(
        SystemExit, match="finished at step 8, but neither weights nor a checkpoint"
    ):
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


def test_a_disk_that_vanishes_is_said_and_what_it_held_is_as_it_was(
    whole, mounted, at, tmp_path, capsys
):
    source = tmp_path / "source"
    source.mkdir()
    disk = mounted("--bind", source)
    at(6, lambda: command("umount", "--lazy", disk).check_returncode())
    train_here("--out", disk / "run")
    captured = capsys.readouterr()
    folder = disk / "run" / "checkpoints"
    assert f"{folder} was deleted with its checkpoints; it is created again" in captured.out
    assert "Traceback" not in captured.out + captured.err
    assert intact(source / "run") == ["step-00000002", "step-00000004"]
    # The same place without the disk: the work goes on there.
    assert intact(disk / "run") == ["step-00000006", "step-00000008"]
    for name in ("metrics.jsonl", "kappa.jsonl"):
        later = [row for row in rows(whole / name) if row["step"] >= 6]
        assert rows(disk / "run" / name) == later
    train_here("--out", source / "run", "--resume", "auto")
    assert_same_run(source / "run", whole)
