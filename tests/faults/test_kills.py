"""A run whose processes are killed, again and again, ends with the bits of one that was not."""

import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.zygote import LONG, Ranks, Zygote, steps_done, wait_until
from tests.train.launch import assert_same_run, run

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


def newest_checkpoint(out: Path) -> int:
    """Return the step of the newest checkpoint, whole or not; 0 without any."""
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def being_saved(out: Path, since: float) -> int | None:
    """Return the step of the checkpoint that is being written at this moment.

    Args:
        out: folder of the run.
        since: time when its processes were started; what is older was left by others, killed.
    """
    for path in (out / "checkpoints").glob(".step-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime >= since:
                return int(path.name.removeprefix(".step-"))
    return None


def resumed_from(said: str) -> list[int]:
    """Return the steps from which a run was resumed by its log, in order."""
    return [int(step) for step in re.findall(r"resumed from \S*step-(\d+)", said)]


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
) -> bool:
    """Train while the processes are killed; return whether the last ones resumed the run."""
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
    return bool(resumed)


@pytest.fixture(scope="module")
def kills(request: pytest.FixtureRequest) -> tuple[int, int]:
    """How many kills are of a run on one rank, and how many of one on two."""
    kills = request.config.getoption("--kills")
    return kills - kills // 3, kills // 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_which_any_rank_is_killed_again_and_again_ends_with_the_same_bits(
    zygote, kills, tmp_path, ranks
):
    if not kills[ranks - 1]:
        pytest.skip("two ranks are killed with --kills 3 and more")
    steps = SPACING * max(kills[ranks - 1], 3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    args = [*MODEL, "--steps", steps, "--out", whole]
    if ranks == 1 and sum(kills) >= 50:
        run(*args)  # as a user starts it, by a process that nobody forked
    else:
        Ranks(zygote, args, tmp_path / "log", ranks).finish()
    how = {"steps": steps, "ranks": ranks, "kills": kills[ranks - 1], "seed": ranks}
    resumed = survive(zygote, killed, tmp_path, **how)
    assert_same_run(killed, whole, f"step-{steps:08d}", resumed=resumed)
