"""Rows of ``KappaMonitor`` as a table of text."""

from collections.abc import Iterable
from typing import Any

from .probe import layer_means

_COLUMNS = {
    "κ": "kappa",
    "Gaussian": "kappa_gaussian",
    "eff. rank": "effective_rank",
    "entropy": "entropy",
    "max logit": "max_logit",
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

    Where kappa is None the reason is there instead. Entropy is in nats. Rows with a head report
    also show the correlation of pairs of heads, the isotropy of heads, each before what
    independent Gaussian heads have, and the share of the norm that is the token mean.

    Raises:
        ValueError: no rows.
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
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:,.0f}"
        if value >= 1e3
        else f"{value:.3g}"
    )
