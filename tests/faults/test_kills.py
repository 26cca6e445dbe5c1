"""A run whose processes are killed, again and again, ends with the bits of one that was not."""

import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.campaign import (
    Processes,
    being_saved,
    differences,
    kill,
    newest_checkpoint,
    resumed_from,
    steps_done,
    torchrun,
    wait_until,
)
from tests.faults.zygote import LONG, Ranks, Zygote
from tests.train.launch import SCRIPT

EVERY, EVALUATED = 4, 8
MODEL = ["--heads", 2, "--depth", 2, "--head-dim", 8, "--batch-size", 32, "--workers", 0]
MODEL += ["--dropout", 0.1, "--drop-path", 0.1, "--ema", 0.9, "--deterministic"]
# An epoch is 44 steps.
MODEL += ["--kappa-every", 3, "--ckpt-every", EVERY, "--eval-every", EVALUATED / 44]
# Steps per kill: a run must be long enough for every kill to find it somewhere else.
SPACING = 4


# What the kills are aimed at, one after another.
WHENS = ("saved", "done", "evaluated", "started", "done", "saved", "done", "started")


class Moment(NamedTuple):
    """When to kill: as a step is done, saved or evaluated, or a moment after the start."""

    step: int
    when: str


def moments(kills: int, steps: int, draw: random.Random) -> list[Moment]:
    """Return when to kill a run, in the order in which it gets there."""
    whens = [WHENS[number % len(WHENS)] for number in range(kills)]
    places = {
        "done": range(1, steps),
        "saved": range(EVERY, steps, EVERY),
        "evaluated": range(EVALUATED, steps, EVALUATED),
        # Not so late that the run could be over before it is killed.
        "started": range(1, steps // 2),
    }
    return sorted(
        Moment(step, when)
        for when, count in Counter(whens).items()
        for step in draw.sample(places[when], count)
    )


def come(moment: Moment, ranks: Ranks, out: Path, draw: random.Random) -> None:
    """Wait for the moment, and then for a random part of what happens in it."""

    def is_there() -> bool:
        if not (has_started(out, ranks.since) and ranks.running()):
            return not ranks.running()
        if moment.when == "done":
            return steps_done(out) >= moment.step
        # An evaluation follows the copy of the state that is being written.
        saving = being_saved(out, ranks.since) or 0
        return max(newest_checkpoint(out), saving) >= moment.step

    if moment.when == "started":
        time.sleep(draw.uniform(0, 1))
        return
    assert wait_until(is_there, LONG), f"{moment} has not come: {ranks.log.read_text()}"
    time.sleep(draw.uniform(0, 0.03))


def has_started(out: Path, since: float) -> bool:
    """Return whether the run that was started at that time has taken up its files."""
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_mtime >= since


def survive(
    zygote: Zygote, out: Path, logs: Path, *, steps: int, ranks: int, kills: int, seed: int
) -> None:
    """Train while the processes are killed."""
    draw = random.Random(seed)
    args = [*MODEL, "--steps", steps, "--out", out, "--resume", "auto"]
    lost_at = None
    for number, moment in enumerate([*moments(kills, steps, draw), None]):
        log, saved = logs / f"{number}.log", newest_checkpoint(out)
        started = Ranks(zygote, args, log, ranks)
        try:
            if moment is None:
                started.finish()
            else:
                come(moment, started, out, draw)
                assert started.running(), f"ended before {moment}: {log.read_text()}"
        finally:
            if started.pids:
                statuses = started.kill([draw.choice(started.pids)])
        resumed = resumed_from(log.read_text())
        if saved and steps_done(out) > saved and has_started(out, started.since):
            assert resumed, f"began anew beside a checkpoint: {log.read_text()}"
        if resumed and lost_at is not None:
            # The one being written when it died may be lost, and the steps until it is whole.
            assert lost_at - resumed[0] <= 2 * EVERY, "lost more than since its last checkpoint"
            lost_at = None
        if moment is not None:
            assert -signal.SIGKILL in statuses, log.read_text()
            lost_at = max(steps_done(out), lost_at or 0)


def split(kills: int) -> tuple[int, int, int]:
    """Return how many kills are of a run on one rank, on two, and on two that torchrun restarts."""
    by_torchrun = 3 if kills >= 50 else 0
    of_two = (kills - by_torchrun) // 3
    return kills - by_torchrun - of_two, of_two, by_torchrun


@pytest.fixture(scope="module")
def kills(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return split(request.config.getoption("--kills"))


@pytest.fixture(scope="module")
def whole_of_one(zygote, kills, tmp_path_factory) -> tuple[Path, int]:
    """A run on one rank that nothing interrupts, and its steps."""
    steps = SPACING * max(kills[0], 3)
    folder = tmp_path_factory.mktemp("one")
    args = [*MODEL, "--steps", steps, "--out", folder / "whole"]
    if not kills[2]:
        Ranks(zygote, args, folder / "log", 1).finish()
        return folder / "whole", steps
    # As a user starts it, by a process that nobody forked.
    alone = Processes([sys.executable, SCRIPT, *map(str, args)], folder / "log")
    try:
        assert alone.wait(LONG) == 0, alone.said()
    finally:
        alone.end()
    return folder / "whole", steps


@pytest.fixture(scope="module")
def whole_of_two(zygote, kills, tmp_path_factory) -> tuple[Path, int]:
    """A run on two ranks that nothing interrupts, and its steps."""
    if not kills[1]:
        pytest.skip("not with less than --kills 3")
    steps = SPACING * max(kills[1], 3)
    folder = tmp_path_factory.mktemp("two")
    args = [*MODEL, "--steps", steps, "--out", folder / "whole"]
    Ranks(zygote, args, folder / "log", 2).finish()
    return folder / "whole", steps


def test_a_run_on_one_rank_killed_again_and_again_ends_with_the_same_bits(
    zygote, kills, whole_of_one, tmp_path
):
    whole, steps = whole_of_one
    how = {"steps": steps, "ranks": 1, "kills": kills[0], "seed": 1}
    survive(zygote, tmp_path / "killed", tmp_path, **how)
    assert differences(tmp_path / "killed", whole, steps) == []


def test_a_run_of_which_any_rank_of_two_is_killed_ends_with_the_same_bits(
    zygote, kills, whole_of_two, tmp_path
):
    whole, steps = whole_of_two
    how = {"steps": steps, "ranks": 2, "kills": kills[1], "seed": 2}
    survive(zygote, tmp_path / "killed", tmp_path, **how)
    assert differences(tmp_path / "killed", whole, steps) == []


def kill_a_rank(job: Processes, out: Path, step: int, draw: random.Random) -> None:
    """Kill a rank when a step is done, and wait until torchrun has ended all the others too."""
    assert wait_until(lambda: steps_done(out) >= step, LONG), job.said()
    ranks = job.ranks()
    assert kill(draw.choice(ranks), signal.SIGKILL)
    assert wait_until(lambda: not set(job.ranks()) & set(ranks), LONG), job.said()


def test_ranks_that_torchrun_starts_again_go_on_by_themselves(kills, whole_of_two, tmp_path):
    if not kills[2]:
        pytest.skip("takes a minute: done with --kills 50 and more")
    whole, steps = whole_of_two
    draw, out = random.Random(3), tmp_path / "killed"
    # Without --resume: torchrun repeats the command that began the run.
    args = [*MODEL, "--steps", steps, "--out", out]
    job = Processes(torchrun(args, ranks=2, restarts=kills[2]), tmp_path / "log")
    try:
        for step in sorted(draw.sample(range(1, steps - 1), kills[2])):
            kill_a_rank(job, out, step, draw)
        status = job.wait(LONG)
    finally:
        job.end()
    assert status == 0, job.said()
    assert differences(out, whole, steps) == []
