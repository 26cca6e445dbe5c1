"""Choose depth and heads within a budget of parameters and memory.

    python -m models.plan --params 40e6 --memory 24GB --model vit_base

A grid of depths, heads and MLP widths around a row of the paper is counted exactly; what comes
near the budget of parameters is run on the meta device for its FLOPs and the peak memory of a
training step (predicted, ``models.memory``). What fits is listed by parameters. kappa, measured at
initialisation on a few images, is shown and ranks nothing: docs/studies.md says why.

Rows in stages (VOLO, DaViT) take a number for each: ``--depths 4/4/8/2 --heads 8/16/16/16``.
"""

import argparse
import itertools
import math
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leaner_kernels import KappaMonitor
from leaner_kernels.monitor.command_line import command
from models import papers
from models.layers import VisionModel
from models.memory import PRECISIONS, Memory, paper_batch_size, predict

Sizes = int | tuple[int, ...]

# What a budget of parameters may leave unused.
LEAST = 0.8
# Of what fits nowhere, how many are shown.
NEAREST = 3
COLUMNS = "depth", "heads", "head_dim", "mlp_ratio", "params", "gflops", "memory_gb", "kappa", "row"


@dataclass(frozen=True)
class Limits:
    """What a configuration may cost; None sets no limit.

    Attributes:
        params: parameters.
        memory: bytes, at the peak of a training step.
        flops: FLOPs of one image's forward.
    """

    params: float
    memory: float
    flops: float | None = None


@dataclass(frozen=True)
class Configuration:
    """One model of a plan.

    Attributes:
        architecture: key of ``papers.MODELS``.
        config: arguments of its constructor.
        params: exact number of parameters.
        flops: of one image's forward pass.
        memory: predicted, at the peak of a training step.
        fits: whether it keeps all limits.
        kappa: geometric mean over attention layers and images at initialisation; None where it
            was not measured or not resolved in any layer. Layers that are not resolved are
            left out; theirs is larger than that of any other, so the mean is a lower bound then.
        resolved: attention layers whose kappa float32 heads can tell.
        layers: attention layers measured.
        name: of the row of the paper that this is, or empty.
    """

    architecture: str
    config: dict[str, Any]
    params: int
    flops: int = 0
    memory: Memory = field(default_factory=Memory)
    fits: bool = False
    kappa: float | None = None
    resolved: int = 0
    layers: int = 0
    name: str = ""

    def build(self) -> VisionModel:
        """Return the model, on the default device."""
        return papers.constructor(self.architecture)(**self.config)


def grid(
    row: papers.PaperRow,
    *,
    depths: Sequence[Sizes] | None = None,
    heads: Sequence[Sizes] | None = None,
    mlp_ratios: Sequence[float] | None = None,
    head_dim: int | str | None = None,
) -> list[Configuration]:
    """Count every combination of depth, heads and MLP ratio that the architecture allows.

    Args:
        row: where the other arguments, and the defaults of these, come from.
        depths: layers; of a row in stages, one tuple for each choice. By default from a third (in
            stages, a quarter) to all of the row's.
        heads: of all layers, or a tuple: of each layer, in stages of each stage. By default from
            half to twice the row's.
        mlp_ratios: by default half, three quarters and all of the row's.
        head_dim: ``"split"`` or a width; the row's by default.

    Raises:
        ValueError: a depth for another number of stages, or nothing in the grid can be built and
            run on a GPU.
    """
    base = row.config | ({} if head_dim is None else {"head_dim": head_dim})
    name = "depth" if "depth" in base else "depths"
    stages = 1 if name == "depth" else len(base[name])
    depths = depths or _depths(base[name])
    for depth in depths:
        if (1 if isinstance(depth, int) else len(depth)) != stages:
            numbers = "number" if stages == 1 else "numbers"
            raise ValueError(
                f"depths of {row.row} must have {stages} {numbers} each, got {_joined(depth)}"
            )
    heads = heads or [h for h in _heads(base["heads"]) if _divides(h, base)]
    mlp_ratios = mlp_ratios or [base["mlp_ratio"] * share for share in (0.5, 0.75, 1)]
    configurations, refusal = [], None
    for depth, head, mlp_ratio in itertools.product(depths, heads, mlp_ratios):
        config = base | {name: depth, "heads": head, "mlp_ratio": mlp_ratio}
        try:
            model = papers.constructor(row.architecture)(**config, device="meta")
            model.check_kernels()
        except ValueError as error:
            refusal = error
        else:
            configurations.append(Configuration(row.architecture, config, model.num_params()))
    if not configurations:
        raise ValueError(f"no configuration of {row.row} can be built: {refusal}")
    return configurations


