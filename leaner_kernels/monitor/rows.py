"""Rows and the summary of a run: read, whoever wrote them, and summed up."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..ops.statistics import COLUMNS
from .files import SETTINGS, lines_of, open_file, parse_json, read_file

Row = Mapping[str, Any]
_LINE = 1 << 24  # bytes of a row


def read_rows(path: Path, **keys: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file of JSON lines with ``keys``, and how many lines were damaged.

    Half a line at the end, which a kill leaves, is dropped and not counted.
    """
    rows, damaged = [], 0
    with open_file(path) as file:
        for line in lines_of(file, _LINE):
            try:
                rows.append(parse_row(line, **keys))
            except ValueError:
                damaged += line.endswith(b"\n")
    return rows, damaged


class Thinned(NamedTuple):
    """Some rows of a file, in its order."""

    rows: list[dict[str, Any]]
    damaged: int  # lines of the file
    steps: int  # how many the file has, if some were left out; else 0


def read_thinned(path: Path, most: int, *, always: str = "", **keys: Any) -> Thinned:
    """Return about ``most`` rows of evenly spaced steps, the first and the last among them.

    Rows with a key that begins with ``always`` are returned besides.
    """
    rows, damaged = read_rows(path, **keys)
    if len(rows) <= most:
        return Thinned(rows, damaged, 0)
    steps = list(dict.fromkeys(row["step"] for row in rows))
    count = min(max(most * len(steps) // len(rows), 2), len(steps))
    kept = {steps[number * (len(steps) - 1) // max(count - 1, 1)] for number in range(count)}
    thinned = [
        row
        for row in rows
        if row["step"] in kept or (always and any(name.startswith(always) for name in row))
    ]
    return Thinned(thinned, damaged, len(steps))


def parse_row(line: bytes, **keys: Any) -> dict[str, Any]:
    """Return a row of a file of JSON lines, which may come from anyone; ValueError if it is none.

    It must have ``keys``, of their types. What ``KappaMonitor`` writes must be as it writes it;
    whatever else there is may be anything.
    """
    row = parse_json(line)
    check_row(row, **keys)
    return row


def check_row(row: Any, **keys: Any) -> None:
    """Check that a value is a row, as ``parse_row`` does."""
    if not isinstance(row, dict):
        raise ValueError("a row is an object")
    for name, kind in keys.items():
        if name not in row or not isinstance(row[name], kind):
            raise ValueError(f"a row has {name}")
    for name, fits in _FITS.items():
        if name in row and not fits(row[name]):
            raise ValueError(f"{name} in a row is no {type(row[name]).__name__}")


def _is_number(value: Any) -> bool:
    # Sums and means of what is close to the largest float would overflow.
    return isinstance(value, int | float) and not 1e300 < abs(value) < math.inf


def _is_text(value: Any) -> bool:
    # JSON has halves of characters, which no font has.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_value(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_positive(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_value, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: type(value) is int and abs(value) < 1 << 53,
    "layer": _is_text,
    "reason": lambda value: value is None or _is_text(value),
    **{column.name: _is_list if column.over_heads == "each" else _is_value for column in COLUMNS},
    **dict.fromkeys(("kappa", "kappa_gaussian", "heads", "head_dim"), _is_positive),
    **dict.fromkeys(("tokens", "columns"), _is_positive),
    **dict.fromkeys(("loss", "throughput", "sigma_max", "rank"), _is_value),
}
_NUMBER = int | float | None
# What is needed of the row of a step, and of one of ``KappaMonitor`` by alarms and by tables.
METRICS_ROW: dict[str, Any] = {"step": int, "loss": _NUMBER}
ALARM_ROW: dict[str, Any] = {
    **{"step": int, "layer": str},
    **dict.fromkeys(("kappa", "sigma_max", "entropy", "columns"), _NUMBER),
}
KAPPA_ROW: dict[str, Any] = {
    **ALARM_ROW,
    **{"reason": str | None, "heads": int, "head_dim": int},
    **dict.fromkeys(("kappa_gaussian", "tokens"), _NUMBER),
}


MEANS = "arithmetic_mean", "geometric_mean"


def layer_means(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means of kappa over the layers of each step, in the order of the rows.

    They are of the ``layers`` with a kappa, and None without any. Layers that are ``not_resolved``
    have a larger one than can be told: where there are some, both means are lower bounds.
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


def read_summary(path: Path) -> dict[str, Any]:
    """Return what is plain in a ``summary.json``: numbers, texts, lists of them, and settings."""
    summary = parse_json(read_file(path, SETTINGS))
    if not isinstance(summary, dict):
        return {}
    settings = summary.pop("settings", None)
    kept = {"settings": _plain(settings)} if isinstance(settings, dict) else {}
    return _plain(summary) | kept


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if all(
            isinstance(one, int | float | str | None)
            for one in (value if isinstance(value, list) else [value])
        )
    }


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of steps, of several of a step and layer the last.

    A run that goes on from a checkpoint may have written some twice.
    """
    rows = {(row["step"], row["layer"]): row for row in rows}.values()
    return sorted(rows, key=lambda row: row["step"])
