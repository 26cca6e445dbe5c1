"""Plot kappa, and write the HTML page of runs: scores, loss, kappa, attention and alarms.

    python -m leaner_kernels.monitor.page runs/vit-1 runs/vit-2 --out page.html

Charts are SVG inside the file. It needs neither scripts nor a network, and its content security
policy forbids both. matplotlib is imported on demand.
"""

import argparse
import colorsys
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from html import escape
from io import StringIO
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import removed
from ..extras import needed_by
from ..ops.statistics import COLUMNS, UNITS
from .command_line import one_line, take_every_character, words
from .run_files import Row, newest, read_summary, read_thinned, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot", "write_page"]

# Rows that are read from a metrics file, and from all kappa files: they keep the page small.
LINE_POINTS, CHART_POINTS = 500, 2_000
_ALARMS = 200
_FILES = {"metrics": (), "kappa": ("layer",), "kappa_probe": ("layer",), "alarms": ("message",)}
# Okabe and Ito's colours, which colour-blind readers tell apart; legible on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#808080"
_LEGEND = 24  # names of layers that fit in a column next to an axis
_ALARM = "#d62728"  # colour of the lines at alarms
_DASHES = ("-", "--", ":")
# Charts of metrics: title, unit, and the label of each line by its key in a row.
_LOSSES = {"loss": "training", "held_out_loss": "held out", "held_out_ema_loss": "averaged weights"}
_ACCURACIES = {
    "held_out_accuracy": "accuracy",
    "held_out_ema_accuracy": "averaged weights",
    "held_out_top5": "top-5",
}
_SCORES = (("Loss", "loss", _LOSSES), ("Held-out accuracy", "fraction correct", _ACCURACIES))
_HEAD_REPORT = (
    (
        "head_correlation",
        "Correlation of heads",
        "Mean over pairs of heads; 1 if all heads are alike.",
    ),
    ("isotropy", "Isotropy of heads", "1 if each head uses all of its directions equally."),
)
# Facts of a summary that are shown in the table under another name.
_FACTS = {
    "params": "parameters",
    "seconds": "time (h:mm:ss)",
    "peak_memory_bytes": "peak_memory",
    "peak_memory_kind": "kind_of_peak_memory",
    "data_wait_share": "share_of_time_waiting_for_data",
}
_COURSE = (
    ("Learning rate", "learning rate", {"lr": "", "learning_rate": ""}),
    ("Gradient norm", "norm", {"grad_norm": ""}),
    ("Throughput", "items per second", {"throughput": ""}),
)


@removed.refuse_removed_arguments
def plot(rows: Iterable[Row], path: str | Path | None = None) -> "Figure":
    """Draw kappa of every layer against the step, and the prediction for Gaussian heads.

        plot(monitor.flush(), "kappa.png")

    The axis of kappa is logarithmic if its values span a decade. Rows without a kappa are left out,
    and the title counts them.

    Args:
        rows: rows of ``KappaMonitor``, at least one. If a step and layer has several, the last
            counts.
        path: file to save the figure to, if given: PNG, SVG or PDF, by its suffix.

    Returns:
        The figure; no window is opened.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no rows, or a suffix that names no format.
        OSError: the file cannot be written.
    """
    rows = newest(rows)
    if not rows:
        raise ValueError("there are no rows to draw")
    with needed_by("a plot"):
        from matplotlib.figure import Figure
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


