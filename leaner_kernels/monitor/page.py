"""One HTML file of one run or several: what was run and reached, loss, kappa, attention, alarms.

    python -m leaner_kernels.monitor.page runs/vit-1 runs/vit-2 --out page.html

Charts are SVG in the file, which needs neither scripts nor a network: its own policy forbids the
browser both. matplotlib is imported when there is something to draw.
"""

import colorsys
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from io import StringIO
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from ..ops.statistics import COLUMNS, UNITS
from .command_line import as_path, command, one_line, status_of_errors
from .files import write_file
from .plots import (
    axis_scale,
    gaussian_lines,
    head_norms,
    kappa_or_rank,
    number,
    series,
    short_names,
    spread,
    without_kappa,
)
from .rows import newest, read_summary, read_thinned

__all__ = ["write_page"]

# Points of a line, and of the charts of one quantity together: a page stays small.
LINE_POINTS, CHART_POINTS = 500, 2_000
# Inches of a chart, and of one that takes the page's whole width; a pixel is 1/72 of one.
_WIDTH, _WIDE, _HEIGHT = 7.0, 14.0, 3.6
# Okabe and Ito's colours, which colour-blind readers tell apart; legible on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY, _ALARM = "#808080", "#d62728"
_SCORES = {
    "held_out_accuracy": "accuracy",
    "held_out_ema_accuracy": "accuracy, averaged weights",
    "held_out_top5": "top-5",
}
_LOSSES = {"held_out_loss": "held out", "held_out_ema_loss": "held out, averaged weights"}
# Of the optimizer and the clock: title, unit, and the names that trainers write it under.
_COURSE = (
    ("Learning rate", "learning rate", ("lr", "learning_rate")),
    ("Gradient norm", "norm", ("grad_norm",)),
    ("Throughput", "{unit} a second", ("throughput",)),
)
# Layers whose kappa the first table lists; of more it has the mean.
_LISTED = 12
_FILES = {
    "metrics": {"step": int},
    "kappa": {"step": int, "layer": str},
    "kappa_probe": {"step": int, "layer": str},
    "alarms": {"step": int, "message": str},
}

# Rows that are read of a file, where they are not as many as the points of a chart.
_MOST = {"metrics": LINE_POINTS, "alarms": sys.maxsize}

Points = Sequence[tuple[float, float]]


@dataclass
class Run:
    """What a page shows of a run: its files in the order of steps, of a long one not every step.

    ``steps`` has about how many steps a file has of which some were left out, by its name;
    ``damaged`` how many damaged lines were met, by path.
    """

    name: str
    metrics: list[dict[str, Any]]
    kappa: list[Mapping[str, Any]]
    kappa_probe: list[Mapping[str, Any]]
    alarms: list[dict[str, Any]]
    summary: dict[str, Any]
    steps: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)


@dataclass
class _Line:
    """A line of a chart; ``title`` is what a pointer on it shows, ``legend`` names it below."""

    name: str
    points: Points
    colour: str
    width: float = 1.5
    dash: str = "-"
    has_dots: bool = False
    title: str = ""
    legend: bool = True


@dataclass
class _Chart:
    title: str
    unit: str = ""
    lines: list[_Line] = field(default_factory=list)
    alarms: Sequence[dict[str, Any]] = ()
    scale: str = "linear"
    limits: list[float] | None = None
    norms: dict[str, list[float]] = field(default_factory=dict)
    caption: list[str] = field(default_factory=list)
    height: float = _HEIGHT
    is_wide: bool = False
    has_legend: bool = True


