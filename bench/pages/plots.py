"""Pictures of measured rows, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.pages.attention_report import AttentionRow, Groups

OURS, OTHERS = "tab:orange", "lightgray"
# Ways of reading kappa off a training step: what the field is called, marker, colour.
READINGS = {
    "hook": ("hook on the bfloat16 output", "v", "gray"),
    "single": ("float32 output, P in one bfloat16", "s", "tab:blue"),
    "split": ("P in two bfloat16, as kernels capture", "D", "tab:green"),
    "captured": ("captured on a CPU", "o", OURS),
}
MARKERS = {"forward": "o", "backward": "s", "both": "D"}


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def medians(groups: "Groups", path: Path) -> None:
    """Draw a panel for each case and direction, ours in colour."""
    groups = {key: group for key, group in groups.items() if key[2] != "eager"}
    cases = list(dict.fromkeys(case for case, _, _ in groups))
    directions = list(dict.fromkeys(direction for _, direction, _ in groups))
    figure = _figure(4.2 * len(directions), 0.6 + 2.4 * len(cases))
    panels = figure.subplots(len(cases), len(directions), squeeze=False)
    for (case, direction, mode), group in groups.items():
        panel = panels[cases.index(case)][directions.index(direction)]
        panel.barh(
            [row.peer for row in group],
            [row.median * 1e6 for row in group],
            xerr=[row.iqr / 2 * 1e6 for row in group],
            color=[OURS if row.ours else OTHERS for row in group],
        )
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
        panel.set_title(f"{case}, {direction}, {mode} (µs)", fontsize=8)
    figure.savefig(path)


def roofline(groups: "Groups", dtypes: Mapping[str, str], path: Path) -> None:
    """Draw useful FLOP/s over useful FLOP per byte under the measured ceilings, in logarithms.

    A panel for each dtype, since the matrix ceiling is its own; of each case and direction our
    fastest row and the fastest of the others.
    """
    groups = {key: group for key, group in groups.items() if key[2] != "eager"}
    names = list(dict.fromkeys(dtypes[case] for case, _, _ in groups))
    figure = _figure(6.5 * len(names), 5)
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        here = {key: group for key, group in groups.items() if dtypes[key[0]] == name}
        _ceilings(panel, name, [row for group in here.values() for row in group])
        for (case, direction, _), group in here.items():
            for ours, colour in ((False, "gray"), (True, OURS)):
                best = min(
                    (row for row in group if row.ours == ours),
                    key=lambda row: row.median,
                    default=None,
                )
                if best is None:
                    continue
                point = best.intensity, best.tflop_per_s
                panel.plot(*point, MARKERS[direction], color=colour, markersize=5)
                if ours and direction == "both":
                    panel.annotate(
                        case, point, xytext=(4, -8), textcoords="offset points", fontsize=6
                    )
        panel.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    names_of = {direction: (marker, OURS) for direction, marker in MARKERS.items()}
    for label, (marker, colour) in {**names_of, "fastest peer": ("o", "gray")}.items():
        panel.plot([], [], marker, color=colour, label=label)
    figure.legend(loc="outside lower center", ncols=len(names_of) + 1, fontsize=8)
    figure.savefig(path)


def _ceilings(panel: Any, dtype: str, rows: Sequence["AttentionRow"]) -> None:
    """Draw what a copy and a large product reached: min(bandwidth * intensity, matrix rate)."""
    bandwidth = max(row.copy_gb_per_s for row in rows) / 1e3
    rate = max(row.matrix_tflop_per_s for row in rows)
    ridge = rate / bandwidth
    low = min(ridge, *(row.intensity for row in rows)) / 2
    high = max(ridge, *(row.intensity for row in rows)) * 2
    panel.plot([low, ridge, high], [low * bandwidth, rate, rate], color="black")
    reached = f"a copy reached {bandwidth:.3g} TB/s, a product {rate:.3g} TFLOP/s"
    panel.set_title(f"{dtype}: {reached}", fontsize=9)


def readings(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw what each way of reading kappa reports over the truth, and by how much it is off.

    Args:
        rows: of ``bench.kappa.capture_accuracy``, as dictionaries.
        path: of the PNG.
    """
    figure = _figure(9, 4)
    reported, errors = figure.subplots(1, 2)
    truth = [row["truth"] for row in rows]
    reported.plot([min(truth), max(truth)], [min(truth), max(truth)], "k-", lw=1, label="truth")
    for name, (label, marker, colour) in READINGS.items():
        style = {"marker": marker, "color": colour, "ls": "", "ms": 5}
        reported.plot(truth, [row[name] for row in rows], label=label, **style)
        errors.plot(truth, [abs(row[name] / row["truth"] - 1) for row in rows], **style)
    axes = {"xscale": "log", "yscale": "log", "xlabel": "true condition number κ"}
    reported.set(**axes, ylabel="reported κ")
    errors.set(**axes, ylabel="relative error of κ")
    for panel in (reported, errors):
        panel.grid(alpha=0.3)
    reported.legend(fontsize=8)
    figure.savefig(path)
