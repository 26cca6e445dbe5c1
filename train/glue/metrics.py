"""Compute the metrics of GLUE from means over items.

So items may be scored on any number of processes and in any batches. Items of a second split,
MNLI's mismatched one, count apart: each split has a "mass", 1 for its items and 0 for others, and
the mean over its items is a mean over all divided by that of the mass.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from train.glue.tasks import GlueTask

_MOMENTS = ("x", "y", "xx", "yy", "xy")  # of predictions x and labels y


def item_loss(task: GlueTask, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each item, (B,) float32: cross-entropy, or the squared error.

    Args:
        task: what the labels are of.
        logits: (B, classes).
        labels: (B,) int64 classes, or float32 numbers.
    """
    if task.is_regression:
        return (logits.float().squeeze(1) - labels).square()
    return F.cross_entropy(logits.float(), labels, reduction="none")


def item_values(task: GlueTask, logits: Tensor, labels: Tensor, parts: Tensor) -> dict[str, Tensor]:
    """Return values of each item, (B,) float64, whose means ``derive`` takes.

    Args:
        task: what is scored.
        logits: (B, classes).
        labels: (B,) int64 classes, or float32 numbers.
        parts: (B,) int64, which of the task's splits each is of.
    """
    values = {"loss": item_loss(task, logits, labels).double()}
    x = (logits.squeeze(1) if task.is_regression else logits.argmax(dim=1)).double()
    y = labels.double()
    one = torch.ones_like(x)
    counted = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y, "right": x == y, "mass": one}
    for part, (_, ending) in enumerate(task.held_out):
        mine = (parts == part).double()
        values |= {name + ending: each * mine for name, each in counted.items()}
    return values


def derive(task: GlueTask, means: dict[str, float]) -> dict[str, float]:
    """Return the loss and the task's measures from the means of ``item_values``.

    Where all predictions are alike, no correlation is defined: Matthews' and Pearson's are 0 then,
    as is F1 without a true positive.
    """
    measures = {"loss": means["loss"]}
    for _, ending in task.held_out:
        mass = means["mass" + ending]
        if not task.is_regression:
            measures["accuracy" + ending] = means["right" + ending] / mass
        if task.metric != "accuracy":
            moments = (means[name + ending] / mass for name in _MOMENTS)
            measures[task.metric + ending] = (f1 if task.metric == "f1" else pearson)(*moments)
    return measures


def f1(x: float, y: float, _xx: float, _yy: float, xy: float) -> float:
    """Return the harmonic mean of precision and recall of class 1 of 0 and 1."""
    return 2 * xy / (x + y) if xy else 0.0


def pearson(x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Return the correlation of two variables from the means of them and of their products.

    Of variables that are 0 or 1 it is Matthews' coefficient.
    """
    spread = [square - mean * mean for mean, square in ((x, xx), (y, yy))]
    # What is left of a constant is rounding, some 1e-16 of its square.
    if any(s <= 1e-12 * square for s, square in zip(spread, (xx, yy))):
        return 0.0
    return (xy - x * y) / math.sqrt(spread[0] * spread[1])
