"""Plots of kappa, and one HTML file of runs: what was reached, loss, kappa, attention, alarms.

    python -m leaner_kernels.monitor.page runs/vit-1 runs/vit-2 --out page.html

Charts are SVG in the file, which needs neither scripts nor a network: its own policy forbids the
browser both. matplotlib is imported when there is something to draw.
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
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops.statistics import COLUMNS, UNITS
from .command_line import one_line, take_every_character, words
from .files import write_file
from .rows import Row, newest, read_summary, read_thinned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot", "write_page"]

# Rows that are read of a file of metrics, and of kappa: a page stays small.
LINE_POINTS, CHART_POINTS = 500, 2_000
_ALARMS = 200
_FILES = {"metrics": (), "kappa": ("layer",), "kappa_probe": ("layer",), "alarms": ("message",)}
# Okabe and Ito's colours, which colour-blind readers tell apart; legible on white and on black.
_STYLES = (("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"))
GREY = "#808080"
_ALARM = "#d62728"  # of the lines at alarms
_GROUP = "shown-"  # what begins the name of a line's group
# Charts of metrics: title, unit, and what lines are called by the names of their rows.
_LOSSES = {"loss": "training", "held_out_loss": "held out", "held_out_ema_loss": "averaged weights"}
_ACCURACIES = {
    "held_out_accuracy": "accuracy",
    "held_out_ema_accuracy": "averaged weights",
    "held_out_top5": "top-5",
}
_SCORES = (("Loss", "loss", _LOSSES), ("Held-out accuracy", "share that is correct", _ACCURACIES))
_COURSE = (
    ("Learning rate", "learning rate", {"lr": "", "learning_rate": "learning rate"}),
    ("Gradient norm", "norm", {"grad_norm": ""}),
    ("Throughput", "items a second", {"throughput": ""}),
)


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
    figure = Figure(figsize=(9, max(4.5, 0.2 * len(lines))), layout="constrained")
    scale = axis_scale(row.get("kappa") for row in rows)
    axes = figure.add_subplot(xlabel="step", ylabel="condition number κ", yscale=scale)
    for line in lines:
        axes.plot(*line.columns(), line.dash, color=line.colour, marker="o", ms=3, label=line.name)
    axes.set_title(without_kappa(rows), fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


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
    for points in dict.fromkeys(map(tuple, series(rows, "kappa_gaussian").values())):
        if not points:
            continue
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
    return {layer: _points(of_layer, field) for layer, of_layer in _by_layer(rows).items()}


def _by_layer(rows: Iterable[Row]) -> dict[str, list[Row]]:
    by_layer: dict[str, list[Row]] = {}
    for row in rows:
        by_layer.setdefault(row["layer"], []).append(row)
    return by_layer


def _points(rows: Iterable[Row], key: str) -> list[tuple[int, float]]:
    """Return steps and values of the rows that have a number under a name."""
    return [(row["step"], row[key]) for row in rows if _has(row, key)]


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


@dataclass
class Run:
    """What a page shows of a run; ``notes`` says of a file what of it is not shown."""

    name: str
    metrics: list[dict[str, Any]]
    kappa: list[Mapping[str, Any]]
    kappa_probe: list[Mapping[str, Any]]
    alarms: list[dict[str, Any]]
    summary: dict[str, Any]
    notes: dict[str, str]


@dataclass
class _Chart:
    """A chart of lines, with alarms as vertical ones."""

    title: str
    unit: str = ""
    lines: list[Line] = field(default_factory=list)
    scale: str = "linear"
    alarms: list[dict[str, Any]] = field(default_factory=list)
    caption: str = ""


def write_page(folders: Iterable[str | Path], path: str | Path) -> None:
    """Write one HTML file that shows runs, which opens in a browser without a network.

        write_page(["runs/vit-1", "runs/vit-2"], "page.html")

    Of long runs evenly spaced steps are drawn, and damaged lines are skipped; the page says how
    many.

    Args:
        folders: of the runs, each with ``kappa.jsonl`` as ``KappaMonitor`` writes it, or with
            ``metrics.jsonl``, one object with a "step" per line, of which those of one step are
            merged; ``kappa_probe.jsonl``, ``alarms.jsonl`` and ``summary.json`` are shown where
            they exist.
        path: of the file, which is replaced when all of it is written.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no folder, or one that does not exist or has no rows.
        OSError: a file cannot be read or written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("a page needs the package matplotlib: pip install matplotlib") from None
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise ValueError("a page needs the folder of a run, got none")
    runs = [_read_run(folder) for folder in folders]
    write_file(path, _PAGE.format("\n".join(map(_section, runs))).encode("utf-8", "replace"))