def write_page(runs: Iterable[str | Path | Run], path: str | Path) -> dict[str, int]:
    """Write one HTML file that shows runs, which opens in a browser without a network.

        write_page(["runs/vit-1", "runs/vit-2"], "page.html")

    Lines of more points than a browser draws quickly are thinned evenly, which their captions say.

    Args:
        runs: their folders, each with ``kappa.jsonl`` as ``KappaMonitor`` writes it, or with
            ``metrics.jsonl``, one object with a "step" per line, of which those of one step are
            merged; ``kappa_probe.jsonl``, ``alarms.jsonl`` and ``summary.json`` are shown where
            they exist. Or what ``read_run`` returned of them.
        path: of the file, which is replaced when all of it is written.

    Returns:
        How many damaged lines each file has, which were skipped; files without are left out.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no folder, or one that does not exist or has no rows.
        OSError: a file cannot be read or written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("a page needs the package matplotlib: pip install matplotlib") from None
    runs = _read_runs([run if isinstance(run, Run) else Path(run) for run in runs])
    steps = [row["step"] for run in runs for row in (*run.metrics, *run.kappa)]
    margin = 0.02 * max(max(steps) - min(steps), 1)
    ends = min(steps) - margin, max(steps) + margin
    charts = []
    for chart in _charts(runs):
        wide = ' class="wide"' if chart.is_wide else ""
        charts.append(
            f"<figure{wide}><h2>{escape(chart.title)}</h2>{_svg(chart, ends)}{_legend(chart)}"
            f"<figcaption>{escape(_sentences(chart.caption))}</figcaption></figure>"
        )
    names = ", ".join(run.name for run in runs)
    text = _PAGE.format(
        title=escape(names),
        glance=_table([run.name for run in runs], [_glance(run) for run in runs]),
        charts="\n".join(charts),
        alarms=_alarms_table(runs),
        facts=_facts_table(runs),
    )
    write_file(path, text.encode("utf-8", "backslashreplace"))
    return {name: count for run in runs for name, count in run.damaged.items()}


def _read_runs(sources: list[Path | Run]) -> list[Run]:
    if not sources:
        raise ValueError("a page needs the folder of a run, got none")
    runs = [run if isinstance(run, Run) else read_run(run) for run in sources]
    names = [run.name for run in runs]
    for run, source in zip(runs, sources):
        if names.count(run.name) > 1 and isinstance(source, Path):
            run.name = str(source)
    return runs


def read_run(folder: Path) -> Run:
    """Read what a page shows of a run: evenly spaced steps of a long one, and every evaluation."""
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    rows: dict[str, Any] = {}
    steps, damaged = {}, {}
    for kind, keys in _FILES.items():
        file = folder / f"{kind}.jsonl"
        rows[kind] = []
        if file.exists():
            most = _MOST.get(kind, CHART_POINTS)
            thinned = read_thinned(file, most, always="held_out_", **keys)
            rows[kind], steps[kind] = thinned.rows, thinned.steps
            if thinned.damaged:
                damaged[str(file)] = thinned.damaged
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
        summary, damaged[str(file)] = {}, 1
    return Run(folder.resolve().name, **rows, summary=summary, steps=steps, damaged=damaged)


def _charts(runs: list[Run]) -> Iterator[_Chart]:
    yield from _of_metrics(runs)
    several = len(runs) > 1
    if several and any(run.kappa for run in runs):
        yield _mean_kappa(runs)
    limits = _kappa_range(runs)
    for run in runs:
        named = f": {run.name}" if several else ""
        if run.kappa:
            title = f"κ of every layer{named}"
            yield _kappa(run.kappa, title, limits, run, run.steps["kappa"], len(runs))
        if run.kappa_probe:
            title = f"κ of every layer on fixed held-out items{named}"
            steps = run.steps["kappa_probe"]
            yield _kappa(run.kappa_probe, title, limits, None, steps, len(runs))
    yield from _of_course(runs)
    if any(run.kappa for run in runs):
        yield from _of_attention(runs)
    for run in runs:
        step, norms = head_norms(run.kappa)
        if norms:
            named = f": {run.name}" if several else ""
            yield _heat_map(f"Norms of heads, step {step}{named}", norms)


def _of_metrics(runs: list[Run]) -> Iterator[_Chart]:
    lines = []
    for index, run in enumerate(runs):
        for place, (key, label) in enumerate({"loss": "training", **_LOSSES}.items()):
            points = _points(run.metrics, key)
            if points:
                colour = _colour(index if len(runs) > 1 else place)
                name = f"{run.name}, {label}" if len(runs) > 1 else label
                line = _Line(name, points, colour, 1.0 if key == "loss" else 1.5)
                line.has_dots = key != "loss"
                line.dash = ":" if key == "held_out_ema_loss" else "-"
                lines.append(line)
    if lines:
        values = [value for line in lines for _, value in line.points]
        steps = max(run.steps.get("metrics", 0) for run in runs)
        yield _lines("Loss", "loss", lines, steps, scale=axis_scale(values), alarms=runs)
    lines = []
    for index, run in enumerate(runs):
        # The accuracy alone is compared; the table has all scores.
        shown = dict([*_SCORES.items()][: 1 if len(runs) > 1 else None])
        for place, (key, label) in enumerate(shown.items()):
            points = [(step, 100 * value) for step, value in _points(run.metrics, key)]
            if points:
                name = run.name if len(runs) > 1 else label
                line = _Line(name, points, _colour(index if len(runs) > 1 else place))
                line.has_dots, line.dash = True, ("-", ":", "--")[place]
                lines.append(line)
    if lines:
        yield _lines("Held-out accuracy", "correct, %", lines)


def _of_course(runs: list[Run]) -> Iterator[_Chart]:
    for title, unit, keys in _COURSE:
        lines = []
        for index, run in enumerate(runs):
            points = _points(run.metrics, *keys)
            if points:
                lines.append(_Line(run.name, points, _colour(index), 1.0))
        if lines:
            unit = unit.format(unit=runs[0].summary.get("unit", "items"))
            chart = _lines(title, unit, lines, max(run.steps.get("metrics", 0) for run in runs))
            chart.has_legend, chart.height = len(runs) > 1, 0.7 * _HEIGHT
            yield chart


def _points(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[tuple[int, float]]:
    """Return steps and values of the rows that have a number under one of some names."""
    return [
        (row["step"], row[key]) for row in rows for key in keys if number(row.get(key)) is not None
    ]


def _kappa_range(runs: list[Run]) -> list[float] | None:
    """Return the range of the axes of kappa of all runs."""
    rows = [row for run in runs for row in (*run.kappa, *run.kappa_probe)]
    values = [number(row.get(key)) for row in rows for key in ("kappa", "kappa_gaussian")]
    logs = [math.log10(value) for value in values if value is not None and value > 0]
    if not logs:
        return None
    margin = 0.05 * max(max(logs) - min(logs), 1)
    return [10 ** (min(logs) - margin), 10 ** (max(logs) + margin)]


def _kappa(
    rows: list[Mapping[str, Any]],
    title: str,
    limits: list[float] | None,
    alarmed: Run | None,
    steps: int,
    among: int,
) -> _Chart:
    lines = _layer_lines(rows, "kappa")
    ends = rows[0]["step"], rows[-1]["step"]
    for line in gaussian_lines(rows):
        values = set(line.values())
        points = sorted(line.items())
        if len(values) == 1:
            (value,) = values
            points = [(step, value) for step in ends]
        lines.append(_Line(f"Gaussian heads: {spread(values)}", points, _GREY, 2.0, "--"))
    alarms = [alarmed] if alarmed else []
    chart = _lines(title, "κ", lines, steps, scale="log", alarms=alarms, among=among)
    chart.limits = limits
    dashed = "Dashed: what independent Gaussian heads of this size would have"
    chart.caption = [without_kappa(rows), _left_out(rows), dashed, *chart.caption]
    chart.is_wide = among == 1
    return chart


def _left_out(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of the layers that have no kappa at some step; nothing where all have."""
    names = short_names(rows)
    layers = dict.fromkeys(row["layer"] for row in rows if number(row.get("kappa")) is None)
    shown = [names[layer] or "the model" for layer in layers]
    more = f" and {len(shown) - _LISTED} more" if len(shown) > _LISTED else ""
    return f"Of {', '.join(shown[:_LISTED])}{more}" if shown else ""


