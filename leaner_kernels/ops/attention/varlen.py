"""Softmax attention over a varlen batch of sequences of any length, with its statistics.

Sizes: T tokens, S sequences, H query heads, D head dimension. Sequence i owns the tokens from
``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``; what lies before the first and after the last is
padding, which nothing reads. The limits are those of ``attention``.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leaner_kernels.ops import _vmap
from leaner_kernels.ops._checks import (
    autocast,
    check_device,
    check_scale,
)
from leaner_kernels.ops._operators import (
    SingleLevelFunction,
    autocast_rule,
    below_autograd,
    differentiable,
    differentiable_backward,
    direct,
    library,
    on_cpu,
    on_device,
)
from leaner_kernels.ops._stats import AttentionStats
from leaner_kernels.ops.attention import reference
from leaner_kernels.ops.attention.call import Call, new_call, unless_empty
from leaner_kernels.ops.attention.checks import (
    check_params,
    check_varlen,
)
from leaner_kernels.ops.attention.dropout import draw_seed, keep_mask
from leaner_kernels.ops.attention.operators import (
    _upcast,
    has_dropout,
    max_log_sum_of,
    ops,
    rows_contiguous,
)
from leaner_kernels.ops.attention.repeat import Way, repeated
from leaner_kernels.ops.attention.ways import addresses

# --- The short way of a call like one before ------------------------------------------------------


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
    return _backward(grad, *inputs, *sequences, out, rows, 0.0, is_causal, scale)


_SHORT_WAY = Way(
    count=4,
    rank=3,
    pointers=_pointers,
    new_rows=_new_rows,
    new_gradients=lambda tensors: tuple(map(new_contiguous, tensors[:3])),
    gradient_pointers=addresses,
    rows_contiguous=rows_contiguous,
    backward=_backward_by_operator,
)


@repeated(_SHORT_WAY)
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
    seed = draw_seed(dropout_p, query.device)
    if key_starts is None:
        key_starts, max_seqlen_k = starts, max_seqlen
    sequences = starts, key_starts, max_seqlen, max_seqlen_k
    return _attention(query, key, value, *sequences, seed, dropout_p, is_causal, scale)[0]


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
    *results, _ = _attention_with_stats(
        query, key, value, *sequences, seed, sample, dropout_p, is_causal, scale
    )
    stats = AttentionStats(*results)
    return stats if sample is not None else stats._replace(heads=None)


# --- Schemas and what the operators return -------------------------------------------------------

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor cu_seqlens_k, "
    "SymInt max_seqlen, SymInt max_seqlen_k, Tensor? seed"
)
_PARAMS = "float dropout_p, bool is_causal, float? scale"
library.define(f"attention_varlen({_INPUTS}, {_PARAMS}) -> (Tensor out, Tensor max_log_sum)")
library.define(
    f"attention_varlen_with_stats({_INPUTS}, Tensor? sample, {_PARAMS}) -> (Tensor out, "
    "Tensor lse, Tensor max_logit, Tensor entropy, Tensor prob_norm, Tensor head_norm, "
    "Tensor heads, Tensor max_log_sum)"
)
library.define(
    f"attention_varlen_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor max_log_sum, {_PARAMS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


def new_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate out (T, H, D) and max_log_sum (H, T, 2), which see ``new_max_log_sum``."""
    tokens, heads, _ = query.shape
    return new_contiguous(query), query.new_empty(heads, tokens, 2, dtype=torch.float32)


def new_stats(
    query: Tensor, cu_seqlens: Tensor, sample: Tensor | None, max_seqlen: int
) -> list[Tensor]:
    """Allocate lse (H, T), four statistics (S, H) and heads (slots, max_seqlen, H * D)."""
    tokens, num_heads, dim = query.shape
    slots = 0 if sample is None else sample.shape[0]
    per_head = ((cu_seqlens.shape[0] - 1, num_heads),) * 4
    shapes = (num_heads, tokens), *per_head, (slots, max_seqlen, num_heads * dim)
    return [query.new_empty(shape, dtype=torch.float32) for shape in shapes]


