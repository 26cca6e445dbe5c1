"""Softmax attention over a varlen batch of sequences of any length, with its statistics.

Sizes: T tokens, S sequences, H query heads, D head dimension. Sequence i owns the tokens from
``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``; what lies before the first and after the last is
padding, which nothing reads. The limits are those of ``attention``.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import autocast, check_device, check_scale
from .._operators import (
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    register,
    rows_contiguous,
    upcast,
)
from ..statistics import AttentionStats
from . import reference
from .call import Call, Sequences, check_params, check_varlen, draw_seed, new_call
from .fast_path import FastPath, addresses, with_fast_path
from .library import faster_varlen, varlen_attention
from .operators import max_log_sum_of
from .reference import keep_mask

# --- The fast path of a call like one before ------------------------------------------------------


def _pointers(tensors):
    query, key, value, starts = tensors
    starts = starts.data_ptr()
    return [query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0, starts, starts]


def _new_rows(query):
    tokens, heads, _ = query.shape
    return query.new_empty((heads, tokens, 2), dtype=torch.float32)


def _backward_by_operator(grad, tensors, out, rows, *, max_seqlen, is_causal, scale):
    *inputs, starts = tensors
    sequences = starts, starts, max_seqlen, max_seqlen, None
    return VARLEN.backward(grad, *inputs, *sequences, out, rows, 0.0, is_causal, scale)


_SHORT_WAY = FastPath(
    count=4,
    rank=3,
    pointers=_pointers,
    new_rows=_new_rows,
    new_gradients=lambda tensors: tuple(t.new_empty(t.shape) for t in tensors[:3]),
    gradient_pointers=addresses,
    rows_contiguous=rows_contiguous,
    backward=_backward_by_operator,
)


@with_fast_path(_SHORT_WAY)
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Softmax attention within each sequence of a varlen batch: nothing is padded.

    Args:
        query: (T, H, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous, such as a view of a (T, 3, H, D) projection; D from 1
            to 128.
        key: (Tk, Hkv, D), dtype and device of ``query``; Hkv = H, or a divisor of H with
            ``enable_gqa``. Tk = T unless ``cu_seqlens_k`` is given.
        value: (Tk, Hkv, D), as ``key``.
        cu_seqlens: (S + 1,) integers, or a list of ints, where each sequence starts and, last,
            where the last one ends: not decreasing, in [0, T]. A sequence may be empty, and S may
            be 0. All but int32 is converted. On a GPU the values of a tensor are not read back to
            be checked: none leads to an access outside the tensors.
        max_seqlen: the length of the longest sequence, or more; rows of a sequence past it are
            neither computed nor written.
        cu_seqlens_k: (S + 1,), the sequences of the keys where they differ.
        max_seqlen_k: as ``max_seqlen``, for the keys; together with ``cu_seqlens_k``.
        dropout_p: probability of dropping a probability, in [0, 1).
        is_causal: row i of a sequence sees its columns 0 to i.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        enable_gqa: let H / Hkv query heads share each key and value head.

    Returns:
        (T, H, D), contiguous, in ``query.dtype``. Zero for tokens outside every sequence and for
        the rows of a sequence without keys; the gradients of tokens outside are zero too.

    Raises:
        ValueError: a shape, dtype, stride, device or sequence outside the list above.

    On a GPU, self-attention without dropout is dispatched to PyTorch's ``varlen_attn`` where
    ``library.toml`` says that it is faster at the mean length, T / S. Its gradients are not bitwise
    deterministic, and it has no second derivatives; deterministic algorithms and torch.func keep
    every call here.

    Row and column count from the start of their sequence, also in the mask of dropout: sequence i
    gets what entry i of a batch would get from ``attention`` on a GPU. Second derivatives and
    forward mode compute in PyTorch, one sequence after the other, and read ``cu_seqlens`` back.

    Numerics and source: as ``attention``.
    """
    query, key, value = autocast(query, key, value)
    check_params(dropout_p, is_causal, enable_gqa)
    starts, key_starts = check_varlen(
        query, key, value, cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k, enable_gqa
    )
    scale = check_scale(scale)
    check_device(query.device)
    if query.is_cuda and key_starts is None:
        given = query, key, value, starts
        if faster_varlen(*given, is_causal, scale, dropout_p) is not None:
            return varlen_attention(*given, max_seqlen, is_causal, scale)
    seed = draw_seed(dropout_p, query.device)
    if key_starts is None:
        key_starts, max_seqlen_k = starts, max_seqlen
    sequences = starts, key_starts, max_seqlen, max_seqlen_k
    return VARLEN.forward(query, key, value, *sequences, seed, dropout_p, is_causal, scale)[0]


