"""Softmax attention on the CPU: the reference, in float32 for half-precision inputs.

Of a varlen batch, one sequence after the other. PyTorch can differentiate every operation.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..dispatcher import upcast
from ..statistics import largest, per_head
from . import reference
from .call import Call, Results, Sequences


def forward(call: Call, results: Results) -> None:
    """Fill the results of a call, statistics where they are wanted."""
    if call.sequences is not None:
        _forward_varlen(call, call.sequences, results)
        return
    out, max_log_sum, lse, stats, heads, sample = results
    q, k, v, mask = _float32(*call[:4])
    k, v = (reference.without_padding(t, call.key_lengths) for t in (k, v))
    p, row_lse, s = _probabilities(call, q, k, mask)
    a = reference.attend(p, v, _keep(call, s), call.dropout_p)
    out.copy_(a)
    max_log_sum.copy_(_max_log_sum(p, s))
    if lse is None or stats is None or heads is None:
        return
    lse.copy_(row_lse)
    stats.copy_(per_head(p, s, a))
    if sample is not None:
        wanted = sample >= 0
        heads[wanted] = a[sample[wanted]].transpose(1, 2).flatten(2).to(heads.dtype)


def backward(grad: Tensor, call: Call) -> Sequence[Tensor | None]:
    """Return dq, dk, dv and dS (B, H, N, M), the gradient of an additive mask before broadcasting.

    Of a varlen batch there is no dS.
    """
    if call.sequences is not None:
        return _backward_varlen(grad, call, call.sequences)
    g, q, k, v, mask = _float32(grad, *call[:4])
    k, v = (reference.without_padding(t, call.key_lengths) for t in (k, v))
    p, _, s = _probabilities(call, q, k, mask)
    params = _keep(call, s), call.dropout_p, call.scale, call.softcap
    return reference.backward(g, q, k, v, p, *params)


def _float32(*tensors: Tensor | None) -> list[Any]:
    """Return half precision as float32, anything else as it is."""
    return [None if t is None else upcast(t) for t in tensors]


def _probabilities(call: Call, q: Any, k: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    params = call.is_causal, call.scale, call.softcap, call.window
    return reference.probabilities(q, k, mask, call.key_lengths, *params)


def _keep(call: Call, s: Tensor, first: int = 0) -> Tensor | None:
    """Return what dropout keeps of the scores of entries from ``first`` on."""
    if call.seed is None:
        return None
    return reference.keep_mask(call.seed, *s.shape, p=call.dropout_p, first=first)


def _max_log_sum(p: Tensor, s: Tensor) -> Tensor:
    """Return (B, H, N, 2) as ``Results`` states; the backward here computes P again."""
    score = largest(s, (-1,))
    score = score.masked_fill(score == -math.inf, 0)
    return torch.stack((score, -largest(p, (-1,)).clamp(min=0).log()), dim=-1).float()


# --- Sequences side by side -----------------------------------------------------------------------


def _forward_varlen(call: Call, sequences: Sequences, results: Results) -> None:
    out, max_log_sum, lse, stats, heads, sample = results
    out.zero_()
    max_log_sum.zero_()
    if lse is not None and stats is not None and heads is not None:
        lse.fill_(-math.inf)
        nothing = call.query.new_zeros(1, 1, 0, 0)
        stats.copy_(per_head(nothing, nothing, nothing))
        if sample is not None:
            heads[sample >= 0] = 0
    for number, rows, cols in _sequences(sequences):
        q, k, v = _one(call.query, rows), _one(call.key, cols), _one(call.value, cols)
        p, row_lse, s = _probabilities(call, q, k, None)
        a = reference.attend(p, v, _keep(call, s, number), call.dropout_p)
        out[rows] = a[0].transpose(0, 1).to(out.dtype)
        max_log_sum[:, rows] = _max_log_sum(p, s)[0]
        if lse is None or stats is None or heads is None:
            continue
        lse[:, rows] = row_lse[0]
        stats[:, number] = per_head(p, s, a)[:, 0]
        if sample is not None:
            captured = a[0].transpose(0, 1).flatten(1).to(heads.dtype)
            heads[sample == number, : len(captured)] = captured


def _backward_varlen(grad: Tensor, call: Call, sequences: Sequences) -> list[Tensor | None]:
    dq, dk, dv = (torch.zeros_like(t, dtype=upcast(t).dtype) for t in call[:3])
    for number, rows, cols in _sequences(sequences):
        g, q = _one(grad, rows), _one(call.query, rows)
        k, v = _one(call.key, cols), _one(call.value, cols)
        p, _, s = _probabilities(call, q, k, None)
        params = _keep(call, s, number), call.dropout_p, call.scale
        *gradients, _ = reference.backward(g, q, k, v, p, *params)
        for slot, gradient in zip((dq[rows], dk[cols], dv[cols]), gradients, strict=True):
            slot.copy_(gradient[0].transpose(0, 1))
    return [dq, dk, dv, None]


def _sequences(sequences: Sequences) -> Iterator[tuple[int, slice, slice]]:
    """Yield number, rows and columns of each sequence that has both."""
    starts, key_starts = sequences.starts.tolist(), sequences.key_starts.tolist()
    ranges = zip(pairwise(starts), pairwise(key_starts), strict=True)
    for number, ((row, row_end), (col, col_end)) in enumerate(ranges):
        if row < row_end and col < col_end:
            yield number, slice(row, row_end), slice(col, col_end)


def _one(t: Tensor, tokens: slice) -> Tensor:
    """Return a sequence as a batch of one, (1, H, N, D), half precision as float32."""
    return upcast(t[tokens].transpose(0, 1)[None])
