"""The flags, the same in every script.

A flag is a field of ``Settings``: its name, default, meaning and how its text is read stand in one
place. A default of None follows the data and model: each script fills it in from its recipe.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

HeadDim = int | Literal["split"]


def _number(
    kind: type, low: float, high: float = float("inf"), open_high: bool = False
) -> Callable[[str], Any]:
    """Return a reader of numbers in [low, high], or in [low, high)."""
    bounds = f"at least {low}" if high == float("inf") else f"in [{low}, {high}]"
    if open_high:
        bounds = f"in [{low}, {high})"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        # Not a comparison chain alone: nan compares false and must be refused too, as must inf.
        inside = value is not None and low <= value <= high and value < float("inf")
        if not inside or (open_high and value == high):
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name} {bounds}, got {text!r}")
        return value

    return read


def _per_layer(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a reader of one value, or several with commas between: one per layer."""
    return lambda text: tuple(read(part) for part in text.split(","))


def _depth(text: str) -> int | tuple[int, ...]:
    depths = _per_layer(_positive)(text)
    return depths[0] if len(depths) == 1 else depths


def _head_dim(text: str) -> HeadDim:
    return "split" if text == "split" else _number(int, 1, 128)(text)


def _flag(default: Any, read: Callable[[str], Any] | None, text: str, **more: Any) -> Any:
    """Declare a field that is also a flag; a flag without a reader is a switch."""
    return dataclasses.field(default=default, metadata={"read": read, "help": text, **more})


