"""A process that hangs, however it hangs, ends and prints where."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.train.launch import ROOT
from train.loop.watchdog import Watchdog

START = """
import ctypes, multiprocessing, os, sys, time
from pathlib import Path
from train.loop.watchdog import Watchdog

def hang_here():
    {hang}

with Watchdog({seconds}, Path(sys.argv[1])) as watchdog:
    watchdog.progress("step", 12)
    print("started", flush=True)
    hang_here()
print("over", flush=True)
"""


def start(folder: Path, hang: str, seconds: float = 1.0) -> subprocess.Popen:
    """Start a process of rank 3 that hangs so under a watchdog."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "3"}
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(hang=hang, seconds=seconds), str(folder)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "started\n", process.communicate()
    return process


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, out, err


def test_a_process_that_hangs_ends_with_its_stacks_on_stderr_and_in_a_file(tmp_path):
    status, out, err = finish(start(tmp_path, "time.sleep(60)"))
    assert (status, out) == (1, "")
    assert "rank 3 made no progress for 1 s, in step 12: stacks follow\n" in err
    assert "in hang_here\n" in err
    kept = (tmp_path / "stacks-rank3.txt").read_text()
    assert kept.startswith("rank 3 made no progress for 1 s, in step 12: stacks follow\n")
    assert "in hang_here\n" in kept


def test_a_folder_that_is_gone_costs_the_file_only(tmp_path):
    status, _, err = finish(start(tmp_path / "gone", "time.sleep(60)"))
    assert status == 1
    assert "in hang_here\n" in err
    assert "stacks not written: [Errno 2] No such file or directory" in err


def test_code_that_never_gives_up_pythons_lock_is_ended_too(tmp_path):
    # PyDLL, unlike CDLL, keeps it.
    status, out, err = finish(start(tmp_path, "ctypes.PyDLL(None).sleep(60)"))
    assert (status, out) == (1, "")
    assert err.startswith("Timeout (")
    assert "in hang_here\n" in err


def test_a_data_worker_that_hangs_goes_with_it(tmp_path):
    hang = (
        "worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)); "
        "worker.start(); worker.join()"
    )
    # It holds the same pipes, so that waiting for their end is waiting for it.
    status, _, err = finish(start(tmp_path, hang))
    assert status == 1
    assert "in hang_here\n" in err


def test_a_process_that_makes_progress_lives(tmp_path):
    # Twice the timeout in all, but never in one piece.
    slow = "[(time.sleep(0.4), watchdog.progress()) for _ in range(5)]"
    assert finish(start(tmp_path, slow)) == (0, "over\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_that_is_shorter_than_the_timeout_does_not_end_it(tmp_path):
    process = start(tmp_path, "time.sleep(1.5)", seconds=3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    assert finish(process) == (0, "over\n", "")


def test_a_clock_that_jumps_ends_nothing_and_saves_nothing(tmp_path):
    forward, back = (f"time.time = lambda: {now}; " for now in (1e12, 0.0))
    lives = forward + "time.sleep(0.5)"
    assert finish(start(tmp_path, lives)) == (0, "over\n", "")
    assert finish(start(tmp_path, back + "time.sleep(60)"))[0] == 1


def test_it_leaves_nothing_behind(tmp_path):
    threads = threading.active_count()
    for _ in range(2):
        with Watchdog(0.3, tmp_path) as watchdog:
            assert threading.active_count() == threads + 1
            watchdog.progress("step", 1)
        assert threading.active_count() == threads
    # Were one still on, this process would end here.
    time.sleep(0.5)
    with Watchdog(0.0):
        assert threading.active_count() == threads


def test_progress_costs_microseconds():
    with Watchdog(1800.0) as watchdog:
        start = time.perf_counter()
        for step in range(10_000):
            watchdog.progress("step", step)
        assert time.perf_counter() - start < 10_000 * 20e-6


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_seconds_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match=f"seconds must be at least 0 and finite, got {seconds}"):
        Watchdog(seconds)
