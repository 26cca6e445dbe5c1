"""Rows of ``KappaMonitor`` as a table of text."""

from collections.abc import Iterable
from typing import Any

from ..ops.statistics import COLUMNS
from .rows import layer_means

_COLUMNS = {
    "κ": "kappa",
    "Gaussian": "kappa_gaussian",
    "eff. rank": "effective_rank",
    **{column.name.replace("_", " "): column.name for column in COLUMNS if column.title},
}
_HEAD_REPORT = {
    "corr.": "head_correlation",
    "Gaussian ": "head_correlation_gaussian",
    "isotropy": "isotropy",
    "Gaussian  ": "isotropy_gaussian",
    "mean share": "mean_share",
}


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return a line per layer of the newest step among ``rows``, and the means over the layers.

    Where kappa is None the reason is there instead. Of rows with a head report, what independent
    Gaussian heads have is beside the correlation and the isotropy of heads.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows to show")
    newest = [row for row in rows if row["step"] == rows[-1]["step"]]
    columns = _COLUMNS | (_HEAD_REPORT if "mean_share" in newest[0] else {})
    lines = [["layer", "heads", "tokens", *columns]]
    for row in newest:
        numbers = [row["reason"] if key == "kappa" and row[key] is None else _number(row[key])
                   for key in columns.values()]  # fmt: skip
        size = f"{row['heads']}x{row['head_dim']}"
        lines.append([row["layer"] or "the model", size, _number(row["tokens"]), *numbers])
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    (means,) = layer_means(newest)
    if means["layers"]:
        text.append(
            f"mean κ of {means['layers']} layers: arithmetic {_number(means['arithmetic_mean'])}, "
            f"geometric {_number(means['geometric_mean'])}"
        )
    if means["not_resolved"]:
        text.append(f"not resolved: {means['not_resolved']} layers, which no mean counts")
        unresolved = (row for row in newest if row["reason"] == "not resolved")
        # Rows of before have no rank.
        ranks = [row["rank"] for row in unresolved if row.get("rank") is not None]
        if ranks:
            text.append(
                "their rank (singular values above 1e-6 of the largest): "
                f"{_number(min(ranks))} to {_number(max(ranks))}"
            )
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.3g}"
