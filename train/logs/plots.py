"""Pictures of a run: ``loss.png`` and ``kappa.png``.

matplotlib is imported when there is something to draw: no rank waits for it before its first step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_loss(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of every step, and the held-out loss where it was measured.

    Args:
        metrics: rows of ``metrics.jsonl``.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log")
    axes.plot([r["step"] for r in metrics], [r["loss"] for r in metrics], lw=0.8, label="training")
    measured = [r for r in metrics if "held_out_loss" in r]
    if measured:
        steps, losses = zip(*((r["step"], r["held_out_loss"]) for r in measured))
        axes.plot(steps, losses, "o-", ms=4, label="held out")
    axes.grid(alpha=0.3)
    axes.legend()
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
    axes = figure.add_subplot(xlabel="step", ylabel="condition number κ", yscale="log")
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