def _mean_kappa(runs: list[Run]) -> _Chart:
    lines = []
    for index, run in enumerate(runs):
        measured, predicted = (
            [(step, geometric_mean(values)) for step, values in _by_step(run.kappa, key)]
            for key in ("kappa", "kappa_gaussian")
        )
        lines.append(_Line(run.name, measured, _colour(index), has_dots=True))
        expected = _Line(f"{run.name}, Gaussian heads", predicted, _colour(index), 1.0, "--")
        expected.legend = False
        lines.append(expected)
    steps = max(run.steps.get("kappa", 0) for run in runs)
    chart = _lines("κ, geometric mean over layers", "κ", lines, steps, scale="log")
    dashed = "Dashed: what independent Gaussian heads of their sizes would have"
    chart.caption = ["Layers without a κ at a step do not count there", dashed, *chart.caption]
    return chart


def _of_attention(runs: list[Run]) -> Iterator[_Chart]:
    columns = {number(row.get("columns")) for run in runs for row in run.kappa}
    most = ""
    logs = [math.log(n) for n in columns if n]
    if logs:
        most = f"Attention spread evenly has {spread(logs)}; near 0 each token attends to one"
    for column in COLUMNS:
        if not column.title:
            continue
        title, key = column.title, column.name
        join = max if column.over_heads == "max" else fmean
        caption = most if key == "entropy" else column.caption
        if len(runs) == 1:
            lines = _layer_lines(runs[0].kappa, key)
        else:
            title += ", mean over layers" if join is fmean else ", of all layers"
            lines = [
                _Line(run.name, [(s, join(v)) for s, v in _by_step(run.kappa, key)], _colour(i))
                for i, run in enumerate(runs)
            ]
        if any(line.points for line in lines):
            steps = max(run.steps.get("kappa", 0) for run in runs)
            unit = UNITS[column.statistic]
            chart = _lines(title, unit, lines, steps, alarms=runs if key == "entropy" else ())
            chart.caption.insert(0, caption)
            yield chart


