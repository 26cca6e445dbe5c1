"""Images that cannot be read, and data workers that die, in runs that go on or say why not."""

import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.image_files import photographs, write_folder
from tests.train.launch import TINY, assert_same_run, rows
from train import vit
from train.loop import train as loop
from train.loop.setup import Run

RUN = ["--model", "vit_digits", *TINY, "--batch-size", "4", "--recipe", "paper", "--deterministic"]
RUN += ["--eval-every", "1", "--ckpt-every", "4", "--keep", "9", "--steps", "8"]
RUN += ["--kappa-every", "4"]
LAST = "step-00000008"
# One image of each kind of damage.
DAMAGE = {"no picture": b"not a picture", "empty": b"", "cut off": None}


def train_here(*args: object) -> None:
    vit.main([str(arg) for arg in (*RUN, *args)])


def damage(root: Path, places: dict[int, str]) -> list[Path]:
    """Damage images of a split by their place; return which."""
    files = sorted(root.glob("*/*.JPEG"))
    for place, kind in places.items():
        content = DAMAGE[kind]
        files[place].write_bytes(files[place].read_bytes()[:400] if content is None else content)
    return [files[place] for place in places]


def messages_of(out: Path) -> list[str]:
    """What the run said of its data."""
    path = out / "alarms.jsonl"
    return [row["message"] for row in rows(path) if row["kind"] == "data"] if path.exists() else []


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Images, all of which can be read."""
    root = tmp_path_factory.mktemp("whole")
    write_folder(root, "train", photographs("train", 16))
    write_folder(root, "val", photographs("val", 7))
    return root


@pytest.fixture(scope="module")
def torn(whole, tmp_path_factory) -> Path:
    """Images of which three of sixteen, and one of seven, cannot be read."""
    root = tmp_path_factory.mktemp("torn") / "images"
    shutil.copytree(whole, root)
    damage(root / "train", {2: "no picture", 9: "cut off", 15: "empty"})
    damage(root / "val", {4: "cut off"})
    return root


@pytest.fixture(scope="module")
def torn_run(torn, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("torn-run")
    train_here("--data", torn, "--out", out)
    return out


@pytest.fixture(scope="module")
def whole_run(whole, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole-run")
    train_here("--data", whole, "--out", out)
    return out


@pytest.fixture
def at_step(monkeypatch) -> Iterator[Callable[[int, Callable[[], object]], None]]:
    """Let something happen at the beginning of a step."""

    def arrange(wanted: int, happen: Callable[[], object]) -> None:
        step = loop.optimizer_step

        def stepped(run: Run, *args: object) -> object:
            if run.progress.step == wanted:
                happen()
            return step(run, *args)

        monkeypatch.setattr(loop, "optimizer_step", stepped)

    return arrange


def test_images_that_cannot_be_read_are_named_once_and_left_out(torn, torn_run, tmp_path):
    messages = messages_of(torn_run)
    assert len(messages) == len(set(messages)) == summary(torn_run)["bad_samples"] == 4
    assert all(re.search(r"holds /.*\.JPEG, which is not a readable image: ", m) for m in messages)
    assert len(rows(torn_run / "metrics.jsonl")) == 8
    # Their scores are those of the images that can be read.
    shutil.copytree(torn, tmp_path / "images")
    sorted((tmp_path / "images" / "val").glob("*/*"))[4].unlink()
    train_here("--data", tmp_path / "images", "--out", tmp_path / "run")
    assert len(messages_of(tmp_path / "run")) == 3
    scores = [
        [row["held_out_loss"] for row in rows(out / "metrics.jsonl") if "held_out_loss" in row]
        for out in (torn_run, tmp_path / "run")
    ]
    assert len(scores[0]) == 2
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_data_workers_and_a_resume_do_not_change_which_images_stand_in(torn, torn_run, tmp_path):
    train_here("--data", torn, "--out", tmp_path, "--workers", 2, "--resume", "auto")
    assert_same_run(tmp_path, torn_run, LAST, resumed=False)
    shutil.rmtree(tmp_path / "checkpoints" / LAST)
    (tmp_path / "summary.json").unlink()
    train_here("--data", torn, "--out", tmp_path, "--resume", "auto")
    assert_same_run(tmp_path, torn_run, LAST)
    assert summary(tmp_path)["bad_samples"] == 4


def test_more_of_them_than_are_allowed_end_the_run_in_one_line(torn, tmp_path, capfd):
    with pytest.raises(SystemExit, match="2"):
        train_here("--data", torn, "--out", tmp_path, "--bad-data-limit", 1)
    *_, error = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"vit\.py: error: --bad-data-limit allows 1 unreadable items, got [2-4], .*\.JPEG, .*",
        error,
    )


def test_a_killed_data_worker_ends_the_run_in_one_line_and_a_resume_has_the_same_bits(
    whole, whole_run, tmp_path, at_step, capfd
):
    def kill() -> None:
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()

    with pytest.MonkeyPatch.context() as patch:
        step = loop.optimizer_step
        at_step(5, kill)
        with pytest.raises(SystemExit, match="2"):
            train_here("--data", whole, "--out", tmp_path, "--workers", 2)
        patch.setattr(loop, "optimizer_step", step)
        assert "DataLoader worker" in capfd.readouterr().err.splitlines()[-1]
        assert not multiprocessing.active_children()
        train_here("--data", whole, "--out", tmp_path, "--workers", 2, "--resume", "auto")
    assert_same_run(tmp_path, whole_run, LAST)


def test_images_deleted_in_mid_run_are_named(whole, whole_run, tmp_path, at_step):
    images = tmp_path / "images"
    shutil.copytree(whole, images)
    lost = sorted((images / "train").glob("*/*"))[3:11]
    at_step(4, lambda: [path.unlink() for path in lost])
    train_here("--data", images, "--out", tmp_path / "run")
    same = [rows(out / "metrics.jsonl") for out in (tmp_path / "run", whole_run)]
    assert len(same[0]) == len(same[1]) == 8
    assert same[0][:4] == same[1][:4]
    assert set(messages_of(tmp_path / "run")) == {
        f"{path}: No such file or directory" for path in lost
    }
