"""Which folder a run gets, whether what is in it goes on, and what its file system may lack."""

import errno
import fcntl
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.security.refusals import refusal
from tests.train.image_files import photographs, write_folder
from tests.train.launch import TINY, rows
from tests.train.trained import gpt, train_text, train_vit
from train import vit
from train.checkpoint.checkpointer import find_damage
from train.checkpoint.run_folder import choose_folder
from train.config.flags import Settings
from train.loop import parallel


@pytest.fixture
def world():
    with parallel.init_distributed() as alone:
        yield alone


def test_a_run_goes_on_in_its_folder_until_it_is_finished(world, tmp_path):
    settings = Settings(out=str(tmp_path / "run"))
    out = choose_folder("vit", settings, world)
    (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert choose_folder("vit", settings, world) == out
    (out / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a finished run: give --resume auto or another"):
        choose_folder("vit", settings, world)
    assert choose_folder("vit", Settings(out=str(out), resume="auto"), world) == out


def test_without_out_a_run_has_the_next_folder_of_its_name(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (choose_folder("vit", Settings(), world) for _ in range(2))
    assert (first, second) == (Path("runs/vit-1"), Path("runs/vit-2"))
    assert choose_folder("vit", Settings(resume="auto"), world) == second
    assert choose_folder("gpt", Settings(), world) == Path("runs/gpt-1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="--max-restarts needs --out"):
        choose_folder("vit", Settings(), world)


def runs(folder: Path) -> list[str]:
    """Return what a run wrote into its folder, less checkpoints and its lock."""
    return sorted(p.name for p in folder.iterdir() if p.name not in ("checkpoints", ".lock"))


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_run_begun_anew_keeps_nothing_of_the_former_under_a_name_that_is_read(
    tmp_path, capsys, resume
):
    write_folder(tmp_path, "pictures", photographs("train", 12))
    out = tmp_path / "run"
    args = ["--batch-size", 4, "--steps", 2, "--workers", 0, "--kappa-every", 1, "--kappa-probe", 1]
    args += ["--tensorboard", "--ema", 0.5, "--data", tmp_path / "pictures", "--out", out]
    vit.main([*map(str, args)])
    former = {*runs(out), "tokenizer.json", "wandb_id.txt"}
    assert {"classes.txt", "held_out.txt", "kappa_probe.jsonl", "model_ema.safetensors"} < former
    for name in ("tokenizer.json", "wandb_id.txt"):
        (out / name).write_text("{}")
    shutil.rmtree(out / "checkpoints")
    if resume == "none":
        (out / "summary.json").unlink()
        former.remove("summary.json")
    capsys.readouterr()
    train_vit(out, "--resume", resume)
    assert "files of an earlier run were renamed to " in capsys.readouterr().out
    plain = train_vit(tmp_path / "plain")
    aside = {f"{Path(name).stem}.1{Path(name).suffix}" for name in former}
    assert {*runs(out)} == {*runs(plain)} | aside
    for name in ("metrics.jsonl", "kappa.jsonl"):
        assert rows(out / name) == rows(plain / name)
    assert "pictures" not in (out / "page.html").read_text()
    assert (out / "model.1.safetensors").stat().st_size != (
        out / "model.safetensors"
    ).stat().st_size


def test_a_run_that_ended_ahead_of_its_first_checkpoint_begins_every_log_anew(tmp_path):
    args = ["--tensorboard", "--kappa-probe", "1", "--loss-alarm", "1"]
    out = train_vit(tmp_path / "run", *args)
    shutil.rmtree(out / "checkpoints")
    for name in ("summary.json", "page.html"):
        (out / name).unlink()
    for name in ("metrics.jsonl", "kappa_probe.jsonl", "alarms.jsonl"):
        with (out / name).open("a") as file:
            row = {"step": 9, "loss": 9.0, "message": "former", "layer": "former", "kappa": 1.0}
            file.write(json.dumps(row) + "\n")
    train_vit(out, "--resume", "auto", "--tensorboard", "--steps", 1)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("loss")] == [0]
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == [0]
    assert rows(out / "kappa_probe.jsonl") == rows(out / "alarms.jsonl") == []
    assert "former" not in (out / "page.html").read_text()


def test_a_tokeniser_of_the_former_run_is_set_aside(tmp_path):
    out = train_text(gpt, tmp_path)
    shutil.rmtree(out / "checkpoints")
    (out / "tokenizer.json").write_text("{}")
    train_text(gpt, tmp_path, "--resume", "auto")
    assert (out / "tokenizer.1.json").read_text() == "{}"
    assert (out / "tokenizer.json").read_text() != "{}"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_takes_a_run(tmp_path, monkeypatch, number):
    def lockf(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert (train_vit(tmp_path / "run") / "summary.json").exists()


@pytest.mark.parametrize("kind", ["folders", "files"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_takes_a_run(tmp_path, monkeypatch, capsys, number, kind):
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "folders"):
            raise OSError(number, os.strerror(number))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = train_vit(tmp_path / "run", "--ckpt-every", "1")
    assert find_damage(out / "checkpoints" / "step-00000002") is None
    assert (out / "model_best.safetensors").exists()
    assert " not " not in capsys.readouterr().out.replace("not resolved", "")


def test_a_disk_that_fails_to_sync_is_not_trusted(tmp_path, monkeypatch, capsys):
    def fsync(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SystemExit, match="neither weights nor a checkpoint could be saved"):
        train_vit(tmp_path / "run")
    assert "checkpoint of step 2 not saved, training goes on: " in capsys.readouterr().out


def test_a_file_system_without_renaming_ends_a_run_in_one_line(tmp_path, monkeypatch, capsys):
    def replace(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", replace)
    line = refusal(capsys, vit.main, *TINY, "--steps", 2, "--out", tmp_path / "run")
    assert "metrics.jsonl" in line


def test_a_file_system_without_appending_ends_no_run(tmp_path, monkeypatch, capsys):
    opened = os.open

    def only_new(path: str, flags: int, *more: object, **named: object) -> int:
        there = os.path.exists(path) and os.path.getsize(path) > 0
        if flags & os.O_APPEND and there and Path(path).suffix == ".jsonl":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", only_new)
    out = train_vit(tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl not written, training goes on: ") == 1
    assert (out / "summary.json").exists()


def test_a_folder_that_cannot_be_written_ends_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").write_text("")
    line = refusal(capsys, vit.main, *TINY, "--steps", 2, "--out", tmp_path / "run")
    assert f"--out {tmp_path / 'run'} cannot be used: File exists" in line
