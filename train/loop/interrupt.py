"""Handle the signals that stop a run: SIGTERM, SIGINT and SIGHUP.

While a run trains and writes its results, an ``Interrupt`` notes the signal, and the run stops
where it can be resumed; only a second SIGINT ends the process at once. Before training nothing can
be lost, and a signal ends the process as usual.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Seconds within which two signals count as one: a scheduler signals every process, and torchrun
# forwards the signal.
_SAME_REQUEST = 1.0
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupt:
    """Note signals while in use, so that a step is never interrupted; for the main thread.

    A second SIGINT ends the process with status 130 and without a traceback: nothing more is
    written, and complete checkpoints remain. Python runs handlers only between its own
    instructions: a process that waits for others in C ends after that wait, or when torchrun kills
    it after 30 s.

    Attributes:
        received: name of the first signal, or None.
    """

    def __init__(self):
        self.received: str | None = None
        self._sigint_at: float | None = None

    def __enter__(self):
        # Under nohup a process ignores SIGHUP, and must continue to do so.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._before = {n: signal.signal(n, self._note) for n in _NUMBERS if n not in ignored}
        return self

    def __exit__(self, *exception: object):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGHUP:
            _let_go_of_closed_terminal()
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._sigint_at is None:
            self._sigint_at = now
        elif now - self._sigint_at > _SAME_REQUEST:
            line = b"stopped at once by a second SIGINT; checkpoints that are whole stay\n"
            with suppress(OSError):
                os.write(2, line)
            os._exit(130)


def ignore_signals() -> None:
    """Ignore signals that arrive after everything is saved, while the interpreter exits."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals that arrive after everything is saved, while a run is closed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _let_go_of_closed_terminal() -> None:
    """Drop further output: an error while printing would end the run before it is saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(nowhere, stream)
    os.close(nowhere)