def attention_varlen_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sample: Tensor | None = None,
) -> AttentionStats:
    """``attention_varlen``, with statistics of every head of every sequence.

    Args:
        query: (T, H, D), as in ``attention_varlen``.
        key: (Tk, Hkv, D), as in ``attention_varlen``.
        value: (Tk, Hkv, D), as in ``attention_varlen``.
        cu_seqlens: as in ``attention_varlen``.
        max_seqlen: as in ``attention_varlen``.
        cu_seqlens_k: as in ``attention_varlen``.
        max_seqlen_k: as in ``attention_varlen``.
        dropout_p: as in ``attention_varlen``.
        is_causal: as in ``attention_varlen``.
        scale: as in ``attention_varlen``.
        enable_gqa: as in ``attention_varlen``.
        sample: (slots,) int32 on the device of ``query``: the sequences whose heads are captured.
            A negative index leaves its slot of ``heads`` unwritten; on a GPU so does one past the
            sequences, which the CPU refuses.

    Returns:
        AttentionStats: out (T, H, D); lse (H, T), -inf outside every sequence; max_logit, entropy,
            prob_norm and head_norm (S, H), of an empty sequence -inf, 0, 0 and 0; heads
            (slots, max_seqlen, H * D), zero past the end of a sequence, None without ``sample``.

    Raises:
        ValueError: a shape, dtype, stride, device or sequence outside the list above.

    Numerics: as ``attention_with_stats``.
    """
    query, key, value = autocast(query, key, value)
    check_params(dropout_p, is_causal, enable_gqa)
    starts, key_starts = check_varlen(
        query, key, value, cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k, enable_gqa, sample
    )
    scale = check_scale(scale)
    check_device(query.device)
    seed = draw_seed(dropout_p, query.device)
    if key_starts is None:
        key_starts, max_seqlen_k = starts, max_seqlen
    sequences = starts, key_starts, max_seqlen, max_seqlen_k
    *results, _ = VARLEN.with_stats(
        query, key, value, *sequences, seed, sample, dropout_p, is_causal, scale
    )
    stats = AttentionStats(*results)
    return stats if sample is not None else stats._replace(heads=None)


# --- What the operator returns -------------------------------------------------------------------


def _shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    *rest: Any,
) -> Shapes:
    tokens, heads, dim = query.shape
    per_head, rows = (cu_seqlens.shape[0] - 1, heads), (heads, tokens)
    return Shapes(query.shape, rows, per_head, (max_seqlen, heads * dim), (*rows, 2))


# --- CPU: the reference, one sequence after the other --------------------------------------------


