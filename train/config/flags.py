"""Define the flags that the training scripts share.

A flag is a field of ``Settings``, with its name, default, help and parser in one place. A default
of None depends on the data and model: each script fills it in from its recipe, a mapping of flags
to values (``apply_recipe``). A script with flags of its own defines a subclass.
"""

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

from leaner_kernels.monitor.command_line import one_line, take_every_character, words
from leaner_kernels.removed import line_for
from models.allocation import STRATEGIES

HeadDim = int | Literal["split"]

# Three ways to give the length of a run.
BUDGETS = ("epochs", "steps", "tokens")


def number(
    kind: type, low: float, high: float = float("inf"), open_high: bool = False
) -> Callable[[str], Any]:
    """Return a parser of numbers in [low, high], or in [low, high)."""
    bounds = f"at least {low}" if high == float("inf") else f"in [{low}, {high}]"
    if open_high:
        bounds = f"in [{low}, {high})"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        # A comparison chain is not enough: nan compares false, and inf must be refused too.
        inside = value is not None and low <= value <= high and value < float("inf")
        too_large = isinstance(value, int) and value > sys.maxsize  # for any library
        if not inside or too_large or (open_high and value == high):
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name} {bounds}, got {text!r}")
        return value

    return read


def _per_layer(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of one value, or of several separated by commas, one per layer."""
    return lambda text: tuple(read(part) for part in text.split(","))


def _depth(text: str) -> int | tuple[int, ...]:
    depths = _per_layer(positive)(text)
    return depths[0] if len(depths) == 1 else depths


def _head_dim(text: str) -> HeadDim:
    return "split" if text == "split" else number(int, 1, 128)(text)


def _betas(text: str) -> tuple[float, ...]:
    betas = _per_layer(number(float, 0, 1, open_high=True))(text)
    if len(betas) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers separated by a comma, got {text!r}")
    return betas


def in_utf8(text: str) -> str:
    """Return text for a tokeniser; raise an error unless it is valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be text in UTF-8, got {text!r}") from None
    return text


def flag(default: Any, read: Callable[[str], Any] | None, text: str, **more: Any) -> Any:
    """Declare a field that is also a flag; a flag without a parser is a switch."""
    return dataclasses.field(default=default, metadata={"read": read, "help": text, **more})


count, positive = number(int, 0), number(int, 1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; ``--batch-size`` is the field ``batch_size``, and so on."""

    # Flags, besides those of ``Settings``, that must equal those of the resumed run.
    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = ()
    # Titles in the help by the first flag of each group, and that of a script's own flags.
    GROUPS: ClassVar[Mapping[str, str]] = {
        "recipe": "model",
        "data": "data",
        "epochs": "optimizer",
        "precision": "computation",
        "out": "run folder, checkpoints, evaluation",
        "skip_limit": "faults and alarms",
        "kappa_every": "condition number κ",
        "tensorboard": "logs",
    }
    OWN_GROUP: ClassVar[str] = "of this script"

    recipe: str | None = flag(None, str, "named set of defaults; chosen from the data if omitted")
    model: str | None = flag(
        None,
        str,
        "row of the paper, with _lean appended for its lean model, or the script's small model; "
        "chosen by the recipe if omitted",
    )
    heads: tuple[int, ...] | None = flag(
        None,
        _per_layer(positive),
        "number of heads: one value, or one per layer: 16,16,12,8 (from --model)",
    )
    depth: int | tuple[int, ...] | None = flag(
        None,
        _depth,
        "number of layers; for a model in stages, one value per stage: 4,4,8,2 (from --model)",
    )
    allocation: str | None = flag(
        None,
        str,
        "distribution of the heads: early and late move heads to those layers, saturated halves "
        "the head width in the later half of the layers (uniform)",
        choices=STRATEGIES,
    )
    head_dim: tuple[HeadDim, ...] | None = flag(
        None,
        _per_layer(_head_dim),
        "width of a head, or split for width // heads; one value, or one per layer (from --model)",
    )
    mlp_ratio: float | None = flag(
        None,
        number(float, 0.01),
        "ratio of the MLP's hidden width to the model's width (from --model)",
    )
    dropout: float | None = flag(
        None,
        number(float, 0, 1, open_high=True),
        "dropout rate, in vision models before the classifier only; 0 disables it",
    )
    data: str | None = flag(None, str, "training data; a small bundled data set if omitted")
    workers: int | None = flag(
        None,
        count,
        "data loading processes per rank; 0 loads in the training process; the rank's share of the "
        "CPU cores minus one if omitted",
    )
    batch_size: int | None = flag(
        None, positive, "items per optimizer step, summed over ranks and accumulated passes"
    )
    accum: int | None = flag(None, positive, "gradient accumulation: passes per optimizer step")
    batch_size_warmup: float | None = flag(
        None,
        number(float, 0, 1, open_high=True),
        "fraction of the run over which the passes per step, and so the batch size, grow from 1 to "
        "--accum; 0 disables it",
    )
    epochs: float | None = flag(None, number(float, 0.001), "length of the run in epochs")
    steps: int | None = flag(None, positive, "length in optimizer steps, instead of --epochs")
    tokens: float | None = flag(
        None, number(float, 1), "length in tokens, instead of --epochs; not for images"
    )
    lr: float | None = flag(None, number(float, 0), "peak learning rate")
    schedule: str | None = flag(
        None,
        str,
        "decay of the learning rate after the warm-up",
        choices=("cosine", "linear", "constant"),
    )
    warmup: float | None = flag(
        None,
        number(float, 0, 1, open_high=True),
        "fraction of the run over which the learning rate rises linearly to --lr; 0 disables it",
    )
    warmup_lr: float | None = flag(
        None, number(float, 0), "learning rate at which the warm-up starts"
    )
    min_lr: float | None = flag(None, number(float, 0), "learning rate at which the decay ends")
    weight_decay: float | None = flag(
        None,
        number(float, 0),
        "AdamW's weight decay; norms, biases and position embeddings are exempt",
    )
    betas: tuple[float, ...] | None = flag(
        None, _betas, "AdamW's two beta coefficients, separated by a comma"
    )
    eps: float | None = flag(None, number(float, 0), "AdamW's epsilon, added to the denominator")
    cycle_momentum: bool | None = flag(
        None, None, "cycle AdamW's first beta between 0.95 and 0.85, inversely to the learning rate"
    )
    clip_grad: float | None = flag(
        None, number(float, 0), "maximum gradient norm; 0 disables clipping"
    )
    ema: float | None = flag(
        None,
        number(float, 0, 1, open_high=True),
        "decay of an exponential moving average of the weights, which is evaluated as well; 0 "
        "disables it",
    )
    seed: int = flag(0, count, "seed of the initial weights, data order and augmentation")
    precision: str = flag(
        "auto",
        str,
        "auto selects bf16 on a GPU and fp32 on a CPU",
        choices=("auto", "fp32", "bf16"),
    )
    shard: str = flag(
        "auto",
        str,
        "fsdp shards the model over the ranks (FSDP2), none keeps a full copy on each rank (DDP), "
        "auto selects fsdp if there are several ranks",
        choices=("auto", "fsdp", "none"),
    )
    compile: bool = flag(False, None, "compile each block with torch.compile")
    ac: str = flag(
        "none",
        str,
        "activation checkpointing: recompute each block in the backward pass, fully or all but "
        "attention",
        choices=("none", "full", "selective"),
    )
    deterministic: bool = flag(
        False,
        None,
        "use deterministic kernels: runs on the same number of ranks, resumed or not, are bitwise "
        "identical",
    )
    out: str | None = flag(
        None, str, "run folder; an unfinished run in it continues; a new folder in runs/ if omitted"
    )
    resume: str = flag(
        "none",
        str,
        "auto continues the newest matching run in runs/, or the run in --out even if it has "
        "finished; a path starts from that checkpoint",
    )
    ckpt_every: int | None = flag(None, count, "steps between checkpoints; 0 saves only at the end")
    keep: int = flag(3, positive, "number of checkpoints to keep")
    eval_every: float | None = flag(
        None, number(float, 0), "epochs between evaluations; 0 evaluates only at the end"
    )
    skip_limit: int = flag(
        10,
        count,
        "consecutive steps that may be skipped because the loss or gradient is not finite; one "
        "more ends the run",
    )
    bad_data_limit: int = flag(10, count, "unreadable items allowed; one more ends the run")
    timeout: float = flag(
        1800.0,
        number(float, 0),
        "seconds that a rank waits for another before it ends with an error; 0 keeps PyTorch's",
    )
    loss_alarm: float = flag(
        8.0,
        number(float, 0),
        "warn if the loss is this many deviations above its recent median for three steps in a "
        "row; 0 disables the warning",
    )
    kappa_alarm: float = flag(
        10.0,
        number(float, 0),
        "warn if the kappa of a layer stays above this many times its recent median; 0 disables "
        "the warning",
    )
    entropy_alarm: float = flag(
        0.1,
        number(float, 0, 1, open_high=True),
        "warn if the attention entropy of a layer falls below this fraction of its maximum, "
        "log(columns); 0 disables the warning",
    )
    kappa_every: int = flag(
        20,
        count,
        "steps between samples of kappa; the first and the last step are always sampled; 0 "
        "disables sampling",
    )
    kappa_samples: int | None = flag(
        None,
        positive,
        "batch entries per rank in each sample of kappa (4), and held-out items over all ranks in "
        "each probe (16)",
    )
    kappa_probe: int = flag(
        0, count, "steps between measurements of kappa on fixed held-out items; 0 disables them"
    )
    qk_clip: float = flag(
        0.0,
        number(float, 0, 1e30),
        "QK-Clip threshold: scale down the queries and keys of a head whose largest logit exceeds "
        "it (100 is typical); 0 disables it",
    )
    kappa_penalty: float = flag(
        0.0,
        number(float, 0, 1e30),
        "weight of the conditioning penalty on attention blocks in the loss; 0 disables it",
    )
    tensorboard: bool = flag(False, None, "write TensorBoard events to the run folder")
    wandb: str | None = flag(None, str, "log metrics to this Weights & Biases project")
    dry_run: bool = flag(False, None, "print the plan and the recipe as flags, then exit")

    def filled(self, recipe: Mapping[str, Any]) -> Self:
        """Return these settings, with missing values filled from the recipe."""
        missing = {key: value for key, value in recipe.items() if getattr(self, key) is None}
        if any(getattr(self, budget) is not None for budget in BUDGETS):
            missing = {key: value for key, value in missing.items() if key not in BUDGETS}
        return dataclasses.replace(self, **missing)

    def as_flags(self) -> list[str]:
        """Return the flags that give these settings, without those at their default."""
        flags = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            name = field.name.replace("_", "-")
            if value == field.default:
                continue
            if isinstance(value, bool):
                flags.append(f"--{name}" if value else f"--no-{name}")
                continue
            for text in value if field.metadata.get("repeated") else [_text(value)]:
                flags += [f"--{name}", text]
        return flags

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON types."""
        return dataclasses.asdict(self)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, from one rank, with a suggestion for a misspelt flag."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error, without listing all flags."""
        kind, _, words = message.partition("unrecognized arguments: ")
        if not kind and words:
            # The values of an unknown flag follow it.
            flags = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
            for flag in flags[:1]:
                suggestion = nearest(flag, self._option_string_actions)
                message = line_for("flags", flag) or message + suggestion
        stop(self.prog, message)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ", did you mean ...?" with the closest name, or "" if none is close."""
    bare = {other.lstrip("-"): other for other in names}
    matches = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.7)
    return f", did you mean {bare[matches[0]]}?" if matches else ""


def stop(program: str, message: object, *, every_rank: bool = False) -> NoReturn:
    """Exit with status 2 after one line on standard error, by default written by rank 0 alone."""
    if every_rank or (os.environ.get("RANK") or "0") == "0":
        sys.stderr.write(f"{program}: error: {one_line(message)}\n")
    raise SystemExit(2)


def _text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Turn errors about user input or files into one line and exit status 2."""
    try:
        yield
        sys.stdout.flush()
    except (ValueError, OSError, MemoryError, OverflowError) as error:
        # No rank knows which of the others failed to join.
        message = str(error) or type(error).__name__
        stop(program, message, every_rank=isinstance(error, ConnectionError))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


_Settings = TypeVar("_Settings", bound=Settings)


def parse(
    program: str,
    description: str | None,
    argv: Sequence[str] | None,
    kind: type[_Settings],
    *,
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
) -> _Settings:
    """Read the command line.

    Args:
        program: name of the script, for messages.
        description: of the script, its examples after the first line; None under ``python -OO``.
        argv: arguments instead of the process's own; None for these.
        kind: ``Settings``, or a subclass with the script's own flags.
        recipes: by name, as ``apply_recipe`` takes them; the help shows their values.

    Returns:
        The settings, None where a value follows the data.

    Raises:
        SystemExit: an unknown flag, or a value that is not allowed, after one line naming both.
    """
    take_every_character(program)
    first, _, examples = (description or "").partition("\n")
    parser = Parser(
        program,
        usage="%(prog)s [--FLAG VALUE] ...",
        description=first,
        epilog=f"examples:\n{examples.strip()}\n\npython -m models.papers lists the paper's rows.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    titles = dict(kind.GROUPS)
    shared = {field.name for field in dataclasses.fields(Settings)}
    own = [field.name for field in dataclasses.fields(kind) if field.name not in shared]
    titles |= dict.fromkeys(own[:1], kind.OWN_GROUP)
    for field in dataclasses.fields(kind):
        if field.name in titles:
            group = parser.add_argument_group(titles[field.name])
        name = "--" + field.name.replace("_", "-")
        read = words if field.metadata["read"] is str else field.metadata["read"]
        text = field.metadata["help"]
        if field.default is None and recipes:
            text += _of_recipes(field.name, recipes)
        if read is None:
            # A switch that a recipe may turn on can also be turned off.
            recipes_own = field.default is None
            action = argparse.BooleanOptionalAction if recipes_own else "store_true"
            group.add_argument(name, action=action, default=field.default, help=text)
            continue
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        shown = "" if default in (None, "") else f" ({default})"
        choices = field.metadata.get("choices")
        action = "append" if field.metadata.get("repeated") else "store"
        group.add_argument(
            name,
            action=action,
            type=read,
            default=field.default,
            choices=choices,
            help=text + shown,
        )
    settings = kind(**vars(parser.parse_args(argv)))
    budgets = [name for name in BUDGETS if getattr(settings, name) is not None]
    if len(budgets) > 1:
        one, other = (f"--{name} {getattr(settings, name):g}" for name in budgets[:2])
        parser.error(
            f"give only one of {', '.join(f'--{n}' for n in BUDGETS)}, got {one} and {other}"
        )
    return settings


def _of_recipes(name: str, recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the values that recipes give a flag, for its help."""
    by_value: dict[str, list[str]] = {}
    for recipe, values in recipes.items():
        value = (PLAIN | dict(values)).get(name)
        if value is not None:
            if callable(value):  # computed once the other flags are known
                shown = "computed from other flags"
            elif isinstance(value, float):
                shown = f"{value:.6g}"
            else:
                shown = _text(value)
            by_value.setdefault(shown.replace("%", "%%"), []).append(recipe)
    if not by_value:
        return ""
    if list(map(len, by_value.values())) == [len(recipes)]:
        return f" ({next(iter(by_value))})"
    parts = (f"{', '.join(names)}: {value}" for value, names in by_value.items())
    return f" ({'; '.join(parts)})"


# Defaults of every recipe.
PLAIN: dict[str, Any] = {
    "dropout": 0.0,
    "accum": 1,
    "batch_size_warmup": 0.0,
    "schedule": "cosine",
    "warmup": 0.0,
    "warmup_lr": 0.0,
    "min_lr": 0.0,
    "weight_decay": 0.0,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "cycle_momentum": False,
    "clip_grad": 0.0,
    "ema": 0.0,
    "eval_every": 5.0,
    "ckpt_every": 100,
}


def apply_recipe(settings: _Settings, name: str, recipe: Mapping[str, Any]) -> _Settings:
    """Return the settings, with missing values filled from a recipe, and then from ``PLAIN``.

    Args:
        settings: from the command line.
        name: name of the recipe.
        recipe: values by the field of a flag. A value that depends on others is a function of the
            settings, called after all other values are filled in.
    """
    recipe = {"recipe": name} | PLAIN | dict(recipe)
    fixed = {key: value for key, value in recipe.items() if not callable(value)}
    settings = settings.filled(fixed)
    for key, value in recipe.items():
        if callable(value):
            settings = settings.filled({key: value(settings)})
    return settings
