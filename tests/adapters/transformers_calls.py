"""Calls that modules of transformers make of their attention, as data, and plain versions of it."""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def heads(count: int, tokens: int, seed: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, tokens, 8, generator=generator, dtype=torch.float64)


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ragged(rows: int, cols: int) -> Tensor:
    """A boolean mask in which every row sees a column, and no two rows the same."""
    seen = torch.arange(cols) <= torch.arange(rows)[:, None] + cols - rows
    return torch.stack([seen, seen & (torch.arange(cols) != 1)])[:, None]


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"query": heads(4, 7, 0), "key": heads(4, 7, 1)},
    "full": {"query": heads(4, 7, 0), "key": heads(2, 9, 1), "is_causal": False},
    "one new token": {"query": heads(4, 1, 0), "key": heads(2, 9, 1)},
    "one new token and a mask": {
        "query": heads(4, 1, 0),
        "key": heads(2, 9, 1),
        "attention_mask": ragged(1, 9),
    },
    "one new token and position bias": {
        "query": heads(4, 1, 0),
        "key": heads(2, 9, 1),
        "position_bias": numbers(1, 4, 1, 9),
    },
    "a cache that is not full yet": {"query": heads(4, 5, 0), "key": heads(2, 9, 1)},
    "a boolean mask": {
        "query": heads(4, 7, 0),
        "key": heads(2, 9, 1),
        "attention_mask": ragged(7, 9),
    },
    "an additive mask": {
        "query": heads(4, 7, 0),
        "key": heads(2, 9, 1),
        "attention_mask": numbers(2, 1, 7, 9),
        "scaling": 0.7,
    },
    "position bias": {
        "query": heads(4, 7, 0),
        "key": heads(2, 9, 1),
        "is_causal": False,
        "position_bias": numbers(1, 4, 7, 9),
    },
    "position bias, causal, with a cache": {
        "query": heads(4, 5, 0),
        "key": heads(4, 9, 1),
        "position_bias": numbers(1, 4, 5, 9),
    },
    "position bias and a boolean mask": {
        "query": heads(4, 7, 0),
        "key": heads(4, 9, 1),
        "attention_mask": ragged(7, 9),
        "position_bias": numbers(1, 4, 7, 9),
    },
    "position bias and an additive mask": {
        "query": heads(4, 7, 0),
        "key": heads(4, 9, 1),
        "attention_mask": numbers(2, 1, 7, 9),
        "position_bias": numbers(1, 4, 7, 9),
    },
    "keys that lie the other way round": {
        "query": heads(4, 7, 0).mT.contiguous().mT,
        "key": heads(2, 7, 1).mT.contiguous().mT,
    },
    "queries for the whole batch": {
        "query": heads(4, 3, 0, batch=1),
        "key": heads(4, 9, 1),
        "is_causal": False,
    },
}


def eager_with_sinks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor, **given: Any
) -> tuple[Tensor]:
    """Agarwal et al. 2025: one more score in the softmax, which has no value."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * query.shape[-1] ** -0.5
    mask = given["attention_mask"]
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - 1)
        mask = mask if query.shape[2] == 1 else mask.tril()
    scores = scores.masked_fill(~mask, -1e30)
    sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return ((shares @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(),)


def plain_attention(*given: Any, s_aux: Tensor | None = None, **keywords: Any) -> Any:
    if s_aux is None:
        return sdpa_attention_forward(*given, **keywords)
    module, query, key, value, mask = given
    return *eager_with_sinks(module, query, key, value, s_aux, attention_mask=mask), None


def every_mask(*given: Any, **keywords: Any) -> Tensor | None:
    return sdpa_mask(*given, **(keywords | {"allow_is_causal_skip": False}))