_count, _positive = _number(int, 0), _number(int, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run does. ``--batch-size`` is a field ``batch_size``, and so on."""

    recipe: str | None = _flag(
        None,
        str,
        "what is used where no other flag says otherwise; follows the data: paper for photographs",
        choices=("digits", "synthetic", "paper", "deit"),
    )
    # The model.
    model: str | None = _flag(
        None, str, "which model, such as vit_base or xcit_medium_lean; follows the data"
    )
    heads: tuple[int, ...] | None = _flag(
        None, _per_layer(_positive), "heads of every layer, or one number per layer: 16,16,12,8"
    )
    depth: int | tuple[int, ...] | None = _flag(
        None, _depth, "number of layers; for a model in stages, of each stage: 4,4,8,2"
    )
    head_dim: tuple[HeadDim, ...] | None = _flag(
        None, _per_layer(_head_dim), "width of a head, or split: width // heads; also per layer"
    )
    mlp_ratio: float | None = _flag(
        None, _number(float, 0.01), "hidden width of the feed-forward over the model's width"
    )
    control: str | None = _flag(
        None,
        str,
        "train, instead of a lean model, one of its size whose budget went to depth, mlp or heads",
        choices=("depth", "mlp", "heads"),
    )
    drop_path: float | None = _flag(
        None, _number(float, 0, 1, open_high=True), "rate of stochastic depth"
    )
    # The data.
    data: str = _flag(
        "digits",
        str,
        "digits, synthetic, a folder with train/ and val/ or with train-*.tar and val-*.tar inside,"
        " a pattern of such, hf:NAME or hf-stream:NAME for Hugging Face's",
    )
    rand_augment: str | None = _flag(
        None, str, "none, or RandAugment as timm writes it: rand-m9-mstd0.5"
    )
    erase: float | None = _flag(
        None, _number(float, 0, 1), "probability of filling a box of an image with noise"
    )
    repeats: int | None = _flag(
        None, _positive, "times that an epoch takes an image, each changed otherwise"
    )
    mixup: float | None = _flag(None, _number(float, 0), "alpha of Mixup; 0 does without")
    cutmix: float | None = _flag(None, _number(float, 0), "alpha of CutMix; 0 does without")
    smoothing: float | None = _flag(
        None, _number(float, 0, 1, open_high=True), "share of a label spread over all classes"
    )
    workers: int | None = _flag(None, _count, "processes per rank that prepare batches")
    batch_size: int | None = _flag(
        None, _positive, "items per optimizer step, over all ranks and accumulation"
    )
    accum: int = _flag(1, _positive, "forward and backward passes per optimizer step")
    # The optimizer.
    epochs: float | None = _flag(None, _number(float, 0.001), "passes over the training data")
    steps: int | None = _flag(None, _positive, "optimizer steps, instead of --epochs")
    lr: float | None = _flag(None, _number(float, 0), "peak learning rate")
    warmup: float | None = _flag(
        None, _number(float, 0, 1, open_high=True), "share of the run in which it rises to the peak"
    )
    warmup_lr: float | None = _flag(None, _number(float, 0), "rate that it rises from")
    min_lr: float | None = _flag(None, _number(float, 0), "rate that it falls to")
    weight_decay: float | None = _flag(
        None, _number(float, 0), "AdamW's, on matrices; not on norms, biases and positions"
    )
    clip_grad: float | None = _flag(
        None, _number(float, 0), "largest norm of the gradient; 0 does not clip"
    )
    ema: float | None = _flag(
        None,
        _number(float, 0, 1, open_high=True),
        "decay of an average of the weights, which is then also evaluated; 0 keeps none",
    )
    seed: int = _flag(0, _count, "of the initial weights, the order of the data, augmentation")
    # How it is computed.
    precision: str = _flag(
        "auto", str, "auto is bf16 on a GPU and fp32 on a CPU", choices=("auto", "fp32", "bf16")
    )
    compile: bool = _flag(False, None, "torch.compile each block")
    ac: str = _flag(
        "none",
        str,
        "recompute the activations of each block: all, or all but attention's",
        choices=("none", "full", "selective"),
    )
    deterministic: bool = _flag(
        False, None, "same bits in every run, and after a resume, on the same number of ranks"
    )
    # What it keeps and says.
    out: str | None = _flag(None, str, "folder of the run; a new one in runs/ when omitted")
    resume: str = _flag(
        "none", str, "auto continues the newest intact checkpoint, if any; or a checkpoint's path"
    )
    ckpt_every: int = _flag(100, _count, "steps between checkpoints; 0 saves only at the end")
    keep: int = _flag(3, _positive, "checkpoints kept")
    eval_every: int = _flag(5, _count, "epochs between evaluations; 0 evaluates only at the end")
    kappa_every: int = _flag(20, _count, "steps between samples of kappa; 0 samples none")
    tensorboard: bool = _flag(False, None, "write TensorBoard events into the run's folder")
    wandb: str | None = _flag(None, str, "project on Weights & Biases to send metrics to")
    dry_run: bool = _flag(False, None, "print the plan and stop")

    def filled(self, recipe: Mapping[str, Any]) -> "Settings":
        """Return these settings with the recipe's values where none was given."""
        missing = {key: value for key, value in recipe.items() if getattr(self, key) is None}
        if self.steps is not None or self.epochs is not None:
            missing = {k: v for k, v in missing.items() if k not in ("steps", "epochs")}
        return dataclasses.replace(self, **missing)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON types."""
        return dataclasses.asdict(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Stop with one line, from one rank, and without the list of all flags."""
        stop(self.prog, message)


def stop(program: str, message: object, *, every_rank: bool = False) -> NoReturn:
    """Exit with status 2 after one line on standard error, by default written by rank 0 alone."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{program}: error: {message}\n")
    raise SystemExit(2)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Turn an error that names what the user gave, or a file, into one line and status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        stop(program, error)


def parse(program: str, description: str, argv: Sequence[str] | None = None) -> Settings:
    """Read the command line.

    Args:
        program: name of the script, for messages.
        description: first line of its help.
        argv: arguments instead of the process's own.

    Returns:
        The settings, None where a value follows the data.

    Raises:
        SystemExit: an unknown flag, or a value that is not allowed, after one line naming both.
    """
    parser = _Parser(program, description=description, allow_abbrev=False)
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        read = field.metadata["read"]
        text = field.metadata["help"]
        if read is None:
            parser.add_argument(name, action="store_true", help=text)
            continue
        shown = "" if field.default is None else f" ({field.default})"
        choices = field.metadata.get("choices")
        parser.add_argument(
            name, type=read, default=field.default, choices=choices, help=text + shown
        )
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.epochs is not None and settings.steps is not None:
        parser.error(f"give --epochs or --steps, got {settings.epochs:g} and {settings.steps}")
    return settings


def per_layer(flag: str, values: Sequence[Any], depth: int) -> list[Any]:
    """Return one value for each of ``depth`` layers from one value, or from exactly ``depth``.

    Raises:
        ValueError: neither one value nor ``depth`` of them.
    """
    if len(values) not in (1, depth):
        raise ValueError(
            f"{flag} takes one value or one per layer, got {len(values)} for --depth {depth}"
        )
    return list(values) * (depth if len(values) == 1 else 1)