def _by_step(rows: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, list[float]]]:
    by_step: dict[int, list[float]] = {}
    for row in rows:
        value = number(row.get(key))
        if value is not None:
            by_step.setdefault(row["step"], []).append(value)
    return list(by_step.items())


def _layer_lines(rows: list[Mapping[str, Any]], key: str) -> list[_Line]:
    names = short_names(rows)
    return [
        _Line(names[layer], points, _layer_colour(place, len(names)), has_dots=True, title=layer)
        for place, (layer, points) in enumerate(series(rows, key).items())
    ]


def _heat_map(title: str, norms: dict[str, list[float]]) -> _Chart:
    caption = ["Frobenius norm of each head's output; a head near 0 contributes nothing"]
    height = max(2.5, min(12.0, 1 + 0.25 * len(norms)))
    return _Chart(title, norms=norms, caption=caption, height=height, has_legend=False)


def _lines(
    title: str,
    unit: str,
    lines: list[_Line],
    steps: int = 0,
    *,
    scale: str = "linear",
    alarms: Sequence[Run] = (),
    among: int = 1,
) -> _Chart:
    """Return a chart of lines, with the alarms of runs as vertical ones.

    ``steps`` are those that the files have, where the lines may have fewer; ``among`` is how many
    charts share the points of one.
    """
    # A line of two points is straight, and nothing of it is left out.
    many = sum(len(line.points) > 2 for line in lines)
    limit = max(30, min(LINE_POINTS, CHART_POINTS // among // max(many, 1)))
    longest, most = steps, 0
    for line in lines:
        longest = max(longest, len(line.points))
        line.points = _thinned(line.points, limit)
        most = max(most, len(line.points))
        # A single point has no line, and many hide it.
        line.has_dots = len(line.points) == 1 or (line.has_dots and len(line.points) <= 12)
    marks = _thinned([alarm for run in alarms for alarm in run.alarms], 200)
    caption = []
    if longest > max(most, 1):
        caption.append(
            f"Of lines of up to {longest:,} points {most:,} each are drawn, evenly spaced"
        )
    return _Chart(title, unit, lines, marks, scale, caption=caption)


def _svg(chart: _Chart, ends: tuple[float, float]) -> str:
    """Return a chart as SVG; a line and an alarm have what a pointer on them shows as a title."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and names are no formulas.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 11}):
        width = _WIDE if chart.is_wide else _WIDTH
        figure = Figure(figsize=(width, chart.height), layout="constrained")
        axes = figure.add_subplot()
        titles = _draw_norms(figure, axes, chart) if chart.norms else _draw_lines(axes, chart, ends)
        with StringIO() as file:
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            text = file.getvalue()
    # A tenth of a pixel is as much as a browser shows; the page has a font of its own.
    text = re.sub(r"<[^>]+>", lambda tag: _short(tag[0]), text)
    text = re.sub(r">\s+<", "><", text)
    for place, title in enumerate(titles):
        group = f'<g id="{_GROUP}{place}">'
        text = text.replace(group, f"{group}<title>{escape(title)}</title>", 1)
    return text[text.index("<svg") :]


# What begins the name of a line's group.
_GROUP = "shown-"


def _short(tag: str) -> str:
    tag = re.sub(r"\d+\.\d\d+", lambda value: f"{float(value[0]):.1f}", tag)
    return re.sub(r"\s*([ML]) (?=[-\d])", r"\1", re.sub(r" font-family: [^;]*;", "", tag))


def _draw_lines(axes: Any, chart: _Chart, ends: tuple[float, float]) -> list[str]:
    from matplotlib.ticker import LogLocator, NullFormatter

    titles = []
    axes.set_yscale(chart.scale)
    for line in chart.lines:
        (drawn,) = axes.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            line.dash,
            color=line.colour,
            linewidth=line.width,
            marker="o" if line.has_dots else None,
            markersize=3.5,
        )
        drawn.set_gid(f"{_GROUP}{len(titles)}")
        last = f": {line.points[-1][1]:.4g} at step {line.points[-1][0]}" if line.points else ""
        titles.append(f"{line.title or line.name}{last}")
    for alarm in chart.alarms:
        mark = axes.axvline(alarm["step"], color=_ALARM, linewidth=1, alpha=0.6)
        mark.set_gid(f"{_GROUP}{len(titles)}")
        titles.append(str(alarm["message"]))
    axes.set(xlim=ends, xlabel="optimizer step")
    axes.set_ylabel(chart.unit, parse_math=False)
    if chart.limits:
        axes.set_ylim(chart.limits)
    if chart.scale == "log":
        low, high = axes.get_ylim()
        few = high / low < 10**2.5  # over few decades digits between them
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=_GREY, alpha=0.25)
    axes.spines[:].set_color(_GREY)
    axes.tick_params(which="both", color=_GREY)
    return titles


def _draw_norms(figure: Any, axes: Any, chart: _Chart) -> list[str]:
    heads = max(map(len, chart.norms.values()))
    table = [values + [math.nan] * (heads - len(values)) for values in chart.norms.values()]
    image = axes.imshow(table, aspect="auto", interpolation="nearest")
    figure.colorbar(image)
    axes.set_yticks(range(len(table)), [*chart.norms], parse_math=False)
    axes.set_xlabel("head")
    return []


def _legend(chart: _Chart) -> str:
    """Return the names of lines in their colours, which a page breaks into rows."""
    shown = [(line.colour, line.name) for line in chart.lines if line.legend]
    shown += [(_ALARM, "alarms")] if chart.alarms else []
    if not chart.has_legend:
        return ""
    names = "".join(f'<li style="--line:{colour}">{escape(name)}' for colour, name in shown)
    return f'<ul class="legend">{names}</ul>'


def _thinned(points: Sequence[Any], limit: int) -> Sequence[Any]:
    if len(points) <= limit:
        return points
    return [points[place * (len(points) - 1) // (limit - 1)] for place in range(limit)]


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _layer_colour(place: int, layers: int) -> str:
    """Return a colour from blue, of the first layer, to red; legible on white and on black."""
    hue = 0.62 * (1 - place / max(layers - 1, 1))
    red, green, blue = colorsys.hls_to_rgb(hue, 0.45, 0.75)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _sentences(parts: Iterable[str]) -> str:
    return " ".join(f"{part}." for part in parts if part)


def _alarms_table(runs: list[Run]) -> str:
    rows = [
        (run.name, alarm["step"], alarm.get("kind", ""), alarm["message"])
        for run in runs
        for alarm in run.alarms
    ]
    if not rows:
        return "<p>None.</p>"
    first = len(runs) == 1  # whose name is above
    lines = "".join(f"<tr>{_cells('td', row[first:])}</tr>" for row in rows[:200])
    head = _cells("th", ("run", "step", "kind", "what")[first:])
    more = f"<p>And {len(rows) - 200:,} more.</p>" if len(rows) > 200 else ""
    return f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>{more}"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape(str(value))}</{tag}>" for value in values)


def _glance(run: Run) -> dict[str, str]:
    """Return what a reader asks first: what was run, how good it is, and what kappa did."""
    command, step = run.summary.get("command"), run.summary.get("best_step")
    facts = {} if command is None else {"command": str(command)}
    for name, best_of in (("accuracy", max), ("loss", min)):
        scored = _points(run.metrics, f"held_out_{name}")
        if not scored:
            continue
        shown = "{:.1%}".format if name == "accuracy" else _shown
        (at, best), (last_at, last) = best_of(scored, key=lambda point: point[1]), scored[-1]
        said = f"best {shown(best)} at step {at:,}; final {shown(last)} at step {last_at:,}"
        kept = number(run.summary.get(f"best_held_out_{name}"))
        if kept is not None and step is not None:
            said += f"; of the best weights, after {_shown(step)} steps, {shown(kept)}"
        facts[f"held-out {name}"] = said
    return facts | _kappa_at_a_glance(run.kappa)


def _kappa_at_a_glance(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return kappa at the first and the last step: of each layer, or the mean over many."""
    names = short_names(rows)
    if len(names) <= _LISTED:
        return {
            f"κ, {name or 'the model'}": _change([row for row in rows if row["layer"] == layer])
            for layer, name in names.items()
        }
    facts, means = {}, _by_step(rows, "kappa")
    if means:
        ends = (
            f"{geometric_mean(values):.4g} at step {step:,}"
            for step, values in means[:: len(means) - 1 or 1]
        )
        facts[f"κ, geometric mean of {len(names)} layers"] = " → ".join(ends)
    gaussian = [value for _, values in _by_step(rows, "kappa_gaussian") for value in values]
    return facts | ({"κ of Gaussian heads": spread(gaussian)} if gaussian else {})


def _change(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return kappa of a layer at its first and its last step, and that of Gaussian heads."""
    ends = rows[:: len(rows) - 1 or 1]
    said = " → ".join(f"{kappa_or_rank(row)} at step {row['step']:,}" for row in ends)
    gaussian = number(rows[-1].get("kappa_gaussian"))
    return said if gaussian is None else f"{said}; Gaussian heads {gaussian:.4g}"


def _facts_table(runs: list[Run]) -> str:
    facts = [_facts(run) for run in runs]
    settings = [
        {k: f"{v:.10g}" if isinstance(v, float) else _shown(v) for k, v in settings.items()}
        for settings in (run.summary.get("settings") for run in runs)
        if isinstance(settings, dict)
    ]
    table = _table([run.name for run in runs], facts)
    if len(settings) == len(runs):
        more = _table([run.name for run in runs], settings)
        table += f"<details><summary>All settings</summary>{more}</details>"
    return table


def _table(names: list[str], columns: list[dict[str, str]]) -> str:
    lines = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [column.get(key, "") for column in columns]
        different = ' class="different"' if len(set(values)) > 1 else ""
        cells = _cells("th", [key.replace("_", " ")]) + _cells("td", values)
        lines.append(f"<tr{different}>{cells}</tr>")
    head = _cells("th", ("", *names))
    return f"<div class=scroll><table><tr>{head}</tr>{''.join(lines)}</table></div>"


def _facts(run: Run) -> dict[str, str]:
    facts: dict[str, str] = {}
    names = {"params": "parameters", "torch": "PyTorch"}
    for name, value in run.summary.items():
        if name in ("command", "kappa", "kappa_probe", "settings") or value is None or value == []:
            continue
        if name == "throughput":
            facts[name] = f"{_shown(value)} {run.summary.get('unit', 'items')}/s"
        elif name == "seconds":
            facts["time"] = _duration(value)
        elif name.endswith("_bytes") and isinstance(value, int):
            facts[name.removesuffix("_bytes")] = f"{value / 2**30:.2f} GiB"
        elif name.endswith("_joules"):
            facts[name.removesuffix("_joules")] = f"{_shown(value)} J"
        elif isinstance(value, float) and name.endswith(("_accuracy", "_share", "mfu", "_top5")):
            facts[name] = f"{value:.1%}"
        elif name != "unit":
            facts[names.get(name, name)] = _shown(value)
    last = [rows[-1]["step"] for rows in (run.metrics, run.kappa) if rows]
    facts["newest_step"] = f"{max(last):,}" if run.summary else f"{max(last):,}, not finished"
    if run.kappa:
        layers = short_names(run.kappa)
        newest_rows = {row["layer"]: row for row in run.kappa}.values()
        facts["monitored_layers"] = f"{len(layers):,}"
        for key in ("heads", "head_dim", "tokens"):
            known = [row[key] for row in newest_rows if number(row.get(key)) is not None]
            if known:
                facts.setdefault(key, spread(known))
    facts["alarms"] = f"{len(run.alarms):,}"
    for file, count in run.damaged.items():
        facts[f"damaged lines in {Path(file).name}"] = f"{count:,}, skipped"
    return facts


def _duration(seconds: Any) -> str:
    if number(seconds) is None:
        return _shown(seconds)
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        same = len(value) > 1 and all(item == value[0] for item in value)
        return _shown(value[0]) if same else ", ".join(map(_shown, value))
    return str(value)


# The policy lets nothing run and nothing be asked of any network.
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
.wide {{ grid-column: 1 / -1 }}
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
.different td {{ background: var(--mark) }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>κ is the condition number of a layer's attention heads side by side: their largest singular value
over their smallest. Near 1 the heads' outputs point in all directions alike; the larger κ, the
closer some are to combinations of others. Gaussian heads are the comparison: the κ that independent
random heads of the same number and size would have; far above it, heads share directions. A rank
stands where κ is not resolved: how many singular values are above a millionth of the largest.
Point at a line for its name and its last value.</p>
{glance}
<div class="charts">
{charts}
</div>
<h2>Alarms</h2>
{alarms}
<h2>Runs</h2>
{facts}
</body>
</html>
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page of runs."""
    parser = command(
        "python -m leaner_kernels.monitor.page",
        "Write one HTML file that shows a run, or several side by side.",
    )
    add = partial(parser.add_argument, type=as_path)
    add("runs", nargs="+", metavar="RUN", help="folder with kappa.jsonl")
    add("--out", help="HTML file to write (of one run RUN/page.html)")
    options = parser.parse_args(arguments)
    if options.out is None and len(options.runs) > 1:
        raise SystemExit(f"a page of {len(options.runs)} runs needs --out")
    out = options.out or options.runs[0] / "page.html"
    with status_of_errors():
        if not out.parent.is_dir():
            raise ValueError(f"no such folder: {out.parent}")
        for file, count in write_page(options.runs, out).items():
            sys.stderr.write(one_line(f"{file}: {count} damaged lines skipped") + "\n")
        sys.stdout.write(one_line(f"written to {out}") + "\n")


if __name__ == "__main__":
    main()
