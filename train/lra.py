"""Train a Nyströmformer with any number of heads in each layer on a task of the Long-Range Arena.

torchrun train/lra.py
torchrun train/lra.py --model nystromformer_listops_lean
torchrun train/lra.py --model nystromformer_text_lean --data hf:stanfordnlp/imdb
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from models import papers
from train.config import architecture, flags
from train.loop import engine, parallel
from train.config.architecture import Architecture
from train.config.flags import flag
from train.data.listops import SPLITS, ListLimits, baseline, open_lists
from train.data.longrange import DIGITS, TASKS, Kind, LongRange, open_task, padded
from train.data.sampler import BatchSplit

PROGRAM = "lra.py"
GENERATED = "generated"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(flags.positive(part) for part in text.split(","))
    if len(sizes) != len(SPLITS):
        raise argparse.ArgumentTypeError(f"must be three numbers separated by commas, got {text!r}")
    return sizes


@dataclasses.dataclass(frozen=True)
class LraSettings(flags.Settings):
    """The settings of a run on a long-range task."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("recipe", "task", "sizes", "data_seed", "length", "text_column", "label_column"),
        *("attention", "landmarks", "conv", "init"),
    )
    OWN_GROUP: ClassVar[str] = "long-range tasks"

    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; if omitted, paper with --task, --data or a model of the paper, and "
        "otherwise quick, which trains a small model on short lists",
        choices=("quick", "paper"),
    )
    data: str | None = flag(
        None,
        str,
        "hf:NAME for a Hugging Face data set, a folder of tables (.tsv, .csv or .parquet), or a "
        "folder with one subfolder of pictures per class; for listops also generated, the default",
    )
    task: str | None = flag(
        None, str, "task of the Long-Range Arena; that of --model if omitted", choices=[*TASKS]
    )
    text_column: tuple[str, ...] | None = flag(
        None,
        str,
        "column of a table that holds the text, given twice for retrieval; a column's place, from "
        "0, in a table whose first line does not name the columns",
        repeated=True,
    )
    label_column: str | None = flag(None, str, "column of a table that holds the class")
    length: int | None = flag(
        None, flags.positive, "tokens to read of each text; the rest is cut off"
    )
    attention: str | None = flag(
        None,
        str,
        "nystrom attends through landmarks, softmax attends to all tokens",
        choices=("nystrom", "softmax"),
    )
    landmarks: int | None = flag(
        None, flags.number(int, 1), "number of landmarks of Nyström attention"
    )
    conv: int | None = flag(
        None,
        flags.count,
        "kernel size of the convolution over the values, in tokens; 0 disables it",
    )
    init: str | None = flag(
        None,
        str,
        "initial scale of the pseudo-inverse: one per matrix, or one per batch, as published",
        choices=("matrix", "batch"),
    )
    sizes: tuple[int, ...] | None = flag(
        None, _sizes, "number of lists to generate for training, development and test"
    )
    data_seed: int = flag(0, flags.count, "seed of the generated lists, independent of --seed")


