"""Attention to the bits of a step without statistics, and the statistics beside it.

On the CPU a library attends, whose bits and dropout are its own; statistics are computed once more.
On a GPU they come from the same pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from .._checks import autocast
from ..statistics import AttentionStats, frobenius
from . import (
    attention,
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_with_stats,
)
from .checks import NO_WINDOW, plain_mask
from .op import draw_seed, split_qkv
from .reference import attend, keep_mask, probabilities, without_padding


def attention_beside_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
    sample: Tensor,
    attends: Callable[[], Tensor] | None = None,
) -> AttentionStats:
    """``attention_with_stats`` that on the CPU changes no bit, gradient or random number of a step.

    Arguments are those of ``attention_with_stats``, and ``attends``: computes ``out`` on the CPU,
    where a caller has another way to it than ``attention`` of these arguments, in which as many
    probabilities are dropped. ``out`` is that of ``attention``; heads and head_norm are of the
    probabilities that it dropped.
    """
    attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
    kept_all = attn_mask, 0.0, is_causal, scale, enable_gqa
    params = attn_mask, dropout_p, is_causal, scale, enable_gqa
    named: dict[str, Any] = {"key_lengths": key_lengths, "softcap": softcap}
    named["window_size"] = window_size
    if not _on_the_cpu(query, dropout_p):
        return attention_with_stats(query, key, value, *params, **named, sample=sample)
    before = torch.get_rng_state() if dropout_p else None
    out = attention(query, key, value, *params, **named) if attends is None else attends()
    with torch.no_grad():
        stats = attention_with_stats(query, key, value, *kept_all, **named, sample=sample)
        if before is None or stats.heads is None:
            return stats._replace(out=out)
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
        keep = _kept(before, query, key.shape[2], dropout_p)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = (t.to(stats.heads.dtype) for t in (query, key, value))
        key, value = (without_padding(t, key_lengths) for t in (key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        hidden = attn_mask, key_lengths, is_causal
        # A region of autocast has narrowed the inputs by now, and would narrow the products too.
        with torch.autocast("cpu", enabled=False):
            p, _, _ = probabilities(query, key, *hidden, factor, softcap, window_size)
            heads = attend(p, value, keep, dropout_p)
        return stats._replace(
            out=out,
            head_norm=frobenius(heads).float(),
            heads=heads.index_select(0, sample).transpose(1, 2).flatten(2),
        )


def attention_qkvpacked_beside_stats(
    qkv: Tensor, *, dropout_p: float = 0.0, sample: Tensor, **params: Any
) -> AttentionStats:
    """``attention_qkvpacked_with_stats``, likewise."""
    params["dropout_p"] = dropout_p
    if not _on_the_cpu(qkv, dropout_p):
        return attention_qkvpacked_with_stats(qkv, sample=sample, **params)
    attends = partial(attention_qkvpacked, qkv, **params)
    return attention_beside_stats(*split_qkv(qkv), **params, sample=sample, attends=attends)


def _on_the_cpu(query: Tensor, dropout_p: float) -> bool:
    # Compiled code has a generator of its own.
    return query.device.type == "cpu" and not (dropout_p and torch.compiler.is_compiling())


def _kept(before: Tensor, query: Tensor, cols: int, dropout_p: float) -> Tensor:
    """Return the dropout mask (B, H, N, M) of the call that the generator's state was before.

    PyTorch's function returns nothing of it; from the same state, with all scores zero and the
    identity as values, it returns it.
    """
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    q, k = query.new_zeros(*query.shape[:3], 1), query.new_zeros(*query.shape[:2], cols, 1)
    eye = torch.eye(cols, dtype=query.dtype, device=query.device).expand(*query.shape[:2], -1, -1)
    with torch.autocast("cpu", enabled=False):
        keep = _sdpa(q, k, eye, dropout_p=dropout_p) != 0
    if not torch.equal(torch.get_rng_state(), after):
        # The call did not go to PyTorch's function, but drew a seed.
        torch.set_rng_state(before)
        seed = draw_seed(dropout_p, query.device)
        assert seed is not None
        batch, heads, rows, _ = query.shape
        keep = keep_mask(seed, batch, heads, rows, cols, dropout_p)
    torch.set_rng_state(after)
    return keep
