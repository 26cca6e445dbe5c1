"""Architectures to train: the rows of the paper, small models, and sizes from flags.

``--control`` trains a model of a lean model's size that spends its parameters differently.
A lean row changes several things at once: fewer layers, in some rows a narrower feed-forward, more
heads. To tell their effects apart, all arms share the lean row's embedding, input, heads of class
attention and number of parameters within 3%, and one base: the lean row's depth, half of its
feed-forward's width, the original row's heads. One size of the base then grows until the parameters
are used up:

- ``depth``: the number of layers; in a model of stages, of the stage that has most of them.
- ``mlp``: the width of the feed-forward, in steps of 1/32 of the model's.
- ``heads``: the number of heads, each as wide as the lean row's, so that attention widens; in a
  model of stages, in the lean row's proportion.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from models import papers
from models.allocation import allocate
from models.layers import Model
from train.config import flags
from train.config.flags import Settings


@dataclass(frozen=True)
class Architecture:
    """A model by name.

    Attributes:
        family: key of ``models.papers.MODELS``.
        sizes: what its constructor takes.
        variant: name of a class beside the family's own, such as "SmallTransformer".
    """

    family: str
    sizes: dict[str, Any]
    variant: str | None = None

    @property
    def build(self) -> Callable[..., Model]:
        """Its constructor."""
        return papers.constructor(self.family, self.variant)

    @property
    def stages(self) -> int | None:
        """How many stages it has, each with a depth of its own; None for one depth."""
        return len(self.sizes["depths"]) if "depths" in self.sizes else None


# The architectures of the paper that take images.
VISION = tuple(dict.fromkeys(r.architecture for r in papers.ROWS.values() if r.takes_images))

# 8 x 8 digits: the ViT takes them as they are, in 16 tokens of 2 x 2 pixels; the others, whose
# convolutions shrink an image from the start, enlarged.
DIGITS = {
    "vit_digits": Architecture(
        "vit",
        {
            "image_size": 8,
            "patch_size": 2,
            "in_chans": 1,
            "embed_dim": 192,
            "pool": "avg",
            "init": "xavier",
            "heads": 16,
            "depth": 7,
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
        "SmallTransformer",
    ),
    "xcit_digits": Architecture(
        "xcit",
        {
            "image_size": 32,
            "patch_size": 8,
            "in_chans": 1,
            "embed_dim": 96,
            "eta": 1.0,
            "heads": 8,
            "depth": 3,
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
    "tnt_digits": Architecture(
        "tnt",
        {
            "image_size": 32,
            "patch_size": 8,
            "in_chans": 1,
            "embed_dim": 128,
            "inner_dim": 16,
            "inner_heads": 4,
            # Beside patches of unit variance timm's 0.02 would drown.
            "position_std": 1.0,
            "heads": 8,
            "depth": 2,
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
    "volo_digits": Architecture(
        "volo",
        {
            "image_size": 32,
            "patch_size": 4,
            "in_chans": 1,
            "embed_dims": [48, 96],
            "stem_dim": 16,
            "heads": [4, 8],
            "depths": [2, 2],
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
    "davit_digits": Architecture(
        "davit",
        {
            "image_size": 32,
            "in_chans": 1,
            "embed_dims": [48, 96],
            "window": 4,
            "heads": [4, 8],
            "depths": [1, 2],
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
}

# For some hundred or thousand pictures: convolutions make the patches, which a ViT would first have
# to find; many heads in few layers, as in the paper's lean rows.
PICTURES = {
    "xcit_tiny_lean": Architecture(
        "xcit",
        {
            "image_size": 128,
            "patch_size": 16,
            "in_chans": 3,
            "embed_dim": 128,
            "eta": 1.0,
            "heads": 8,
            "depth": 4,
            "head_dim": 16,
            "mlp_ratio": 2.0,
        },
    ),
}
# Flags of scripts on images, and the arguments of models that they give.
_OF_IMAGES = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "in_chans": "in_chans",
    "width": "embed_dim",
}


def find(name: str, small: Mapping[str, Architecture], kinds: Sequence[str]) -> Architecture:
    """Return a model by its name.

    Args:
        name: of a small model or of a row of the paper.
        small: the script's own models.
        kinds: architectures of the rows that the script can train.

    Raises:
        ValueError: no such model.
    """
    if name in small:
        return small[name]
    rows = {key: row for key, row in papers.names().items() if row.architecture in kinds}
    if name not in rows:
        tables = [key for key in rows if not key.startswith("figure")]
        raise ValueError(
            f"--model must be one of {', '.join(small)}, or a row of the paper as python -m "
            f"models.papers lists them, such as {', '.join(tables[:2])}, got {name!r}"
            + flags.nearest(name, [*small, *rows])
        )
    row = rows[name]
    channels = {"in_chans": 3} if row.takes_images else {}
    return Architecture(row.architecture, channels | row.config)


# How far an arm of ``--control`` may be from the lean row's parameters.
TOLERANCE = 0.03

_Settings = TypeVar("_Settings", bound=Settings)


def for_images(settings: _Settings, architecture: Architecture) -> tuple[_Settings, Architecture]:
    """Return a model that takes images as the flags say, and the settings with what they left out.

    Args:
        settings: with ``img_size``, ``patch_size``, ``in_chans`` and ``width``, None for the
            model's own.
        architecture: that ``settings.model`` names.

    Raises:
        ValueError: a flag that the model has no use for.
    """
    takes, sizes = inspect.signature(architecture.build).parameters, dict(architecture.sizes)
    for flag, size in _OF_IMAGES.items():
        value = getattr(settings, flag)
        if value is None:
            settings = dataclasses.replace(settings, **{flag: sizes.get(size)})
        elif size in takes:
            sizes[size] = value
        else:
            raise ValueError(
                f"--{flag.replace('_', '-')} is not a size of {settings.model}: leave it out"
            )
    return settings, dataclasses.replace(architecture, sizes=sizes)


def sized(settings: _Settings, model: Architecture) -> _Settings:
    """Return the settings with the model's sizes, unless ``--control`` is to find them.

    Raises:
        ValueError: sizes that do not fit the model, or beside ``--control``.
    """
    if settings.control is None:
        return _sized(settings, model)
    sizes = [name for name in flags.SIZES if getattr(settings, name)]
    if sizes:
        flag = sizes[0].replace("_", "-")
        raise ValueError(f"--control sets the sizes itself: leave out --{flag}")
    return settings


def _sized(settings: _Settings, architecture: Architecture) -> _Settings:
    settings = dataclasses.replace(
        settings, mlp_ratio=settings.mlp_ratio or architecture.sizes["mlp_ratio"]
    )
    if architecture.stages is None:
        return _sized_in_layers(settings, architecture)
    return _sized_in_stages(settings, architecture)


def _sized_in_layers(settings: _Settings, architecture: Architecture) -> _Settings:
    sizes, depth = architecture.sizes, settings.depth
    if isinstance(depth, tuple):
        raise ValueError(f"--depth must be one number for {settings.model}, got {_shown(depth)}")
    if depth is None:
        lengths = [len(v) for v in (settings.heads, settings.head_dim) if v and len(v) > 1]
        depth = max(lengths, default=sizes["depth"])
    heads = settings.heads or (sizes["heads"],)
    head_dim = settings.head_dim or (sizes["head_dim"],)
    if settings.allocation is not None:
        if len(heads) > 1 or len(head_dim) > 1:
            raise ValueError(
                f"--allocation needs one value each for --heads and --head-dim, got {len(heads)} "
                f"and {len(head_dim)}"
            )
        width = sizes["embed_dim"] // heads[0] if head_dim[0] == "split" else head_dim[0]
        heads, head_dim = allocate(settings.allocation, heads[0], width, depth)
    return dataclasses.replace(
        settings,
        allocation=None,  # what it made is in the heads of each layer
        depth=depth,
        heads=flags.per_layer("--heads", heads, depth),
        head_dim=flags.per_layer("--head-dim", head_dim, depth),
    )


def _sized_in_stages(settings: _Settings, architecture: Architecture) -> _Settings:
    sizes, stages = architecture.sizes, architecture.stages
    if settings.allocation is not None:
        raise ValueError(
            f"--allocation does not support models in stages, got {settings.model}: leave it out"
        )
    depths = sizes["depths"] if settings.depth is None else settings.depth
    if isinstance(depths, int) or len(depths) != stages:
        shown = f"{depths} for all" if isinstance(depths, int) else _shown(depths)
        raise ValueError(
            f"--depth must be {stages} numbers for {settings.model}, one per stage, got {shown}"
        )
    head_dim = sizes["head_dim"]
    own = {
        "depth": list(depths),
        "heads": list(settings.heads or sizes["heads"]),
        "head_dim": list(settings.head_dim or (head_dim if type(head_dim) is list else [head_dim])),
    }
    layers = sum(depths)
    for name in ("heads", "head_dim"):
        if len(own[name]) not in (1, stages, layers):
            raise ValueError(
                f"--{name.replace('_', '-')} must be one value, {stages} (one per stage) or "
                f"{layers} (one per layer) for {settings.model}, got {len(own[name])}"
            )
    return dataclasses.replace(settings, **own)


def arguments(settings: Settings, architecture: Architecture) -> dict[str, Any]:
    """Return what to build a model of settings from ``sized``, less its classes and dropout."""
    chosen: dict[str, Any] = {"mlp_ratio": settings.mlp_ratio}
    chosen["depth" if architecture.stages is None else "depths"] = settings.depth
    for name in ("heads", "head_dim"):
        values = getattr(settings, name)
        chosen[name] = values[0] if len(values) == 1 else values
    return architecture.sizes | chosen


def _shown(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


def planned(
    settings: _Settings, model: Architecture, own: dict[str, Any], **more: Any
) -> tuple[_Settings, Callable[[], Model], Model, dict[str, Any]]:
    """Return the settings, what builds the model, one without memory, and facts of it.

    Args:
        settings: from ``sized``.
        model: the one that they name; ``--control`` puts one of its arms in its place.
        own: what the script gives every model beside its sizes, such as its classes.
        **more: what it gives this one alone, such as its dropout.

    Raises:
        ValueError: as ``arm``, or sizes that do not fit each other or the kernels of this GPU.
    """
    compared = {}
    if settings.control is not None:
        model, params = arm(settings.model, settings.control, model, **own)
        settings = _sized(settings, model)
        compared = {"control": settings.control, "params_of_the_lean_model": params["lean"]}
    sizes = arguments(settings, model) | own | more
    build = partial(model.build, **sizes)
    with torch.device("meta"):
        built = build()
    if torch.cuda.is_available():
        built.check_kernels()
    attention = built.attention_modules().values()
    facts = _uneven(attention, settings.head_dim) | {
        "model": settings.model,
        **compared,
        "params": built.num_params(),
        "recipe": settings.recipe,
        "depth": settings.depth,
        "width": sizes.get("embed_dim") or sizes["embed_dims"],
        "heads": [a.num_heads for a in attention],
        "head_dim": [a.head_dim for a in attention],
        "head_convention": built.head_convention,
    }
    return settings, build, built, facts


def _uneven(layers: Iterable[nn.Module], head_dims: Sequence[Any]) -> dict[str, str]:
    """Return a warning where heads do not divide the width that they are to split."""
    if "split" not in head_dims:
        return {}
    sizes = dict.fromkeys((a.num_heads, a.head_dim, a.dim) for a in layers if a.dim % a.num_heads)
    uneven = [
        f"{heads} heads do not divide {dim}: attention is {heads * width} wide, {heads} x {width}"
        for heads, width, dim in sizes
        if width == dim // heads
    ]
    return {"warning": "; ".join(uneven)} if uneven else {}


def suffix(settings: Settings) -> str:
    """Return what distinguishes the runs of arms in names."""
    return "" if settings.control is None else f"-{settings.control}"


def arm(
    name: str, control: str, model: Architecture, **built: Any
) -> tuple[Architecture, dict[str, int]]:
    """Return the model of one arm, and how many parameters the lean one and it have.

    Args:
        name: of a lean row, such as ``"vit_base_lean"``, or of a script's own model.
        control: ``"depth"``, ``"mlp"`` or ``"heads"``.
        model: of that name.
        **built: what both are built with beside their sizes.

    Raises:
        ValueError: no lean model, or no whole number comes within 3% of its parameters.
    """
    lean, row = model.sizes, papers.names().get(name)
    if row is None:
        original = {"heads": _half(lean["heads"]), "head_dim": lean["head_dim"]}
    elif row.variant == "lean":
        original = (papers.ROWS | papers.PRESETS)[row.row, "original"].config
    else:
        raise ValueError(f"--control needs a lean --model such as vit_base_lean, got {name!r}")

    def count(sizes: dict[str, Any]) -> int:
        with torch.device("meta"):
            return model.build(**(sizes | built)).num_params()

    base = lean | {
        "heads": original["heads"],
        "head_dim": original["head_dim"],
        "mlp_ratio": lean["mlp_ratio"] / 2,
    }
    if model.family in ("xcit", "volo"):
        base["class_heads"] = _last(lean["heads"])
    grow = {"depth": _deeper, "mlp": _wider, "heads": _more_heads}[control]
    target = count(lean)
    sizes = _closest(lambda size: base | grow(lean, size), count, target)
    reached = count(sizes)
    if abs(reached - target) > TOLERANCE * target:
        raise ValueError(
            f"--control {control} cannot match the {target:,} parameters of {name} within "
            f"{TOLERANCE:.0%}, the closest model has {reached:,}: choose another --control"
        )
    return dataclasses.replace(model, sizes=sizes), {"lean": target, control: reached}


def _closest(
    sizes_of: Callable[[int], dict[str, Any]], count: Callable[[dict[str, Any]], int], target: int
) -> dict[str, Any]:
    """Return the sizes whose count is closest to the target, of all that grow with a number."""
    above = 1
    while count(sizes_of(above)) < target:
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        if count(sizes_of(middle)) < target:
            below = middle
        else:
            above = middle
    return min(
        (sizes_of(size) for size in (below, above) if size),
        key=lambda sizes: abs(count(sizes) - target),
    )


def _deeper(lean: dict[str, Any], layers: int) -> dict[str, Any]:
    if "depth" in lean:
        return {"depth": layers}
    depths = list(lean["depths"])
    depths[depths.index(max(depths))] = layers
    return {"depths": depths}


def _wider(_lean: dict[str, Any], steps: int) -> dict[str, Any]:
    return {"mlp_ratio": steps / 32}


def _more_heads(lean: dict[str, Any], most: int) -> dict[str, Any]:
    """``most`` heads, in the stage that has most of them."""
    heads, head_dim = lean["heads"], lean["head_dim"]
    if isinstance(heads, int):
        own = lean["embed_dim"] // heads if head_dim == "split" else head_dim
        return {"heads": most, "head_dim": own}
    own = [width // h for width, h in zip(lean["embed_dims"], heads)]
    return {"heads": [max(1, round(h * most / max(heads))) for h in heads], "head_dim": own}


def _last(heads: int | list[int]) -> int:
    return heads if isinstance(heads, int) else heads[-1]


def _half(heads: int | list[int]) -> int | list[int]:
    return max(1, heads // 2) if isinstance(heads, int) else [max(1, h // 2) for h in heads]
