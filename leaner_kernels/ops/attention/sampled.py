"""Attention in a sampled step: the output of any other step, and statistics.

On a GPU one pass computes both. On the CPU ``attention`` computes the output, so that its bits,
gradients and random numbers are those of a step without statistics. The heads are this output
where it has their precision, and the other statistics only need the probabilities.
"""

from typing import Any

import torch
from torch import Tensor

from .._checks import MAX_HEAD_DIM, autocast
from ..statistics import AttentionStats, attention_stats, per_head
from . import (
    attention,
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_with_stats,
    op,
    reference,
)
from .checks import checked_dense, plain_mask


def sampled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sample: Tensor,
    **params: Any,
) -> AttentionStats:
    """Compute ``attention_with_stats``, with the output of ``attention`` on the CPU.

    Arguments are those of ``attention_with_stats``. On the CPU, heads and head_norm are of the
    probabilities before dropout.
    """
    inputs = query, key, value, attn_mask
    params |= {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if query.device.type != "cpu":
        return attention_with_stats(*inputs, dropout_p, sample=sample, **params)
    out = attention(*inputs, dropout_p, **params)
    # A CausalBias that is cast or detached is a tensor of whatever its memory holds.
    attn_mask, params["is_causal"] = plain_mask(attn_mask, is_causal, query, key)
    exact = out if dropout_p == 0 else None
    return _with_statistics(out, exact, sample, query, key, value, attn_mask, **params)


def sampled_attention_qkvpacked(
    qkv: Tensor, *, sample: Tensor, dropout_p: float = 0.0, **params: Any
) -> AttentionStats:
    """Compute ``attention_qkvpacked_with_stats`` likewise."""
    if qkv.device.type != "cpu":
        return attention_qkvpacked_with_stats(qkv, sample=sample, dropout_p=dropout_p, **params)
    out = attention_qkvpacked(qkv, dropout_p=dropout_p, **params)
    exact = out.transpose(1, 2) if dropout_p == 0 else None
    query, key, value = op.split_qkv(qkv)
    return _with_statistics(out, exact, sample, query, key, value, None, **params)


@torch.no_grad()
def _with_statistics(
    out: Tensor,
    exact: Tensor | None,
    sample: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    **params: Any,
) -> AttentionStats:
    """Return ``out`` with the statistics of a call that ``attention`` has checked.

    ``exact`` is the output (B, H, N, D) without dropout, if that was computed. In half precision
    its rounding would determine kappa: then, too, the heads are computed again, in float32.
    """
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (t.detach().to(dtype) for t in (query, key, value))
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.detach().to(dtype)
    with torch.autocast("cpu", enabled=False):
        call = checked_dense(
            q,
            k,
            v,
            attn_mask,
            dropout_p=0.0,
            sample=sample,
            max_head_dim=MAX_HEAD_DIM,
            **params,
        )
        if exact is None or exact.dtype != dtype:
            exact = op.compute_plain(op.Dense, None, call, params.get("enable_gqa", False))
        k = reference.without_padding(k, call.key_lengths)
        numbers = {"scale": call.scale, "softcap": call.softcap}
        p, lse, s = reference.probabilities(
            q, k, call.attn_mask, call.key_lengths, **numbers, **call.visibility
        )
        statistics = per_head(p, s, exact.detach()).float()
        # A slot of a negative index may hold anything.
        heads = exact.detach().index_select(0, sample.clamp(min=0))
        heads = heads.transpose(1, 2).flatten(2).float()
    return attention_stats(out, lse.float(), statistics, heads)
