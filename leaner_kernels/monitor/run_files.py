"""Read and write the files of a run: rows as JSON lines, and a summary.

Files are written completely or not at all. A run folder may come from anyone, so its files must be
regular files, not links, and their contents are not trusted.
"""

import errno
import json
import math
import os
import re
import stat
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any

from ..ops.statistics import COLUMNS

Row = Mapping[str, Any]
# Keys that rows must have: rows of metrics, and rows of ``KappaMonitor`` for alarms and tables.
METRICS_ROW = ("loss",)
ALARM_ROW = "layer", "kappa", "sigma_max", "entropy", "columns"
KAPPA_ROW = *ALARM_ROW, "reason", "heads", "head_dim", "kappa_gaussian", "tokens"
MEANS = "arithmetic_mean", "geometric_mean"
_LEVELS = 6  # nesting depth of lists and objects; a summary has four
_FIRST, _NEWEST = 50, 10_000  # rows of a file that a resumed run reads
# Windows has neither flag: there, a link created after ``check_own`` is followed.
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def check_own(path: str | Path, *, folder: bool = False) -> None:
    """Check that a path in a run folder is a regular file, a folder, or missing.

    Raises:
        OSError: if it is a link, a pipe or another special file.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(
            errno.EINVAL, "is a link, and links in a run folder are not followed", str(path)
        )
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        raise OSError(errno.EINVAL, f"is not a {'folder' if folder else 'regular file'}", str(path))


def open_own(path: str | Path, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
    """Open a file in a run folder without following links or waiting for pipes.

    Args:
        path: path of the file. The folder itself may be a link.
        mode: "rb", "ab" or "xb", as of ``open``.
        buffering: as of ``open``.

    Raises:
        OSError: if it is not a regular file, or cannot be opened.
    """
    check_own(path)
    return open(path, mode, buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _NO_LINK_NO_WAIT, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", path)


def read_own(path: str | Path) -> bytes:
    """Return the bytes of a file that ``open_own`` opens."""
    with open_own(path) as file:
        return file.read()


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file completely or not at all; a link of its name is replaced, never followed."""
    with new_file(Path(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(descriptor: int) -> None:
    """Flush a file or folder to the disk, if the file system supports it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems raise this for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open ``.NAME.partial`` beside a path, which it becomes unless the context raises."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def set_aside(folder: Path, names: Iterable[str]) -> str:
    """Rename the files of an earlier run, all with one number, and return their new names."""
    paths = [folder / name for name in names]
    there = [path for path in paths if path.is_file() or (path.is_dir() and not path.suffix)]

    def aside(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    number = next(n for n in count(1) if not any(aside(path, n).exists() for path in there))
    return ", ".join(path.rename(aside(path, number)).name for path in there)


# --- Rows -----------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    # Larger numbers would overflow in sums and on axes.
    return isinstance(value, int | float) and not 1e300 < abs(value) < math.inf


def _is_value(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_positive(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


def _is_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_value, value)))


def _is_text(value: Any) -> bool:
    # JSON may hold half of a surrogate pair, which no font has.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


# Checks of the values of a row that are drawn or enter a calculation.
_FITS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and abs(value) < 1 << 53,
    "layer": _is_text,
    "message": lambda value: isinstance(value, str),
    "reason": lambda value: value is None or isinstance(value, str),
    **{column.name: _is_list if column.over_heads == "each" else _is_value for column in COLUMNS},
    **dict.fromkeys(("kappa", "kappa_gaussian", "heads", "head_dim"), _is_positive),
    **dict.fromkeys(("tokens", "columns"), _is_positive),
    **dict.fromkeys(("loss", "throughput", "sigma_max", "rank"), _is_value),
}


def is_row(value: Any, keys: Iterable[str] = ()) -> bool:
    """Return whether a value of JSON is a row: an object with a step and ``keys``.

    Values of calculations must be numbers, and values that are shown must be text.
    """
    if not isinstance(value, dict) or not value.keys() >= {"step", *keys}:
        return False
    return all(fits(value[name]) for name, fits in _FITS.items() if name in value)


def parse_row(line: bytes, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return the row of a JSON line; raise ValueError unless ``is_row`` accepts it."""
    row = _parse(line)
    if not is_row(row, keys):
        raise ValueError("not a row of a run")
    return row


def _parse(text: bytes) -> Any:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _is_nested(value, _LEVELS):
        raise ValueError("nested too deeply")
    return value


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a JSON value is nested more deeply than this many levels."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_nested(item, levels - 1) for item in inner)


def read_thinned(
    path: Path, most: int, keys: Iterable[str] = (), *, always: str = ""
) -> tuple[list[dict[str, Any]], int, int]:
    """Return about ``most`` rows of evenly spaced steps, the first and the last among them.

    Rows with a key that begins with ``always`` are all returned. The second result counts damaged
    lines, except half a line at the end, which a kill leaves. The third is the number of steps in
    the file if some were left out, otherwise 0.
    """
    rows, damaged = [], 0
    with open_own(path) as file:
        for line in file:
            try:
                rows.append(parse_row(line, keys))
            except ValueError:
                damaged += line.endswith(b"\n")
    if len(rows) <= most:
        return rows, damaged, 0
    steps = list(dict.fromkeys(row["step"] for row in rows))
    count = min(max(most * len(steps) // len(rows), 2), len(steps))
    kept = {steps[number * (len(steps) - 1) // max(count - 1, 1)] for number in range(count)}
    thinned = [
        row
        for row in rows
        if row["step"] in kept or (always and any(name.startswith(always) for name in row))
    ]
    return thinned, damaged, len(steps)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the contents of ``summary.json``; raise ValueError if it is not a summary."""
    try:
        summary = _parse(read_own(path))
    except ValueError:
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("settings", {}), dict):
        raise ValueError(f"{path} is no summary of a run")
    return summary


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of steps; of several rows of a step and layer, only the last.

    A run that was resumed from a checkpoint may have written some rows twice.
    """
    rows = {(row["step"], row["layer"]): row for row in rows}.values()
    return sorted(rows, key=lambda row: row["step"])


def layer_means(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of kappa over the layers of each step, in the order of the rows.

    The means are over the ``layers`` that have a kappa, and None if there are none. Kappa of layers
    that are ``not_resolved`` is too large to be computed: if a step has such layers, both means are
    lower bounds.
    """
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return [_means(step, of_step) for step, of_step in steps.items()]


def _means(step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    kappas = [row["kappa"] for row in rows if row.get("kappa") is not None]
    return {
        "step": step,
        "layers": len(kappas),
        "not_resolved": sum(row.get("reason") == "not resolved" for row in rows),
        "arithmetic_mean": math.fsum(kappas) / len(kappas) if kappas else None,
        "geometric_mean": statistics.geometric_mean(kappas) if kappas else None,
    }


# --- JSON lines -----------------------------------------------------------------------------------


class JsonLines:
    """A file of JSON objects, one per line, which a resumed run continues without overlap.

    When ``append`` returns, each line is in the file.

    Args:
        path: path of the file.
        first: lines of this step and later ones are removed, and so are damaged lines; None keeps
            all.
        log: called once if lines could not be written, which then wait for the next call. Without
            it ``append`` raises OSError.
        keys: keys that a line must have besides "step".

    Raises:
        OSError: if the path is not a regular file, but a link or a pipe, for example.

    Attributes:
        rows: of the steps before ``first``, the first and the newest rows of the file.
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
        """Keep the earlier lines and load their first and newest rows; create a missing file."""
        open_own(self.path, "ab").close()
        with open_own(self.path) as old, new_file(self.path) as new:
            for number, line in enumerate(old, start=1):
                if not line.endswith(b"\n"):
                    break  # half a line, left by a kill
                try:
                    row = parse_row(line, keys)
                except ValueError:
                    # A power cut leaves such a line at the end of a write.
                    if self.log is not None:
                        self.log(f"line {number} of {self.path.name} cannot be read: dropped")
                    continue
                if row["step"] < first:
                    new.write(line)
                    self.rows.append(row)
                    if len(self.rows) > 2 * _NEWEST:
                        del self.rows[_FIRST:-_NEWEST]

    def sync(self) -> None:
        """Write the lines that wait since the disk was full, and flush the file to the disk."""
        self.append([])
        with suppress(OSError), open_own(self.path, "ab") as file:
            sync(file.fileno())

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows; with ``log``, rows that do not fit on a full disk wait for the next call."""
        self.unwritten += b"".join(json.dumps(finite(row)).encode() + b"\n" for row in rows)
        try:
            with open_own(self.path, "ab", buffering=0) as file:
                # If a full disk cut a line off, the rest of it waits.
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
