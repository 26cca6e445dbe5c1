"""Write the files of a run for a callback or a loop: rows, losses, alarms, and the page."""

import json
import math
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn

from ..alarms import EntropyAlarm, KappaAlarm
from . import KappaMonitor
from .command_line import one_line
from .run_files import ALARM_ROW, JsonLines, layer_means, set_aside, write_file

_FILES = "kappa.jsonl", "metrics.jsonl", "alarms.jsonl", "summary.json", "page.html"


class RunLog:
    """A ``KappaMonitor`` with the files that ``leaner_kernels.monitor.page`` reads.

    Under torch.distributed every rank constructs it and calls all methods; rank 0 writes.

    Args:
        model: any model with attention.
        folder: folder of the run, created if missing. ``kappa.jsonl``, ``metrics.jsonl`` and
            ``alarms.jsonl`` are appended to; ``close`` writes ``summary.json`` and ``page.html``.
        first: number of updates before this run, as when it resumes from a checkpoint. Rows from
            this step on are removed from the files, because they will be written again. 0 is a new
            run: files of an earlier run get a number in their names, as in ``kappa.1.jsonl``.
        page: whether to write the page.
        kappa_factor: factor of ``KappaAlarm``; 0 disables it.
        entropy_floor: floor of ``EntropyAlarm``; 0 disables it.
        **options: options of ``KappaMonitor``: every, samples, writer, head_report.

    ``newest`` holds the newest ``layer_means``, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        first: int = 0,
        page: bool = True,
        kappa_factor: float = 10.0,
        entropy_floor: float = 0.1,
        **options: Any,
    ) -> None:
        self.folder, self.page = Path(folder), page
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writes = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if self._writes and first == 0 and (renamed := set_aside(self.folder, _FILES)):
            _warn(f"{self.folder} had files of an earlier run, now renamed to {renamed}")

        def file(name: str, keys: Iterable[str] = ()) -> JsonLines | None:
            path = self.folder / name
            goes_on = first if path.exists() else None
            return JsonLines(path, goes_on, _warn, keys) if self._writes else None

        kappa = file("kappa.jsonl", ALARM_ROW)
        self._metrics, self._alarm_rows = file("metrics.jsonl"), file("alarms.jsonl")
        self.monitor = KappaMonitor(model, path=kappa, **options)
        self.newest: dict[str, Any] | None = None
        self._begun: int | None = None
        self._began = time.monotonic()
        self._alarms: list[KappaAlarm | EntropyAlarm] = []
        if kappa_factor:
            self._alarms.append(KappaAlarm(kappa_factor))
        if entropy_floor:
            self._alarms.append(EntropyAlarm(entropy_floor))
        for alarm in self._alarms:
            # Alarms of earlier rows were reported at the time.
            alarm.update([] if kappa is None else kappa.rows)

    def begin(self, step: int) -> None:
        """Begin the step after ``step`` updates; sample it if ``every`` steps have passed.

        If the count grows by more than one, the first step after a multiple of ``every`` is
        sampled.
        """
        every, before = self.monitor.every, self._begun
        self._begun = step
        due = step % every == 0 or (before is not None and step // every > before // every)
        self.monitor.begin(step, due=due)

    def end(self) -> None:
        """End a step after its last backward, and process the rows that have arrived."""
        # A trainer may also run batches outside of a step.
        if self._begun is not None:
            self.take(self.monitor.end())

    def take(self, rows: Iterable[dict[str, Any]]) -> None:
        """Process rows that the monitor has returned and written: raise alarms, keep the means."""
        rows = list(rows)
        for means in layer_means(rows):
            self.newest = means
        found = [one for alarm in self._alarms for one in alarm.update(rows)]
        if found and self._alarm_rows is not None:
            self._alarm_rows.append([one.as_row() for one in found])
            for one in found:
                warnings.warn(one.message, stacklevel=3)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append the finite numbers among ``values`` to ``metrics.jsonl``."""
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self._metrics is not None and numbers:
            self._metrics.append([{"step": step} | numbers])

    def close(self) -> None:
        """Cancel an open step; write the remaining rows, a summary, and the page."""
        self.monitor.cancel()
        self.take(self.monitor.flush())
        if not self._writes:
            return
        summary = {
            "model": type(self.monitor.model).__name__,
            "params": sum(param.numel() for param in self.monitor.model.parameters()),
            "seconds": time.monotonic() - self._began,
        }
        write_file(self.folder / "summary.json", json.dumps(summary | {"kappa": self.newest}))
        if not (self.page and (self.folder / "kappa.jsonl").exists()):
            return
        from .page import write_page

        try:
            write_page([self.folder], self.folder / "page.html")
        except Exception as error:
            # The run is over and its rows are on disk: the page can be written at any time.
            warnings.warn(
                one_line(f"the page of {self.folder} was not written: {error}"), stacklevel=2
            )


def _warn(message: str) -> None:
    warnings.warn(one_line(message), stacklevel=4)
