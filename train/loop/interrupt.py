"""Handle the signals that stop a run: SIGTERM, SIGINT and SIGHUP.

While a run trains and writes what came of it, an ``Interrupt`` notes the signal, and the run ends
where it can go on later; only a second SIGINT ends the process at once. Before training there is
nothing to lose, and a signal ends the process as it ends any other.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# One request may reach a process twice: from a scheduler that signals every process, and handed
# on by torchrun. Seconds.
_SAME_REQUEST = 1.0
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupt:
    """Notes signals while in use, so that a step is never cut in two; for the main thread.

    A second SIGINT ends the process with status 130 and without a word from Python: nothing more
    is written, and checkpoints that are whole stay. Python runs a handler between two lines of
    Python: a process that waits for others in C ends when that wait does, or when torchrun, which
    gives it 30 s, kills it.

    Attributes:
        received: name of the first signal, or None.
    """

    def __init__(self):
        self.received: str | None = None
        self._sigint_at: float | None = None

    def __enter__(self):
        # nohup has a process ignore SIGHUP, which must stay so.
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
    """Let signals that come when all is saved, while the interpreter ends, do nothing."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Let signals that come when all is saved, while a run is closed, do nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
