"""Train a Nyströmformer with any number of heads in each layer on a task of the Long-Range Arena.

torchrun train/lra.py --task listops --model nystromformer_listops_lean
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

if not __package__:  # as a script: from this checkout, ahead of an editable install of another
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.meta_path.insert(0, PathFinder)
import train  # noqa: F401, I001 - sets how OpenMP waits, before torch loads it

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from train.config import architecture, flags
from train.loop import engine
from train.config.architecture import Architecture
from train.config.flags import flag
from train.data.longrange import listops
from train.data.longrange.corpus import SPLITS
from train.data.longrange.listops import ListLimits
from train.data.longrange.tasks import GENERATED, TASKS, Shape, open_task
from train.data.sampler import Split

PROGRAM = "lra.py"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(flags.positive(part) for part in text.split(","))
    if len(sizes) != len(SPLITS):
        raise flags.argparse.ArgumentTypeError(
            f"must be three numbers separated by commas, got {text!r}"
        )
    return sizes


@dataclasses.dataclass(frozen=True)
class LraSettings(flags.Settings):
    """What one run on a long-range task does."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("task", "sizes", "data_seed", "length"),
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
    task: str | None = flag(
        None, str, "task of the Long-Range Arena (listops)", choices=tuple(TASKS)
    )
    model: str | None = flag(
        None,
        str,
        "nystromformer_small, or a row of the paper such as nystromformer_listops_lean; chosen by "
        "the recipe and --task if omitted",
    )
    data: str | None = flag(
        None,
        str,
        "folder of the published files, or generated, for listops only",
    )
    attention: str | None = flag(
        None,
        str,
        "nystrom attends through landmarks, softmax attends to all tokens",
        choices=("nystrom", "softmax"),
    )
    landmarks: int | None = flag(
        None, flags.number(int, 1, 256), "number of landmarks of Nyström attention"
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
        None,
        _sizes,
        "number of lists to generate for training, development and test: 96000,2000,2000",
    )
    data_seed: int = flag(0, flags.count, "seed of the generated lists, independent of --seed")
    cache: str = flag("runs/data", str, "folder that caches generated lists")
    length: int | None = flag(
        None, flags.positive, "tokens to read of each text; the rest is cut off"
    )


# Lists of two levels and a model that learns them in a minute on two cores.
QUICK_LIMITS = ListLimits(max_depth=3, max_args=5, min_length=5, max_length=17)
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
    # Where PyTorch's OneCycleLR begins and ends.
    "warmup_lr": lambda settings: settings.lr / 25,
    "min_lr": lambda settings: settings.lr / 25e4,
    # To start some for each of a hundred evaluations takes longer than to do without.
    "workers": 0,
}
# mlpen/Nystromformer, LRA/code/lra_config.py; landmarks as in its README.
_PUBLISHED: dict[str, Any] = _PLAIN | {
    "landmarks": 64,
    "lr": 1e-4,
    "eps": 1e-6,
    # PyTorch's OneCycleLR does so by default.
    "cycle_momentum": True,
    "dropout": 0.1,
}
RECIPES: dict[str, dict[str, Any]] = {
    "quick": _PLAIN
    | {
        "model": "nystromformer_small",
        "landmarks": 4,
        "sizes": (20_000, 1000, 1000),
        "length": 16,
        "batch_size": 32,
        "steps": 1200,
        "lr": 3e-3,
        "warmup": 0.1,
    },
    "listops": _PUBLISHED
    | {
        "model": "nystromformer_listops",
        "sizes": tuple(listops.SIZES[split] for split in SPLITS),
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
        "batch_size": 256,
        "steps": 35_000,
        "warmup": 175 / 35_000,
    },
    "pathfinder": _PUBLISHED
    | {
        "model": "nystromformer_pathfinder",
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
    settings, key = _filled(settings)
    shape = TASKS[settings.task]
    length = shape.length(settings.length)
    model = architecture.find(settings.model, SMALL, ("nystromformer",))
    settings = architecture.sized(settings, model)
    _check(settings, shape, length, model.sizes)
    build, built, facts = architecture.planned(
        settings,
        model,
        {"num_classes": shape.classes, "pairs": shape.pairs},
        num_landmarks=settings.landmarks,
        attention=settings.attention,
        conv_kernel_size=settings.conv or None,
        init=settings.init,
        dropout=settings.dropout,
    )
    items = open_task(
        settings.task,
        settings.data,
        length=settings.length,
        sizes=settings.sizes,
        limits=QUICK_LIMITS if settings.recipe == "quick" else ListLimits(),
        seed=settings.data_seed,
        cache=settings.cache,
    )
    epochs = _EVALUATE[key] / max(1, len(items.train) // settings.batch_size)
    settings = settings.filled({"eval_every": epochs})
    facts = {"task": settings.task} | facts
    facts |= {
        "attention": settings.attention,
        "landmarks": settings.landmarks if settings.attention == "nystrom" else None,
        "tokens": length,
        "test_items": len(items.test),
        **{f"baseline_{rule}": share for rule, share in items.baselines.items()},
    }
    task = engine.Task(
        name=settings.model,
        unit="pairs" if shape.pairs else "sequences",
        build=build,
        train=items.train,
        held_out=items.dev,
        test=items.test,
        best_of="accuracy",
        loss=lambda model, batch, _seed: F.cross_entropy(_logits(model, batch), batch[-1]),
        score=_score,
        flops_per_item=built.flops_per_sequence(length),
        tokens_per_item=length * (2 if shape.pairs else 1),
        facts=facts,
        about={"task": "long range", "classes": shape.names},
        identity=items.identity(settings.data),
    )
    return task, settings


def _filled(settings: LraSettings) -> tuple[LraSettings, str]:
    """Return the settings with the recipe's values where none was given, and its name.

    When to evaluate is left open: it follows from how much data there is.
    """
    chosen = settings.task or settings.data or settings.model not in (None, *SMALL)
    name = settings.recipe or ("paper" if chosen else "quick")
    task = settings.task or "listops"
    if name == "quick" and (task != "listops" or settings.data not in (None, GENERATED)):
        raise ValueError(
            "--recipe quick needs --task listops and --data generated, got "
            f"{task} and {settings.data or GENERATED}"
        )
    key = task if name == "paper" else name
    data = {"data": GENERATED} if task == "listops" else {}
    recipe = RECIPES[key] | data | {"task": task, "eval_every": None}
    return flags.fill(settings, name, recipe), key


def _check(settings: LraSettings, shape: Shape, length: int, sizes: Mapping[str, Any]) -> None:
    """Raise ValueError where the model cannot take the data, or the processes the batch."""
    if length > sizes["sequence_length"]:
        raise ValueError(
            f"--length must be at most the {sizes['sequence_length']} tokens of --model "
            f"{settings.model}, got {settings.length or length} for --task {settings.task}"
        )
    if shape.vocab > sizes["vocab_size"]:
        raise ValueError(
            f"--model must have a vocabulary of {shape.vocab} tokens for --task {settings.task}, "
            f"got {settings.model}, which has {sizes['vocab_size']}"
        )
    landmarks = settings.landmarks
    if settings.attention == "nystrom" and landmarks < length and length % landmarks:
        raise ValueError(
            f"--landmarks must divide the {length} tokens of a sequence, got {landmarks}"
        )
    Split(settings.batch_size, int(os.environ.get("WORLD_SIZE", 1)), settings.accum)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Train on a long-range task; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, LraSettings, recipes=RECIPES)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
