"""Where rows go: files of JSON lines, TensorBoard, Weights & Biases."""

import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ..ops.statistics import COLUMNS
from .files import check_own, new_file, open_own, sync
from .rows import MEANS, layer_means, parse_row

# The columns that TensorBoard and W&B get, of every layer.
WRITTEN = (
    *("kappa", "kappa_before_skip", "kappa_after_skip"),
    *(column.name for column in COLUMNS if column.written),
    *("effective_rank", "stable_rank", "head_correlation", "isotropy", "mean_share"),
)
# The step of the rows in the model's training, over which W&B draws them.
AXIS = "kappa/step"
_FIRST, _NEWEST = 50, 10_000  # rows of a file that a resumed run is given


class JsonLines:
    """A file of JSON objects, one per line, which a resumed run continues without overlap.

    Each line is in the file when ``append`` returns.

    Args:
        path: of the file.
        first: lines of this step and later ones are removed, and damaged ones; None keeps all.
        log: shows, once, that lines could not be written; they wait for the next call. Without it
            ``append`` raises OSError.
        keys: what a line must have, beside a step.

    Raises:
        OSError: the path is a link, a pipe or another thing that is no regular file.

    Attributes:
        rows: before ``first``: the first and the newest of the file.
    """

    def __init__(
        self,
        path: str | Path,
        first: int | None = None,
        log: Callable[[str], None] | None = None,
        keys: Iterable[str] = (),
    ) -> None:
        self.path, self.log, self.failed, self.unwritten = Path(path), log, False, b""
        self.rows: list[dict[str, Any]] = []
        check_own(self.path)
        if first is not None:
            self._take_up(first, keys)

    def _take_up(self, first: int, keys: Iterable[str]) -> None:
        """Keep the lines of before, and their first and newest rows; make the file if need be."""
        open_own(self.path, "ab").close()
        with open_own(self.path) as old, new_file(self.path) as new:
            for number, line in enumerate(old, start=1):
                if not line.endswith(b"\n"):
                    break  # half a line, of a kill
                try:
                    row = parse_row(line, keys)
                except ValueError:
                    # What a power cut left where nothing was written yet.
                    if self.log is not None:
                        self.log(f"line {number} of {self.path.name} cannot be read: dropped")
                    continue
                if row["step"] < first:
                    new.write(line)
                    self.rows.append(row)
                    if len(self.rows) > 2 * _NEWEST:
                        del self.rows[_FIRST:-_NEWEST]

    def sync(self) -> None:
        """Write what waits since a disk was full, and see it to the disk."""
        self.append([])
        with suppress(OSError), open_own(self.path, "ab") as file:
            sync(file.fileno())

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows; with ``log``, those that a full disk refuses wait for the next call."""
        self.unwritten += b"".join(json.dumps(finite(row)).encode() + b"\n" for row in rows)
        try:
            with open_own(self.path, "ab", buffering=0) as file:
                # Of a line that a full disk cut off, the rest waits.
                while self.unwritten:
                    self.unwritten = self.unwritten[file.write(self.unwritten) :]
        except OSError as error:
            if self.log is None:
                raise
            if not self.failed:
                self.log(f"{self.path.name} not written, training goes on: {error}")
            self.failed = True


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
