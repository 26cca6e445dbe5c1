"""Compute attention in a sampled step: the same output as in any other step, and statistics.

On a GPU one pass computes both. On the CPU ``attention`` computes the output, so that its bits,
gradients and random numbers are those of a step without statistics. The heads are this output
where it has their precision, and the other statistics only need the probabilities.
"""

from typing import Any

import torch
from torch import Tensor

from .._checks import MAX_HEAD_DIM, autocast
from ..statistics import AttentionStats, attention_stats, per_head
from . import attention_qkvpacked_with_stats, attention_with_stats, op, reference, sdpa
from .call import Call
from .checks import checked_dense, checked_packed


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
    params |= {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    params |= {"dropout_p": dropout_p, "sample": sample}
    if query.device.type != "cpu":
        return attention_with_stats(query, key, value, attn_mask, **params)
    query, key, value = autocast(query, key, value)
    call = checked_dense(query, key, value, attn_mask, max_head_dim=MAX_HEAD_DIM, **params)
    return _with_statistics(call, enable_gqa, sample)


def sampled_attention_qkvpacked(
    qkv: Tensor, *, sample: Tensor, dropout_p: float = 0.0, **params: Any
) -> AttentionStats:
    """Compute ``attention_qkvpacked_with_stats`` likewise."""
    params |= {"dropout_p": dropout_p, "sample": sample}
    if qkv.device.type != "cpu":
        return attention_qkvpacked_with_stats(qkv, **params)
    (qkv,) = autocast(qkv)
    call = op.Packed.call(checked_packed(qkv, max_head_dim=MAX_HEAD_DIM, **params))
    stats = _with_statistics(call, False, sample)
    return stats._replace(out=op.Packed.from_query(stats.out))


def _with_statistics(call: Call, enable_gqa: bool, sample: Tensor) -> AttentionStats:
    """Return the output of a checked call as ``attention`` computes it, and statistics.

    In half precision the rounding of the output would determine kappa, and dropout changes it: then
    the heads are computed again, in float32 without dropout.
    """
    out = _output(call, enable_gqa)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        q, k, v = (t.detach().to(dtype) for t in (call.query, call.key, call.value))
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.detach().to(dtype)
        exact = out.detach()
        if call.dropout_p or exact.dtype != dtype:
            wide = call._replace(query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0)
            exact = _output(wide, enable_gqa)
        k = reference.without_padding(k, call.key_lengths)
        numbers = {"scale": call.scale, "softcap": call.softcap}
        p, lse, s = reference.probabilities(
            q, k, mask, call.key_lengths, **numbers, **call.visibility
        )
        statistics = per_head(p, s, exact).float()
        # The slot of a negative index may hold anything.
        heads = exact.index_select(0, sample.clamp(min=0)).transpose(1, 2).flatten(2).float()
    return attention_stats(out, lse.float(), statistics, heads)


def _output(call: Call, enable_gqa: bool) -> Tensor:
    """Return what ``attention`` returns for a call on the CPU."""
    if sdpa.transformed(call.query):  # PyTorch's function lacks derivatives that the operator has
        return op.compute_plain(op.Dense, None, call, enable_gqa)
    return sdpa.library_attention(call, enable_gqa)
