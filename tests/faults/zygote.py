"""A process that has imported everything and forks one that trains on request.

An import of torch takes seconds and a fork milliseconds, so a run can be killed and started again
fifty times in a test. What is forked is a process of its own: it can be killed as any other.
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# What training imports late.
import torch._inductor  # noqa: F401

from tests.train.launch import ROOT, SCRIPT, free_port
from train import lra, vit  # noqa: F401
from train.logs.report import Report

# Seconds until something must have happened, on a machine that does much else.
LONG = 300


def state_of(pid: int) -> str | None:
    """Return the letter of what a process does, Z where it has ended, or None without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def kill(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process was still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, looking often; return whether it came in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def steps_done(out: Path) -> int:
    """Return how many steps the run has written down."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


class Zygote:
    """The other end: starts the process that forks, and requests it to."""

    def __init__(self):
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            env=os.environ | own,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_exception: object):
        # The end of its input ends it, and what it forked.
        self._process.communicate()

    def fork(
        self, args: list[object], log: Path, environment: dict[str, object], script: str = SCRIPT
    ) -> int:
        """Start to train; return the number of the process.

        Args:
            args: of the script.
            log: file that takes its output.
            environment: beside the zygote's own.
            script: to run.
        """
        words = {name: str(value) for name, value in environment.items()}
        arguments = [script, *map(str, args)]
        return self._ask({"arguments": arguments, "log": str(log), "environment": words})

    def status(self, pid: int) -> int:
        """Wait for a process that was forked; return its status, negative after a signal."""
        return self._ask({"wait": pid})

    def _ask(self, question: dict) -> int:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Ranks:
    """The processes of a run that a zygote forks: as torchrun starts them, but in no time.

    Args:
        zygote: that forks them.
        args: of the script.
        log: file that takes the output of rank 0; the others' lie beside it.
        ranks: how many.
        script: to run.
    """

    def __init__(
        self, zygote: Zygote, args: list[object], log: Path, ranks: int, *, script: str = SCRIPT
    ):
        self.zygote, self.log, self.pids, self.since = zygote, log, [], time.time()
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(ranks):
            own = {} if ranks == 1 else common | {"RANK": rank, "LOCAL_RANK": rank}
            name = log if rank == 0 else log.with_suffix(f".{rank}")
            self.pids.append(zygote.fork(args, name, own, script))

    def running(self) -> bool:
        return all(state_of(pid) not in ("Z", None) for pid in self.pids)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds while all of them run."""
        assert wait_until(lambda: holds() or not self.running(), LONG), "nothing happened"
        assert self.running(), self.log.read_text()

    def kill(self, pids: list[int]) -> list[int]:
        """Kill some of them, then the rest, as whoever started them would; return all statuses."""
        for pid in pids + self.pids:
            kill(pid, signal.SIGKILL)
        return self.statuses()

    def statuses(self) -> list[int]:
        """Wait for all of them to end; return their statuses."""
        if not wait_until(lambda: all(state_of(pid) in ("Z", None) for pid in self.pids), LONG):
            for pid in self.pids:
                kill(pid, signal.SIGKILL)
            raise AssertionError(f"hung: {self.log.read_text()}")
        statuses, self.pids = [self.zygote.status(pid) for pid in self.pids], []
        return statuses

    def finish(self) -> str:
        """Wait for all of them to end, with 0; return what rank 0 said."""
        statuses = self.statuses()
        assert not any(statuses), f"{statuses}: {self.log.read_text()}"
        return self.log.read_text()


def _train(question: dict) -> int:
    """Train in this process, which was just forked, and return its exit status."""
    os.setsid()
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, descriptor)
    os.environ.update(question["environment"])
    # As long to draw as twenty steps to train.
    Report.draw = lambda report: None
    sys.argv = question["arguments"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve() -> None:
    # A fork copies one thread alone.
    assert threading.active_count() == 1
    children = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            pid, status = os.waitpid(question["wait"], 0)
            children.remove(pid)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                status = _train(question)
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                # Not exit: what the zygote would do at its end is not for a fork to do.
                os._exit(status)
            children.add(answer)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for child in children:
        kill(child, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
