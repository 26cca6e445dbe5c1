"""A run that is stopped goes on as if nothing had happened, or is refused; see tests/faults."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn import functional

from tests.train.launch import (
    TINY,
    assert_same_run,
    finish,
    pid_of_rank,
    rows,
    run,
    start,
    torchrun,
    wait_for,
)
from train import vit
from train.checkpoint.checkpointer import Checkpointer, find_damage

RUN = [*TINY, "--deterministic", "--ema", 0.9, "--ckpt-every", 2]


def train_here(*args: object) -> None:
    """Run the script in this process."""
    vit.main([str(arg) for arg in args])


def checkpoints(out: Path) -> list[str]:
    """The names of what is in a run's folder of checkpoints, but for the pointer."""
    return sorted(p.name for p in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory):
    """A whole run of eight steps, to copy and damage."""
    out = tmp_path_factory.mktemp("eight")
    train_here(*RUN, "--steps", 8, "--keep", 9, "--out", out)
    return out


def test_each_process_prepares_its_first_save_after_its_first_step(tmp_path, monkeypatch):
    prepare, steps = Checkpointer.prepare, []

    def noting(checkpointer, model, optimizer, average):
        share, *_ = optimizer.shares.values()
        steps.append(int(optimizer.state[share]["step"]))
        prepare(checkpointer, model, optimizer, average)

    monkeypatch.setattr(Checkpointer, "prepare", noting)
    for last in (3, 5):
        train_here(*RUN, "--steps", last, "--resume", "auto", "--out", tmp_path)
    assert steps == [1, 4]


@pytest.fixture
def six_of_eight(eight_steps, tmp_path):
    """The same run, as if killed between its sixth and its last step."""
    out = tmp_path / "run"
    shutil.copytree(eight_steps, out)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    return out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "auto", "--batch-size", 16], r"with --batch-size 32, got 16"),
        (["--resume", "auto", "--heads", 4], r"with --heads \[2, 2\], got \[4, 4\]"),
        (["--resume", "auto", "--ema", 0], r"with --ema 0\.9, got 0"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused_in_one_line(six_of_eight, capsys, flags, message):
    before = (six_of_eight / "metrics.jsonl").read_text()
    with pytest.raises(SystemExit, match="2"):
        train_here(*RUN, "--steps", 8, "--out", six_of_eight, *flags)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert (six_of_eight / "metrics.jsonl").read_text() == before


def test_a_finished_run_and_an_older_checkpoint_of_a_run_are_left_alone(
    six_of_eight, eight_steps, capsys
):
    older = six_of_eight / "checkpoints" / "step-00000002"
    for out, resume, kind in (
        (eight_steps, "none", "a finished run"),
        (eight_steps, "elsewhere/step-00000002", "a finished run"),
        (six_of_eight, older, "this checkpoint's own run"),
    ):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit, match="2"):
            train_here(*RUN, "--steps", 9, "--out", out, "--resume", resume)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"--out {out} holds {kind}: give --resume auto or another --out" in error
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both_and_one_process_continues(tmp_path):
    # The rank's number is in its environment; its own process is the one to signal.
    process = start(
        *TINY, "--steps", 100_000, "--ckpt-every", 0, "--out", tmp_path, torchrun=torchrun(2)
    )
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    wait_for(lambda: (tmp_path / "metrics.jsonl").read_text().count("\n") > 2, process)
    os.kill(pid_of_rank(1, process.pid), signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    steps = len(rows(tmp_path / "metrics.jsonl"))
    assert f"stopped at step {steps} by another rank's signal" in done.stdout
    assert checkpoints(tmp_path) == [f"step-{steps:08d}"]
    assert find_damage(tmp_path / "checkpoints" / f"step-{steps:08d}") is None

    resumed = run(*TINY, "--steps", steps + 2, "--out", tmp_path, "--resume", "auto")
    assert "resuming on 1 ranks from a checkpoint of 2 ranks" in resumed.stdout
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(steps + 2))


def test_a_run_that_another_process_still_does_is_left_alone(six_of_eight, capsys):
    holder = f"import fcntl, time; file = open({str(six_of_eight / '.lock')!r}, 'w'); "
    holder += "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(SystemExit, match="2"):
            train_here(*RUN, "--steps", 8, "--out", six_of_eight, "--resume", "auto")
        other.kill()
    assert "is in use by another run" in capsys.readouterr().err
    train_here(*RUN, "--steps", 8, "--out", six_of_eight, "--resume", "auto")


def test_a_run_stopped_before_its_first_real_step_resumes_to_the_same_bits(tmp_path, monkeypatch):
    def poisoned(stop: bool):
        loss, calls = functional.cross_entropy, []

        def of_the_first_steps(*args, **kwargs):
            calls.append(None)
            if stop and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss(*args, **kwargs) * (float("nan") if len(calls) <= 2 else 1.0)

        return of_the_first_steps

    for out in ("whole", "stopped"):
        with monkeypatch.context() as patch:
            patch.setattr(functional, "cross_entropy", poisoned(out == "stopped"))
            train_here(*RUN, "--steps", 8, "--out", tmp_path / out)
    train_here(*RUN, "--steps", 8, "--out", tmp_path / "stopped", "--resume", "auto")
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
