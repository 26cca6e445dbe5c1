"""Rows of ``KappaMonitor`` as a table of text."""

from collections.abc import Iterable
from typing import Any

from ..ops.statistics import COLUMNS
from .run_files import layer_means

_COLUMNS = {
    "κ": "kappa",
    "Gaussian": "kappa_gaussian",
    "eff. rank": "effective_rank",
    **{column.name.replace("_", " "): column.name for column in COLUMNS if column.title},
}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a line per layer of the newest step among ``rows``, and the means over the layers.

    If kappa is None, the reason is shown instead.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows to show")
    newest = [row for row in rows if row["step"] == rows[-1]["step"]]
    lines = [["layer", "heads", "tokens", *_COLUMNS]]
    for row in newest:
        numbers = [_number(row[key]) for key in ("tokens", *_COLUMNS.values())]
        if row["kappa"] is None:
            numbers[1] = row["reason"]
        lines.append([row["layer"] or "the model", f"{row['heads']}x{row['head_dim']}", *numbers])
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    (means,) = layer_means(newest)
    mean, unresolved = _number(means["geometric_mean"]), means["not_resolved"]
    counted = f"{means['layers']} layer{'s'[: means['layers'] != 1]}"
    text.append(f"geometric mean κ of {counted}: {mean}; not resolved: {unresolved}")
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.3g}"