class Line(NamedTuple):
    """A line of a chart; a line without a name is left out of the legend."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dash: str = "-"
    title: str = ""  # tooltip of the line; the name if empty

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
    """Return kappa of each layer over the steps, and kappa of Gaussian heads of each size."""
    rows = list(rows)
    lines = layer_lines(rows, "kappa")
    for points in dict.fromkeys(map(tuple, series(rows, "kappa_gaussian").values())):
        if not points:
            continue
        name = f"Gaussian heads: {spread(value for _, value in points)}"
        lines.append(Line(name, points, GREY, "--"))
    return lines


def number(value: Any) -> float | None:
    """Return a number if it is finite and a float can hold it, else None."""
    fits = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value if fits else None


def _has(row: Row, field: str) -> bool:
    return number(row.get(field)) is not None


def series(rows: Iterable[Row], field: str) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each layer, without those that are not numbers."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        points = found.setdefault(row["layer"], [])
        if _has(row, field):
            points.append((row["step"], row[field]))
    return found


def head_norms(rows: Iterable[Row]) -> tuple[int, dict[str, list[float]]]:
    """Return the newest step with norms of heads, and those of each layer, nan if not finite."""
    with_norms = [row for row in rows if row.get("head_norms")]
    step = max((row["step"] for row in with_norms), default=0)
    with_norms = [row for row in with_norms if row["step"] == step]
    names = short_names(with_norms)
    return step, {
        names[row["layer"]]: [math.nan if number(v) is None else v for v in row["head_norms"]]
        for row in with_norms
    }


def short_names(rows: Iterable[Row]) -> dict[str, str]:
    """Return the layers in order, each with its name without the parts that all names share.

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
    """Return the scale of an axis: "log" if all values are positive and span a decade."""
    numbers = [value for value in map(number, values) if value is not None]
    return "log" if numbers and 0 < 10 * min(numbers) <= max(numbers) else "linear"


def spread(values: Iterable[float]) -> str:
    """Return a value, or the smallest and the largest of several, in three digits."""
    ends = sorted(values)
    least, most = f"{ends[0]:.3g}", f"{ends[-1]:.3g}"
    return least if least == most else f"{least} to {most}"


def without_kappa(rows: Sequence[Row]) -> str:
    """Return how many rows have no kappa, and why; "" if all have one."""
    reasons = Counter(r.get("reason") or "not resolved" for r in rows if not _has(r, "kappa"))
    if not reasons:
        return ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    return f"{reasons.total():,} of {len(rows):,} rows left out: {why}"


def kappa_or_rank(row: Row) -> str:
    """Return a row's kappa as text, or its rank if kappa is not resolved, or a reason."""
    if _has(row, "kappa"):
        return f"{row['kappa']:.4g}"
    reason = row.get("reason") or "not resolved"
    if reason != "not resolved" or not all(_has(row, k) for k in ("rank", "heads", "head_dim")):
        return reason
    most = row["heads"] * row["head_dim"]
    if _has(row, "tokens"):
        most = min(most, row["tokens"])
    return f"rank {row['rank']:.4g} of {most:.4g}"


@dataclass
class Run:
    """The contents of a run on a page: its files in the order of steps, thinned if long.

    ``notes`` says what a page leaves out of a file.
    """

    name: str
    metrics: list[dict[str, Any]]
    kappa: list[Mapping[str, Any]]
    kappa_probe: list[Mapping[str, Any]]
    alarms: list[dict[str, Any]]
    summary: dict[str, Any]
    notes: dict[str, str]


@dataclass
class _Chart:
    """A chart of lines, with vertical lines for alarms, or a map of the norms of heads by layer."""

    title: str
    unit: str = ""
    lines: list[Line] = field(default_factory=list)
    scale: str = "linear"
    alarms: list[dict[str, Any]] = field(default_factory=list)
    norms: dict[str, list[float]] = field(default_factory=dict)
    caption: str = ""


