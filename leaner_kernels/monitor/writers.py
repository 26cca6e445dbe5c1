"""Where rows go: files of JSON lines, TensorBoard, Weights & Biases."""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ..ops.statistics import COLUMNS
from .files import lines_backwards, new_path, open_file, open_own
from .rows import MEANS, layer_means, parse_row

# The columns that TensorBoard and W&B get, of every layer.
WRITTEN = (
    *("kappa", "kappa_before_skip", "kappa_after_skip"),
    *(column.name for column in COLUMNS if column.written),
    *("effective_rank", "stable_rank"),
)
# The step of the rows in the model's training, over which W&B draws them.
AXIS = "kappa/step"
_HEAD = 50  # rows at the beginning of a file that a resume reads
_BLOCK = 1 << 20  # bytes


class JsonLines:
    """A file of JSON objects, one per line, which a resumed run continues without overlap.

    Each line is in the file when ``append`` returns. A resume reads the file's end alone.

    Args:
        path: of the file.
        first: lines of this step and later ones are removed, and damaged ones; None keeps all.
        log: shows, once, that lines could not be written; they wait for the next call. Without it
            ``append`` raises OSError.
        steps: how many of the newest steps before ``first`` are kept in ``rows``.
        **keys: what a line must have, beside a step, as ``parse_row`` takes it.

    Attributes:
        rows: those of the first steps and of the newest ``steps`` before ``first``.
        removed: steps of the lines that were removed.
    """

    def __init__(
        self,
        path: str | Path,
        first: int | None = None,
        log: Callable[[str], None] | None = None,
        *,
        steps: int = 1,
        **keys: Any,
    ) -> None:
        self.path, self.log, self.failed = Path(path), log, False
        self.keys = {"step": int} | keys
        self.rows: list[dict[str, Any]] = []
        self.removed: set[int] = set()
        self.unwritten = b""
        self._descriptor: int | None = None
        if first is not None:
            self._open()
            with open_file(self.path) as file:
                self._take_up(file, first, steps)
            self.append([])

    def _open(self) -> None:
        with open_own(self.path) as file:
            self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def _take_up(self, file: IO[bytes], first: int, steps: int) -> None:
        """Cut the file where the run goes on, and keep the rows of before."""
        newest: list[tuple[int, bytes, dict[str, Any]]] = []
        known: set[int] = set()
        damaged, begin, size = None, 0, os.fstat(file.fileno()).st_size
        for begin, line in lines_backwards(file):
            if not line.endswith(b"\n"):
                # Half a line, of a kill.
                size = begin
                continue
            try:
                row = parse_row(line, **self.keys)
            except ValueError:
                # What a power cut left where nothing was written yet.
                size = damaged = begin
                continue
            if row["step"] >= first:
                size = begin
                self.removed.add(row["step"])
                continue
            known.add(row["step"])
            if len(known) > steps:
                break
            newest.append((begin, line, row))
        if damaged is not None and self.log is not None:
            file.seek(0)
            number = 1 + file.read(damaged).count(b"\n")
            self.log(f"line {number} of {self.path.name} cannot be read: dropped")
        newest.reverse()
        # Rows after damaged or later ones: an alarm of kappa is known when its row has arrived.
        self.unwritten = b"".join(line for place, line, _ in newest if place >= size)
        if newest and begin < newest[0][0]:
            file.seek(0)
            for line in islice(iter(file.readline, b""), _HEAD):
                with suppress(ValueError):
                    if file.tell() <= newest[0][0]:
                        self.rows.append(parse_row(line, **self.keys))
        self.rows += [row for _, _, row in newest]
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Write what waits since a disk was full, and see it to the disk."""
        self.append([])
        with suppress(OSError):
            if self._descriptor is not None:
                os.fsync(self._descriptor)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows; with ``log``, those that a full disk refuses wait for the next call."""
        self.unwritten += b"".join(json.dumps(finite(row)).encode() + b"\n" for row in rows)
        if not self.unwritten:
            return
        try:
            self._write()
        except OSError as error:
            if self.log is None:
                self.unwritten = b""
                raise
            if not self.failed:
                self.log(f"{self.path.name} not written, training goes on: {error}")
            self.failed = True
        else:
            self.unwritten = b""

    def _write(self) -> None:
        descriptor = self._follow()
        size, written = os.fstat(descriptor).st_size, 0
        try:
            while written < len(self.unwritten):
                written += os.write(descriptor, memoryview(self.unwritten)[written:])
        except OSError:
            # Part of a line that a full disk let through.
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise

    def _follow(self) -> int:
        """Open the file that now has the path; where there is none, write all of it again."""
        if self._descriptor is not None:
            try:
                there = os.stat(self.path)
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with new_path(self.path) as partial, open_own(partial) as copy:
                    for place in range(0, os.fstat(self._descriptor).st_size, _BLOCK):
                        copy.write(os.pread(self._descriptor, _BLOCK, place))
            else:
                with suppress(OSError):
                    if os.path.samestat(there, os.fstat(self._descriptor)):
                        return self._descriptor
            self._close()
        self._open()
        assert self._descriptor is not None
        return self._descriptor


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with null for infinities and nan, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def scalars(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers that TensorBoard and W&B get of the rows of one step, by name."""
    values = {
        f"{key}/{row['layer']}": row[key]
        for row in rows
        for key in WRITTEN
        if row.get(key) is not None
    }
    (means,) = layer_means(rows)
    return values | {f"kappa/{key}": means[key] for key in MEANS if means[key] is not None}


class TensorBoard:
    """Logs rows to a ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows of one step."""
        for name, value in scalars(rows).items():
            self.writer.add_scalar(name, value, rows[0]["step"])


class WandbRun:
    """Logs rows to a run that others log to, and loses none of theirs or of its own.

    W&B merges what is logged for one of its steps, and drops what comes for an earlier one. Rows
    arrive late, and the loop may count its steps otherwise. So rows are added to the step that the
    run is at, which the next ``log`` of the loop ends; where rows wait there already, they begin
    the next.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._defined: set[str] = set()
        self._waits_at: int | None = None

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows of one step."""
        self.log({**scalars(rows), AXIS: rows[0]["step"]})

    def log(self, values: dict[str, float]) -> None:
        """Log the values of a sampled step, which is among them, as ``AXIS``."""
        run = self.run.run if isinstance(self.run, ModuleType) else self.run
        for name in sorted(values.keys() - self._defined, key=lambda name: name != AXIS):
            if hasattr(run, "define_metric"):
                run.define_metric(name, **({} if name == AXIS else {"step_metric": AXIS}))
            self._defined.add(name)
        mode = getattr(getattr(run, "settings", None), "mode", None)
        # Several processes log to a shared run, and only W&B's server knows its step.
        if mode is None or mode == "shared":
            run.log(values)
            return
        at = run.step
        if at == self._waits_at:
            at += 1
            run.log(values, step=at)
        else:
            run.log(values, commit=False)
        self._waits_at = at
