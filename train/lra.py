"""Train a Nyströmformer with any number of heads in each layer on ListOps of the Long-Range Arena.

torchrun train/lra.py
torchrun train/lra.py --model nystromformer_listops_lean
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
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from train.config import architecture, flags
from train.loop import engine, parallel
from train.config.architecture import Architecture
from train.config.flags import flag
from train.data import listops
from train.data.listops import SPLITS, ListLimits, baseline, open_lists
from train.data.sampler import Split

PROGRAM = "lra.py"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(flags.positive(part) for part in text.split(","))
    if len(sizes) != len(SPLITS):
        raise argparse.ArgumentTypeError(f"must be three numbers separated by commas, got {text!r}")
    return sizes


@dataclasses.dataclass(frozen=True)
class LraSettings(flags.Settings):
    """What one run on ListOps does."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("recipe", "sizes", "data_seed"),
        *("attention", "landmarks", "conv", "init"),
    )
    OWN_GROUP: ClassVar[str] = "ListOps"

    recipe: str | None = flag(
        None,
        str,
        "named set of defaults; if omitted, paper with a model of the paper, and otherwise quick, "
        "which trains a small model on short lists",
        choices=("quick", "paper"),
    )
    data: str = flag(
        "generated", str, "always generated: no files are read", choices=("generated",)
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


# Of the quick recipe two levels, which a small model learns in a minute on two cores.
LIMITS = {
    "quick": ListLimits(max_depth=3, max_args=5, min_length=5, max_length=17),
    "paper": ListLimits(),
}
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
    "batch_size": 32,
    "schedule": "linear",
    # Where PyTorch's OneCycleLR begins and ends.
    "warmup_lr": lambda settings: settings.lr / 25,
    "min_lr": lambda settings: settings.lr / 25e4,
    # To start some for each of a hundred evaluations takes longer than to do without.
    "workers": 0,
}
RECIPES: dict[str, dict[str, Any]] = {
    "quick": _PLAIN
    | {
        "model": "nystromformer_small",
        "landmarks": 4,
        "sizes": (20_000, 1000, 1000),
        "steps": 1200,
        "lr": 3e-3,
        "warmup": 0.1,
        "eval_every": lambda settings: _epochs(150, settings),
    },
    # mlpen/Nystromformer, LRA/code/lra_config.py; landmarks as in its README.
    "paper": _PLAIN
    | {
        "model": "nystromformer_listops",
        "landmarks": 64,
        "sizes": (96_000, 2000, 2000),
        "steps": 5000,
        "lr": 1e-4,
        "warmup": 1000 / 5000,
        "eps": 1e-6,
        # PyTorch's OneCycleLR does so by default.
        "cycle_momentum": True,
        "dropout": 0.1,
        "eval_every": lambda settings: _epochs(50, settings),
    },
}


def _epochs(steps: int, settings: LraSettings) -> float:
    return steps / max(1, settings.sizes[0] // settings.batch_size)


def make_task(settings: LraSettings) -> tuple[engine.Task, LraSettings]:
    """Return what to train, and the settings with every value filled in.

    Sizes that do not fit are found before lists are generated, which takes long.

    Raises:
        ValueError: no such model, or sizes that do not fit each other.
    """
    if settings.kappa_penalty:
        raise ValueError(
            "--kappa-penalty needs sequences without padding, which ListOps has: leave it out"
        )
    name = settings.recipe or ("quick" if settings.model in (None, *SMALL) else "paper")
    settings = flags.fill(settings, name, RECIPES[name])
    length = LIMITS[name].padded_length
    model = architecture.find(settings.model, SMALL, ("nystromformer",))
    settings = architecture.sized(settings, model)
    _check(settings, length, model.sizes["sequence_length"])
    build, built, facts = architecture.planned(
        settings,
        model,
        {"num_classes": listops.CLASSES, "pairs": False},
        num_landmarks=settings.landmarks,
        attention=settings.attention,
        conv_kernel_size=settings.conv or None,
        init=settings.init,
        dropout=settings.dropout,
    )
    lists = open_lists(dict(zip(SPLITS, settings.sizes)), LIMITS[name], settings.data_seed)
    training, test = lists["train"], lists["test"]
    facts = {"task": "listops"} | facts
    facts |= {
        "attention": settings.attention,
        "landmarks": settings.landmarks if settings.attention == "nystrom" else None,
        "tokens": length,
        "test_items": len(test),
        "baseline_constant_class": baseline(training.labels, test.labels),
        "baseline_first_operator": baseline(
            training.labels, test.labels, training.first, test.first
        ),
    }
    task = engine.Task(
        name=settings.model,
        unit="sequences",
        build=build,
        train=training,
        held_out=lists["dev"],
        test=test,
        best_of="accuracy",
        loss=lambda model, batch, _seed: F.cross_entropy(_logits(model, batch), batch[-1]),
        score=_score,
        flops_per_item=built.flops_per_sequence(length),
        tokens_per_item=length,
        facts=facts,
        about={"task": "long range", "classes": [*"0123456789"]},
        identity={f"the {split} set of lists": lists[split].digest() for split in SPLITS},
    )
    return task, settings


def _check(settings: LraSettings, length: int, longest: int) -> None:
    """Raise ValueError where the model cannot take the lists, or the processes the batch."""
    if length > longest:
        raise ValueError(
            f"--recipe {settings.recipe} has sequences of {length} tokens, got --model "
            f"{settings.model}, which takes {longest}"
        )
    landmarks = settings.landmarks
    if settings.attention == "nystrom" and landmarks < length and length % landmarks:
        raise ValueError(
            f"--landmarks must divide the {length} tokens of a sequence, got {landmarks}"
        )
    Split(settings.batch_size, parallel.place_in_launch().size, settings.accum)


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
    """Train on ListOps; see ``--help``."""
    settings = flags.parse(PROGRAM, __doc__, argv, LraSettings, recipes=RECIPES)
    engine.main(PROGRAM, settings, make_task)


if __name__ == "__main__":
    main()
