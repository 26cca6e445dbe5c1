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
from ..route import Results
from ..statistics import largest, per_head
from . import reference
from .call import Call, Sequences


def forward(call: Call, results: Results) -> None:
    """Fill the results of a call, statistics where they are wanted."""
    out, max_log_sum, lse, stats, heads, sample = results
    if max_log_sum is None:
        # The backward here computes P again: calls that save the log-sum-exp alone are empty.
        assert lse is not None
        out.zero_()
        lse.fill_(math.inf)  # no row has a key
        return
    if call.sequences is None:
        _fill(call, results)
        return
    # Tokens outside all sequences, and sequences without rows or keys.
    out.zero_()
    max_log_sum[..., 0], max_log_sum[..., 1] = 0, math.inf
    if lse is not None and stats is not None and heads is not None:
        lse.fill_(-math.inf)
        nothing = call.query.new_zeros(1, 1, 0, 0)
        stats.copy_(per_head(nothing, nothing, nothing))
        if sample is not None:
            heads[sample >= 0] = 0
    for number, rows, cols in _sequences(call.sequences):
        sequence_results = Results(_one(out, rows), max_log_sum[None, :, rows])
        if lse is not None and stats is not None and heads is not None:
            # Slots that name this sequence, the only entry of its call.
            here = None if sample is None else torch.where(sample == number, 0, -1)
            sequence_results = sequence_results._replace(
                lse=lse[None, :, rows],
                stats=stats[:, number : number + 1],
                heads=heads[:, : rows.stop - rows.start],
                sample=here,
            )
        _fill(_sequence(call, rows, cols), sequence_results, number)


def _fill(call: Call, results: Results, first: int = 0) -> None:
    """Fill the results of a batch whose entries are those from ``first`` on, for dropout."""
    out, max_log_sum, lse, stats, heads, sample = results
    assert max_log_sum is not None
    q, k, v, mask = _float32(*call.operands, call.attn_mask)
    k, v = (reference.without_padding(t, call.key_lengths) for t in (k, v))
    p, row_lse, s = _probabilities(call, q, k, mask)
    a = reference.forward(p, v, _keep(call, s, first), call.dropout_p)
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
    if call.sequences is None:
        return _gradients(grad, call)
    dq, dk, dv = (torch.zeros_like(t, dtype=upcast(t).dtype) for t in call.operands)
    for number, rows, cols in _sequences(call.sequences):
        gradients = _gradients(_one(grad, rows), _sequence(call, rows, cols), number)
        for slot, gradient in zip((dq[rows], dk[cols], dv[cols]), gradients):
            slot.copy_(gradient[0].transpose(0, 1))
    return [dq, dk, dv, None]


def _gradients(grad: Tensor, call: Call, first: int = 0) -> tuple[Tensor, ...]:
    g, q, k, v, mask = _float32(grad, *call.operands, call.attn_mask)
    k, v = (reference.without_padding(t, call.key_lengths) for t in (k, v))
    p, _, s = _probabilities(call, q, k, mask)
    keep = _keep(call, s, first)
    numbers = {"scale": call.scale, "softcap": call.softcap}
    return reference.backward(g, q, k, v, p, keep, call.dropout_p, **numbers)


def _float32(*tensors: Tensor | None) -> list[Any]:
    """Return half precision as float32, anything else as it is."""
    return [None if t is None else upcast(t) for t in tensors]


def _probabilities(call: Call, q: Any, k: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    numbers = {"scale": call.scale, "softcap": call.softcap}
    return reference.probabilities(q, k, mask, call.key_lengths, **numbers, **call.visibility)


def _keep(call: Call, s: Tensor, first: int) -> Tensor | None:
    """Return which scores of entries from ``first`` on dropout keeps."""
    if call.seed is None:
        return None
    return reference.keep_mask(call.seed, *s.shape, p=call.dropout_p, first=first)


def _max_log_sum(p: Tensor, s: Tensor) -> Tensor:
    """Return (B, H, N, 2) as ``Results`` states; the backward here computes P again."""
    score = largest(s, (-1,))
    score = score.masked_fill(score == -math.inf, 0)
    return torch.stack((score, -largest(p, (-1,)).clamp(min=0).log()), dim=-1).float()


# --- Sequences side by side -----------------------------------------------------------------------


def _sequences(sequences: Sequences) -> Iterator[tuple[int, slice, slice]]:
    """Yield number, rows and columns of each sequence that has both."""
    starts, key_starts = sequences.starts.tolist(), sequences.key_starts.tolist()
    ranges = zip(pairwise(starts), pairwise(key_starts), strict=True)
    for number, ((row, row_end), (col, col_end)) in enumerate(ranges):
        if row < row_end and col < col_end:
            yield number, slice(row, row_end), slice(col, col_end)


def _sequence(call: Call, rows: slice, cols: slice) -> Call:
    """Return the call of one sequence."""
    query, key, value = _one(call.query, rows), _one(call.key, cols), _one(call.value, cols)
    return call._replace(query=query, key=key, value=value, sequences=None)


def _one(t: Tensor, tokens: slice) -> Tensor:
    """Return a view of a sequence as a batch of one, (1, H, N, D)."""
    return t[tokens].transpose(0, 1)[None]
