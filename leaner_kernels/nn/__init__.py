"""Attention modules: the operators with their projections, and the capture of heads for kappa."""

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
