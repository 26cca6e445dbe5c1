"""Attention modules: the operators with their projections, and the capture of heads for kappa."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..ops.statistics import evenly_spaced
from .attention import ManyHeadAttention
from .capture import Captured, Capturing

if TYPE_CHECKING:
    from .nystrom import NystromAttention
    from .vision import (
        ChannelAttention,
        CrossCovarianceAttention,
        OutlookAttention,
        WindowAttention,
    )

__all__ = [
    "Captured",
    "Capturing",
    "ChannelAttention",
    "CrossCovarianceAttention",
    "ManyHeadAttention",
    "NystromAttention",
    "OutlookAttention",
    "WindowAttention",
    "evenly_spaced",
]
# Most models need ManyHeadAttention alone: the others are imported at first access.
_VISION = "ChannelAttention", "CrossCovarianceAttention", "OutlookAttention", "WindowAttention"
_LATE = dict.fromkeys(_VISION, "vision") | {"NystromAttention": "nystrom"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATE[name]}", __name__), name)
