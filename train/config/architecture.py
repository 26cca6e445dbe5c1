"""Architectures to train: the rows of the paper, small models, and sizes from flags."""

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
from models.layers import Model, per_layer
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


def _small(family: str, variant: str | None = None, **sizes: Any) -> Architecture:
    """Return a model with heads of width 16, by default for grey images of 32 x 32 pixels."""
    shared = {"image_size": 32, "in_chans": 1, "head_dim": 16, "mlp_ratio": 2.0}
    return Architecture(family, shared | sizes, variant)


# 8 x 8 digits: the ViT reads them unchanged, as 16 tokens of 2 x 2 pixels. The other models, whose
# convolutions shrink an image at once, read them enlarged.
DIGITS = {
    "vit_digits": _small(
        "vit",
        "SmallTransformer",
        image_size=8,
        patch_size=2,
        embed_dim=192,
        pool="avg",
        init="xavier",
        heads=16,
        depth=7,
    ),
    "xcit_digits": _small("xcit", patch_size=8, embed_dim=96, eta=1.0, heads=8, depth=3),
    "tnt_digits": _small(
        "tnt",
        patch_size=8,
        embed_dim=128,
        inner_dim=16,
        inner_heads=4,
        # Positions with timm's 0.02 would be drowned out by patches of unit variance.
        position_std=1.0,
        heads=8,
        depth=2,
    ),
    "volo_digits": _small(
        "volo", patch_size=4, stem_dim=16, embed_dims=[48, 96], heads=[4, 8], depths=[2, 2]
    ),
    "davit_digits": _small("davit", window=4, embed_dims=[48, 96], heads=[4, 8], depths=[1, 2]),
}
# For some hundreds or thousands of pictures. Convolutions produce the patch embeddings, which a ViT
# would have to learn; many heads in few layers, as in the paper's lean rows.
PICTURES = {
    "xcit_tiny_lean": _small(
        "xcit",
        image_size=128,
        patch_size=16,
        in_chans=3,
        embed_dim=128,
        eta=1.0,
        heads=8,
        depth=4,
    ),
}
# Flags of the image scripts, and the model arguments that they set.
_OF_IMAGES = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "in_chans": "in_chans",
    "width": "embed_dim",
}


def find(name: str, small: Mapping[str, Architecture], kinds: Sequence[str]) -> Architecture:
    """Return a model by its name.

    Args:
        name: name of a small model or of a row of the paper.
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


_Settings = TypeVar("_Settings", bound=Settings)


def for_images(settings: _Settings, architecture: Architecture) -> tuple[_Settings, Architecture]:
    """Return a model for images as the flags describe, and the settings with missing values filled.

    Args:
        settings: with ``img_size``, ``patch_size``, ``in_chans`` and ``width``, None for the
            model's own.
        architecture: that ``settings.model`` names.

    Raises:
        ValueError: if the model does not use a flag.
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


def sized(settings: _Settings, architecture: Architecture) -> _Settings:
    """Return the settings with the model's sizes where none were given.

    Raises:
        ValueError: sizes that do not fit the model.
    """
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
        allocation=None,  # its result is in the heads of each layer
        depth=depth,
        heads=per_layer("--heads", _unlisted(heads), depth),
        head_dim=per_layer("--head-dim", _unlisted(head_dim), depth),
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
    """Return the constructor arguments for settings from ``sized``, without classes and dropout."""
    chosen: dict[str, Any] = {"mlp_ratio": settings.mlp_ratio}
    chosen["depth" if architecture.stages is None else "depths"] = settings.depth
    for name in ("heads", "head_dim"):
        chosen[name] = _unlisted(getattr(settings, name))
    return architecture.sizes | chosen


def _unlisted(values: Sequence[Any]) -> Any:
    """Return the value of a list of one, or the list of several."""
    return values[0] if len(values) == 1 else values


def _shown(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


def planned(
    settings: Settings, model: Architecture, own: dict[str, Any], **more: Any
) -> tuple[Callable[[], Model], Model, dict[str, Any]]:
    """Return a function that builds the model, a model on the meta device, and facts about it.

    Args:
        settings: from ``sized``.
        model: the one that they name.
        own: arguments that the script passes to every model besides sizes, such as its classes.
        **more: arguments for this model only, such as its dropout.

    Raises:
        ValueError: sizes that do not fit each other or the kernels of this GPU.
    """
    sizes = arguments(settings, model) | own | more
    build = partial(model.build, **sizes)
    with torch.device("meta"):
        built = build()
    if torch.cuda.is_available():
        built.check_kernels()
    attention = built.attention_modules().values()
    facts = _uneven(attention, settings.head_dim) | {
        "model": settings.model,
        "params": built.num_params(),
        "recipe": settings.recipe,
        "depth": settings.depth,
        "width": sizes.get("embed_dim") or sizes["embed_dims"],
        "heads": [a.num_heads for a in attention],
        "head_dim": [a.head_dim for a in attention],
        "head_convention": built.head_convention,
    }
    return build, built, facts


def _uneven(layers: Iterable[nn.Module], head_dims: Sequence[Any]) -> dict[str, str]:
    """Return a warning if heads do not divide the width that they split."""
    if "split" not in head_dims:
        return {}
    sizes = dict.fromkeys((a.num_heads, a.head_dim, a.dim) for a in layers if a.dim % a.num_heads)
    uneven = [
        f"{heads} heads do not divide {dim}: attention is {heads * width} wide, {heads} x {width}"
        for heads, width, dim in sizes
        if width == dim // heads
    ]
    return {"warning": "; ".join(uneven)} if uneven else {}
