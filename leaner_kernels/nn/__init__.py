"""Attention modules: the operators with their projections, and the capture of heads for kappa."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..ops.statistics import evenly_spaced
from .attention import ManyHeadAttention
from .capture import Captured, Capturing

if TYPE_CHECKING:
    from .covariance import ChannelAttention, CrossCovarianceAttention
    from .nystrom import NystromAttention
    from .outlook import OutlookAttention
    from .window import WindowAttention

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
# Most models have one kind of attention: the others are imported at first access.
_LATE = {
    "ChannelAttention": "covariance",
    "CrossCovarianceAttention": "covariance",
    "NystromAttention": "nystrom",
    "OutlookAttention": "outlook",
    "WindowAttention": "window",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATE[name]}", __name__), name)
