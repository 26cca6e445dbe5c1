"""A process that has imported everything and forks one that trains whenever it is asked to.

An import of torch takes seconds and a fork milliseconds, so a run can be killed and started again
fifty times in a test. What is forked is a process of its own: it can be killed as any other.
"""

import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

# What training imports late.
import torch._inductor  # noqa: F401

from tests.train.launch import ROOT
from train import plots, vit


class Zygote:
    """The other end: starts the process that forks, and asks it to."""

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
        self._process.kill()
        self._process.communicate()

    def fork(self, args: list[object], log: Path, environment: dict[str, object]) -> int:
        """Start to train; return the number of the process.

        Args:
            args: of train/vit.py.
            log: file that takes what it says.
            environment: beside the zygote's own.
        """
        words = {name: str(value) for name, value in environment.items()}
        return self._ask({"args": [str(a) for a in args], "log": str(log), "environment": words})

    def status(self, pid: int) -> int:
        """Wait for a process that was forked; return its status, negative after a signal."""
        return self._ask({"wait": pid})

    def _ask(self, question: dict) -> int:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def _train(question: dict) -> int:
    """Train in this process, which was just forked, and return its exit status."""
    os.setsid()
    log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, descriptor)
    os.environ.update(question["environment"])
    # As long to draw as twenty steps to train.
    plots.plot_loss = plots.plot_kappa = lambda *_: None
    try:
        vit.main(question["args"])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve() -> None:
    # A fork copies one thread alone.
    assert threading.active_count() == 1
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
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
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()
