"""Nyström attention on a GPU: its stages, one after another.

Landmarks (with K3 V), the pseudo-inverse applied to it, and the output. The backward keeps no more
than the inputs and the log-sum-exp of K1's rows; what is of the size of the landmarks it makes
again.
"""

import torch
from torch import Tensor

from .._checks import MAX_ROW_STRIDE
from ..operator import Results
from .inverse import Inversion, invert_backward, invert_forward
from .landmarks import landmarks_backward, landmarks_forward
from .output import (
    LastStage,
    output_backward_landmarks,
    output_backward_query,
    output_capture,
    output_forward,
)


def forward(inputs: tuple, params: tuple, results: Results) -> None:
    """Fill ``out`` (B, N, H, D), ``lse`` (B, H, N) and any ``stats``."""
    query, key, value, lengths = inputs
    num_landmarks, scale, iterations, whole_batch = params
    out, lse, stats, heads, sample = results
    lengths = None if lengths is None else lengths.contiguous()
    made = landmarks_forward(query, key, value, lengths, num_landmarks, scale)
    inversion = Inversion(scale, iterations, whole_batch, query.dtype)
    land = made[:3]
    core, largest = invert_forward(land, inversion)
    stage = LastStage(query, made.k_land, core, lengths, scale)
    output_forward(stage, out.transpose(1, 2), lse, stats)
    if stats is None:
        return
    for other in (largest, made.largest.amax(dim=-1)):
        torch.maximum(stats[0], other, out=stats[0])
    if sample is not None:
        output_capture(stage, heads, sample)


def backward(grad: Tensor, inputs: tuple, params: tuple, lse: Tensor, grads: list) -> None:
    """Fill the gradients (B, H, N, D) of query, key and value from that of the output."""
    query, key, value, lengths = inputs
    dq, dk, dv = grads
    num_landmarks, scale, iterations, whole_batch = params
    lengths = None if lengths is None else lengths.contiguous()
    grad = grad.transpose(1, 2)
    if grad.stride(2) > MAX_ROW_STRIDE:
        grad = grad.contiguous()
    made = landmarks_forward(query, key, value, lengths, num_landmarks, scale)
    inversion = Inversion(scale, iterations, whole_batch, query.dtype)
    land = made[:3]
    core, _ = invert_forward(land, inversion)
    stage = LastStage(query, made.k_land, core, lengths, scale)
    dk_land, dcore, delta = output_backward_landmarks(stage, grad, lse)
    dq_land, dk_land_2, dk3v = invert_backward(dcore, land, inversion)
    dk_land += dk_land_2
    landmarks_backward(key, value, lengths, made, dk3v, dq_land, dk_land, scale, dk, dv)
    output_backward_query(stage, grad, lse, delta, dq_land, dq)
