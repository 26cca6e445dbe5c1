"""Run the training loop of all scripts, each of which supplies a ``Task``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from train.data.loader import DataSet


@dataclass(frozen=True)
class Task:
    """The model and data of a script.

    Attributes:
        name: name of the model and data, for the run's folder.
        unit: name of the items, in the plural.
        build: function that builds the model, with ``blocks`` and ``init_weights(generator)``.
        train: the training items.
        held_out: the held-out items, or None.
        loss: the mean loss, a scalar, of a model on one batch of tensors on the device, and a seed
            for what it draws on the host.
        weight: the number of terms in the mean of ``loss``, a scalar, if it may differ between
            batches.
        score: scores of one batch by name, each (B,), one value per item; "loss" is one of them.
        flops_per_item: matrix-product FLOPs of one item's forward.
        facts: further facts to show and store, such as parameters and heads.
        repeats: how often an epoch reads an item.
        tokens_per_item: tokens of a training item of text; throughput then counts tokens too.
        derive: computes scores that are not means over items, such as F1, from the means of the
            scores.
        best_of: held-out score that chooses the best weights: "loss", of which the smallest is
            best, or another, of which the largest is best.
        test: items on which the best weights are tested, once, at the end.
        start: called with the sharded model when a run begins, unless it resumes: to load weights.
        about: information that a user of the weights needs besides them, as JSON types: "task";
            "classes", their names; "images", of ``data.images.about``.
        identity: digests of the data that a resumed run must find unchanged, by a description such
            as "the text of --data"; their location does not matter.
        files: text of files, by name, that are written to the run folder at the start, such as the
            tokeniser.
        finish: called on every rank with the model after training; its result is added to the
            summary.
    """

    name: str
    unit: str
    build: Callable[[], nn.Module]
    train: DataSet
    held_out: DataSet | None
    loss: Callable[[nn.Module, tuple[Tensor, ...], int], Tensor]
    score: Callable[[nn.Module, tuple[Tensor, ...]], dict[str, Tensor]]
    flops_per_item: int
    facts: dict[str, Any]
    weight: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    repeats: int = 1
    tokens_per_item: int | None = None
    derive: Callable[[dict[str, float]], dict[str, float]] | None = None
    best_of: str = "loss"
    test: DataSet | None = None
    start: Callable[[nn.Module], None] | None = None
    finish: Callable[[nn.Module], dict[str, Any]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