# Lists of two levels, which a small model learns in a minute on two cores.
QUICK = ListLimits(max_depth=3, max_args=5, min_length=5, max_length=17)
SMALL = {
    "nystromformer_small": Architecture(
        "nystromformer",
        {
            "vocab_size": 32,
            "sequence_length": 16,
            "embed_dim": 64,
            "depth": 2,
            "heads": 4,
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
}

_PLAIN: dict[str, Any] = {
    "attention": "nystrom",
    "conv": 0,
    "init": "matrix",
    "schedule": "linear",
    # The start and end of PyTorch's OneCycleLR.
    "warmup_lr": lambda settings: settings.lr / 25,
    "min_lr": lambda settings: settings.lr / 25e4,
    # Starting workers for each of a hundred evaluations takes longer than working without them.
    "workers": 0,
}
# mlpen/Nystromformer, LRA/code/lra_config.py; landmarks as in its README.
_PUBLISHED: dict[str, Any] = _PLAIN | {
    "landmarks": 64,
    "lr": 1e-4,
    "eps": 1e-6,
    # As in PyTorch's OneCycleLR by default.
    "cycle_momentum": True,
    "dropout": 0.1,
}
RECIPES: dict[str, dict[str, Any]] = {
    "quick": _PLAIN
    | {
        "model": "nystromformer_small",
        "landmarks": 4,
        "sizes": (20_000, 1000, 1000),
        "length": QUICK.max_length - 1,
        "batch_size": 32,
        "steps": 1200,
        "lr": 3e-3,
        "warmup": 0.1,
    },
    "listops": _PUBLISHED
    | {
        "model": "nystromformer_listops",
        "sizes": (96_000, 2000, 2000),
        "length": 2000,
        "batch_size": 32,
        "steps": 5000,
        "warmup": 1000 / 5000,
    },
    "text": _PUBLISHED
    | {
        "model": "nystromformer_text",
        "length": 1000,
        "batch_size": 32,
        "steps": 20_000,
        "warmup": 8000 / 20_000,
    },
    "retrieval": _PUBLISHED
    | {
        "model": "nystromformer_retrieval",
        "length": 4000,
        "batch_size": 32,
        "steps": 30_000,
        "warmup": 800 / 30_000,
    },
    "image": _PUBLISHED
    | {
        "model": "nystromformer_image",
        "length": 1024,
        "batch_size": 256,
        "steps": 35_000,
        "warmup": 175 / 35_000,
    },
    "pathfinder": _PUBLISHED
    | {
        "model": "nystromformer_pathfinder",
        "length": 1024,
        "batch_size": 256,
        "steps": 62_400,
        "warmup": 312 / 62_400,
    },
}
# Optimizer steps between evaluations.
_EVALUATE = {
    "quick": 150,
    "listops": 50,
    "text": 500,
    "retrieval": 300,
    "image": 175,
    "pathfinder": 312,
}
# The task of a model, by its row of the paper.
_TASK_OF = {f"nystromformer_{task}": task for task in TASKS} | {
    "figure8": "listops",
    "figure9": "text",
}


def make_task(settings: LraSettings) -> tuple[engine.Task, LraSettings]:
    """Return what to train, and the settings with every value filled in.

    Sizes that do not fit are found before data is opened, which may take long.

    Raises:
        ValueError: no such model or data, or sizes that do not fit each other.
    """
    if settings.kappa_penalty:
        raise ValueError(
            "--kappa-penalty needs sequences without padding, which these tasks have: leave it out"
        )
    settings, steps = _filled(settings)
    kind, length = TASKS[settings.task], padded(settings.length)
    model = architecture.find(settings.model, SMALL, ("nystromformer",))
    settings = architecture.sized(settings, model)
    _check(settings, kind, length, model.sizes)
    items = _open(settings)
    pairs = kind.text_columns is not None and len(kind.text_columns) > 1
    build, built, facts = architecture.planned(
        settings,
        model,
        {"num_classes": len(items.classes), "pairs": pairs},
        num_landmarks=settings.landmarks,
        attention=settings.attention,
        conv_kernel_size=settings.conv or None,
        init=settings.init,
        dropout=settings.dropout,
    )
    epochs = steps / max(1, len(items.train) // settings.batch_size)
    settings = settings.filled({"eval_every": epochs})
    training, test = items.train, items.test
    parts = {"train": training, "dev": items.dev, "test": test}
    unit = "pairs" if pairs else "sequences"
    noun = "lists" if settings.task == "listops" else unit
    facts = {"task": settings.task} | facts
    facts |= {
        "attention": settings.attention,
        "landmarks": settings.landmarks if settings.attention == "nystrom" else None,
        "tokens": length,
        "test_items": len(test),
        "baseline_constant_class": baseline(training.labels, test.labels),
    }
    if settings.task == "listops":
        facts["baseline_first_operator"] = baseline(
            training.labels, test.labels, training.first, test.first
        )
    if items.made:
        facts["held_out"] = (
            f"a tenth of the training items of each class for {' and '.join(items.made)}"
        )
    task = engine.Task(
        name=settings.model,
        unit=unit,
        build=build,
        train=training,
        held_out=items.dev,
        test=test,
        best_of="accuracy",
        loss=lambda model, batch, _seed: F.cross_entropy(_logits(model, batch), batch[-1]),
        score=_score,
        flops_per_item=built.flops_per_sequence(length),
        tokens_per_item=length * (2 if pairs else 1),
        facts=facts,
        about={"task": "long range", "classes": items.classes},
        identity={f"the {split} set of {noun}": part.digest() for split, part in parts.items()},
    )
    return task, settings


def _filled(settings: LraSettings) -> tuple[LraSettings, int]:
    """Return the settings with the recipe's values where none was given, and when to evaluate.

    The latter is in steps: the number of epochs depends on the amount of data.
    """
    row = papers.names().get(settings.model)
    own = _TASK_OF.get(row.row) if row else "listops" if settings.model in SMALL else None
    if settings.task and own not in (None, settings.task):
        raise ValueError(
            f"--model {settings.model} is for --task {own}, got --task {settings.task}"
        )
    chosen = row or settings.task or settings.data not in (None, GENERATED)
    name = settings.recipe or ("paper" if chosen else "quick")
    task = settings.task or own or "listops"
    if task != "listops" and settings.data in (None, GENERATED):
        raise ValueError(f"--task {task} needs --data: a folder or hf:NAME")
    if name == "quick" and (task != "listops" or settings.data not in (None, GENERATED)):
        raise ValueError(
            f"--recipe quick needs generated lists, got --task {task} and --data "
            f"{settings.data or GENERATED}"
        )
    generated = settings.data in (None, GENERATED)
    if settings.sizes and not generated:
        raise ValueError(f"--sizes needs --data {GENERATED}, got {settings.data}: leave it out")
    key, kind = task if name == "paper" else name, TASKS[task]
    fixed = RECIPES[key]["length"] if generated or kind.text_columns is None else None
    if fixed and settings.length not in (None, fixed):
        raise ValueError(
            f"--length must be {fixed} where no text of tables is read, got {settings.length}"
        )
    recipe = RECIPES[key] | {"task": task, "data": GENERATED, "eval_every": None}
    if not generated:
        recipe.pop("sizes", None)
        recipe |= {"label_column": kind.label_column, "text_column": kind.text_columns}
    settings = flags.apply_recipe(settings, name, recipe)
    columns = 0 if generated else len(kind.text_columns or ())
    if len(settings.text_column or ()) != columns:
        raise ValueError(
            f"--text-column must be given {columns} times for --task {task} and --data "
            f"{settings.data}, got {len(settings.text_column or ())}"
        )
    return settings, _EVALUATE[key]


def _open(settings: LraSettings) -> LongRange:
    if settings.data == GENERATED:
        limits = QUICK if settings.recipe == "quick" else ListLimits()
        lists = open_lists(dict(zip(SPLITS, settings.sizes)), limits, settings.data_seed)
        return LongRange(*(lists[split] for split in SPLITS), DIGITS)
    return open_task(
        settings.task,
        settings.data,
        text_columns=settings.text_column or (),
        label_column=settings.label_column,
        length=settings.length,
    )


def _check(settings: LraSettings, kind: Kind, length: int, sizes: Mapping[str, Any]) -> None:
    """Raise ValueError if the model does not fit the data, or the processes the batch."""
    if length > sizes["sequence_length"]:
        raise ValueError(
            f"--length must be at most the {sizes['sequence_length']} tokens of --model "
            f"{settings.model}, got {settings.length}"
        )
    if kind.vocab > sizes["vocab_size"]:
        raise ValueError(
            f"--model must have a vocabulary of {kind.vocab} tokens for --task {settings.task}, "
            f"got {settings.model}, which has {sizes['vocab_size']}"
        )
    landmarks = settings.landmarks
    if settings.attention == "nystrom" and landmarks < length and length % landmarks:
        raise ValueError(
            f"--landmarks must divide the {length} tokens of a sequence, got {landmarks}"
        )
    BatchSplit(settings.batch_size, parallel.place_in_launch().size, settings.accum)


def _logits(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    tokens, lengths, _ = batch
    return model(tokens, lengths).float()


def _score(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return each item's loss, and whether its class is right."""
    logits, labels = _logits(model, batch), batch[-1]
    return {
        "loss": F.cross_entropy(logits, labels, reduction="none"),
        "accuracy": logits.argmax(dim=1) == labels,
    }


@engine.restored()
def main(argv: Sequence[str] | None = None) -> None:
    """Train on a long-range task; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, LraSettings, recipes=RECIPES)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
