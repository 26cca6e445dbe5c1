"""Train for an hour under random faults, then prove that nothing was lost and nothing changed.

python -m tests.faults.soak --minutes 60 --out DIR

A small ViT trains on the bundled digits with dropout, an average of the weights, kappa,
evaluations and checkpoints. Faults come at random times; each ends the run, which is started again
with ``--resume auto``, or restarted by torchrun itself. When the minutes are over it is stopped,
goes on for a few steps to its end, and is compared with a run of as many steps that nothing
interrupted. ``DIR/soak.json`` has what happened; the exit status is 1 if anything differs.
"""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from tests.faults.table import facts, of_soak

EVERY = 50  # steps between checkpoints
# A constant rate: the steps then do not depend on how many there are to be.
MODEL = ["--heads", 2, "--depth", 2, "--head-dim", 8, "--batch-size", 64, "--dropout", 0.1]
MODEL += ["--drop-path", 0.1, "--schedule", "constant", "--warmup", 0, "--ema", 0.99]
MODEL += ["--deterministic", "--kappa-every", 20, "--eval-every", 5, "--ckpt-every", EVERY]
NO_END = 100_000_000

# Faults and how often each is drawn.
FAULTS = {
    "kill -9 of a rank": 4,
    "kill -9 of torchrun and all ranks": 2,
    "a rank stopped (SIGSTOP), then kill -9 of it": 1,
    "SIGTERM to torchrun": 1,
    "SIGINT to torchrun": 1,
    "SIGTERM to a rank": 1,
}
GENTLE = ("SIGTERM to torchrun", "SIGINT to torchrun", "SIGTERM to a rank")

# Seconds without any progress after which a run is called stuck; a start takes ten on a quiet
# machine.
STUCK = 300.0
# Seconds in which a run must have ended once it was hit; torchrun alone may wait for 30.
ENDING = 240.0


