"""One HTML file of one run or several: what was run and reached, loss, kappa, attention, alarms.

    python -m leaner_kernels.monitor.page runs/vit-1 runs/vit-2 --out page.html

The file holds plotly's JavaScript and needs no network: its own policy forbids the browser any.
plotly is imported when there is something to draw.
"""

import colorsys
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
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

# Points of a line and of a chart, so that a browser stays quick.
LINE_POINTS, CHART_POINTS = 2000, 20_000
# Okabe and Ito's colours, which colour-blind readers tell apart; legible on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY, _GRID = "#808080", "rgba(128,128,128,0.25)"
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

_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["toImage", "resetScale2d"]],
}

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
class _Chart:
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: list[str] = field(default_factory=list)
    height: int = 380
    is_wide: bool = False


def write_page(runs: Iterable[str | Path | Run], path: str | Path) -> dict[str, int]:
    """Write one HTML file that shows runs, which opens in a browser without a network.

        write_page(["runs/vit-1", "runs/vit-2"], "page.html")

    Lines of more points than a browser draws quickly are thinned evenly, which their captions say.

    Args:
        runs: their folders, each with ``kappa.jsonl`` as ``KappaMonitor`` writes it, or with
            ``metrics.jsonl``, one object with a "step" per line, of which those of one step are
            merged; ``kappa_probe.jsonl``, ``alarms.jsonl`` and ``summary.json`` are shown where
            they exist. Or what ``read_run`` returned of them.
        path: of the file, of about 5 MB, which is replaced when all of it is written.

    Returns:
        How many damaged lines each file has, which were skipped; files without are left out.

    Raises:
        ImportError: plotly is missing.
        ValueError: no folder, or one that does not exist or has no rows.
        OSError: a file cannot be read or written.
    """
    try:
        from plotly import io
    except ImportError:
        raise ImportError("a page needs the package plotly: pip install plotly") from None
    runs = _read_runs([run if isinstance(run, Run) else Path(run) for run in runs])
    steps = [row["step"] for run in runs for row in (*run.metrics, *run.kappa)]
    margin = 0.02 * max(max(steps) - min(steps), 1)
    charts = []
    for index, chart in enumerate(_charts(runs)):
        if chart.data[0]["type"] == "scatter":  # the axes of steps are all alike
            chart.layout["xaxis"]["range"] = [min(steps) - margin, max(steps) + margin]
        drawn = io.to_html(
            {"data": chart.data, "layout": chart.layout},
            validate=False,
            full_html=False,
            include_plotlyjs=index == 0,
            config=_CONFIG,
            div_id=f"chart-{index}",
            default_height=f"{chart.height}px",
        )
        wide = ' class="wide"' if chart.is_wide else ""
        charts.append(
            f"<figure{wide}><h2>{escape(chart.title)}</h2>{drawn}"
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


def _read_runs(given: list[Path | Run]) -> list[Run]:
    if not given:
        raise ValueError("a page needs the folder of a run, got none")
    runs = [run if isinstance(run, Run) else read_run(run) for run in given]
    names = [run.name for run in runs]
    for run, source in zip(runs, given):
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
            found = read_thinned(file, most, always=b'"held_out_', **keys)
            rows[kind], steps[kind] = found.rows, found.steps
            if found.damaged:
                damaged[str(file)] = found.damaged
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
            yield _kappa(run.kappa, title, limits, run, run.steps["kappa"], not several)
        if run.kappa_probe:
            title = f"κ of every layer on fixed held-out items{named}"
            steps = run.steps["kappa_probe"]
            yield _kappa(run.kappa_probe, title, limits, None, steps, not several)
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
                style = {"line": {"color": colour, "width": 1}} if key == "loss" else _dots(colour)
                if key == "held_out_ema_loss":
                    style["line"]["dash"] = "dot"
                name = f"{run.name}, {label}" if len(runs) > 1 else label
                lines.append((name, points, style))
    if lines:
        values = [value for _, points, _ in lines for _, value in points]
        steps = max(run.steps.get("metrics", 0) for run in runs)
        yield _lines("Loss", "loss", lines, steps, scale=axis_scale(values), alarms=runs)
    lines = []
    for index, run in enumerate(runs):
        # The accuracy alone is compared; the table has all scores.
        shown = dict([*_SCORES.items()][: 1 if len(runs) > 1 else None])
        for place, (key, label) in enumerate(shown.items()):
            points = [(step, 100 * value) for step, value in _points(run.metrics, key)]
            if points:
                style = _dots(_colour(index if len(runs) > 1 else place))
                style["line"]["dash"] = ("solid", "dot", "dash")[place]
                lines.append((run.name if len(runs) > 1 else label, points, style))
    if lines:
        yield _lines("Held-out accuracy", "correct, %", lines)


def _of_course(runs: list[Run]) -> Iterator[_Chart]:
    for title, unit, keys in _COURSE:
        lines = []
        for index, run in enumerate(runs):
            points = _points(run.metrics, *keys)
            if points:
                lines.append((run.name, points, {"line": {"color": _colour(index), "width": 1}}))
        if lines:
            unit = unit.format(unit=runs[0].summary.get("unit", "items"))
            chart = _lines(title, unit, lines, max(run.steps.get("metrics", 0) for run in runs))
            chart.layout["showlegend"], chart.height = len(runs) > 1, 260
            yield chart


def _points(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[tuple[int, float]]:
    """Return steps and values of the rows that have a number under one of some names."""
    return [
        (row["step"], row[key]) for row in rows for key in keys if number(row.get(key)) is not None
    ]


def _kappa_range(runs: list[Run]) -> list[float] | None:
    """Return the range, in powers of ten, of the axes of kappa of all runs."""
    rows = [row for run in runs for row in (*run.kappa, *run.kappa_probe)]
    values = [number(row.get(key)) for row in rows for key in ("kappa", "kappa_gaussian")]
    logs = [math.log10(value) for value in values if value is not None and value > 0]
    if not logs:
        return None
    margin = 0.05 * max(max(logs) - min(logs), 1)
    return [min(logs) - margin, max(logs) + margin]


def _kappa(
    rows: list[Mapping[str, Any]],
    title: str,
    limits: list[float] | None,
    alarmed: Run | None,
    steps: int,
    is_wide: bool,
) -> _Chart:
    lines = _layer_lines(rows, "kappa")
    ends = rows[0]["step"], rows[-1]["step"]
    for line in gaussian_lines(rows):
        values = set(line.values())
        points = sorted(line.items())
        if len(values) == 1:
            (value,) = values
            points = [(step, value) for step in ends]
        style = {"line": {"color": _GREY, "width": 2, "dash": "dash"}, "mode": "lines"}
        lines.append((f"Gaussian heads: {spread(values)}", points, style))
    chart = _lines(title, "κ", lines, steps, scale="log", alarms=[alarmed] if alarmed else [])
    chart.layout["yaxis"]["range"] = limits
    dashed = "Dashed: what independent Gaussian heads of this size would have"
    chart.caption = [without_kappa(rows), _left_out(rows), dashed, *chart.caption]
    chart.is_wide = is_wide
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
        lines.append((run.name, measured, _dots(_colour(index))))
        style = {"line": {"color": _colour(index), "width": 1, "dash": "dash"}, "mode": "lines"}
        lines.append((f"{run.name}, Gaussian heads", predicted, style | {"showlegend": False}))
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
                (run.name, [(s, join(v)) for s, v in _by_step(run.kappa, key)], _dots(_colour(i)))
                for i, run in enumerate(runs)
            ]
        if any(points for _, points, _ in lines):
            steps = max(run.steps.get("kappa", 0) for run in runs)
            unit = UNITS[column.statistic]
            chart = _lines(title, unit, lines, steps, alarms=runs if key == "entropy" else ())
            chart.caption.insert(0, caption)
            yield chart


def _by_step(rows: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, list[float]]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        value = number(row.get(key))
        if value is not None:
            found.setdefault(row["step"], []).append(value)
    return list(found.items())


def _layer_lines(rows: list[Mapping[str, Any]], key: str) -> list[tuple[str, Points, dict]]:
    names = short_names(rows)
    lines = []
    for place, (layer, points) in enumerate(series(rows, key).items()):
        style = _dots(_layer_colour(place, len(names)), size=4)
        style["meta"] = escape(layer)
        lines.append((names[layer], points, style))
    return lines


def _heat_map(title: str, norms: dict[str, list[float]]) -> _Chart:
    heads = max(map(len, norms.values()))
    table = [
        [None if math.isnan(value) else value for value in values] + [None] * (heads - len(values))
        for values in norms.values()
    ]
    data = {
        "type": "heatmap",
        "x": list(range(heads)),
        "y": [escape(name) for name in norms],
        "z": table,
        "colorscale": "Viridis",
        "colorbar": {"thickness": 12},
        "hovertemplate": "%{y}, head %{x}<br>norm %{z:.4g}<extra></extra>",
    }
    layout = _layout("head", "")
    layout["xaxis"] |= {"showgrid": False, "zeroline": False}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "showgrid": False}
    caption = ["Frobenius norm of each head's output; a head near 0 contributes nothing"]
    return _Chart(title, [data], layout, caption, height=max(260, min(900, 120 + 20 * len(norms))))


