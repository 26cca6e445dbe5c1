"""Rows and the summary of a run: read from files that may be damaged, and summed up."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import open_file, read_file

Row = Mapping[str, Any]
# What is needed of the row of a step, and of one of ``KappaMonitor`` by alarms and by tables.
METRICS_ROW = ("loss",)
ALARM_ROW = "layer", "kappa", "sigma_max", "entropy", "columns"
KAPPA_ROW = *ALARM_ROW, "reason", "heads", "head_dim", "kappa_gaussian", "tokens"
MEANS = "arithmetic_mean", "geometric_mean"


def parse_row(line: bytes, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return a row of a file of JSON lines: an object with a step and keys; else ValueError."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not row.keys() >= {*keys}:
        raise ValueError("no row of a run")
    return row


def read_thinned(
    path: Path, most: int, keys: Iterable[str] = (), *, always: str = ""
) -> tuple[list[dict[str, Any]], int, int]:
    """Return about ``most`` rows of evenly spaced steps, the first and the last among them.

    Rows with a key that begins with ``always`` are returned besides. The second result counts
    damaged lines, but not half a line at the end, which a kill leaves; the third the steps of the
    file if some were left out, else it is 0.
    """
    rows, damaged = [], 0
    with open_file(path) as file:
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
    """Return what a ``summary.json`` holds; ValueError where that is no object."""
    summary = json.loads(read_file(path))
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
