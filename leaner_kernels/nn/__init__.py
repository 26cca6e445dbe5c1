"""Attention modules: the operators with their projections, and the capture of heads for kappa."""

from functools import partial
from typing import TYPE_CHECKING

from .. import removed
from ..ops.statistics import evenly_spaced
from .attention import ManyHeadAttention
from .capture import Captured, Capturing
from .nystrom import NystromAttention
from .vision import ChannelAttention, CrossCovarianceAttention, OutlookAttention, WindowAttention

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

if not TYPE_CHECKING:  # where it would hide misspelt names
    __getattr__ = partial(removed.attribute, __name__)
