"""Whatever happens to the files of a checkpoint, or to the run while it writes one.

The next run goes on from the newest that is whole, to the bits of a run that nothing happened to.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.train.launch import ROOT, SHARD, TINY, assert_same_run
from train import vit
from train.checkpoint import checkpointer
from train.checkpoint.checkpointer import Checkpointer, find_damage, newest_first
from train.logs.report import Report
from train.loop import parallel

RUN = [*TINY, "--deterministic", "--ema", 0.9, "--ckpt-every", 2, "--steps", 8]
FILES = ("manifest.json", SHARD, "state.json")
NEWEST, BEFORE = "step-00000006", "step-00000004"


@pytest.fixture(scope="module", autouse=True)
def no_plots() -> Iterator[None]:
    """Half of the time of a run this short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "draw", lambda report: None)
        yield


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in (*RUN, *args)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of eight steps that nothing happens to, with all of its checkpoints."""
    out = tmp_path_factory.mktemp("whole")
    train_here("--keep", 9, "--out", out)
    assert {file.name for file in (out / "checkpoints" / NEWEST).iterdir()} == set(FILES)
    return out


def as_killed(whole: Path, out: Path) -> Path:
    """The same run, as if killed between its sixth and its last step."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    for file in (*out.glob("*.safetensors"), out / "summary.json"):
        file.unlink()
    return out


@pytest.fixture
def killed(whole, tmp_path) -> Path:
    return as_killed(whole, tmp_path / "run")


def cut(kept: Callable[[int], int]) -> Callable[[Path], None]:
    """Leave the first ``kept(size)`` bytes."""
    return lambda file: os.truncate(file, kept(file.stat().st_size))


def flip(place: Callable[[int], int]) -> Callable[[Path], None]:
    """Flip one bit of the byte at ``place(size)``."""

    def flip_one(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place(len(content))] ^= 1 << len(content) % 8
        file.write_bytes(content)

    return flip_one


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def take_that_of_another_checkpoint(file: Path) -> None:
    other = file.parent.with_name("step-00000002") / file.name
    assert other.read_bytes() != file.read_bytes()
    shutil.copy(other, file)


