"""Models of a lean model's size that spend it on something else than heads.

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

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from models import papers
from models.layers import Model
from train.config import architecture, flags
from train.config.architecture import Architecture
from train.config.flags import Settings

# How far an arm may be from the lean row's parameters.
TOLERANCE = 0.03

_Settings = TypeVar("_Settings", bound=Settings)


def sized(settings: _Settings, model: Architecture) -> _Settings:
    """Return the settings with the model's sizes, unless ``--control`` is to find them.

    Raises:
        ValueError: sizes that do not fit the model, or beside ``--control``.
    """
    if settings.control is None:
        return architecture.sized(settings, model)
    given = [name for name in flags.SIZES if getattr(settings, name)]
    if given:
        flag = given[0].replace("_", "-")
        raise ValueError(f"--control sets the sizes itself: give it or --{flag}, not both")
    return settings


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
        settings = architecture.sized(settings, model)
        compared = {"control": settings.control, "params_of_the_lean_model": params["lean"]}
    sizes = architecture.arguments(settings, model) | own | more
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
        original = papers.ROWS[row.row, "original"].config
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
    if model.build in (papers.MODELS["xcit"], papers.MODELS["volo"]):
        base["class_heads"] = _last(lean["heads"])
    grow = {"depth": _deeper, "mlp": _wider, "heads": _more_heads}[control]
    target = count(lean)
    sizes = _closest(lambda size: base | grow(lean, size), count, target)
    reached = count(sizes)
    if abs(reached - target) > TOLERANCE * target:
        raise ValueError(
            f"--control {control}: no whole number comes within {TOLERANCE:.0%} of the {target:,} "
            f"parameters of {name}; the closest has {reached:,}"
        )
    return Architecture(model.build, sizes), {"lean": target, control: reached}


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
