"""End a process that makes no progress, and print where it hung.

Nothing else does: a rank that waits for a rank that is stuck waits for as long as its collectives'
timeout, and what is stuck does not notice.
"""

import faulthandler
import math
import threading
import time

# Straight to the descriptor: what replaces sys.stderr may have none.
_STDERR = 2
# Of the seconds: what a note of progress may be old. Starting the timer takes a millisecond.
_SHARE = 0.01


class Watchdog:
    """Ends the process with status 1, and the stacks of its threads, if it makes no progress.

        with Watchdog(1800) as watchdog:
            for step in range(steps):
                watchdog.progress()
                ...

    ``faulthandler`` writes the Python stacks of all threads to standard error, in C, while other
    code keeps Python's lock. torchrun then ends the other ranks, and starts all again where
    ``--max-restarts`` allows.

    Args:
        seconds: without progress, until the end; 0 never ends it.

    Raises:
        ValueError: seconds below 0 or not finite.
    """

    def __init__(self, seconds: float):
        if not 0 <= seconds <= threading.TIMEOUT_MAX / 2:
            raise ValueError(f"seconds must be at least 0 and finite, got {seconds}")
        self.seconds = seconds

    def __enter__(self) -> "Watchdog":
        self._noted = -math.inf
        self.progress()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()

    def progress(self) -> None:
        """Note that there was some; that the last note is as good as new costs a microsecond."""
        now = time.monotonic()
        if self.seconds and now - self._noted > _SHARE * self.seconds:
            self._noted = now
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=_STDERR)
