"""Rows and the summary of a run: read from files that anyone may have made, and summed up."""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..ops.statistics import COLUMNS
from .files import open_own, read_own

Row = Mapping[str, Any]
# What is needed of the row of a step, and of one of ``KappaMonitor`` by alarms and by tables.
METRICS_ROW = ("loss",)
ALARM_ROW = "layer", "kappa", "sigma_max", "entropy", "columns"
KAPPA_ROW = *ALARM_ROW, "reason", "heads", "head_dim", "kappa_gaussian", "tokens"
MEANS = "arithmetic_mean", "geometric_mean"
_LEVELS = 6  # of lists and objects inside each other; a summary has four


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
    # JSON may hold half of a character, which no font has.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


# What is calculated with or drawn, if a row has it.
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

    What is calculated with must be a number, and what is shown must be text.
    """
    if not isinstance(value, dict) or not value.keys() >= {"step", *keys}:
        return False
    return all(fits(value[name]) for name, fits in _FITS.items() if name in value)


def parse_row(line: bytes, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return the row of a line of JSON, as ``is_row`` requires it; ValueError if it is none."""
    row = _parse(line)
    if not is_row(row, keys):
        raise ValueError("no row of a run")
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
    """Return whether a value of JSON has more levels than so many."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_nested(item, levels - 1) for item in inner)


def read_thinned(
    path: Path, most: int, keys: Iterable[str] = (), *, always: str = ""
) -> tuple[list[dict[str, Any]], int, int]:
    """Return about ``most`` rows of evenly spaced steps, the first and the last among them.

    Rows with a key that begins with ``always`` are returned besides. The second result counts
    damaged lines, but not half a line at the end, which a kill leaves; the third the steps of the
    file if some were left out, else it is 0.
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
    """Return what a ``summary.json`` holds; ValueError where that is no summary."""
    try:
        summary = _parse(read_own(path))
    except ValueError:
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("settings", {}), dict):
        raise ValueError(f"{path} is no summary of a run")
    return summary


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of steps, of several of a step and layer the last.

    A run that goes on from a checkpoint may have written some twice.
    """
    rows = {(row["step"], row["layer"]): row for row in rows}.values()
    return sorted(rows, key=lambda row: row["step"])


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
