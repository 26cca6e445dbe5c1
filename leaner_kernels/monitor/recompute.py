"""The heads and statistics of a call of PyTorch's attention, computed once more from its arguments.

What it returns is rounded to the precision of the model, and kappa is lost there. Its queries, keys
and values are exact in float32.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leaner_kernels.ops._checks import autocast
from leaner_kernels.ops._stats import AttentionStats, evenly_spaced
from leaner_kernels.ops.attention.reference import attend, probabilities, statistics

# Scores that exist at a time, 64 MiB of them in float32: a long sequence goes in blocks of rows.
MAX_SCORES = 2**24


@torch.no_grad()
def attention_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    samples: int,
) -> AttentionStats:
    """Attend for sampled batch entries, without dropout.

    Args:
        query: (..., H, N, D), as PyTorch's ``scaled_dot_product_attention`` took it; the axes
            before these are its batch, and (B, N, D) is a batch of one head.
        key: (..., Hkv, M, D).
        value: (..., Hkv, M, E).
        attn_mask: boolean (True is seen) or added, broadcastable to (..., H, N, M).
        is_causal: row i sees columns 0 to i.
        scale: multiplies the scores; ``D ** -0.5`` when omitted.
        samples: at most so many entries, spread over the batch.

    Returns:
        AttentionStats of S entries: heads (S, N, H * E), float32, or float64 of float64; the
        statistics (S, H) float32; out and lse are empty.

    Numerics: an autocast region rounds the inputs, as it does for PyTorch's function; then all is
    float32, in whole products even where TF32 is allowed.
    """
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    if query.dim() < 4:
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(-3)
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    heads = max(t.shape[-3] for t in (query, key, value))
    query = query.expand(*batch, heads, -1, -1)
    key, value = (t.expand(*batch, -1, -1, -1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*batch, heads, query.shape[-2], key.shape[-2])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    found = []
    with torch.autocast(query.device.type, enabled=False), _whole_products():
        for number in evenly_spaced(math.prod(batch), samples, torch.device("cpu")):
            place = tuple(int(i) for i in torch.unravel_index(number, batch))
            mask = None if attn_mask is None else attn_mask[place]
            found.append(_entry(query[place], key[place], value[place], mask, is_causal, factor))
    captured, max_logit, entropy, prob_norm, head_norm = map(torch.stack, zip(*found, strict=True))
    nothing = captured.new_empty(0)
    per_head = max_logit.float(), entropy.float(), prob_norm.float(), head_norm.float()
    return AttentionStats(nothing, nothing, *per_head, captured)


def _entry(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the heads (N, H * E) of one entry, then max_logit, entropy and the two norms, (H,)."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = (t.to(dtype)[None] for t in (query, key, value))
    _, heads, rows, _ = query.shape
    cols = key.shape[2]
    columns = torch.arange(cols, device=query.device)
    step = max(1, MAX_SCORES // (heads * cols))
    outputs, found = [], []
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        seen = None if mask is None else mask[None, :, block]
        if seen is not None and seen.dtype != torch.bool:
            seen = seen.to(dtype)
        elif is_causal:
            past = columns <= torch.arange(block.start, block.stop, device=query.device)[:, None]
            seen = past if seen is None else seen & past
        p, _, s = probabilities(query[:, :, block], key, seen, None, False, scale)
        a = attend(p, value, None, 0.0)
        max_logit, entropy, prob_norm, head_norm = statistics(p, s, a)
        share = (block.stop - block.start) / rows
        found.append((max_logit, share * entropy, prob_norm.square(), head_norm.square()))
        outputs.append(a[0].transpose(0, 1).flatten(1))
    max_logit, entropy, prob_norm, head_norm = (torch.cat(each) for each in zip(*found))
    norms = (squares.sum(dim=0).sqrt() for squares in (prob_norm, head_norm))
    return torch.cat(outputs), max_logit.amax(dim=0), entropy.sum(dim=0), *norms


@contextmanager
def _whole_products() -> Iterator[None]:
    # TF32 and bfloat16 products are a choice for speed; kappa past their precision is rounding.
    mkldnn: Any = torch.backends.mkldnn
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision
