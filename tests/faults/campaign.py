"""Processes of a training run, what they are doing, and how they are ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.train.launch import ROOT, SCRIPT, rows, tensors_of

# Every process of a run finds this in its environment, its own children's children too.
MARK = "LEANER_FAULTS_RUN"


class Processes:
    """What one command started, wherever its processes are: torchrun's are sessions of their own.

    Args:
        command: to start.
        log: file that takes the output of all of them.
    """

    def __init__(self, command: list[str], log: Path):
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as file:
            self.first = subprocess.Popen(
                command,
                env=os.environ | own | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.log = log

    def said(self) -> str:
        """Return what all of them have said so far."""
        return self.log.read_text(errors="replace")

    def alive(self) -> dict[int, int | None]:
        """Return the processes that run, each with its rank, or None where it has none."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's process, or one that has just ended
                continue
            ended = state_of(int(folder.name)) in ("Z", None)
            if f"{MARK}={self.mark}".encode() in variables and not ended:
                ranks = [v for v in variables if v.startswith(b"RANK=")]
                found[int(folder.name)] = int(ranks[0][5:]) if ranks else None
        return found

    def ranks(self) -> list[int]:
        """Return the processes that train, without what they may have started themselves."""
        alive = self.alive()
        of_ranks = {pid for pid, rank in alive.items() if rank is not None}
        return [pid for pid in of_ranks if parent_of(pid) not in of_ranks]

    def wait(self, seconds: float) -> int | None:
        """Return the status of the first process; None if any still runs after some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.first.poll()
            if status is not None and not self.alive():
                return status
            time.sleep(0.05)
        return None

    def end(self) -> None:
        """Kill whatever still runs, all at once, and wait until it is gone."""
        deadline = time.monotonic() + 30
        while self.first.poll() is None or self.alive():
            for pid in [self.first.pid, *self.alive()]:
                kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {sorted(self.alive())} cannot be killed")
            time.sleep(0.02)


def state_of(pid: int) -> str | None:
    """Return the letter of what a process does, Z where it has ended, or None without one."""
    return _stat(pid)[0]


def parent_of(pid: int) -> int | None:
    """Return the process that started another, or None without one."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str | None, int | None]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None, None
    return state, int(parent)


def kill(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def torchrun(args: list[object], *, ranks: int, restarts: int = 0) -> list[str]:
    """Return the command that trains on some ranks, which torchrun restarts by itself."""
    how = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", *how, SCRIPT]
    return command + [str(arg) for arg in args]


def steps_done(out: Path) -> int:
    """Return how many steps the run has written down."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


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


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, looking often; return whether it came in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def differences(out: Path, whole: Path, step: int) -> list[str]:
    """Return in what two runs of as many steps differ: no line where every bit is the same."""
    found = []
    for name in ("metrics.jsonl", "kappa.jsonl"):
        ours, theirs = rows(out / name), rows(whole / name)
        if len(ours) != len(theirs):
            found.append(f"{name} has {len(ours)} rows instead of {len(theirs)}")
        for row, other in zip(ours, theirs):
            if row != other:
                found.append(f"{name}: {json.dumps(row)} instead of {json.dumps(other)}")
                break
    last = Path("checkpoints") / f"step-{step:08d}"
    digests, others = tensors_of(out / last), tensors_of(whole / last)
    if not digests or digests.keys() != others.keys():
        found.append(f"{last} has the tensors {sorted(digests)} instead of {sorted(others)}")
    found += [
        f"{last}: {name} has other bytes"
        for name, digest in digests.items()
        if others.get(name, digest) != digest
    ]
    return found