def of_the_paper(name: str) -> list[Configuration]:
    """Return the original and the lean model of a row, to compare with."""
    configurations = []
    for row in papers.ROWS.values():
        if row.row == name:
            model = papers.build(name, row.variant, device="meta")
            title = f"{name} {row.variant}"
            config = Configuration(row.architecture, row.config, model.num_params(), name=title)
            configurations.append(config)
    return configurations


def plan(
    candidates: Iterable[Configuration],
    limits: Limits,
    *,
    batch_size: int,
    show: int = 12,
    precision: str = "bf16",
    recompute: bool = False,
) -> list[Configuration]:
    """Choose the configurations that fit, those that use most of the parameters first.

    Args:
        candidates: what to choose from, as ``grid`` returns it.
        limits: what a configuration may cost.
        batch_size: images in the training step whose memory is predicted.
        show: how many to return at most.
        precision: as in ``models.memory.predict``.
        recompute: as in ``models.memory.predict``.

    Returns:
        Configurations that keep every limit and use at least ``LEAST`` of the parameters; where
        there are none, the nearest few, whose ``fits`` is whether they keep the limits.
    """
    options = {"precision": precision, "recompute": recompute}
    # Splitting heads costs no parameters: of equals, those with more heads come first.
    candidates = sorted(
        candidates, key=lambda c: (abs(c.params - limits.params), -_total(c.config["heads"]))
    )
    near = [c for c in candidates if LEAST * limits.params <= c.params <= limits.params]
    tried, fitting = [], []
    for configuration in near or candidates[:NEAREST]:
        tried.append(with_costs(configuration, limits, batch_size, **options))
        if tried[-1].fits:
            fitting.append(tried[-1])
        if len(fitting) == show:
            break
    return fitting or sorted(tried, key=lambda c: c.memory.total)[:NEAREST]


def with_costs(
    configuration: Configuration, limits: Limits, batch_size: int, **options: Any
) -> Configuration:
    """Count the FLOPs, predict the memory and compare them with the limits; as ``plan``."""
    with torch.device("meta"):
        flops = configuration.build().flops_per_image()
    memory = predict(configuration.build, batch_size, **options)
    fits = (
        configuration.params <= limits.params
        and memory.total <= limits.memory
        and (limits.flops is None or flops <= limits.flops)
    )
    return replace(configuration, flops=flops, memory=memory, fits=fits)


def with_kappa(configuration: Configuration, images: Tensor, seed: int = 0) -> Configuration:
    """Measure kappa of every attention layer at initialisation, in float32 on the CPU.

    Args:
        configuration: what to build.
        images: (S, C, H, W), resized to the model's image size; kappa is a mean over them.
        seed: of the initial weights.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = configuration.build()
    side = (model.image_size, model.image_size)
    images = F.interpolate(images, side, mode="bilinear", antialias=True)
    monitor = KappaMonitor(model, every=1, samples=len(images))
    monitor.begin(0)
    with torch.no_grad():
        model(images)
    layers = [row["kappa"] for row in monitor.end()]
    known = [kappa for kappa in layers if kappa is not None]
    mean = math.exp(sum(map(math.log, known)) / len(known)) if known else None
    return replace(configuration, kappa=mean, resolved=len(known), layers=len(layers))


def sample_images() -> tuple[Tensor, str]:
    """Return (2, 3, S, S) in [-1, 1], and what they are: scikit-learn's photographs, or noise."""
    try:
        from sklearn.datasets import load_sample_images

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the arrays' age, not of theirs alone
            pictures = load_sample_images().images
    except ImportError:
        noise = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        return noise, "2 images of noise, since scikit-learn and Pillow are not installed"
    side = min(pictures[0].shape[:2])
    squares = [torch.tensor(p[:side, :side]).permute(2, 0, 1) / 127.5 - 1 for p in pictures]
    return torch.stack(squares), "the 2 photographs that come with scikit-learn"