def _section(run: Run) -> str:
    """Return the tables and charts of a run as HTML."""
    steps = [row["step"] for row in (*run.metrics, *run.kappa)]
    margin = 0.02 * max(max(steps) - min(steps), 1)
    ends = min(steps) - margin, max(steps) + margin
    charts = "\n".join(
        f"<figure><h2>{escape(chart.title)}</h2>{_svg(chart, ends)}{_legend(chart)}"
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        for chart in _charts(run)
    )
    alarms = [(alarm["step"], alarm.get("kind", ""), alarm["message"]) for alarm in run.alarms]
    settings = run.summary.get("settings", {})
    return f"""<h1>{escape(run.name)}</h1>
<details open><summary>κ of every layer, at its first and its last step</summary>
{_table(_kappa_of_layers(run).items())}</details>
<div class="charts">
{charts}
</div>
<h2>Alarms</h2>
{_table(alarms) if alarms else "<p>None.</p>"}
<h2>Run</h2>
{_table(_facts(run).items())}
<details><summary>All settings</summary>
{_table((name, _shown(value, digits=10)) for name, value in settings.items())}</details>
"""


def _read_run(folder: Path) -> Run:
    """Read what a page shows of a run: some rows of kappa, and every evaluation."""
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    limits = {"metrics": LINE_POINTS, "alarms": _ALARMS}
    rows: dict[str, Any] = {}
    notes = {}
    for kind, keys in _FILES.items():
        file = folder / f"{kind}.jsonl"
        rows[kind] = []
        if not file.exists():
            continue
        rows[kind], bad, steps = read_thinned(
            file, limits.get(kind, CHART_POINTS), keys, always="held_out_"
        )
        if steps:
            drawn = len({row["step"] for row in rows[kind]})
            notes[file.name] = f"{drawn:,} of {steps:,} steps are shown, evenly spaced"
        if bad:
            notes[f"damaged lines in {file.name}"] = f"{bad:,}, skipped"
    if not rows["metrics"] and not rows["kappa"]:
        raise ValueError(f"no rows in {folder}: neither in kappa.jsonl nor in metrics.jsonl")
    for kind in ("kappa", "kappa_probe"):
        rows[kind] = newest(rows[kind])
    # A trainer writes a row when it logs and another when it evaluates, perhaps of one step.
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


def _charts(run: Run) -> Iterator[_Chart]:
    yield from _of_metrics(run, _SCORES)
    for rows, alarms, on in (
        (run.kappa, run.alarms, ""),
        (run.kappa_probe, [], " on fixed held-out items"),
    ):
        if rows:
            left_out = without_kappa(rows)
            caption = f"{left_out}. " if left_out else ""
            caption += "Dashed: what independent Gaussian heads of this size would have."
            title = f"κ of every layer{on}"
            yield _Chart(title, "κ", kappa_lines(rows), "log", alarms, caption=caption)
    for column in COLUMNS:
        lines = layer_lines(run.kappa, column.name) if column.title else []
        if any(line.points for line in lines):
            alarms, caption = [], column.caption
            if column.name == "entropy":
                alarms = run.alarms
                caption = "Spread evenly it has log(columns); near 0 each token attends to one"
            unit = UNITS[column.statistic]
            yield _Chart(column.title, unit, lines, alarms=alarms, caption=f"{caption}.")
    yield from _of_metrics(run, _COURSE)


def _of_metrics(run: Run, charts: Iterable[tuple[str, str, dict[str, str]]]) -> Iterator[_Chart]:
    for title, unit, names in charts:
        points = {label: _points(run.metrics, key) for key, label in names.items()}
        lines = [Line(*item, *how) for item, how in zip(points.items(), _STYLES) if item[1]]
        if lines:
            is_loss = title == "Loss"
            scale = axis_scale(y for line in lines for _, y in line.points) if is_loss else "linear"
            yield _Chart(title, unit, lines, scale, run.alarms if is_loss else [])


