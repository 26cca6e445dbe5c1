"""Ends a process that makes no progress, and prints where it hung.

Nothing else does: a rank that waits for a rank that is stuck waits for as long as its collectives'
timeout, and what is stuck does not notice.
"""

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

# Straight to the descriptor: what replaces sys.stderr may have none.
_STDERR = 2


class Watchdog:
    """Ends the process with status 1, and the stacks of its threads, if it makes no progress.

        with Watchdog(1800, folder) as watchdog:
            for step in range(steps):
                watchdog.progress("step", step)
                ...

    A thread looks at the clock, prints what hung and for how long on standard error, dumps the
    Python stacks of all threads there and into ``stacks-rank<rank>.txt``, and ends the process:
    torchrun then ends the other ranks, and starts all again where ``--max-restarts`` allows. Code
    that never gives up Python's lock keeps that thread from running, too: then ``faulthandler``
    dumps the stacks, a little later, without a word of ours.

    The clock is monotonic: it neither jumps nor counts the time that a machine is suspended. It
    does count the time that the process is stopped (SIGSTOP, Ctrl-Z), for which other ranks wait.

    Args:
        seconds: without progress, until the end; 0 never ends it.
        folder: gets the file; left out if it cannot be written.

    Raises:
        ValueError: seconds below 0 or not finite.
    """

    def __init__(self, seconds: float, folder: Path | None = None):
        if not 0 <= seconds <= threading.TIMEOUT_MAX / 2:
            raise ValueError(f"seconds must be at least 0 and finite, got {seconds}")
        self.seconds, self.folder = seconds, folder
        # How late it may be.
        self._tick = min(seconds / 10, 10.0)
        self._left = threading.Event()
        self.progress("start")

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            self.progress()
            self._left.clear()
            self._restart_c_timer()
            self._thread = threading.Thread(target=self._check, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.seconds:
            self._left.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def progress(self, *doing: object) -> None:
        """Note that there was some; costs less than a microsecond.

        Args:
            *doing: what comes now, as words and numbers, for the message; the same when omitted.
        """
        if doing:
            self._doing = doing
        self._last = time.monotonic()

    def _check(self) -> None:
        while not self._left.wait(self._tick):
            idle = time.monotonic() - self._last
            if idle >= self.seconds:
                self._end(idle)
            self._restart_c_timer()

    def _restart_c_timer(self) -> None:
        # The next tick, when this is put off again, may come late on a busy machine, and progress
        # may have been made until then.
        later = self.seconds + 2 * self._tick
        faulthandler.dump_traceback_later(later, exit=True, file=_STDERR)

    def _end(self, idle: float) -> None:
        """Print what hung and end the process; faulthandler's timer does if a write blocks."""
        rank, doing = os.environ.get("RANK", "0"), " ".join(map(str, self._doing))
        line = f"rank {rank} made no progress for {idle:.0f} s, in {doing}: stacks follow\n"
        os.write(_STDERR, line.encode())
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        if self.folder is not None:
            try:
                with (self.folder / f"stacks-rank{rank}.txt").open("a") as file:
                    file.write(line)
                    file.flush()
                    faulthandler.dump_traceback(file=file, all_threads=True)
            except OSError as error:
                sys.stderr.write(f"stacks not written: {error}\n")
        # A data worker that is stuck would outlive us.
        for worker in multiprocessing.active_children():
            worker.kill()
        # No cleaning up: that is what would hang.
        os._exit(1)
