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

from collections.abc import Callable
from typing import Any

from models import papers
from train.architecture import Architecture

# How far an arm may be from the lean row's parameters.
TOLERANCE = 0.03


def arm(name: str, control: str, num_classes: int) -> tuple[Architecture, dict[str, int]]:
    """Return the model of one arm, and how many parameters the lean one and it have.

    Args:
        name: of a lean row, such as ``"vit_base_lean"``.
        control: ``"depth"``, ``"mlp"`` or ``"heads"``.
        num_classes: of both.

    Raises:
        ValueError: no lean row, or no whole number comes within 3% of its parameters.
    """
    lean = papers.names().get(name)
    if lean is None or lean.variant != "lean":
        raise ValueError(f"--control needs a lean --model such as vit_base_lean, got {name!r}")
    build = papers.MODELS[lean.architecture]
    original = papers.ROWS[lean.row, "original"]

    def count(sizes: dict[str, Any]) -> int:
        return build(**sizes, num_classes=num_classes, device="meta").num_params()

    base = lean.config | {
        "heads": original.config["heads"],
        "head_dim": original.config["head_dim"],
        "mlp_ratio": lean.config["mlp_ratio"] / 2,
    }
    if lean.architecture in ("xcit", "volo"):
        base["class_heads"] = _last(lean.config["heads"])
    grow = {"depth": _deeper, "mlp": _wider, "heads": _more_heads}[control]
    target = count(lean.config)
    sizes = _closest(lambda size: base | grow(lean.config, size), count, target)
    reached = count(sizes)
    if abs(reached - target) > TOLERANCE * target:
        raise ValueError(
            f"--control {control}: no whole number comes within {TOLERANCE:.0%} of the {target:,} "
            f"parameters of {name}; the closest has {reached:,}"
        )
    return Architecture(build, {"in_chans": 3, **sizes}), {"lean": target, control: reached}


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