def _svg(chart: _Chart, ends: tuple[float, float]) -> str:
    """Return a chart as SVG; a line and an alarm have what a pointer on them shows as a title."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and names are no formulas.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 11}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        titles = _draw_lines(figure.add_subplot(), chart, ends)
        with StringIO() as file:
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            text = file.getvalue()
    # A tenth of a pixel is as much as a browser shows; the page has a font of its own.
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
        # A single point has no line, and many hide it.
        marker = "o" if len(line.points) <= 12 else None
        xs, ys = line.columns()
        (drawn,) = axes.plot(xs, ys, line.dash, color=line.colour, marker=marker, markersize=3.5)
        drawn.set_gid(f"{_GROUP}{len(titles)}")
        last = f": {ys[-1]:.4g} at step {xs[-1]}" if line.points else ""
        titles.append(f"{line.title or line.name}{last}")
    for alarm in chart.alarms:
        mark = axes.axvline(alarm["step"], color=_ALARM, linewidth=1, alpha=0.6)
        mark.set_gid(f"{_GROUP}{len(titles)}")
        titles.append(alarm["message"])
    axes.set(xlim=ends, xlabel="optimizer step")
    axes.set_ylabel(chart.unit, parse_math=False)
    if chart.scale == "log":
        low, high = axes.get_ylim()
        few = high / low < 10**2.5  # over few decades digits between them
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=GREY, alpha=0.25)
    axes.spines[:].set_color(GREY)
    axes.tick_params(which="both", color=GREY)
    return titles


def _legend(chart: _Chart) -> str:
    """Return the names of lines in their colours, which a page breaks into rows."""
    shown = [(line.colour, line.name) for line in chart.lines if line.name]
    shown += [(_ALARM, "alarms")] if chart.alarms else []
    names = "".join(f'<li style="--line:{colour}">{escape(name)}' for colour, name in shown)
    return f'<ul class="legend">{names}</ul>'


def _kappa_of_layers(run: Run) -> dict[str, str]:
    """Return kappa of each layer at its first and its last step, and that of Gaussian heads."""
    facts, names = {}, short_names(run.kappa)
    for layer, rows in _by_layer(run.kappa).items():
        ends = rows[:: len(rows) - 1 or 1]
        said = " → ".join(f"{kappa_or_rank(row)} at step {row['step']:,}" for row in ends)
        gaussian = number(rows[-1].get("kappa_gaussian"))
        said += "" if gaussian is None else f"; Gaussian heads {gaussian:.4g}"
        facts[f"κ, {names[layer] or 'the model'}"] = said
    return facts


def _facts(run: Run) -> dict[str, str]:
    apart = ("kappa", "kappa_probe", "settings")
    facts = {
        name.replace("_", " "): _shown(value, name)
        for name, value in run.summary.items()
        if name not in apart and value is not None and value != []
    }
    last = max(row["step"] for row in (*run.metrics, *run.kappa))
    facts["newest step"] = f"{last:,}" if run.summary else f"{last:,}, not finished"
    return facts | run.notes


def _shown(value: Any, name: str = "", digits: int = 4) -> str:
    """Return a value of a summary as text, in the unit that its name tells."""
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


def _table(rows: Iterable[Sequence[object]]) -> str:
    lines = (f"<tr>{_cells('th', row[:1])}{_cells('td', row[1:])}</tr>" for row in rows)
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in values)


# The policy lets nothing run and nothing be asked of any network.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:">
<title>κ of attention</title>
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; --rule: #ccc }}
@media (prefers-color-scheme: dark) {{
:root {{ --ink: #ddd; --paper: #16181c; --rule: #444 }} }}
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
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1rem }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top;
  border-bottom: 1px solid var(--rule) }}
</style>
</head>
<body>
<p>κ is the condition number of a layer's attention heads side by side: their largest singular value
over their smallest. Near 1 the heads' outputs point in all directions alike; the larger κ, the
closer some are to combinations of others. Gaussian heads are the comparison: the κ that independent
random heads of the same number and size would have; far above it, heads share directions. A rank
stands where κ is not resolved: how many singular values are above a millionth of the largest.
Point at a line for its name and its last value.</p>
{}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page of runs."""
    program = "python -m leaner_kernels.monitor.page"
    take_every_character(program)
    about = "Write one HTML file that shows a run, or several one below another."
    parser = argparse.ArgumentParser(program, description=about)
    parser.add_argument("runs", nargs="+", type=words, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=words, help="HTML file to write (of one run RUN/page.html)")
    options = parser.parse_args(arguments)
    if options.out is None and len(options.runs) > 1:
        parser.error(f"a page of {len(options.runs)} runs needs --out")
    out = Path(options.out or Path(options.runs[0], "page.html"))
    try:
        write_page(options.runs, out)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(one_line(error)) from None
    sys.stdout.write(one_line(f"written to {out}") + "\n")


if __name__ == "__main__":
    main()