def _sequences(cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Yield number, rows and columns of each sequence that has both."""
    ranges = zip(pairwise(cu_seqlens.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for number, ((row, row_end), (col, col_end)) in enumerate(ranges):
        if row < row_end and col < col_end:
            yield number, slice(row, row_end), slice(col, col_end)


def _keep(seed: Tensor | None, number: int, s: Tensor, dropout_p: float) -> Tensor | None:
    return None if seed is None else keep_mask(seed, *s.shape, p=dropout_p, first=number)


def _one(t: Tensor, tokens: slice) -> Tensor:
    """Return a sequence as a batch of one, (1, H, N, D), half precision as float32."""
    return upcast(t[tokens].transpose(0, 1)[None])


class _Cpu:
    @staticmethod
    def forward(inputs, params, out, max_log_sum, stats, sample) -> None:
        query, key, value, cu_seqlens, cu_seqlens_k, _, _, seed = inputs
        dropout_p, is_causal, scale = params
        out.zero_()
        max_log_sum.zero_()
        if stats is not None:
            for slot, nothing in zip(stats, (-math.inf, -math.inf, 0, 0, 0)):
                slot.fill_(nothing)
            if sample is not None:
                stats[5][sample >= 0] = 0
        for number, rows, cols in _sequences(cu_seqlens, cu_seqlens_k):
            q, k, v = _one(query, rows), _one(key, cols), _one(value, cols)
            p, lse, s = reference.probabilities(q, k, None, None, is_causal, scale)
            a = reference.attend(p, v, _keep(seed, number, s, dropout_p), dropout_p)
            out[rows] = a[0].transpose(0, 1).to(out.dtype)
            max_log_sum[:, rows] = max_log_sum_of(p, s)[0]
            if stats is None:
                continue
            stats[0][:, rows] = lse[0]
            for slot, statistic in zip(stats[1:5], reference.statistics(p, s, a), strict=True):
                slot[number] = statistic[0]
            if sample is not None:
                heads = a[0].transpose(0, 1).flatten(1).to(stats[5].dtype)
                stats[5][sample == number, : len(heads)] = heads

    @staticmethod
    def backward(grad, inputs, params, saved, grads) -> None:
        query, key, value, cu_seqlens, cu_seqlens_k, _, _, seed = inputs
        dropout_p, is_causal, scale = params
        dq, dk, dv = (slot.zero_() for slot in grads)
        for number, rows, cols in _sequences(cu_seqlens, cu_seqlens_k):
            g, q, k, v = _one(grad, rows), _one(query, rows), _one(key, cols), _one(value, cols)
            p, _, s = reference.probabilities(q, k, None, None, is_causal, scale)
            keep = _keep(seed, number, s, dropout_p)
            *gradients, _ = reference.backward(g, q, k, v, p, keep, dropout_p, scale)
            for slot, gradient in zip((dq[rows], dk[cols], dv[cols]), gradients, strict=True):
                slot.copy_(gradient[0].transpose(0, 1))


# --- CUDA: the Triton kernels, imported at the first call ----------------------------------------


class _Cuda:
    @staticmethod
    def forward(inputs, params, out, max_log_sum, stats, sample) -> None:
        from .kernels import online_forward

        call, sequences = _launch_arguments(inputs, params)
        of_all = None if stats is None else stats[:5]
        online_forward.launch(call, out, max_log_sum, of_all, sequences)
        if stats is not None and sample is not None:
            online_forward.launch_capture(call, sample, stats[5], sequences)

    @staticmethod
    def backward(grad, inputs, params, saved, grads) -> None:
        from .kernels import online_backward

        call, sequences = _launch_arguments(inputs, params)
        (out, max_log_sum), (dq, dk, dv) = saved, grads
        online_backward.launch(grad, call, out, max_log_sum, dq, dk, dv, sequences)


def _launch_arguments(inputs: tuple[Any, ...], params: tuple[Any, ...]) -> tuple[Call, Any]:
    """Return what the launchers take first, and the sequences that they take last."""
    query, key, value, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, seed = inputs
    # Free unless strided: the kernels count along them.
    starts, key_starts = cu_seqlens.contiguous(), cu_seqlens_k.contiguous()
    sequences = Sequences(starts, key_starts, max_seqlen, max_seqlen_k)
    return new_call(query, key, value, None, None, seed, *params), sequences


# --- Registration --------------------------------------------------------------------------------


def _flops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen: int,
    max_seqlen_k: int,
    *rest: Any,
) -> Products:
    _, heads, dim = query.shape
    lengths = zip(_lengths(cu_seqlens, max_seqlen), _lengths(cu_seqlens_k, max_seqlen_k))
    product = 2 * heads * dim * sum(rows * cols for rows, cols in lengths)
    return Products(product, product)


def _lengths(starts: Tensor, longest: int) -> list[int]:
    """Return the tokens of each sequence, all of the longest where values cannot be read."""
    if starts.device.type == "meta" or isinstance(starts, torch._subclasses.FakeTensor):
        return [longest] * (starts.shape[0] - 1)
    return starts.diff().clamp(max=longest).tolist()


VARLEN = register(
    "attention_varlen",
    inputs="Tensor query, Tensor key, Tensor value",
    others=(
        "Tensor cu_seqlens, Tensor cu_seqlens_k, SymInt max_seqlen, SymInt max_seqlen_k, "
        "Tensor? seed"
    ),
    params="float dropout_p, bool is_causal, float? scale",
    shapes=_shapes,
    save_out=True,
    gradients=("dq", "dk", "dv"),
    cpu=_Cpu(),
    cuda=_Cuda,
    flops=_flops,
    sharding=Sharding(dict.fromkeys(("query", "key", "value"), (None, 1)), (None, 1), (None, 0)),
    # Into heads, which every sequence has.
    vmap=VmapAxes((1, 1, 1, *(None,) * 5), out=1, per_head=1, heads=2, sample=None),
    vmap_loop="seed",
)
