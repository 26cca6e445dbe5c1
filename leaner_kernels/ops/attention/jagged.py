"""Attention of jagged nested tensors: each is a varlen batch with its starts, and so is the result.

PyTorch names its longest sequence in private, and so does its own attention of them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._checks import ArgumentError, has_values
from ..statistics import AttentionStats

Result = TypeVar("Result", Tensor, AttentionStats)


def attention_jagged(
    attend: Callable[..., Result],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    others: dict[str, Any],
    **params: Any,
) -> Result:
    """Return the output (B, H, j, D), or statistics, whose lse is (B, H, j).

    Args:
        attend: ``attention_varlen`` or ``attention_varlen_with_stats``.
        query: (B, H, j, D), jagged along j.
        key: (B, Hkv, j, D), jagged; its sequences may have other lengths.
        value: as ``key``, with its sequences.
        others: arguments that ``attend`` does not have, by name: must be None.
        **params: of ``attend``.

    Raises:
        ValueError: other layouts or axes, sequences with holes, one of ``others``, or what
            ``attend`` refuses.
    """
    for name, other in others.items():
        if other is not None:
            raise ArgumentError(f"{name} must be left out beside jagged nested tensors")
    each: tuple[Any, ...] = query, key, value
    for name, t in zip(("query", "key", "value"), each):
        if getattr(t, "layout", None) is not torch.jagged:
            got = f"a tensor of {t.layout}" if isinstance(t, Tensor) else type(t).__name__
            raise ArgumentError(f"{name} must be a jagged nested tensor as query is, got {got}")
        if t.dim() != 4 or t._ragged_idx != 2:
            raise ArgumentError(f"{name} must be jagged along j of (B, H, j, D), got {t.shape}")
        if t.lengths() is not None:
            raise ArgumentError(f"{name} must have no holes: call .contiguous() on it")
    starts, key_starts, value_starts = (t.offsets() for t in each)
    # Known to be the same: a GPU is not made to wait for that.
    known = has_values(key_starts) and has_values(value_starts)
    same = key.shape[2] == value.shape[2] or (known and torch.equal(key_starts, value_starts))
    if not same:
        raise ArgumentError("key and value must have the same sequences: make both of one offsets")
    longest, longest_key = (t._get_max_seqlen() for t in each[:2])
    if query.shape[2] != key.shape[2]:
        params |= {"cu_seqlens_k": key_starts, "max_seqlen_k": longest_key}
    packed = (t.values().transpose(0, 1) for t in each)
    found = attend(*packed, starts, longest, **params)

    def nested(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            values, starts, jagged_dim=2, max_seqlen=longest
        )

    if isinstance(found, Tensor):
        return nested(found.transpose(0, 1))
    return found._replace(out=nested(found.out.transpose(0, 1)), lse=nested(found.lse))
