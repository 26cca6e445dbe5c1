"""Attention to the bits of a step without statistics, and the statistics beside it.

On the CPU a library attends, whose bits and dropout are its own; statistics are computed once more,
of the probabilities before dropout. On a GPU they come from the same pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..statistics import AttentionStats
from . import attention, attention_qkvpacked, attention_qkvpacked_with_stats, attention_with_stats
from .op import split_qkv


def attention_beside_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *params: Any,
    sample: Tensor,
    attends: Callable[[], Tensor] | None = None,
    **named: Any,
) -> AttentionStats:
    """``attention_with_stats`` that on the CPU changes no bit, gradient or random number of a step.

    Arguments are those of ``attention_with_stats``, and ``attends``: computes ``out`` on the CPU,
    where a caller has another way to it than ``attention`` of these arguments. ``out`` is that of
    ``attention``; heads and head_norm are of the probabilities before dropout.
    """
    inputs = query, key, value, attn_mask
    if query.device.type != "cpu":
        return attention_with_stats(*inputs, dropout_p, *params, sample=sample, **named)
    attends = attends or partial(attention, *inputs, dropout_p, *params, **named)
    with torch.no_grad():
        stats = attention_with_stats(*inputs, 0.0, *params, sample=sample, **named)
    return stats._replace(out=attends())


def attention_qkvpacked_beside_stats(
    qkv: Tensor, *, sample: Tensor, **params: Any
) -> AttentionStats:
    """``attention_qkvpacked_with_stats``, likewise."""
    if qkv.device.type != "cpu":
        return attention_qkvpacked_with_stats(qkv, sample=sample, **params)
    attends = partial(attention_qkvpacked, qkv, **params)
    return attention_beside_stats(*split_qkv(qkv), **params, sample=sample, attends=attends)
