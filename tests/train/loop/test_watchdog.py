"""A process that hangs, however it hangs, ends and prints where."""

import math
import os
import shutil
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
import ctypes, os, sys, time
from pathlib import Path
from train.loop.watchdog import Watchdog

def hang_here():
    {hang}

with Watchdog({seconds}, Path(sys.argv[1])) as watchdog:
    watchdog.progress()
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
    assert err.startswith("Timeout (0:00:01")
    assert "in hang_here\n" in err
    assert "in hang_here\n" in (tmp_path / "stacks-rank3.txt").read_text()


def test_the_stacks_are_of_all_threads(tmp_path):
    hang = "import threading; threading.Thread(target=time.sleep, args=(60,), name='other').start()"
    _, _, err = finish(start(tmp_path, f"{hang}; time.sleep(60)"))
    for stacks in (err, (tmp_path / "stacks-rank3.txt").read_text()):
        assert stacks.count("(most recent call first)") == 2


def test_a_folder_that_is_gone_costs_the_file_only(tmp_path):
    status, _, err = finish(start(tmp_path / "gone", "time.sleep(60)"))
    assert status == 1
    assert "in hang_here\n" in err


def test_code_that_never_gives_up_pythons_lock_is_ended_too(tmp_path):
    # PyDLL, unlike CDLL, keeps it; and a mutex that is locked twice waits through signals.
    hang = "m = ctypes.create_string_buffer(64); c = ctypes.PyDLL(None); "
    hang += "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
    status, out, err = finish(start(tmp_path, hang))
    assert (status, out) == (1, "")
    assert err.startswith("Timeout (")
    for stacks in (err, (tmp_path / "stacks-rank3.txt").read_text()):
        assert "in hang_here\n" in stacks


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
    threads, handler = threading.active_count(), signal.getsignal(signal.SIGALRM)
    for _ in range(2):
        with Watchdog(0.3, tmp_path) as watchdog:
            watchdog.progress()
        assert list(tmp_path.iterdir()) == []
    # Were one still on, this process would end here.
    time.sleep(1)
    with Watchdog(0.0, tmp_path) as watchdog:
        watchdog.progress()
    assert (threading.active_count(), signal.getsignal(signal.SIGALRM)) == (threads, handler)


def test_a_folder_that_goes_meanwhile_ends_nothing(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Watchdog(60.0, folder) as watchdog:
        shutil.rmtree(folder)
        watchdog.progress()


def test_stacks_of_an_earlier_attempt_are_kept(tmp_path):
    (tmp_path / "stacks-rank0.txt").write_text("earlier\n")
    with Watchdog(60.0, tmp_path):
        pass
    assert (tmp_path / "stacks-rank0.txt").read_text() == "earlier\n"


def test_progress_costs_less_than_a_millisecond(tmp_path):
    with Watchdog(1800.0, tmp_path) as watchdog:
        start = time.perf_counter()
        for _ in range(1000):
            watchdog.progress()
        assert time.perf_counter() - start < 1


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_seconds_that_are_none_are_refused(seconds, tmp_path):
    with pytest.raises(ValueError, match=f"seconds must be at least 0 and finite, got {seconds}"):
        Watchdog(seconds, tmp_path)
