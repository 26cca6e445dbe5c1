"""torch.hub entry points: the paper's models, without pretrained weights.

``torch.hub.load(repository, "vit_base", variant="lean", num_classes=10)``
"""

from torch import nn as _nn

from models.papers import build as _build

dependencies = ["torch"]


def vit_base(variant: str = "lean", pretrained: bool = False, **overrides) -> _nn.Module:
    """ViT-B: ``"lean"``, 7 layers of 16 heads, 40.1M parameters; ``"original"``, 12 of 12, 86.6M.

    ``overrides`` are arguments of ``models.vit.VisionTransformer``, e.g. ``num_classes=10``.
    """
    return _random("vit_base", variant, pretrained, overrides)


def vit_large(variant: str = "lean", pretrained: bool = False, **overrides) -> _nn.Module:
    """ViT-L: ``"lean"``, 8 layers of 30 heads, 98.6M; ``"original"``, 24 of 16, 203.6M.

    ``overrides`` are arguments of ``models.vit.VisionTransformer``, e.g. ``num_classes=10``.
    """
    return _random("vit_large", variant, pretrained, overrides)


def deit_base(variant: str = "lean", pretrained: bool = False, **overrides) -> _nn.Module:
    """DeiT-B, undistilled: the network of ``vit_base``."""
    return _random("deit_base", variant, pretrained, overrides)


def deit_large(variant: str = "lean", pretrained: bool = False, **overrides) -> _nn.Module:
    """DeiT-L, undistilled: the network of ``vit_large``."""
    return _random("deit_large", variant, pretrained, overrides)


def _random(row: str, variant: str, pretrained: bool, overrides: dict) -> _nn.Module:
    if pretrained:
        raise ValueError(f"pretrained must be False, got {pretrained!r}: {row} has no weights")
    return _build(row, variant, **overrides)
