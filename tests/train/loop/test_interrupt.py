"""A signal is noted while a run trains, and a second SIGINT ends it at once."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from tests.train.launch import ROOT
from train.loop.interrupt import Interrupt

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Processes that a test starts inherit what is ignored: SIGHUP under nohup, SIGINT behind &."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(body: str, **streams: int) -> subprocess.Popen:
    """Start a process that says "ready" where it may be signalled."""
    ready = "import os, sys, time; from train.loop.interrupt import Interrupt\n"
    ready += "ready = lambda: print('ready', flush=True)\n"
    return subprocess.Popen(
        [sys.executable, "-c", ready + textwrap.dedent(body)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        **{"stderr": subprocess.PIPE} | streams,
    )


def signalled(process: subprocess.Popen, *numbers: int | float) -> tuple[int, str]:
    """Send signals, and wait between them where there is a time; return status and output."""
    assert process.stdout.readline() == "ready\n", process.communicate()
    for number in numbers:
        if isinstance(number, float):
            time.sleep(number)
        else:
            process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


STEP = """
with Interrupt() as interrupt:
    ready()
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        time.sleep(0.01)
    print("saved after", interrupt.received)
"""


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ([signal.SIGTERM], "SIGTERM"),
        ([signal.SIGHUP, signal.SIGTERM, signal.SIGTERM], "SIGHUP"),
        # A request that arrives twice: from the scheduler, and handed on by torchrun.
        ([signal.SIGINT, 0.2, signal.SIGINT], "SIGINT"),
    ],
)
def test_a_signal_is_noted_and_the_step_goes_on_to_its_end(numbers, name):
    assert signalled(start(STEP), *numbers) == (0, f"saved after {name}\n")


def test_a_second_sigint_ends_the_process_at_once():
    assert signalled(start(STEP), signal.SIGINT, 1.2, signal.SIGINT) == (130, "")


def test_handlers_are_as_before_afterwards_and_nohup_is_respected():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with Interrupt():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_terminal_that_closes_does_not_keep_the_run_from_saving(tmp_path):
    main, terminal = pty.openpty()
    body = STEP + f"    sys.stderr.write('a line\\n'); open({str(tmp_path / 'saved')!r}, 'w')\n"
    process = start(body, stderr=terminal)
    os.close(terminal)
    assert process.stdout.readline() == "ready\n"
    os.close(main)
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0
    assert (tmp_path / "saved").exists()