def new_contiguous(t: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the shape of ``t``."""
    return t.new_empty(t.shape)


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
    (one,) = _upcast(t[tokens].transpose(0, 1)[None])
    return one


def _attention_varlen_cpu(
    query,
    key,
    value,
    cu_seqlens,
    cu_seqlens_k,
    max_seqlen,
    max_seqlen_k,
    seed,
    dropout_p,
    is_causal,
    scale,
) -> tuple[Tensor, Tensor]:
    out, max_log_sum = (t.zero_() for t in new_results(query))
    for number, rows, cols in _sequences(cu_seqlens, cu_seqlens_k):
        q, k, v = _one(query, rows), _one(key, cols), _one(value, cols)
        p, _, s = reference.probabilities(q, k, None, None, is_causal, scale)
        a = reference.attend(p, v, _keep(seed, number, s, dropout_p), dropout_p)
        out[rows] = a[0].transpose(0, 1).to(out.dtype)
        max_log_sum[:, rows] = max_log_sum_of(p, s)[0]
    return out, max_log_sum


def _attention_varlen_with_stats_cpu(
    query,
    key,
    value,
    cu_seqlens,
    cu_seqlens_k,
    max_seqlen,
    max_seqlen_k,
    seed,
    sample,
    dropout_p,
    is_causal,
    scale,
) -> tuple[Tensor, ...]:
    out, max_log_sum = (t.zero_() for t in new_results(query))
    lse, *per_head, heads = new_stats(query, cu_seqlens, sample, max_seqlen)
    lse.fill_(float("-inf"))
    for slot, nothing in zip(per_head, (float("-inf"), 0, 0, 0), strict=True):
        slot.fill_(nothing)
    if sample is not None:
        heads[sample >= 0] = 0
    for number, rows, cols in _sequences(cu_seqlens, cu_seqlens_k):
        q, k, v = _one(query, rows), _one(key, cols), _one(value, cols)
        p, lse[:, rows], s = reference.probabilities(q, k, None, None, is_causal, scale)
        a = reference.attend(p, v, _keep(seed, number, s, dropout_p), dropout_p)
        out[rows] = a[0].transpose(0, 1).to(out.dtype)
        max_log_sum[:, rows] = max_log_sum_of(p, s)[0]
        for slot, value_ in zip(per_head, reference.statistics(p, s, a), strict=True):
            slot[number] = value_[0]
        if sample is not None:
            heads[sample == number, : q.shape[2]] = a[0].transpose(0, 1).flatten(1).to(heads.dtype)
    return out, lse, *per_head, heads, max_log_sum


def _attention_varlen_backward_cpu(
    grad,
    query,
    key,
    value,
    cu_seqlens,
    cu_seqlens_k,
    max_seqlen,
    max_seqlen_k,
    seed,
    out,
    max_log_sum,
    dropout_p,
    is_causal,
    scale,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (new_contiguous(t).zero_() for t in (query, key, value))
    for number, rows, cols in _sequences(cu_seqlens, cu_seqlens_k):
        g, q, k, v = _one(grad, rows), _one(query, rows), _one(key, cols), _one(value, cols)
        p, _, s = reference.probabilities(q, k, None, None, is_causal, scale)
        keep = _keep(seed, number, s, dropout_p)
        *gradients, _ = reference.backward(g, q, k, v, p, keep, dropout_p, scale)
        for slot, gradient in zip((dq[rows], dk[cols], dv[cols]), gradients, strict=True):
            slot.copy_(gradient[0].transpose(0, 1))
    return dq, dk, dv


# --- CUDA: the Triton kernels, imported at the first call ----------------------------------------


def _launch_arguments(inputs: tuple[Any, ...], params: tuple[Any, ...]) -> tuple[Call, Any]:
    """Return what the launchers take first, and the sequences that they take last."""
    from leaner_kernels.ops.attention.kernels.scores import Sequences

    query, key, value, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, seed = inputs
    # Free unless strided: the kernels count along them.
    starts, key_starts = cu_seqlens.contiguous(), cu_seqlens_k.contiguous()
    sequences = Sequences(starts, key_starts, max_seqlen, max_seqlen_k)
    return new_call(query, key, value, None, None, seed, *params), sequences


@unless_empty(_attention_varlen_cpu, 7)
def _attention_varlen_cuda(*args) -> tuple[Tensor, Tensor]:
    from leaner_kernels.ops.attention.kernels import online_forward

    call, sequences = _launch_arguments(args[:8], args[8:])
    out, max_log_sum = new_results(call.query)
    online_forward.launch(call, out, max_log_sum, sequences=sequences)
    return out, max_log_sum


@unless_empty(_attention_varlen_with_stats_cpu, 7)
def _attention_varlen_with_stats_cuda(*args) -> tuple[Tensor, ...]:
    from leaner_kernels.ops.attention.kernels import online_forward

    sample = args[8]
    call, sequences = _launch_arguments(args[:8], args[9:])
    out, max_log_sum = new_results(call.query)
    *stats, heads = new_stats(call.query, sequences.starts, sample, sequences.rows)
    online_forward.launch(call, out, max_log_sum, stats, sequences)
    if sample is not None:
        online_forward.launch_capture(call, sample, heads, sequences)
    return out, *stats, heads, max_log_sum


@unless_empty(_attention_varlen_backward_cpu, 8)
def _attention_varlen_backward_cuda(grad, *args) -> tuple[Tensor, Tensor, Tensor]:
    from leaner_kernels.ops.attention.kernels import online_backward

    out, max_log_sum = args[8:10]
    call, sequences = _launch_arguments(args[:8], args[10:])
    dq, dk, dv = (new_contiguous(t) for t in call[:3])
    online_backward.launch(grad, call, out, max_log_sum, dq, dk, dv, sequences)
    return dq, dk, dv


for _name, _cpu, _cuda in (
    ("attention_varlen", _attention_varlen_cpu, _attention_varlen_cuda),
    (
        "attention_varlen_with_stats",
        _attention_varlen_with_stats_cpu,
        _attention_varlen_with_stats_cuda,
    ),
    ("attention_varlen_backward", _attention_varlen_backward_cpu, _attention_varlen_backward_cuda),
):
    library.impl(_name, on_cpu(_cpu), "CPU")
    library.impl(_name, on_device(_cuda), "CUDA")


# --- Fakes: what each operator returns, without computing it -------------------------------------


@torch.library.register_fake("leaner_kernels::attention_varlen", lib=library)
def _(query, *_):
    return new_results(query)


@torch.library.register_fake("leaner_kernels::attention_varlen_with_stats", lib=library)
def _(query, key, value, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, seed, sample, *_):
    out, max_log_sum = new_results(query)
    return out, *new_stats(query, cu_seqlens, sample, max_seqlen), max_log_sum


@torch.library.register_fake("leaner_kernels::attention_varlen_backward", lib=library)
def _(grad, query, key, value, *_):
    return tuple(new_contiguous(t) for t in (query, key, value))


# --- Autograd ------------------------------------------------------------------------------------

_backward = direct("attention_varlen_backward", _attention_varlen_backward_cuda, 4)


class _AttentionVarlen(SingleLevelFunction):
    """Runs either operator; everything after ``out`` is a statistic."""

    @staticmethod
    def forward(ctx, op, keyset, *args):
        out, *stats = below_autograd(op, keyset, args)
        query, key, value, cu_seqlens, cu_seqlens_k, *ctx.longest, seed = args[:8]
        ctx.save_for_backward(query, key, value, cu_seqlens, cu_seqlens_k, seed, out, stats[-1])
        ctx.params = args[-3:]
        ctx.num_others = len(args) - 3
        ctx.mark_non_differentiable(*stats)
        # Zeros for the statistics would be a launch each.
        ctx.set_materialize_grads(False)
        return out, *stats

    @staticmethod
    def backward(ctx, grad, *_):
        gradients = None, None, None
        if grad is not None:
            *inputs, seed, out, max_log_sum = ctx.saved_tensors
            grad = rows_contiguous(grad)
            gradients = _backward(grad, *inputs, *ctx.longest, seed, out, max_log_sum, *ctx.params)
        return None, None, *gradients, *(None,) * ctx.num_others


differentiable("attention_varlen", _AttentionVarlen, _attention_varlen_cpu)
differentiable("attention_varlen_with_stats", _AttentionVarlen, _attention_varlen_with_stats_cpu)
differentiable_backward(ops.attention_varlen_backward.default, _attention_varlen_backward_cpu, 4)


# How the functions above call them.
_attention = direct("attention_varlen", _attention_varlen_cuda, 3, _AttentionVarlen)
_attention_with_stats = direct(
    "attention_varlen_with_stats", _attention_varlen_with_stats_cuda, 3, _AttentionVarlen
)


# --- Regions of autocast, and vmap: into heads, which every sequence has ------------------------

_QKV = 1, 1, 1, None, None, None, None, None
for _name, _given, _found in (
    ("attention_varlen", _QKV, (1, 0)),
    ("attention_varlen_with_stats", _QKV, (1, 0, 1, 1, 1, 1, 2, 0)),
    ("attention_varlen_backward", (1, *_QKV, 1, 0), (1, 1, 1)),
):
    _vmap.register(library, _name, _given, _found, apart=has_dropout(_name))
autocast_rule("attention_varlen", 3)
autocast_rule("attention_varlen_with_stats", 3)
