"""Batches, ranks and clocks that go wrong while a run goes on.

Two processes do all runs of the first part one after another: ``python -m
torch.distributed.run --nproc-per-node=2 -m tests.faults.test_guards runs FOLDER``.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from leaner_kernels.monitor.measurement import HostCopy
from tests.train.launch import (
    ROOT,
    TINY,
    assert_same_run,
    finish,
    pid_of_rank,
    rows,
    tensors_of,
    torchrun,
    wait_for,
)
from train import vit
from train.config import flags
from train.loop import parallel
from train.loop import train as loop
from train.loop.schedule import Schedule
from train.loop.setup import Run, set_up
from train.vit import ImageSettings

SHORT = [*TINY, "--deterministic", "--ema", "0.9", "--ckpt-every", "3", "--steps", "6"]
LAST = "step-00000006"
# Its batch norms see the pixels of a batch that is not finite.
XCIT = [*SHORT, "--model", "xcit_digits", "--keep", "9"]
LONG = [*TINY, "--deterministic", "--ckpt-every", "20", "--steps", "56"]


@dataclass
class Faults:
    """What happens to a run; everything else is the run of every script.

    Attributes:
        nan: ranks whose batch is not finite, by step.
        idle: a step that does nothing but take its batches, which skipping another must equal.
        tenfold: steps whose loss is.
        stop: a step during which rank 0 is signalled to stop.
        hang: a step in which rank 1 stops, for good if nobody lets it go on.
    """

    nan: dict[int, list[int]] = field(default_factory=dict)
    idle: int | None = None
    tenfold: range = range(0)
    stop: int | None = None
    hang: int | None = None


def train_with_faults(args: list[str], world: parallel.DistributedContext, **which: Any) -> None:
    """Train with these flags and ``Faults``, without evaluations and plots, which take longer."""
    faults = Faults(**which)
    task, settings = vit.make_task(flags.parse("vit.py", "", args, ImageSettings))
    whole_step = loop.optimizer_step

    def faulty_loss(
        model: torch.nn.Module, batch: tuple[torch.Tensor, ...], seed: int
    ) -> torch.Tensor:
        pixels, labels = batch
        step = run.progress.step
        if step == faults.stop and world.rank == 0:
            run.interrupt.received = "SIGTERM"
        if step == faults.hang and world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if world.rank in faults.nan.get(step, ()):
            pixels = torch.full_like(pixels, torch.nan, dtype=torch.float32)
        loss = task.loss(model, (pixels, labels), seed)
        return 10 * loss if step in faults.tenfold else loss

    def optimizer_step(run: Run, batches: Any, *more: Any) -> loop.PendingMetrics:
        step = run.progress.step
        if step != faults.idle:
            return whole_step(run, batches, *more)
        next(batches)
        return loop.PendingMetrics({"step": step}, HostCopy(torch.zeros(5), None), set())

    with (
        mock.patch.object(Schedule, "evaluation_is_due", return_value=False),
        mock.patch.object(loop, "evaluate", return_value={}),
        mock.patch.object(loop, "finish"),
        mock.patch.object(loop, "optimizer_step", optimizer_step),
    ):
        run = set_up(replace(task, loss=faulty_loss), settings, world, ExitStack())
        loop.train(run)


def work(folder: Path) -> None:
    """Do all runs but the one that hangs, on this rank."""
    with parallel.init_distributed(300) as world:

        def train(name: str, args: list[str], **faults: Any) -> None:
            train_with_faults([*args, "--out", str(folder / name)], world, **faults)

        train("plain", XCIT)
        train("nan", XCIT, nan={3: [1]})
        train("idle", XCIT, idle=3)
        for failing in ({3: [0], 4: [1], 5: [0, 1]}, {}):
            try:
                train("limit", [*XCIT, "--skip-limit", "2", "--resume", "auto"], nan=failing)
            except loop.DivergedError as error:
                (folder / f"diverged-{world.rank}.txt").write_text(str(error))
                # Rank 0 has waited until its checkpoint is whole.
                torch.distributed.barrier()
                left = sorted(path.name for path in (folder / "limit" / "checkpoints").iterdir())
                (folder / f"left-{world.rank}.txt").write_text(" ".join(left))

        streak: dict[str, Any] = {"nan": {40: [1], 41: [0], 42: [0, 1]}, "tenfold": range(53, 56)}
        train("streak", LONG, **streak)
        train("stopped", LONG, **streak, stop=41)
        train("stopped", [*LONG, "--resume", "auto"], **streak)
        train("short", SHORT)


def work_until_it_hangs(folder: Path) -> None:
    """Hang in a step; when torchrun starts this once more, go on."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    # A busy machine takes seconds for a step.
    with parallel.init_distributed(15 if first else 300) as world:
        args = [*SHORT, "--out", str(folder / "hung")]
        train_with_faults(args, world, hang=5 if first else None)