DAMAGES = {
    "cut to nothing": cut(lambda size: 0),
    "cut to half": cut(lambda size: size // 2),
    "cut by one byte": cut(lambda size: size - 1),
    "a bit flipped at the start": flip(lambda size: 0),
    "a bit flipped in the middle": flip(lambda size: size // 2),
    "a bit flipped at the end": flip(lambda size: size - 1),
    "missing": Path.unlink,
    "replaced by a folder": replace_by_a_folder,
    "that of another checkpoint": take_that_of_another_checkpoint,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_named(damage, killed, tmp_path):
    sound = killed / "checkpoints" / NEWEST
    said: list[str] = []
    with parallel.init_distributed() as world:
        for name in FILES:
            shutil.copytree(sound, tmp_path / "sound")
            DAMAGES[damage](sound / name)
            checkpointer = Checkpointer(killed / "checkpoints", world, keep=9, log=said.append)
            assert checkpointer.find("auto") == sound.with_name(BEFORE)
            shutil.rmtree(sound)
            (tmp_path / "sound").rename(sound)
    assert len(said) == len(FILES)
    for name, line in zip(FILES, said):
        assert line.startswith(f"skipped damaged checkpoint {NEWEST}: ")
        # Which file disagrees with a manifest that was changed is not to be known.
        assert name == "manifest.json" or f": {name} " in line or f": {name}: " in line


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(
    damage, whole, tmp_path, capsys, pytestconfig
):
    names = FILES
    if pytestconfig.getoption("--kills") < 50:
        # Each file and each damage one after another, all with all in the long form.
        place = [*DAMAGES].index(damage)
        names = FILES[place % 3 : place % 3 + 1] if place % 2 else ()
    for name in names:
        killed = as_killed(whole, tmp_path / name)
        DAMAGES[damage](killed / "checkpoints" / NEWEST / name)
        train_here("--out", killed, "--resume", "auto")
        assert f"resumed from {killed / 'checkpoints' / BEFORE}" in capsys.readouterr().out
        assert_same_run(killed, whole)
        assert find_damage(killed / "checkpoints" / NEWEST) is None, "it must be replaced"


def test_when_no_checkpoint_is_intact_one_line_says_so_and_nothing_is_touched(killed, capsys):
    folder = killed / "checkpoints"
    for name, checkpoint_path in zip(FILES, newest_first(folder)):
        (checkpoint_path / name).unlink()

    def listed() -> list[tuple[Path, bytes]]:
        return [(p, p.read_bytes()) for p in sorted(killed.rglob("*")) if p.is_file()]

    before = listed()
    with pytest.raises(SystemExit, match="2"):
        train_here("--out", killed, "--resume", "auto")
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"no intact checkpoint in {folder}" in captured.err
    assert captured.out.count("skipped damaged checkpoint") == len(newest_first(folder)) == 3
    assert listed() == before


def test_a_signal_during_a_save_waits_for_it_and_nothing_is_lost(
    whole, tmp_path, capsys, monkeypatch
):
    write = checkpointer.pieces_of_shard
    writes = []

    def interrupted(parts, body):
        writes.extend(path.name for path in (tmp_path / "checkpoints").glob(".step-*"))
        if len(writes) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return write(parts, body)

    monkeypatch.setattr(checkpointer, "pieces_of_shard", interrupted)
    train_here("--keep", 9, "--out", tmp_path)
    assert ".step-00000004" in writes
    assert "by SIGTERM; --resume auto continues" in capsys.readouterr().out
    for path in newest_first(tmp_path / "checkpoints"):
        assert find_damage(path) is None
    train_here("--keep", 9, "--out", tmp_path, "--resume", "auto")
    assert_same_run(tmp_path, whole)


def kill_before(change: int, out: Path) -> None:
    """Train, and end by SIGKILL before a numbered change of the folder by the save of step 4."""
    torch.set_num_threads(1)
    Report.draw = lambda report: None
    seen = [0]

    def count(event: str, args: tuple) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") or not seen[0]:
            return
        path = str(args[0])
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        # What is removed with a folder has no path of its own.
        ours = str(out / "checkpoints") in path or event in ("os.remove", "os.rmdir")
        if reads or not ours:
            return
        if seen[0] == change:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    save = Checkpointer.save

    def save_counted(checkpointer: Checkpointer, step: int, *args: object) -> None:
        checkpointer.wait()
        if step == 4:
            seen[0] = 1
        save(checkpointer, step, *args)
        if step == 4:
            checkpointer.wait()
            seen[0] = 0

    Checkpointer.save = save_counted
    sys.addaudithook(count)
    train_here("--keep", 1, "--out", out)


def kill_before_each(folder: Path, changes: list[int]) -> None:
    """Do so for each of some changes in a process of its own, until one is never reached."""
    for change in changes:
        child = os.fork()
        if child == 0:
            with (folder / "said").open("a") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            try:
                kill_before(change, folder / str(change))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            break


def test_a_kill_before_any_change_that_a_save_makes_loses_nothing(
    whole, tmp_path, capsys, pytestconfig
):
    changes = [*range(1, 100)] if pytestconfig.getoption("--kills") >= 50 else [4, 9]
    code = f"from {__name__} import *; kill_before_each(Path(sys.argv[1]), {changes})"
    killer = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(killer, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, check=True, cwd=ROOT)
    states = []
    for change in changes:
        out = tmp_path / str(change)
        if not out.exists() or (out / "summary.json").exists():
            break
        intact = [p.name for p in newest_first(out / "checkpoints") if find_damage(p) is None]
        assert intact, f"nothing is left after a kill before change {change}"
        states.append(intact[0])
        train_here("--keep", 1, "--out", out, "--resume", "auto")
        assert f"resumed from {out / 'checkpoints' / intact[0]}" in capsys.readouterr().out
        assert_same_run(out, whole)
        assert {p.name for p in (out / "checkpoints").iterdir()} == {"step-00000008"}
    assert set(states) == {"step-00000002", "step-00000004"}, states
    assert states == sorted(states)
    assert len(states) == len(changes) or len(states) >= 10, (tmp_path / "said").read_text()