def _total(heads: Sizes) -> int:
    return heads if isinstance(heads, int) else sum(heads)


def _depths(depth: Sizes) -> list[Sizes]:
    if isinstance(depth, int):
        return list(range(math.ceil(depth / 3), depth + 1, max(1, depth // 12)))
    shares = (eighths / 8 for eighths in range(2, 9))
    return list(dict.fromkeys(tuple(max(1, round(d * s)) for d in depth) for s in shares))


def _heads(heads: Sizes) -> list[Sizes]:
    if isinstance(heads, int):
        return list(range(math.ceil(heads / 2), 2 * heads + 1, max(1, heads // 6)))
    shares = (0.5, 1, 2)
    return list(dict.fromkeys(tuple(max(1, round(h * s)) for h in heads) for s in shares))


def _divides(heads: Sizes, config: dict[str, Any]) -> bool:
    if config["head_dim"] != "split":
        return True
    if isinstance(heads, int):
        return config["embed_dim"] % heads == 0
    return all(width % h == 0 for width, h in zip(config["embed_dims"], heads))


# --- What a user reads ---------------------------------------------------------------------------


def _joined(sizes: Any) -> str:
    return "/".join(map(str, sizes)) if isinstance(sizes, list | tuple) else str(sizes)


def _cells(c: Configuration) -> list[str]:
    depth = c.config.get("depth") or c.config["depths"]
    kappa = "-" if c.kappa is None else f"{c.kappa:.3g}"
    if c.resolved < c.layers:
        kappa = f"> {kappa} ({c.resolved} of {c.layers} layers resolved)"
    return [
        *map(_joined, (depth, c.config["heads"], c.config["head_dim"])),
        f"{c.config['mlp_ratio']:g}",
        f"{c.params:,}",
        f"{c.flops / 1e9:.2f}",
        f"{c.memory.total / 1e9:.2f}",
        kappa,
        c.name,
    ]


def table(planned: Sequence[Configuration]) -> str:
    """Return a Markdown table, its columns aligned."""
    lines = [[*COLUMNS], *map(_cells, planned)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = ["| " + " | ".join(f"{c:>{w}}" for c, w in zip(line, widths)) + " |" for line in lines]
    rows.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(rows) + "\n"


# --- The command line ----------------------------------------------------------------------------

_BYTES = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COUNTS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def _amount(units: dict[str, float], example: str, text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    try:
        value = float(match[1]) * units[match[2].upper()] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive amount such as {example}, got {text!r}"
        )
    return value


bytes_of = partial(_amount, _BYTES, "24GB or 80GiB")
count_of = partial(_amount, _COUNTS, "40e6 or 40M")


def _sizes(text: str) -> list[Sizes]:
    try:
        choices = [tuple(map(int, choice.split("/"))) for choice in text.split(",")]
    except ValueError:
        choices = []
    if not choices or min(map(min, choices)) < 1:
        raise argparse.ArgumentTypeError(f"must be like 6,8,12 or 4/4/8/2,2/2/4/1, got {text!r}")
    return [choice[0] if len(choice) == 1 else choice for choice in choices]


def _ratios(text: str) -> list[float]:
    return [_amount({"": 1}, "2,3,4", ratio) for ratio in text.split(",")]


def _whole(text: str, wanted: str = "a whole number of at least 1") -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return int(text)


def _head_dim(text: str) -> int | str:
    return text if text == "split" else _whole(text, "a width or split")


def _rows() -> dict[str, papers.PaperRow]:
    """Return the rows that can be planned around, by name: those of vision, as the originals."""
    return {
        row.row: row
        for row in papers.ROWS.values()
        if row.variant == "original" and row.takes_images
    }


def _parser() -> argparse.ArgumentParser:
    parser = command("python -m models.plan", "Choose depth and heads within a budget.")
    add = parser.add_argument
    rows = ", ".join(_rows())
    add("--model", required=True, choices=_rows(), metavar="ROW", help=f"row of the paper: {rows}")
    add("--params", required=True, type=count_of, help="maximum number of parameters: 40e6 or 40M")
    add("--memory", required=True, type=bytes_of, help="maximum peak of a step: 24GB or 80GiB")
    add("--flops", type=count_of, help="maximum FLOPs of the forward of one image: 10G (no limit)")
    add("--batch", type=_whole, metavar="N", help="images in a training step (the paper's)")
    add("--precision", choices=PRECISIONS, default="bf16", help="precision of a step (bf16)")
    add("--ac", choices=("none", "full"), default="none", help="full recomputes every block (none)")
    default = "from a third, in stages a quarter, to all of the row's"
    text = f"depths to try: 6,8,12, or in stages 4/4/8/2,2/2/4/1 ({default})"
    add("--depths", type=_sizes, metavar="A,B,...", help=text)
    text = "heads to try: 6,8,12, or per layer or stage 4/8/16/32 (from half to twice the row's)"
    add("--heads", type=_sizes, metavar="A,B,...", help=text)
    text = "MLP ratios to try: 2,3,4 (half, three quarters and all of the row's)"
    add("--mlp-ratio", type=_ratios, metavar="A,B,...", help=text)
    text = "width of a head, or split for width // heads (the row's)"
    add("--head-dim", type=_head_dim, metavar="N|split", help=text)
    add("--show", type=_whole, default=12, metavar="N", help="maximum number of results (12)")
    add("--no-kappa", action="store_true", help="skip kappa, which takes seconds per model")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan from the command line; see ``--help``."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    batch = flags.batch or paper_batch_size(flags.model)
    limits = Limits(flags.params, flags.memory, flags.flops)
    choices = {"depths": flags.depths, "heads": flags.heads, "mlp_ratios": flags.mlp_ratio}
    options = {"precision": flags.precision, "recompute": flags.ac == "full"}
    try:
        candidates = grid(_rows()[flags.model], head_dim=flags.head_dim, **choices)
    except ValueError as error:
        parser.error(str(error))
    planned = plan(candidates, limits, batch_size=batch, show=flags.show, **options)
    printed = [with_costs(c, limits, batch, **options) for c in of_the_paper(flags.model)]
    notes = [
        "memory_gb is predicted: the peak of tensors in a training step, without the CUDA context."
    ]
    if not flags.no_kappa:
        images, source = sample_images()
        planned = [with_kappa(c, images) for c in planned]
        printed = [with_kappa(c, images) for c in printed]
        notes.append(
            f"kappa is at initialisation, the geometric mean over layers and {source}; "
            "in two of three studies parameters told better which model has the lower loss."
        )
    planned.sort(key=lambda c: (not c.fits, -c.params))
    limit = f"{flags.params:,.0f} parameters, {flags.memory / 1e9:.4g} GB"
    limit += f", {flags.flops / 1e9:g} GFLOPs" if flags.flops else ""
    setting = f"batch {batch}, {flags.precision}" + (", recomputed" if flags.ac == "full" else "")
    fit = "fit" if any(c.fits for c in planned) else "come nearest, none fits:"
    head = (
        f"Of {len(candidates)} configurations around {flags.model} these {fit} {limit} ({setting})."
    )
    sys.stdout.write("\n".join([head, "", table([*planned, *printed]), *notes, ""]))


if __name__ == "__main__":
    main()