def write_page(folders: Iterable[str | Path], path: str | Path) -> None:
    """Write one HTML file that shows runs, which opens in a browser without a network.

        write_page(["runs/vit-1", "runs/vit-2"], "page.html")

    Long runs are thinned to evenly spaced steps, and damaged lines are skipped; the page says how
    many.

    Args:
        folders: folders of the runs. Each has ``kappa.jsonl`` as ``KappaMonitor`` writes it, or
            ``metrics.jsonl``, with an object with a "step" on each line; objects of the same step
            are merged. ``kappa_probe.jsonl``, ``alarms.jsonl`` and ``summary.json`` are shown if
            they exist.
        path: file to write; it is replaced once all of it is written.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: if there is no folder, or one does not exist or has no rows.
        OSError: a file cannot be read or written.
    """
    with needed_by("a page"):
        import matplotlib  # noqa: F401
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ValueError("a page needs the folder of a run, got none")
    runs = [_read_run(folder, CHART_POINTS // len(folders)) for folder in folders]
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders):
        if names.count(run.name) > 1:
            run.name = str(folder)
    names = [run.name for run in runs]
    steps = [row["step"] for run in runs for row in (*run.metrics, *run.kappa)]
    margin = 0.02 * max(max(steps) - min(steps), 1)
    ends = min(steps) - margin, max(steps) + margin
    charts = (
        f"<figure><h2>{escape(chart.title)}</h2>{_svg(chart, ends)}{_legend(chart)}"
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        for chart in _charts(runs)
    )
    alarms = [
        (run.name, alarm["step"], alarm.get("kind", ""), alarm["message"])
        for run in runs
        for alarm in run.alarms
    ]
    settings = [run.summary.get("settings", {}) for run in runs]
    listed = _compared(names, ({k: _shown(v, digits=10) for k, v in s.items()} for s in settings))
    text = _PAGE.format(
        title=escape(", ".join(names)),
        glance=_compared(names, map(_glance, runs)),
        kappa=_kappa_table(runs),
        charts="\n".join(charts),
        alarms=_table(("run", "step", "kind", "message"), alarms) if alarms else "<p>None.</p>",
        run_title="Run" if len(runs) == 1 else "Runs",
        facts=_compared(names, map(_facts, runs)),
        settings=f"<details><summary>All settings</summary>{listed}</details>" if listed else "",
    )
    write_file(path, text.encode("utf-8", "backslashreplace"))


def _read_run(folder: Path, most: int) -> Run:
    """Read the contents of a run for a page: about ``most`` rows of kappa, and all evaluations."""
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    limits = {"metrics": LINE_POINTS, "kappa": most, "kappa_probe": most, "alarms": _ALARMS}
    rows: dict[str, Any] = {}
    notes = {}
    for kind, keys in _FILES.items():
        file = folder / f"{kind}.jsonl"
        rows[kind] = []
        if not file.exists():
            continue
        rows[kind], bad, steps = read_thinned(file, limits[kind], keys, always="held_out_")
        if steps:
            drawn = len({row["step"] for row in rows[kind]})
            notes[file.name] = f"{drawn:,} of {steps:,} steps are shown, evenly spaced"
        if bad:
            notes[f"damaged lines in {file.name}"] = f"{bad:,}, skipped"
    if not rows["metrics"] and not rows["kappa"]:
        raise ValueError(f"no rows in kappa.jsonl or metrics.jsonl of {folder}")
    for kind in ("kappa", "kappa_probe"):
        rows[kind] = newest(rows[kind])
    # A trainer may write two rows of one step: one when it logs, another when it evaluates.
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows["metrics"]:
        present = {name: value for name, value in row.items() if value is not None}
        by_step.setdefault(row["step"], {}).update(present)
    rows["metrics"] = [by_step[step] for step in sorted(by_step)]
    file = folder / "summary.json"
    try:
        summary = read_summary(file) if file.exists() else {}
    except ValueError:
        summary, notes[file.name] = {}, "damaged"
    return Run(folder.resolve().name, **rows, summary=summary, notes=notes)


def _charts(runs: list[Run]) -> Iterator[_Chart]:
    yield from _of_metrics(runs, _SCORES)
    several = len(runs) > 1
    if several and any(run.kappa for run in runs):
        lines = _mean_lines(runs, "kappa", geometric_mean)
        for line in _mean_lines(runs, "kappa_gaussian", geometric_mean):
            lines.append(line._replace(name="", dash="--", title=f"{line.name}, Gaussian heads"))
        caption = "A layer without κ at a step is left out of its mean. Dashed: Gaussian heads."
        yield _Chart("κ, geometric mean over layers", "κ", lines, "log", caption=caption)
    for run in runs:
        for rows, alarms, on in (
            (run.kappa, run.alarms, ""),
            (run.kappa_probe, [], " on fixed held-out items"),
        ):
            if rows:
                title = f"κ of every layer{on}{f': {run.name}' if several else ''}"
                left_out = without_kappa(rows)
                caption = f"{left_out}. " if left_out else ""
                caption += "Dashed: κ of independent Gaussian heads of the same number and size."
                yield _Chart(title, "κ", kappa_lines(rows), "log", alarms, caption=caption)
    yield from _of_attention(runs)
    yield from _of_head_report(runs)
    for run in runs:
        step, norms = head_norms(run.kappa)
        if norms:
            title = f"Norm of each head, step {step}{f': {run.name}' if several else ''}"
            caption = "Frobenius norm of each head's output; a head near 0 contributes little."
            yield _Chart(title, norms=norms, caption=caption)
    yield from _of_metrics(runs, _COURSE)


def _of_metrics(
    runs: list[Run], charts: Iterable[tuple[str, str, dict[str, str]]]
) -> Iterator[_Chart]:
    several = len(runs) > 1
    for title, unit, keys in charts:
        lines = []
        for index, run in enumerate(runs):
            for place, (key, label) in enumerate(keys.items()):
                points = _points(run.metrics, key)
                if points:
                    name = ", ".join(filter(None, (run.name if several else "", label)))
                    colour = COLOURS[(index if several else place) % len(COLOURS)]
                    lines.append(Line(name, points, colour, _DASHES[place]))
        if lines:
            is_loss = title == "Loss"
            scale = axis_scale(y for line in lines for _, y in line.points) if is_loss else "linear"
            alarms = [alarm for run in runs for alarm in run.alarms] if is_loss else []
            yield _Chart(title, unit, lines, scale, alarms=alarms)


def _of_attention(runs: list[Run]) -> Iterator[_Chart]:
    for column in COLUMNS:
        if not column.title:
            continue
        title, caption, alarms = column.title, column.caption, []
        if len(runs) == 1:
            lines = layer_lines(runs[0].kappa, column.name)
        else:
            join = max if column.over_heads == "max" else fmean
            title += ", mean over layers" if join is fmean else ", of all layers"
            lines = _mean_lines(runs, column.name, join)
        if column.name == "entropy":
            alarms = [alarm for run in runs for alarm in run.alarms]
            caption = "At most log(columns), if attention is spread evenly; near 0, each token "
            caption += "attends to one other"
        if any(line.points for line in lines):
            unit = UNITS[column.statistic]
            yield _Chart(title, unit, lines, alarms=alarms, caption=f"{caption}.")


def _of_head_report(runs: list[Run]) -> Iterator[_Chart]:
    for key, title, caption in _HEAD_REPORT:
        one = len(runs) == 1
        lines = layer_lines(runs[0].kappa, key) if one else _mean_lines(runs, key, fmean)
        if any(line.points for line in lines):
            yield _Chart(title if one else f"{title}, mean over layers", "", lines, caption=caption)


def _points(rows: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return steps and values of the rows that have a number for a key."""
    return [(row["step"], row[key]) for row in rows if number(row.get(key)) is not None]


def _mean_lines(runs: list[Run], key: str, join: Any) -> list[Line]:
    """Return a line for each run, with the values of all layers reduced by ``join``."""
    lines = []
    for index, run in enumerate(runs):
        by_step: dict[int, list[float]] = {}
        for step, value in _points(run.kappa, key):
            by_step.setdefault(step, []).append(value)
        points = [(step, join(values)) for step, values in by_step.items()]
        lines.append(Line(run.name, points, COLOURS[index % len(COLOURS)]))
    return lines


# Prefix of the ids of lines.
_GROUP = "shown-"


def _svg(chart: _Chart, ends: tuple[float, float]) -> str:
    """Return a chart as SVG; browsers show the titles of its lines and alarms as tooltips."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Write text as text, and do not parse names as formulas.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 11}):
        height = max(3.6, min(12.0, 1 + 0.25 * len(chart.norms)))
        figure = Figure(figsize=(7, height), layout="constrained")
        axes = figure.add_subplot()
        titles = _draw_norms(figure, axes, chart) if chart.norms else _draw_lines(axes, chart, ends)
        with StringIO() as file:
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            text = file.getvalue()
    # Round to a tenth of a pixel, and drop fonts: the page sets its own.
    text = re.sub(r"(?<=[ \"(])-?\d+\.\d\d+(?=[ \")\n])", lambda x: f"{float(x[0]):.1f}", text)
    text = re.sub(r"\s*([ML]) (?=[-\d])", r"\1", re.sub(r" font-family: [^;]*;", "", text))
    text = re.sub(r">\s+<", "><", text)
    for place, title in enumerate(titles):
        group = f'<g id="{_GROUP}{place}">'
        text = text.replace(group, f"{group}<title>{escape(title)}</title>", 1)
    return text[text.index("<svg") :]


def _draw_lines(axes: Any, chart: _Chart, ends: tuple[float, float]) -> list[str]:
    from matplotlib.ticker import LogLocator, NullFormatter

    titles = []
    axes.set_yscale(chart.scale)
    for line in chart.lines:
        # A single point needs a marker; many markers would hide the line.
        marker = "o" if len(line.points) <= 12 else None
        xs, ys = line.columns()
        (drawn,) = axes.plot(xs, ys, line.dash, color=line.colour, marker=marker, markersize=3.5)
        drawn.set_gid(f"{_GROUP}{len(titles)}")
        last = f": {ys[-1]:.4g} at step {xs[-1]}" if line.points else ""
        titles.append(f"{line.title or line.name}{last}")
    for alarm in chart.alarms:
        mark = axes.axvline(alarm["step"], color=_ALARM, linewidth=1.5, linestyle=":")
        mark.set_gid(f"{_GROUP}{len(titles)}")
        titles.append(alarm["message"])
    axes.set(xlim=ends, xlabel="optimizer step")
    axes.set_ylabel(chart.unit, parse_math=False)
    if chart.scale == "log":
        low, high = axes.get_ylim()
        few = high / low < 10**2.5  # label 2 and 5 too if there are few decades
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=GREY, alpha=0.25)
    axes.spines[:].set_color(GREY)
    axes.tick_params(which="both", color=GREY)
    return titles


def _draw_norms(figure: Any, axes: Any, chart: _Chart) -> list[str]:
    heads = max(map(len, chart.norms.values()))
    table = [values + [math.nan] * (heads - len(values)) for values in chart.norms.values()]
    figure.colorbar(axes.imshow(table, aspect="auto", interpolation="nearest"), label="norm")
    axes.set_yticks(range(len(table)), [*chart.norms], parse_math=False)
    axes.set_xlabel("head")
    return []


def _legend(chart: _Chart) -> str:
    """Return the legend as a list, which the page breaks into rows."""
    shown = [(line.colour, line.dash, line.name) for line in chart.lines if line.name]
    shown += [(_ALARM, ":", "alarms")] if chart.alarms else []
    names = "".join(
        f'<li style="--line:{colour}"{"" if dash == "-" else " class=dashed"}>{escape(name)}'
        for colour, dash, name in shown
    )
    return f'<ul class="legend">{names}</ul>'


def _glance(run: Run) -> dict[str, str]:
    """Return the first table: the command, and the scores."""
    command = run.summary.get("command")
    facts = {} if command is None else {"command": str(command)}
    for name, best_of in (("held_out_accuracy", max), ("held_out_loss", min)):
        scored = _points(run.metrics, name)
        if scored:
            (at, best), (last_at, last) = best_of(scored, key=lambda point: point[1]), scored[-1]
            facts[name] = (
                f"best {_shown(best, name)} at step {at:,}; "
                f"final {_shown(last, name)} at step {last_at:,}"
            )
    if (step := number(run.summary.get("best_step"))) is not None:
        facts["best_weights"] = f"of step {_shown(step)}, in model_best.safetensors"
    return facts


def _kappa_table(runs: Sequence[Run]) -> str:
    """Return a table of kappa of each layer at its first and its last step, and of Gaussian heads.

    A single run has these in three columns, several runs one column each.
    """
    if len(runs) > 1:
        named = ({f"κ, {layer}": _in_words(rows) for layer, rows in _ends(r).items()} for r in runs)
        return _compared([run.name for run in runs], named)
    (run,) = runs
    steps = [row["step"] for row in run.kappa]
    if not steps:
        return ""
    table = []
    for layer, rows in _ends(run).items():
        cells = [kappa_or_rank(row) for row in rows]
        for place, (row, usual) in enumerate(zip(rows, (min(steps), max(steps)))):
            if row["step"] != usual:
                cells[place] += f" at step {row['step']:,}"
        table.append((layer, *cells, _gaussian(rows[-1])))
    head = (f"step {min(steps):,}", f"step {max(steps):,}", "Gaussian heads")
    return _table(("layer", *head), table)


def _ends(run: Run) -> dict[str, tuple[Row, Row]]:
    """Return the first and the last row of each layer, by its short name."""
    ends: dict[str, tuple[Row, Row]] = {}
    for row in run.kappa:
        ends[row["layer"]] = ends.get(row["layer"], (row, row))[0], row
    return {name or "the model": ends[layer] for layer, name in short_names(run.kappa).items()}


def _in_words(rows: tuple[Row, Row]) -> str:
    """Return kappa of a layer at both steps, and that of Gaussian heads, as a text."""
    several = rows if rows[0] is not rows[1] else rows[:1]
    said = " → ".join(f"{kappa_or_rank(row)} at step {row['step']:,}" for row in several)
    gaussian = _gaussian(rows[-1])
    return f"{said}; Gaussian heads {gaussian}" if gaussian else said


def _gaussian(row: Row) -> str:
    gaussian = number(row.get("kappa_gaussian"))
    return "" if gaussian is None else f"{gaussian:.4g}"


def _facts(run: Run) -> dict[str, str]:
    apart = ("command", "kappa", "kappa_probe", "settings", "unit")
    facts = {
        _FACTS.get(name, name): _shown(value, name)
        for name, value in run.summary.items()
        if name not in apart and value is not None and value != []
    }
    if "throughput" in facts and "unit" in run.summary:
        facts["throughput"] += f" {run.summary['unit']} per second"
    last = max(row["step"] for row in (*run.metrics, *run.kappa))
    facts["newest_step"] = f"{last:,}" if run.summary else f"{last:,}, not finished"
    return facts | run.notes


def _shown(value: Any, name: str = "", digits: int = 4) -> str:
    """Return a value of a summary as text, in the unit that its name implies."""
    if isinstance(value, list):
        same = len(value) > 1 and all(item == value[0] for item in value)
        return _shown(value[0]) if same else ", ".join(map(_shown, value))
    if isinstance(value, bool) or number(value) is None:
        return str(value)
    if name == "seconds" and abs(value) < 1e9:
        return str(timedelta(seconds=round(value)))
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if name.endswith(("_accuracy", "_share", "mfu", "_top5")):
        return f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _compared(names: list[str], runs: Iterable[dict[str, str]]) -> str:
    """Return a table with a column for each run, facts that differ marked; "" without facts."""
    runs = list(runs)
    keys = dict.fromkeys(key for facts in runs for key in facts)
    if not keys:
        return ""
    rows = [(key.replace("_", " "), *(facts.get(key, "") for facts in runs)) for key in keys]
    return _table(("", *names), rows, mark_different=True)


def _table(
    head: Sequence[str], rows: Iterable[Sequence[object]], mark_different: bool = False
) -> str:
    lines = []
    for row in rows:
        different = mark_different and len(set(row[1:])) > 1
        cells = _cells("th", row[:1]) + _cells("td", row[1:])
        lines.append(f"<tr{' class=different' if different else ''}>{cells}</tr>")
    return f"<div class=scroll><table><tr>{_cells('th', head)}</tr>{''.join(lines)}</table></div>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in values)


# The policy forbids scripts and network requests.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #ccc; --mark: #fff3d6 }}
@media (prefers-color-scheme: dark) {{
:root {{ --ink: #ddd; --paper: #16181c; --rule: #444; --mark: #3a3218 }} }}
html {{ overflow-y: scroll }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1280px; margin: 0 auto; padding: 1rem }}
h1 {{ font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }}
h2 {{ font-size: 1.05rem; margin: 0; overflow-wrap: anywhere }}
.charts {{ display: grid; gap: 1.5rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }}
figure {{ margin: 0; min-width: 0 }}
figcaption {{ margin-top: .3rem; font-size: .85rem; opacity: .8 }}
figure svg {{ width: 100%; height: auto }}
figure svg text {{ fill: var(--ink) !important }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 1rem; margin: .3rem 0; padding: 0;
  list-style: none; font-size: .85rem; max-height: 8rem; overflow-y: auto }}
.legend li::before {{ content: ""; display: inline-block; width: 1.2rem; height: .2rem;
  margin-right: .4rem; vertical-align: middle; background: var(--line) }}
.legend li.dashed::before {{ background: repeating-linear-gradient(90deg, var(--line) 0 .3rem,
  transparent .3rem .45rem) }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1rem }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top;
  border-bottom: 1px solid var(--rule) }}
.different td {{ background: var(--mark) }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>κ is the condition number of a layer's head outputs side by side: their largest singular value
over their smallest. Near 1, the outputs spread evenly over all directions. A large κ means that
some are nearly combinations of others. Gaussian heads are the comparison: κ of independent random
heads of the same number and size. Where float32 cannot resolve κ, the rank is shown instead: the
number of singular values above a millionth of the largest. Point at a line to see its name and last
value.</p>
{glance}
<details open><summary>κ of every layer at its first and its last step</summary>{kappa}</details>
<div class="charts">
{charts}
</div>
<h2>Alarms</h2>
{alarms}
<h2>{run_title}</h2>
{facts}
{settings}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page of runs."""
    program = "python -m leaner_kernels.monitor.page"
    take_every_character(program)
    about = "Write one HTML file that shows a run, or several side by side."
    parser = argparse.ArgumentParser(program, description=about)
    parser.add_argument("runs", nargs="+", type=words, metavar="RUN", help="run folder")
    text = "HTML file to write (RUN/page.html for one run; required for several)"
    parser.add_argument("--out", type=words, help=text)
    options = parser.parse_args(arguments)
    if options.out is None and len(options.runs) > 1:
        parser.error(f"--out is required for a page of several runs, got {len(options.runs)} runs")
    out = Path(options.out or Path(options.runs[0], "page.html"))
    try:
        write_page(options.runs, out)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(one_line(error)) from None
    sys.stdout.write(one_line(f"written to {out}") + "\n")


if not TYPE_CHECKING:  # where it would hide misspelt names
    __getattr__ = partial(removed.attribute, __name__)


if __name__ == "__main__":
    main()
