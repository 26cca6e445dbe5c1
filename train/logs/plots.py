"""Pictures of a run: ``loss.png`` and ``kappa.png``.

matplotlib is imported when there is something to draw: no rank waits for it before its first step.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def plot_loss(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of every step, and held-out loss and accuracy where they were measured.

    Args:
        metrics: rows of ``metrics.jsonl``.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    accuracies = [r for r in metrics if r.get("held_out_accuracy") is not None]
    panels = 2 if accuracies else 1
    figure = Figure(figsize=(8, 1 + 3.5 * panels), layout="constrained")
    axes, *below = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
    axes.plot([r["step"] for r in metrics], [r["loss"] for r in metrics], lw=0.8, label="training")
    measured = [r for r in metrics if r.get("held_out_loss") is not None]
    if measured:
        steps, losses = zip(*((r["step"], r["held_out_loss"]) for r in measured))
        axes.plot(steps, losses, "o-", ms=4, label="held out")
    axes.set(ylabel="loss", yscale=_scale(r["loss"] for r in metrics))
    axes.legend()
    for lower in below:
        steps, shares = zip(*((r["step"], 100 * r["held_out_accuracy"]) for r in accuracies))
        lower.plot(steps, shares, "o-", ms=4)
        lower.set(ylabel="held-out accuracy, %")
    for each in (axes, *below):
        each.grid(alpha=0.3)
    (axes, *below)[-1].set(xlabel="step")
    figure.savefig(path, dpi=120)


def plot_kappa(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the condition number of every layer against the step, and the Gaussian prediction.

    Args:
        rows: rows of ``kappa.jsonl``; those whose kappa was not resolved are left out.
        path: of the PNG.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    scale = _scale(r["kappa"] for r in rows)
    axes = figure.add_subplot(xlabel="step", ylabel="condition number κ", yscale=scale)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    for place, layer in enumerate(layers):
        resolved = [r for r in rows if r["layer"] == layer and r["kappa"] is not None]
        colour = colormaps["viridis"](place / max(len(layers) - 1, 1))
        steps, kappas = [r["step"] for r in resolved], [r["kappa"] for r in resolved]
        axes.plot(steps, kappas, "o-", ms=3, color=colour, label=layer)
    predictions = dict.fromkeys(
        r["kappa_gaussian"] for r in rows if r["kappa_gaussian"] is not None
    )
    for prediction in predictions:
        axes.axhline(prediction, color="black", ls="--", label=f"Gaussian heads: {prediction:.3g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _scale(values: Iterable[float | None]) -> str:
    """Return the scale of an axis: logarithmic where positive values span a decade."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    spans = bool(known) and min(known) > 0 and max(known) >= 10 * min(known)
    return "log" if spans else "linear"
