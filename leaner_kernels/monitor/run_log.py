"""The files of a run that is logged by a callback: rows, losses, alarms, and a page at the end."""

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
from . import KappaMonitor, layer_means
from .writing import check_folder, open_own, write_file


class RunLog:
    """A ``KappaMonitor`` and the files of its run, as ``leaner_kernels.monitor.page`` reads them.

    Under torch.distributed every rank constructs it and calls all methods; rank 0 writes.

    Args:
        model: any that attends.
        folder: made where it is missing. ``kappa.jsonl``, ``metrics.jsonl`` and ``alarms.jsonl``
            are appended to; ``summary.json`` and ``page.html`` are written by ``close``.
        page: whether it is.
        kappa_factor: of ``KappaAlarm``; 0 for none.
        entropy_floor: of ``EntropyAlarm``; 0 for none.
        **options: of ``KappaMonitor``: every, samples, probe, writer, head_report.

    Attributes:
        monitor: the ``KappaMonitor``.
        newest: the newest of ``layer_means``, or None.

    Raises:
        ValueError: what the monitor or an alarm refuses.
        OSError: a folder that cannot be made or written.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        page: bool = True,
        kappa_factor: float = 10.0,
        entropy_floor: float = 0.1,
        **options: Any,
    ) -> None:
        self.folder, self.page = Path(folder), page
        self.folder.mkdir(parents=True, exist_ok=True)
        check_folder(self.folder)
        self.monitor = KappaMonitor(model, path=self.folder / "kappa.jsonl", **options)
        self.newest: dict[str, Any] | None = None
        self._began = time.monotonic()
        self._alarms = [
            *([KappaAlarm(kappa_factor)] if kappa_factor else []),
            *([EntropyAlarm(entropy_floor)] if entropy_floor else []),
        ]
        self._writes = not (dist.is_available() and dist.is_initialized() and dist.get_rank())

    def take(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take in rows that the monitor has returned and written: raise alarms, keep the means."""
        rows = list(rows)
        for means in layer_means(rows):
            self.newest = means
        found = [one for alarm in self._alarms for one in alarm.update(rows)]
        if found and self._writes:
            self._append("alarms.jsonl", [one.as_row() for one in found])
            for one in found:
                warnings.warn(one.message, stacklevel=3)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append the finite numbers among ``values`` to ``metrics.jsonl``."""
        numbers = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self._writes and numbers:
            self._append("metrics.jsonl", [{"step": step} | numbers])

    def close(self) -> None:
        """Write the rows still on their way, a summary, and the page."""
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
        except (ImportError, OSError, ValueError) as error:
            # The run is over and its rows are safe: a page can be written of them at any time.
            warnings.warn(f"no page of {self.folder}: {error}", stacklevel=2)

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        with open_own(self.folder / name) as file:
            file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
