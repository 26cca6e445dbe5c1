"""A signal is handled whatever the process is doing, and ends it as its phase requires."""

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
from train.loop.interrupt import Interrupt, exit_on_signal


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


# Locks a mutex of C twice, from which no signal and no handler of Python's wakes the main thread.
STUCK = "import ctypes; m = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None)\n"
STUCK += "for _ in range(2): lock.pthread_mutex_lock(m)\n"


def start(body: str, **environment: str) -> subprocess.Popen:
    """Start a process that says "ready" where it may be signalled."""
    ready = "import os, sys, time; from train.loop import interrupt\n"
    ready += "ready = lambda: print('ready', flush=True)\n"
    return subprocess.Popen(
        [sys.executable, "-c", ready + textwrap.dedent(body)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def signalled(process: subprocess.Popen, *numbers: int | float) -> tuple[int, str, str]:
    """Send signals, and wait between them where there is a time; return status and output."""
    assert process.stdout.readline() == "ready\n", process.communicate()
    for number in numbers:
        if isinstance(number, float):
            time.sleep(number)
        else:
            process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


STEP = """
with interrupt.Interrupt() as noted:
    ready()
    while noted.received is None:
        time.sleep(0.01)
    print("saved after", noted.received)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_and_the_step_goes_on_to_its_end(number):
    name = signal.Signals(number).name
    assert signalled(start(STEP), number) == (0, f"saved after {name}\n", "")


TWICE = "stopped at once by a second SIGINT; checkpoints that are whole stay\n"
# As a rank in a collective whose other ranks have died.
IN_A_COLLECTIVE = f"""
with interrupt.Interrupt():
    ready()
    {STUCK.splitlines()[0]}
    {STUCK.splitlines()[1]}
"""


def test_a_second_sigint_ends_a_process_at_once_that_waits_for_others_in_c():
    process = start(IN_A_COLLECTIVE)
    begun = time.monotonic()
    assert signalled(process, signal.SIGINT, 0.2, signal.SIGINT) == (130, "", TWICE)
    assert time.monotonic() - begun < 20


def test_under_torchrun_sigterm_after_sigint_is_the_second_ctrl_c():
    process = start(IN_A_COLLECTIVE, TORCHELASTIC_RUN_ID="one")
    assert signalled(process, signal.SIGINT, 0.2, signal.SIGTERM) == (130, "", TWICE)


# Ends itself some time after the first signal, saved.
SAVES = """
with interrupt.Interrupt() as noted:
    ready()
    while noted.received is None:
        time.sleep(0.01)
    time.sleep(0.5)
    print("saved")
"""


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        # Sent by a scheduler to every process, and handed on by torchrun.
        ({"TORCHELASTIC_RUN_ID": "one"}, (signal.SIGINT, 0.2, signal.SIGINT)),
        ({}, (signal.SIGTERM, 0.2, signal.SIGTERM)),
        ({}, (signal.SIGINT, 0.2, signal.SIGTERM)),
        ({}, (signal.SIGTERM, 0.2, signal.SIGINT)),
    ],
)
def test_a_request_that_arrives_twice_does_not_cost_the_save(environment, numbers):
    assert signalled(start(SAVES, **environment), *numbers) == (0, "saved\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_before_training_a_signal_ends_the_process_at_once_in_one_line(number):
    body = f"with interrupt.exit_on_signal('vit'):\n    ready()\n    {STUCK}"
    body = body.replace("\nfor", "\n    for")
    line = f"vit: stopped by {signal.Signals(number).name}, nothing to save\n"
    assert signalled(start(body), number) == (128 + number, "", line)


def test_before_training_only_the_first_rank_speaks():
    body = "with interrupt.exit_on_signal('vit'):\n    ready()\n    time.sleep(30)"
    assert signalled(start(body, RANK="1"), signal.SIGTERM) == (143, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_when_all_is_saved_does_not_make_a_failure_of_it(number):
    body = "with interrupt.exit_on_signal('vit') as exiting:\n    exiting.done = True\n"
    process = start(f"{body}    ready()\n    time.sleep(30)\n    sys.exit(1)")
    assert signalled(process, number) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_interpreter_ends_does_not_make_a_failure_of_it(number):
    # What was registered before ends last, as what torch registers.
    body = "import atexit; atexit.register(lambda: (ready(), time.sleep(1)))\n"
    body += "with interrupt.exit_on_signal('vit') as exiting:\n    exiting.done = {}\n"
    assert signalled(start(body.format(True)), number) == (0, "", "")
    assert signalled(start(body.format(False)), number) != (0, "", "")


def test_handlers_are_as_before_afterwards():
    def handlers() -> list[object]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        wake = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wake)
        return [wake, *map(signal.getsignal, numbers), len(os.listdir("/proc/self/fd"))]

    before = handlers()
    with exit_on_signal("vit"):
        outside = handlers()
        with Interrupt() as interrupt:
            assert handlers() != outside
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.received == "SIGTERM"
        assert handlers() == outside
    assert handlers() == before


def test_an_error_passes_through_and_leaves_no_handler():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), Interrupt():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    body = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{STEP}"
    done = signalled(start(body), signal.SIGHUP, 0.3, signal.SIGTERM)
    assert done == (0, "saved after SIGTERM\n", "")


def test_a_terminal_that_closes_does_not_keep_the_run_from_saving(tmp_path):
    body = f"""
from collections.abc import Iterator
from pathlib import Path
from train.loop import interrupt
print("ready", flush=True)
with interrupt.Interrupt() as noted:
    while noted.received is None:
        pass
    print("stopped by", noted.received, flush=True)
    Path({str(tmp_path / "saved")!r}).write_text(noted.received)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        # Not as these tests may have been started: under nohup it would be ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", body])
    assert os.read(terminal, 5) == b"ready"
    time.sleep(0.3)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"
