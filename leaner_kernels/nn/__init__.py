"""Modules around the operators: the projections before and after, and the capture for kappa."""

from leaner_kernels.nn.attention import ManyHeadAttention
from leaner_kernels.nn.capture import Captured, Capturing, evenly_spaced

__all__ = [
    "Captured",
    "Capturing",
    "ManyHeadAttention",
    "evenly_spaced",
]
