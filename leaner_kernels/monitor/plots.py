"""Plots of the rows of ``KappaMonitor``.

matplotlib is imported when there is something to draw.
"""

import colorsys
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .rows import Row, newest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

_LEGEND = 24  # names of layers that fit in a column beside an axis
# Okabe and Ito's colours, which colour-blind readers tell apart; legible on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#808080"


def plot(rows: Iterable[Row], path: str | Path | None = None) -> "Figure":
    """Draw kappa of every layer against the step, and the prediction for Gaussian heads.

        plot(monitor.flush(), "kappa.png")

    The axis of kappa is logarithmic where its values span a decade. Rows without a kappa are left
    out, and the title counts them.

    Args:
        rows: of ``KappaMonitor``, at least one; of several of a step and layer the last counts.
        path: of the picture, if it is to be saved: PNG, SVG or PDF, by its suffix.

    Returns:
        The figure, which no window shows.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no rows, or a suffix that names no format.
        OSError: the file cannot be written.
    """
    rows = newest(rows)
    if not rows:
        raise ValueError("there are no rows to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a plot needs the package matplotlib: pip install matplotlib") from None
    lines = kappa_lines(rows)
    columns = math.ceil(len(lines) / _LEGEND)
    figure = Figure(figsize=(6.5 + 1.5 * columns, 4.5), layout="constrained")
    scale = axis_scale(row.get("kappa") for row in rows)
    axes = figure.add_subplot(xlabel="step", ylabel="condition number κ", yscale=scale)
    for line in lines:
        axes.plot(*line.columns(), line.dash, color=line.colour, marker="o", ms=3, label=line.name)
    axes.set_title(without_kappa(rows), fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), ncols=columns)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


# What the page of a run shows too.


class Line(NamedTuple):
    """A line of a chart; without a name it has no place in the legend."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str = "-"
    title: str = ""  # shown where a pointer is on the line; else the name

    def columns(self) -> tuple[list[float], list[float]]:
        """Return x and y of the points."""
        return [x for x, _ in self.points], [y for _, y in self.points]


def layer_lines(rows: Iterable[Row], field: str) -> list[Line]:
    """Return a line for each layer, from blue to red; legible on white and on black."""
    rows = list(rows)
    names, lines = short_names(rows), []
    for place, (layer, points) in enumerate(series(rows, field).items()):
        hue = 0.62 * (1 - place / max(len(names) - 1, 1))
        red, green, blue = (round(255 * c) for c in colorsys.hls_to_rgb(hue, 0.45, 0.75))
        colour = f"#{red:02x}{green:02x}{blue:02x}"
        lines.append(Line(names[layer] or "the model", points, colour, title=layer))
    return lines


def kappa_lines(rows: Iterable[Row]) -> list[Line]:
    """Return kappa of each layer over the steps, and what Gaussian heads of each size have."""
    rows = list(rows)
    lines = layer_lines(rows, "kappa")
    for points in {tuple(points) for points in series(rows, "kappa_gaussian").values() if points}:
        name = f"Gaussian heads: {spread(value for _, value in points)}"
        lines.append(Line(name, points, GREY, "--"))
    return lines


def number(value: Any) -> float | None:
    """Return a number if it is finite, else None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _has(row: Row, field: str) -> bool:
    return number(row.get(field)) is not None


def series(rows: Iterable[Row], field: str) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each layer, less those that are not numbers."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        points = found.setdefault(row["layer"], [])
        if _has(row, field):
            points.append((row["step"], row[field]))
    return found


def head_norms(rows: Iterable[Row]) -> tuple[int, dict[str, list[float]]]:
    """Return the newest step with norms of heads, and those of each layer, nan if not finite."""
    known = [row for row in rows if row.get("head_norms")]
    step = max((row["step"] for row in known), default=0)
    known = [row for row in known if row["step"] == step]
    names = short_names(known)
    return step, {
        names[row["layer"]]: [math.nan if number(v) is None else v for v in row["head_norms"]]
        for row in known
    }


def short_names(rows: Iterable[Row]) -> dict[str, str]:
    """Return the layers in their order, each with its name less what all names have alike.

    Of "blocks.0.attn" and "blocks.1.attn" these are "blocks.0" and "blocks.1".
    """
    parts = {layer: layer.split(".") for layer in dict.fromkeys(row["layer"] for row in rows)}
    if len(parts) < 2:
        return {layer: layer for layer in parts}

    def alike(names: Iterable[Sequence[str]]) -> int:
        same = [len(set(place)) == 1 for place in zip(*names, strict=False)]
        return [*same, False].index(False)

    first = max(alike(parts.values()) - 1, 0)
    last = alike([name[first + 1 :][::-1] for name in parts.values()])
    return {layer: ".".join(name[first : len(name) - last]) for layer, name in parts.items()}


def axis_scale(values: Iterable[float | None]) -> str:
    """Return the scale of an axis: logarithmic where positive values span a decade."""
    known = [value for value in map(number, values) if value is not None]
    return "log" if known and 0 < 10 * min(known) <= max(known) else "linear"


def spread(values: Iterable[float]) -> str:
    """Return a value, or the least and the most of several, in three digits."""
    ends = sorted(values)
    least, most = f"{ends[0]:.3g}", f"{ends[-1]:.3g}"
    return least if least == most else f"{least} to {most}"


def without_kappa(rows: Sequence[Row]) -> str:
    """Return how many rows have no kappa, and why; nothing where all have one."""
    reasons = Counter(r.get("reason") or "not resolved" for r in rows if not _has(r, "kappa"))
    if not reasons:
        return ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    return f"{reasons.total():,} of {len(rows):,} rows left out: {why}"


def kappa_or_rank(row: Row) -> str:
    """Return a row's kappa as text; where it is not resolved, the rank; else why there is none."""
    if _has(row, "kappa"):
        return f"{row['kappa']:.4g}"
    reason = row.get("reason") or "not resolved"
    if reason != "not resolved" or not all(_has(row, k) for k in ("rank", "heads", "head_dim")):
        return reason
    most = row["heads"] * row["head_dim"]
    if _has(row, "tokens"):
        most = min(most, row["tokens"])
    return f"rank {row['rank']:.4g} of {most:.4g}"
