"""A process that hangs, however it hangs, ends and prints where."""

import math
import os
import subprocess
import sys
import time

import pytest

from tests.train.launch import ROOT
from train.loop.watchdog import Watchdog

pytestmark = pytest.mark.slow

START = """
import ctypes, threading, time
from train.loop.watchdog import Watchdog

def hang_here():
    {hang}

threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
with Watchdog(1.0) as watchdog:
    hang_here()
print("over", flush=True)
"""


def run(hang: str) -> tuple[int, str, str]:
    """Run a process that hangs so under a watchdog; return its status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", START.format(hang=hang)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "hang",
    [
        "time.sleep(60)",
        # PyDLL, unlike CDLL, keeps Python's lock; a mutex that is locked twice waits for ever.
        "m, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None); "
        "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)",
    ],
)
def test_a_process_that_hangs_ends_with_the_stacks_of_its_threads(hang):
    status, out, err = run(hang)
    assert (status, out) == (1, "")
    assert err.startswith("Timeout (0:00:01")
    assert "in hang_here\n" in err
    assert err.count("(most recent call first)") == 2


def test_a_process_that_makes_progress_lives():
    # Twice the timeout in all, but never in one piece; and a clock that jumps is not looked at.
    slow = "[(time.sleep(0.4), watchdog.progress()) for _ in range(5)]"
    assert run(f"time.time = lambda: 1e12; {slow}") == (0, "over\n", "")


def test_it_leaves_nothing_behind():
    for seconds in (0.0, 0.3):
        with Watchdog(seconds) as watchdog:
            watchdog.progress()
    time.sleep(0.6)  # were one still on, this process would end here


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_seconds_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match=f"seconds must be at least 0 and finite, got {seconds}"):
        Watchdog(seconds)