def _lines(
    title: str,
    unit: str,
    lines: Sequence[tuple[str, Points, dict[str, Any]]],
    steps: int = 0,
    *,
    scale: str = "linear",
    alarms: Sequence[Run] = (),
) -> _Chart:
    """Return a chart of lines (names, points, styles), with the alarms of runs as vertical ones.

    ``steps`` are those that the files have, where the lines may have fewer.
    """
    # A line of two points is straight, and nothing of it is left out.
    many = sum(len(points) > 2 for _, points, _ in lines)
    limit = max(100, min(LINE_POINTS, CHART_POINTS // max(many, 1)))
    data, longest, most = [], steps, 0
    for name, points, style in lines:
        longest = max(longest, len(points))
        shown = _thinned(points, limit)
        most = max(most, len(shown))
        name = escape(name)
        # A single point has no line, and many hide it.
        dots = len(shown) == 1 or ("marker" in style and len(shown) <= 100)
        data.append(
            {
                "type": "scatter",
                "name": name,
                "x": [x for x, _ in shown],
                "y": [y for _, y in shown],
                "meta": name,
                "hovertemplate": f"step %{{x}}<br>{unit} %{{y:.4g}}<extra>%{{meta}}</extra>",
                "mode": "lines+markers" if dots else "lines",
                **style,
            }
        )
    layout = _layout("optimizer step", unit)
    layout["yaxis"] |= {"type": scale}
    if scale == "log":
        logs = [math.log10(y) for _, points, _ in lines for _, y in points if y > 0]
        few = not logs or max(logs) - min(logs) < 2.5
        layout["yaxis"]["dtick"] = "D2" if few else 1  # over few decades digits between them
    if marks := [alarm for run in alarms for alarm in run.alarms]:
        hidden = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        layout["yaxis2"] = hidden
        data.append(_marks(_thinned(marks, 200)))
    caption = []
    if longest > max(most, 1):
        caption.append(
            f"Of lines of up to {longest:,} points {most:,} each are drawn, evenly spaced"
        )
    return _Chart(title, data, layout, caption)


def _marks(alarms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "alarms",
        "mode": "markers",
        "yaxis": "y2",
        "x": [alarm["step"] for alarm in alarms],
        "y": [1] * len(alarms),
        "text": [escape(str(alarm["message"])) for alarm in alarms],
        "hovertemplate": "%{text}<extra>alarm</extra>",
        "marker": {"symbol": "triangle-down", "size": 10, "color": "#d62728"},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [0] * len(alarms),
            "arrayminus": [1] * len(alarms),
            "thickness": 1,
            "width": 0,
        },
        "cliponaxis": False,
    }


def _thinned(points: Sequence[Any], limit: int) -> Sequence[Any]:
    if len(points) <= limit:
        return points
    return [points[place * (len(points) - 1) // (limit - 1)] for place in range(limit)]


def _dots(colour: str, size: int = 6) -> dict[str, Any]:
    return {"line": {"color": colour, "width": 1.5}, "marker": {"color": colour, "size": size}}


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _layer_colour(place: int, layers: int) -> str:
    """Return a colour from blue, of the first layer, to red; legible on white and on black."""
    hue = 0.62 * (1 - place / max(layers - 1, 1))
    red, green, blue = colorsys.hls_to_rgb(hue, 0.45, 0.75)
    return f"rgb({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f})"


def _layout(x: str, y: str) -> dict[str, Any]:
    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID, "automargin": True}
    axis["exponentformat"] = "power"  # 10⁶ and not 1M, 10⁻⁴ and not 100µ
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": _GREY},
        "margin": {"l": 10, "r": 10, "t": 28, "b": 10},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": _GREY, "activecolor": _GREY},
        "xaxis": {**axis, "title": {"text": x, "standoff": 5}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 5}},
        "hoverlabel": {"namelength": -1},
        "showlegend": True,
        "legend": {
            **{"orientation": "h", "x": 0, "maxheight": 100},
            **{"yref": "container", "y": 0, "yanchor": "bottom"},
            "bgcolor": "rgba(0,0,0,0)",
        },
    }


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
        same = len(value) > 1 and all(each == value[0] for each in value)
        return _shown(value[0]) if same else ", ".join(map(_shown, value))
    return str(value)


# The policy lets the page's own scripts run, and asks nothing of any network.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
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
.main-svg > :not(.hoverlayer) text {{ fill: var(--ink) !important }}
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
Point at a line for its values; a click on a name hides
its line, a double click all others.</p>
{glance}
<noscript><p>The charts need JavaScript.</p></noscript>
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
    given = parser.parse_args(arguments)
    if given.out is None and len(given.runs) > 1:
        raise SystemExit(f"a page of {len(given.runs)} runs needs --out")
    out = given.out or given.runs[0] / "page.html"
    with status_of_errors():
        if not out.parent.is_dir():
            raise ValueError(f"no such folder: {out.parent}")
        for file, count in write_page(given.runs, out).items():
            sys.stderr.write(one_line(f"{file}: {count} damaged lines skipped") + "\n")
        sys.stdout.write(one_line(f"written to {out}") + "\n")


if __name__ == "__main__":
    main()