def start(what: str, folder: Path, *options: str) -> subprocess.Popen:
    """Let two ranks do ``what``."""
    command = [*torchrun(2), *options, "-m", "tests.faults.test_guards", what, str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env=os.environ | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, full: None) -> Path:
    folder = tmp_path_factory.mktemp("guards")
    process = start("runs", folder)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        # torchrun takes its ranks with it.
        process.terminate()
    assert process.returncode == 0, out + err
    return folder


def alarms(out: Path) -> list[tuple[int, str]]:
    return [(alarm["step"], alarm["kind"]) for alarm in rows(out / "alarms.jsonl")]


def skipped(out: Path) -> list[int]:
    return [row["step"] for row in rows(out / "metrics.jsonl") if row.get("skipped")]


def test_a_batch_that_is_not_finite_on_one_rank_is_a_step_that_does_nothing(runs):
    bad, idle = runs / "nan", runs / "idle"
    tensors = [tensors_of(out / "checkpoints" / LAST) for out in (bad, idle, runs / "plain")]
    # Of both ranks: weights, moments, batch norms' statistics and the average of the weights.
    assert len({name.partition(" ")[0] for name in tensors[0]}) == 2
    assert tensors[0] == tensors[1]
    assert tensors[0] != tensors[2], "the step that was skipped would have done something"
    metrics = [rows(out / "metrics.jsonl") for out in (bad, idle)]
    assert metrics[0][3].pop("skipped") is True
    assert metrics[0][3]["loss"] is None
    assert [row for row in metrics[0] if row["step"] != 3] == [
        row for row in metrics[1] if row["step"] != 3
    ]
    assert rows(bad / "kappa.jsonl") == rows(idle / "kappa.jsonl")
    assert alarms(bad) == [(3, "skipped")]
    assert alarms(runs / "plain") == []


def test_a_stop_among_steps_that_are_skipped_resumes_to_the_same_bits_and_alarms(runs):
    whole, stopped = runs / "streak", runs / "stopped"
    # The signal came in step 41, and was read when step 42 was under way.
    assert (stopped / "checkpoints" / "step-00000043").exists(), "it stopped after step 42"
    assert_same_run(stopped, whole, "step-00000056")
    assert skipped(whole) == [40, 41, 42]
    of_steps = [(step, kind) for step, kind in alarms(whole) if kind in ("skipped", "loss")]
    assert of_steps == [(40, "skipped"), (55, "loss")]
    assert rows(stopped / "alarms.jsonl") == rows(whole / "alarms.jsonl")


def test_too_many_steps_that_are_not_finite_end_the_run_and_it_can_go_on(runs):
    for rank in range(2):
        said = (runs / f"diverged-{rank}.txt").read_text()
        assert "\n" not in said
        assert said.startswith(
            "step 5: loss nan, gradient norm nan: 3 steps in a row were not finite"
        )
        assert "--skip-limit allows 2" in said
        assert (runs / f"left-{rank}.txt").read_text() == "step-00000003"
    # With the right data, it is as if nothing had happened.
    assert_same_run(runs / "limit", runs / "plain", LAST)
    assert alarms(runs / "limit") == []


def test_a_rank_that_hangs_is_ended_and_the_run_resumes_to_the_same_bits(runs, tmp_path):
    process = start("hang", tmp_path, "--max-restarts=1")
    metrics = tmp_path / "hung" / "metrics.jsonl"
    wait_for(metrics.exists, process)
    waiting = Path(f"/proc/{pid_of_rank(0, process.pid)}")
    wait_for(lambda: not waiting.exists(), process)
    # torchrun's SIGTERM to a process that is stopped waits for this, or half a minute for SIGKILL.
    os.kill(pid_of_rank(1, process.pid), signal.SIGCONT)
    done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Timed out waiting \d+ms for", done.stderr)
    assert "in optimizer_step\n" in done.stderr
    assert_same_run(tmp_path / "hung", runs / "short", LAST)


if __name__ == "__main__":
    {"runs": work, "hang": work_until_it_hangs}[sys.argv[1]](Path(sys.argv[2]))