@dataclass
class Soak:
    """What happens in the interrupted run.

    Args:
        out: its folder.
        logs: folder of what its launches say.
        ranks: processes that train.
        mean: seconds of training between faults, on average.
        draw: where all randomness comes from.
    """

    out: Path
    logs: Path
    ranks: int
    mean: float
    draw: random.Random
    launches: int = 0
    restarts: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.began = time.monotonic()
        # Of the ranks that run now: when they were started, and whether they have resumed; and how
        # often this launch has.
        self.since, self.goes_on, self.resumes = 0.0, False, 0

    def train(self, seconds: float) -> None:
        """Train under faults for some seconds, and stop."""
        deadline = self.began + seconds
        while time.monotonic() < deadline and len(self.problems) < 5:
            # Torchrun itself restarts the ranks in a third of the launches.
            restarts = self.draw.choice((0, 0, 3))
            anew = newest_checkpoint(self.out) == 0
            run = self._launch(NO_END, restarts)
            try:
                if not self._watch(run, STUCK, until=lambda: newest_checkpoint(self.out) > 0):
                    continue
                self.goes_on = anew or self.goes_on
                self._hit(run, restarts, deadline)
            finally:
                run.end()

    def _launch(self, steps: int, restarts: int = 0) -> Processes:
        args = [*MODEL, "--steps", steps, "--out", self.out, "--resume", "auto"]
        log = self.logs / f"launch-{self.launches:03d}.log"
        self.launches, self.resumes = self.launches + 1, 0
        self.since, self.goes_on = time.time(), False
        return Processes(torchrun(args, ranks=self.ranks, restarts=restarts), log)

    def _hit(self, run: Processes, restarts: int, deadline: float) -> None:
        """Send faults to one launch until it has ended."""
        while True:
            # A fifth of the faults may come before the run goes on, as starts take long too.
            if self.draw.random() < 0.8:
                left = min(STUCK, deadline - time.monotonic())
                if not self._watch(run, left, until=lambda: self.goes_on):
                    return
            wait = self.draw.expovariate(1 / self.mean)
            fault = self.draw.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
            aimed = self.draw.random() < 0.25
            over = time.monotonic() + wait >= deadline
            if over:
                wait, fault, aimed = deadline - time.monotonic(), "SIGTERM to torchrun", False
            if not self._watch(run, wait):
                return
            if aimed:
                wait_until(lambda: being_saved(self.out, self.since) is not None, 30)
            if over and not wait_until(lambda: bool(run.ranks()), STUCK):
                self.problems.append(f"launch {self.launches - 1}: no rank after {STUCK:.0f} s")
                return
            before = set(run.ranks())
            self._strike(run, fault)
            # A signal to a rank that is still starting is a failure like any other to torchrun.
            if not (restarts and self._is_restarted(run, before)):
                self._ended(run, fault)
                return
            restarts -= 1
            self.restarts += 1
            self.since, self.goes_on = time.time(), False

    def _watch(
        self, run: Processes, seconds: float, until: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait, and note where the run resumed; return False if it ended or is stuck."""
        end = time.monotonic() + seconds
        moved, steps = time.monotonic(), steps_done(self.out)
        while time.monotonic() < end and not until():
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))
            self._note_resumes(run)
            if run.first.poll() is not None:
                self.problems.append(
                    f"launch {self.launches - 1} ended by itself with {run.first.poll()}: "
                    + " | ".join(run.said().splitlines()[-5:])
                )
                return False
            if steps_done(self.out) != steps:
                moved, steps = time.monotonic(), steps_done(self.out)
            if time.monotonic() - moved > STUCK:
                self.problems.append(f"launch {self.launches - 1} stuck at step {steps}")
                return False
        return True

    def _strike(self, run: Processes, fault: str) -> None:
        # Or else a fault that comes soon after a resume would count as one before it.
        self._note_resumes(run)
        ranks = run.ranks()
        saving = being_saved(self.out, self.since)
        if "rank" in fault and "torchrun" not in fault:
            if not ranks:  # torchrun is still starting them
                fault = "kill -9 of torchrun and all ranks"
            else:
                victim = self.draw.choice(ranks)
        if fault == "kill -9 of torchrun and all ranks":
            for pid in [run.first.pid, *ranks]:
                kill(pid, signal.SIGKILL)
        elif fault == "kill -9 of a rank":
            kill(victim, signal.SIGKILL)
        elif fault.startswith("a rank stopped"):
            kill(victim, signal.SIGSTOP)
            time.sleep(min(20, self.draw.expovariate(1 / 4)))
            kill(victim, signal.SIGKILL)
        elif fault == "SIGTERM to a rank":
            kill(victim, signal.SIGTERM)
        else:
            number = signal.SIGTERM if "SIGTERM" in fault else signal.SIGINT
            kill(run.first.pid, number)
        self.events.append(
            {
                "fault": fault,
                "seconds": round(time.monotonic() - self.began, 2),
                "launch": self.launches - 1,
                "saving": saving,
                "ranks_running": len(ranks),
            }
        )

    def _is_restarted(self, run: Processes, before: set[int]) -> bool:
        """Return whether torchrun has started other ranks in place of those before."""
        self._note_steps()

        def restarted() -> bool:
            now = set(run.ranks())
            return run.first.poll() is not None or (len(now) == self.ranks and not now & before)

        return wait_until(restarted, ENDING) and run.first.poll() is None

    def _ended(self, run: Processes, fault: str) -> None:
        status = run.wait(ENDING)
        if status is None:
            where = f"launch {self.launches - 1} did not end in {ENDING:.0f} s after {fault}"
            self.problems.append(where)
            run.end()
        self._note_resumes(run)
        self._note_steps()
        self.events[-1]["status"] = status

    def _note_steps(self) -> None:
        self.events[-1]["step"] = steps_done(self.out)

    def _note_resumes(self, run: Processes) -> None:
        """Add to the faults since the last resume from where the run went on after them."""
        resumes = resumed_from(run.said())
        for step in resumes[self.resumes :]:
            self.goes_on = True
            pending = [e for e in self.events if "step" in e and "resumed_from" not in e]
            for event in pending:
                event["resumed_from"] = step
            # Further faults came before a step was done: they lost nothing more. A checkpoint from
            # before an evaluation is one step ahead of the rows, which that step's then joins.
            for number, event in enumerate(pending):
                event["steps_lost"] = 0 if number else max(0, event["step"] - step)
                if event["steps_lost"] > 2 * EVERY:
                    self.problems.append(f"lost more than since the last checkpoint: {event}")
                if event["fault"] in GENTLE and event["steps_lost"]:
                    self.problems.append(f"lost steps to a signal that requests a stop: {event}")
        self.resumes = len(resumes)

    def finish(self, steps: int) -> None:
        """Go on to the end of a run of some steps, undisturbed."""
        run = self._launch(steps)
        try:
            status = run.wait(600)
            self._note_resumes(run)
        finally:
            run.end()
        if status != 0:
            self.problems.append(
                f"the last launch ended with {status}: " + " | ".join(run.said().splitlines()[-5:])
            )


def uninterrupted(out: Path, logs: Path, *, steps: int, ranks: int) -> str | None:
    """Do a run of as many steps in one go; return what went wrong, or None."""
    args = [*MODEL, "--steps", steps, "--out", out]
    run = Processes(torchrun(args, ranks=ranks), logs / "uninterrupted.log")
    try:
        done = -1
        while True:
            status = run.wait(STUCK)
            if status is not None or steps_done(out) == done:
                break
            done = steps_done(out)
    finally:
        run.end()
    if status != 0:
        return f"the uninterrupted run ended with {status}: " + " | ".join(
            run.said().splitlines()[-5:]
        )
    return None


def soak(out: Path, *, minutes: float, ranks: int, seed: int, mean: float) -> dict[str, Any]:
    """Do the whole: train under faults, finish, do the uninterrupted run, compare.

    Args:
        out: folder of both runs, their logs and ``soak.json``.
        minutes: that the interrupted training lasts, starts and restarts included.
        ranks: processes that train.
        seed: of the faults and their times.
        mean: seconds of training between faults, on average.

    Returns:
        The content of ``soak.json``.
    """
    logs = out / "logs"
    logs.mkdir()
    campaign = Soak(out / "interrupted", logs, ranks, mean, random.Random(seed))
    began = time.monotonic()
    campaign.train(60 * minutes)
    lasted = time.monotonic() - began
    # A few steps more, so that the last launch ends a run as any other does.
    steps = newest_checkpoint(campaign.out) + 10
    campaign.finish(steps)
    problems = campaign.problems
    began = time.monotonic()
    failure = uninterrupted(out / "uninterrupted", logs, steps=steps, ranks=ranks)
    if failure is not None:
        problems.append(failure)
    try:
        different = differences(campaign.out, out / "uninterrupted", steps)
    except OSError as error:
        different = [f"nothing to compare: {error}"]
    lost = [event.get("steps_lost", 0) for event in campaign.events]
    kinds = [event["fault"] for event in campaign.events]
    return {
        **facts(),
        "ranks": ranks,
        "seed": seed,
        "mean_seconds_between_faults": mean,
        "flags": " ".join(map(str, MODEL)),
        "checkpoint_every": MODEL[MODEL.index("--ckpt-every") + 1],
        "minutes": round(lasted / 60, 2),
        "uninterrupted_minutes": round((time.monotonic() - began) / 60, 2),
        "steps": steps,
        "launches": campaign.launches,
        "restarts": campaign.restarts,
        "faults": {fault: kinds.count(fault) for fault in FAULTS if fault in kinds},
        "faults_during_a_save": sum(event["saving"] is not None for event in campaign.events),
        "steps_lost": sum(lost),
        "most_steps_lost": max(lost, default=0),
        "problems": problems,
        "differences": different,
        "same": not problems and not different,
        "events": campaign.events,
    }


def main() -> int:
    """Read the command line, soak, write ``soak.json`` and print the summary."""
    parser = argparse.ArgumentParser("soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="of interrupted training")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their times")
    parser.add_argument("--mean", type=float, default=20, help="seconds of training between")
    args = parser.parse_args()
    for name in ("minutes", "ranks", "mean"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    try:
        args.out.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--out must be a folder that does not exist yet, got {args.out}: {error}")
    # Whoever stops the soak does not leave its training behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    how = {"minutes": args.minutes, "ranks": args.ranks, "seed": args.seed, "mean": args.mean}
    result = soak(args.out.resolve(), **how)
    (args.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    print(of_soak(result), *result["problems"], *result["differences"], sep="\n")  # noqa: T201
    return 0 if result["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
