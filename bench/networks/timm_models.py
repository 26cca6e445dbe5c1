"""Build timm's model with the sizes of any row of the paper, as a peer of ours.

timm splits the width among the heads; where a row widens it, its attention gets projections of that
width around its own computation.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from bench.attention.vision import cross_covariance
from bench.harness.peers import AbsentError, found

# What timm calls our arguments, where it has another word.
COMMON = {"image_size": "img_size", "heads": "num_heads"}
WORDS = {
    "vit": COMMON,
    "xcit": COMMON,
    "tnt": {**COMMON, "heads": "num_heads_outer", "inner_heads": "num_heads_inner"},
    "volo": {**COMMON, "depths": "layers"},
    "davit": {"heads": "num_heads", "window": "window_size"},
}
# Of constructors that take images of any size.
WITHOUT_SIZE = ("davit",)


def timm_model(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """Build timm's model, on the default device, with random weights.

    Args:
        architecture: as in ``papers.MODELS``.
        config: arguments of our constructor.

    Raises:
        AbsentError: timm is not installed, or has no such model.
    """
    if architecture not in BUILDERS:
        raise AbsentError(f"timm has no {architecture}")
    sizes = dict(config)
    head_dim = sizes.pop("head_dim", "split")
    if architecture in WITHOUT_SIZE:
        sizes.pop("image_size", None)
    words = WORDS[architecture]
    return BUILDERS[architecture](head_dim, **{words.get(k, k): v for k, v in sizes.items()})


def _splits(head_dim: int | str, dim: int, heads: int) -> bool:
    return head_dim == "split" or head_dim * heads == dim


def _vit(head_dim: int | str, **sizes: Any) -> nn.Module:
    attention = found("timm.layers", "Attention")

    class FixedWidthAttention(attention):
        def __init__(self, *args: Any, **kwargs: Any):
            width = None if head_dim == "split" else head_dim
            super().__init__(*args, attn_head_dim=width, **kwargs)

    model = found("timm.models.vision_transformer", "VisionTransformer")
    model = model(attn_layer=FixedWidthAttention, **sizes)
    for block in model.blocks:
        block.attn.__class__ = attention  # the adapter leaves subclasses alone
    return model


class WideXCA(nn.Module):
    """XCiT's attention with heads of any width, as timm computes it between its projections."""

    def __init__(self, like: nn.Module, dim: int, heads: int, head_dim: int):
        """Take the temperature of timm's own module."""
        super().__init__()
        self.sizes = 3, heads, head_dim
        self.temperature = like.temperature
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, N, dim) of (B, N, dim)."""
        out = cross_covariance(self.qkv(x).unflatten(-1, self.sizes), self.temperature[:, 0, 0])
        return self.proj(out.flatten(2))


def _xcit(head_dim: int | str, **sizes: Any) -> nn.Module:
    # What timm's entry points of the rows set.
    model = found("timm.models.xcit", "Xcit")(eta=1e-5, tokens_norm=True, **sizes)
    dim, heads = sizes["embed_dim"], sizes["num_heads"]
    if not _splits(head_dim, dim, heads):
        for block in model.blocks:
            block.attn = WideXCA(block.attn, dim, heads, head_dim)
    return model


def _split_only(module: str, name: str, head_dim: int | str, **sizes: Any) -> nn.Module:
    if head_dim != "split":
        raise AbsentError(f"timm's {name} splits its width, and head_dim is {head_dim}")
    return found(f"timm.models.{module}", name)(**sizes)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "vit": _vit,
    "xcit": _xcit,
    "tnt": partial(_split_only, "tnt", "TNT"),
    "volo": partial(_split_only, "volo", "VOLO"),
    "davit": partial(_split_only, "davit", "DaVit"),
}
