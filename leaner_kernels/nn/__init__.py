"""Modules around the operators: the projections before and after, and the capture for kappa."""

from ..ops.statistics import evenly_spaced
from .attention import ManyHeadAttention
from .capture import Captured, Capturing
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
