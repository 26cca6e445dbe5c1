"""Modules around the operators: the projections before and after, and the capture for kappa."""

from leaner_kernels.nn.attention import ManyHeadAttention
from leaner_kernels.nn.capture import Captured, Capturing
from leaner_kernels.nn.covariance import ChannelAttention, CrossCovarianceAttention
from leaner_kernels.nn.nystrom import NystromAttention
from leaner_kernels.nn.outlook import OutlookAttention
from leaner_kernels.nn.window import WindowAttention
from leaner_kernels.ops._stats import evenly_spaced

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
