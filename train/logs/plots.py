"""A picture of a run: ``loss.png``; ``leaner_kernels.monitor`` draws ``kappa.png``.

matplotlib is imported when there is something to draw: no rank waits for it before its first step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leaner_kernels.monitor.plots import axis_scale


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
    axes.set(ylabel="loss", yscale=axis_scale(r["loss"] for r in metrics))
    axes.legend()
    for lower in below:
        steps, shares = zip(*((r["step"], 100 * r["held_out_accuracy"]) for r in accuracies))
        lower.plot(steps, shares, "o-", ms=4)
        lower.set(ylabel="held-out accuracy, %")
    for each in (axes, *below):
        each.grid(alpha=0.3)
    (axes, *below)[-1].set(xlabel="step")
    figure.savefig(path, dpi=120)
