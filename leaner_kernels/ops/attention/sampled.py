"""Attention in a sampled step: the output of any other step, and statistics.

On a GPU one pass computes both. On the CPU ``attention`` computes the output, so that its bits,
gradients and random numbers are those of a step without statistics. The heads are this output
where it has their precision, and the other statistics only need the probabilities.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import NO_WINDOW, autocast, checked_lengths
from ..statistics import AttentionStats, attention_stats, per_head
from . import attention, attention_qkvpacked, attention_qkvpacked_with_stats, attention_with_stats
from .checks import plain_mask
from .reference import probabilities, without_padding


def sampled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    sample: Tensor,
    **params: Any,
) -> AttentionStats:
    """Compute ``attention_with_stats``, with the output of ``attention`` on the CPU.

    Arguments are those of ``attention_with_stats``. On the CPU, heads and head_norm are of the
    probabilities before dropout.
    """
    inputs = query, key, value, attn_mask
    if query.device.type != "cpu":
        return attention_with_stats(*inputs, dropout_p, *args, sample=sample, **params)
    out = attention(*inputs, dropout_p, *args, **params)
    exact = out if dropout_p == 0 else None
    return _with_statistics(out, exact, sample, *inputs, *args, **params)


def sampled_attention_qkvpacked(
    qkv: Tensor, *, sample: Tensor, dropout_p: float = 0.0, **params: Any
) -> AttentionStats:
    """Compute ``attention_qkvpacked_with_stats`` likewise."""
    if qkv.device.type != "cpu":
        return attention_qkvpacked_with_stats(qkv, sample=sample, dropout_p=dropout_p, **params)
    out = attention_qkvpacked(qkv, dropout_p=dropout_p, **params)
    exact = out.transpose(1, 2) if dropout_p == 0 else None
    query, key, value = (t.transpose(1, 2) for t in qkv.unbind(2))
    return _with_statistics(out, exact, sample, query, key, value, **params)


@torch.no_grad()
def _with_statistics(
    out: Tensor,
    exact: Tensor | None,
    sample: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
) -> AttentionStats:
    """Return ``out`` with the statistics of a call that ``attention`` has checked.

    ``exact`` is the output (B, H, N, D) without dropout, if that was computed. In half precision
    its rounding would determine kappa: then, too, the heads are computed again, in float32.
    """
    attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
    q, k, v, mask = autocast(query, key, value, attn_mask)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (t.detach().to(dtype) for t in (q, k, v))
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().to(dtype)
    with torch.autocast("cpu", enabled=False):
        if exact is None or exact.dtype != dtype:
            params = {"key_lengths": key_lengths, "softcap": softcap, "window_size": window_size}
            exact = attention(q, k, v, mask, 0.0, is_causal, scale, enable_gqa, **params)
        lengths = checked_lengths(key_lengths, len(k), k.shape[2], k.device)
        k = without_padding(k, lengths)
        p, lse, s = probabilities(q, k, mask, lengths, is_causal, scale, softcap, window_size)
        statistics = per_head(p, s, exact.detach()).float()
        heads = exact.detach().index_select(0, sample).transpose(1, 2).flatten(2).float()
    return attention_stats(out, lse.float(), statistics, heads)
