"""The training loop of all scripts, each of which supplies a ``Task``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from train.data.loader import DataSet


@dataclass(frozen=True)
class Task:
    """What a script trains, and on what.

    Attributes:
        name: of the model and data, for the run's folder.
        unit: what an item is called, in the plural.
        build: makes the model, with ``blocks`` and ``init_weights(generator)``.
        train: the training items.
        held_out: the items that measure it, or None.
        loss: the mean loss, a scalar, of a model on one batch of tensors on the device, and a seed
            for what it draws on the host.
        weight: how many terms the mean of ``loss`` is over, a scalar; where batches may differ.
        score: measures of one batch by name, each (B,): one value per item. "loss" is one.
        flops_per_item: matrix-product FLOPs of one item's forward.
        facts: what else to show and keep, such as parameters and heads.
        repeats: how often an epoch takes an item.
        tokens_per_item: of a training item of language; throughput then counts tokens too.
        derive: makes measures that are no means of items, such as F1, from the means of the scores.
        best_of: the score of the held-out items that chooses the best weights: "loss", of which
            the smallest is best, or one whose largest is.
        test: the items that measure the best weights, once, at the end.
        start: called with the sharded model when a run begins, unless it resumes: to load weights.
        about: what a user of the weights needs beside them, as JSON types: "task"; "classes", their
            names; "images", of ``data.images.about``.
        identity: digests of what a run that goes on must find as it was, by what it is in words,
            such as "the text of --data"; wherever it lies.
        files: text by the name of a file that the run's folder gets when it begins, such as the
            tokeniser that its tokens are of.
        finish: called on every rank with the model when training is over; what it returns joins
            the summary.
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
