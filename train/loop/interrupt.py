"""Signals that ask a process to stop: SIGTERM, SIGINT and SIGHUP.

Before training there is nothing to lose: ``exit_on_signal`` ends the process. While it trains and
writes what came of it, an ``Interrupt`` notes the signal, and the run ends where it can go on
later; only a second SIGINT ends the process at once.

Python runs its own handlers between two lines of Python on the main thread, and so not while that
thread waits for other processes. A second thread, which reads the wake-up file descriptor,
receives a signal even then.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# One request may reach a process twice: from a scheduler that signals every process, and handed
# on by torchrun. Seconds.
_SAME_REQUEST = 1.0
# Alone: a data worker that is just starting may pass on what the terminal sent it too.
_SAME_REQUEST_ALONE = 0.1


class Interrupt:
    """Notes signals while in use, so that a step is never cut in two; for the main thread.

    A second SIGINT ends the process at once, with status 130 and without a word from Python:
    nothing more is written, and checkpoints that are whole stay. So does SIGTERM after SIGINT
    under torchrun, which passes on a second Ctrl-C as that.

    Attributes:
        received: name of the first signal, or None.
    """

    def __init__(self):
        self.received: str | None = None
        self._sigint_at: float | None = None

    def __enter__(self):
        self._listening = _listening(self._note, self._end_at_once)
        self._listening.__enter__()
        return self

    def __exit__(self, *exception: object):
        self._listening.__exit__(None, None, None)

    def _note(self, number: int, _frame: object) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGHUP:
            _let_go_of_closed_terminal()

    def _end_at_once(self, number: int) -> None:
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        now = time.monotonic()
        if self._sigint_at is None:
            self._sigint_at = now if number == signal.SIGINT else None
            return
        if number == signal.SIGINT:
            same = _SAME_REQUEST if under_torchrun else _SAME_REQUEST_ALONE
            again = now - self._sigint_at > same
        else:
            again = number == signal.SIGTERM and under_torchrun
        if again:
            _leave(130, "stopped at once by a second SIGINT; checkpoints that are whole stay")


class ExitOnSignal:
    """What a signal outside training finds.

    Attributes:
        done: set when the script has done what it could and only lets go of its resources: then a
            signal ends the process with status 0 and without a word.
    """

    done = False


@contextmanager
def exit_on_signal(program: str) -> Iterator[ExitOnSignal]:
    """End the process at the first signal, with one line; on the main thread.

    The exit status is the shell's for the signal: 143 for SIGTERM, 130 for SIGINT. When the script
    was done, signals that come while the interpreter ends, which takes it a while, are ignored.

    Args:
        program: name of the script, for the line, which rank 0 writes.

    Yields:
        The ``ExitOnSignal``, whose ``done`` is to be set when there is nothing left to do.
    """
    exiting = ExitOnSignal()

    def leave(number: int) -> None:
        if exiting.done:
            _leave(0, "")
        name = signal.Signals(number).name
        is_main_process = os.environ.get("RANK", "0") == "0"
        _leave(
            128 + number,
            f"{program}: stopped by {name}, nothing to save" if is_main_process else "",
        )

    with _listening(lambda *_: None, leave):
        yield exiting
    if exiting.done:
        # Last of all, to be first when the interpreter ends.
        atexit.unregister(_ignore)
        atexit.register(_ignore)


@contextmanager
def _listening(
    note: Callable[[int, object], None], at_once: Callable[[int], None]
) -> Iterator[None]:
    """Handle signals with ``note`` on the main thread, and with ``at_once`` on another."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    # nohup has a process ignore it, which must stay so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen() -> None:
        # Signals with handlers of others, such as SIGCHLD, arrive too. A zero ends it.
        while number := os.read(read_end, 1)[0]:
            if number in numbers:
                at_once(number)

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    # In this order none reaches the new listener alone, which may do nothing about it.
    before = [signal.signal(number, note) for number in numbers]
    write_end_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(write_end_before)
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
        os.write(write_end, b"\0")
        listener.join()
        os.close(read_end)
        os.close(write_end)


def _ignore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _leave(status: int, line: str) -> None:
    # Not through Python's streams, whose lock the main thread may hold.
    try:
        os.write(2, f"{line}\n".encode() if line else b"")
    finally:
        os._exit(status)


def _let_go_of_closed_terminal() -> None:
    """Drop further output; an error of each line would end the run before it is saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(nowhere, stream)
    os.close(nowhere)
