"""The measures of GLUE, from values of single items whose means are enough to compute them.

So items may be scored on any number of processes and in any batches. Items of a second split,
MNLI's mismatched one, count apart: each split has a "mass", 1 for its items and 0 for others, and
the mean over its items is a mean over all divided by that of the mass.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from train.glue.tasks import GlueTask

_OUTCOMES = ("tp", "fp", "fn", "tn")  # of class 1, true or false, positive or negative
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
    if task.is_regression:
        counted = _moments(logits.squeeze(1).double(), labels.double())
    else:
        counted = _counts(logits.argmax(dim=1), labels)
    counted["mass"] = torch.ones_like(values["loss"])
    for part, (_, ending) in enumerate(task.held_out):
        mine = (parts == part).double()
        values |= {name + ending: each.double() * mine for name, each in counted.items()}
    return values


def derive(task: GlueTask, means: dict[str, float]) -> dict[str, float]:
    """Return the loss and the task's measures from the means of ``item_values``.

    Where all predictions are alike, no correlation is defined: Matthews' and Pearson's are 0 then,
    as is F1 without a true positive.
    """
    measures = {"loss": means["loss"]}
    for _, ending in task.held_out:
        mass = means["mass" + ending]
        names = _MOMENTS if task.is_regression else _OUTCOMES
        share = {name: means[name + ending] / mass for name in names}
        if task.is_regression:
            measures["pearson" + ending] = pearson(**share)
            continue
        measures["accuracy" + ending] = means["right" + ending] / mass
        if task.metric == "f1":
            measures["f1" + ending] = f1(share["tp"], share["fp"], share["fn"])
        elif task.metric == "matthews":
            measures["matthews" + ending] = matthews(**share)
    return measures


def f1(tp: float, fp: float, fn: float) -> float:
    """Return the harmonic mean of precision and recall of class 1, from counts or shares."""
    return 2 * tp / (2 * tp + fp + fn) if tp else 0.0


def matthews(tp: float, fp: float, fn: float, tn: float) -> float:
    """Return the correlation of two binary variables, from counts or shares of the outcomes."""
    squared = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(squared) if squared else 0.0


def pearson(x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Return the correlation of two variables from the means of them and of their products."""
    spread = [square - mean * mean for mean, square in ((x, xx), (y, yy))]
    # What is left of a constant is rounding, some 1e-16 of its square.
    if any(s <= 1e-12 * square for s, square in zip(spread, (xx, yy))):
        return 0.0
    return (xy - x * y) / math.sqrt(spread[0] * spread[1])


def _counts(predicted: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Whether each item is a true positive, and so on, of class 1, and whether it is right."""
    positive, holds = predicted == 1, labels == 1
    return {
        "right": predicted == labels,
        "tp": positive & holds,
        "fp": positive & ~holds,
        "fn": ~positive & holds,
        "tn": ~positive & ~holds,
    }


def _moments(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
