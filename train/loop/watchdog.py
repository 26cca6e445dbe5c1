"""Ends a process that makes no progress, and shows where it hung.

Nothing else does: a rank that waits for a rank that is stuck waits for as long as its collectives'
timeout, and what is stuck does not notice.
"""

import faulthandler
import math
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from leaner_kernels.monitor.files import open_own

# Straight to the descriptor: what replaces sys.stderr may have none.
_STDERR = 2
# Of the seconds: what a note of progress may be old.
_SHARE = 0.01
# Between the two dumps.
_SECONDS_TO_WRITE = 0.5


class Watchdog:
    """Ends the process with status 1, and the stacks of its threads, if it makes no progress.

        with Watchdog(1800, folder) as watchdog:
            for step in range(steps):
                watchdog.progress()
                ...

    ``faulthandler`` dumps the Python stacks of all threads: at SIGALRM, which this uses, into
    ``stacks-rank<rank>.txt``, and then from its timer on standard error, where it ends the process.
    Both work in C, while other code keeps Python's lock. torchrun then ends the other ranks, and
    starts all again where ``--max-restarts`` allows.

    The clock is monotonic: it neither jumps nor counts the time that a machine is suspended. It
    does count the time that the process is stopped (SIGSTOP, Ctrl-Z), for which other ranks wait.

    Args:
        seconds: without progress, until the end; 0 never ends it.
        folder: gets the file; left out if it cannot be written.

    Raises:
        ValueError: seconds below 0 or not finite.
    """

    def __init__(self, seconds: float, folder: Path):
        if not 0 <= seconds <= threading.TIMEOUT_MAX / 2:
            raise ValueError(f"seconds must be at least 0 and finite, got {seconds}")
        self.seconds = seconds
        self._path = folder / f"stacks-rank{os.environ.get('RANK', '0')}.txt"

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            try:
                self._file = open_own(self._path)
            except OSError:
                self._file = open(os.devnull, "wb")
            self._noted = -math.inf
            faulthandler.register(signal.SIGALRM, file=self._file, all_threads=True)
            self.progress()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
            self._file.close()
            with suppress(OSError):
                if not self._path.stat().st_size:
                    self._path.unlink()

    def progress(self) -> None:
        """Note that there was some; that the last note is as good as new costs a microsecond."""
        # The timer is a thread, which takes up to milliseconds to start.
        now = time.monotonic()
        if self.seconds and now - self._noted > _SHARE * self.seconds:
            self._noted = now
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
            later = self.seconds + _SECONDS_TO_WRITE
            faulthandler.dump_traceback_later(later, exit=True, file=_STDERR)
