"""The attention operators: schemas, implementations by device, fakes and autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leaner_kernels.ops import _vmap
from leaner_kernels.ops._checks import MAX_ROW_STRIDE
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
    upcast,
)
from leaner_kernels.ops.attention import reference
from leaner_kernels.ops.attention.call import new_call, unless_empty
from leaner_kernels.ops.attention.dropout import keep_mask

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, "
_PACKED = "Tensor qkv, Tensor? key_lengths, Tensor? seed, "
_PARAMS = "float dropout_p, bool is_causal, float? scale"
_CAPPED = f"{_PARAMS}, float softcap"
_RESULT = "(Tensor out, Tensor max_log_sum)"
_STATS = (
    "(Tensor out, Tensor lse, Tensor max_logit, Tensor entropy, Tensor prob_norm, "
    "Tensor head_norm, Tensor heads, Tensor max_log_sum)"
)

library.define(f"attention({_INPUTS} Tensor? seed, {_CAPPED}) -> {_RESULT}")
library.define(
    f"attention_with_stats({_INPUTS} Tensor? seed, Tensor? sample, {_CAPPED}) -> {_STATS}"
)
library.define(
    f"attention_backward(Tensor grad, {_INPUTS} Tensor? seed, Tensor out, Tensor max_log_sum, "
    f"{_CAPPED}, bool mask_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)"
)
library.define(f"attention_qkvpacked({_PACKED} {_PARAMS}) -> {_RESULT}")
library.define(f"attention_qkvpacked_with_stats({_PACKED} Tensor? sample, {_PARAMS}) -> {_STATS}")
library.define(
    f"attention_qkvpacked_backward(Tensor grad, {_PACKED} Tensor out, Tensor max_log_sum, "
    f"{_PARAMS}) -> Tensor"
)
ops = torch.ops.leaner_kernels


def has_dropout(name: str) -> Callable[[tuple[Any, ...]], bool]:
    """Return whether arguments of an operator have a seed: places in its mask are places in B."""
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    seed = names.index("seed")
    return lambda args: args[seed] is not None


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D)."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def new_out(query: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate (B, H, N, D) in the memory order (B, N, H, D), which the next projection reads.

    Of so many heads that its rows would lie further apart than kernels reach, it is contiguous.
    """
    batch, heads, rows, dim = query.shape
    width = heads * dim
    strides = rows * width, dim, width, 1
    if width > MAX_ROW_STRIDE:
        strides = rows * width, rows * dim, dim, 1
    return query.new_empty_strided((batch, heads, rows, dim), strides, dtype=dtype)


def new_packed_out(qkv: Tensor) -> Tensor:
    """Allocate (B, N, H, D), contiguous."""
    batch, rows, _, heads, dim = qkv.shape
    return qkv.new_empty(batch, rows, heads, dim)


def new_max_log_sum(query: Tensor) -> Tensor:
    """Allocate (B, H, N, 2) float32: of each row the largest score, and the log of what it loses.

    Where a row sees a key, the probabilities are exp(score - first - second). What a score is, the
    kernels say: scaled or not. Their sum would lose the second where the first is large, as in a
    row of nothing but -1e9 from a mask.
    """
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, heads, rows, 2), dtype=torch.float32)


def new_stats(query: Tensor, sample: Tensor | None) -> list[Tensor]:
    """Allocate lse (B, H, N), max_logit, entropy, prob_norm and head_norm (B, H) and heads.

    The heads are (S, N, H * D).
    """
    batch, heads, rows, dim = query.shape
    slots = 0 if sample is None else sample.shape[0]
    shapes = (batch, heads, rows), *((batch, heads),) * 4, (slots, rows, heads * dim)
    return [query.new_empty(shape, dtype=torch.float32) for shape in shapes]


def new_gradients(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate dq, dk, dv in the memory order of ``new_out``, and dmask, empty unless wanted."""
    dmask = query.new_empty(0)
    if attn_mask is not None and mask_grad:
        dmask = attn_mask.new_empty(attn_mask.shape)
    return new_out(query), new_out(key), new_out(value), dmask


# --- CPU: the reference, in float32 for half-precision inputs -----------------------------------


def _upcast(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else upcast(t) for t in tensors]


def _in_order(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy (B, H, N, D) to the memory order of ``new_out``."""
    # Allocated like what is copied: vmap and forward mode write to nothing else.
    return new_out(t, dtype).copy_(t)


def _keep(seed: Tensor | None, query: Tensor, key: Tensor, dropout_p: float) -> Tensor | None:
    if seed is None:
        return None
    batch, heads, rows, _ = query.shape
    return keep_mask(seed, batch, heads, rows, key.shape[2], dropout_p)


def max_log_sum_of(p: Tensor, s: Tensor) -> Tensor:
    """Return (B, H, N, 2) as ``new_max_log_sum`` says; the backward here computes P again."""
    score = reference.largest(s, (-1,))
    score = score.masked_fill(score == float("-inf"), 0)
    return torch.stack((score, -reference.largest(p, (-1,)).clamp(min=0).log()), dim=-1).float()


def _attention_cpu(
    query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap
) -> tuple[Tensor, Tensor]:
    q, k, v, mask = _upcast(query, key, value, attn_mask)
    p, _, s = reference.probabilities(q, k, mask, key_lengths, is_causal, scale, softcap)
    a = reference.attend(p, v, _keep(seed, query, key, dropout_p), dropout_p)
    return _in_order(a, query.dtype), max_log_sum_of(p, s)


def _attention_with_stats_cpu(
    query, key, value, attn_mask, key_lengths, seed, sample, dropout_p, is_causal, scale, softcap
) -> tuple[Tensor, ...]:
    q, k, v, mask = _upcast(query, key, value, attn_mask)
    p, lse, s = reference.probabilities(q, k, mask, key_lengths, is_causal, scale, softcap)
    a = reference.attend(p, v, _keep(seed, query, key, dropout_p), dropout_p)
    _, *per_head, heads = new_stats(query, sample)
    for slot, value_ in zip(per_head, reference.statistics(p, s, a), strict=True):
        slot.copy_(value_)
    if sample is not None:
        wanted = sample >= 0
        heads[wanted] = a[sample[wanted]].transpose(1, 2).flatten(2).to(heads.dtype)
    return _in_order(a, query.dtype), lse.float(), *per_head, heads, max_log_sum_of(p, s)


def _attention_backward_cpu(
    grad,
    query,
    key,
    value,
    attn_mask,
    key_lengths,
    seed,
    out,
    max_log_sum,
    dropout_p,
    is_causal,
    scale,
    softcap,
    mask_grad,
) -> tuple[Tensor, ...]:
    g, q, k, v, mask = _upcast(grad, query, key, value, attn_mask)
    p, _, _ = reference.probabilities(q, k, mask, key_lengths, is_causal, scale, softcap)
    keep = _keep(seed, query, key, dropout_p)
    *dqkv, ds = reference.backward(g, q, k, v, p, keep, dropout_p, scale, softcap)
    grads = [_in_order(t, like.dtype) for t, like in zip(dqkv, (query, key, value), strict=True)]
    if attn_mask is None or not mask_grad:
        return *grads, query.new_empty(0)
    return *grads, ds.sum_to_size(attn_mask.shape).to(attn_mask.dtype).contiguous()


def _attention_qkvpacked_cpu(
    qkv, key_lengths, seed, dropout_p, is_causal, scale
) -> tuple[Tensor, Tensor]:
    out, max_log_sum = _attention_cpu(
        *split_qkv(qkv), None, key_lengths, seed, dropout_p, is_causal, scale, 0.0
    )
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format), max_log_sum


def _packed_with_stats(attend_with_stats: Callable[..., Any]) -> Callable[..., Any]:
    def call(qkv, key_lengths, seed, sample, dropout_p, is_causal, scale) -> tuple[Tensor, ...]:
        out, *rest = attend_with_stats(
            *split_qkv(qkv), None, key_lengths, seed, sample, dropout_p, is_causal, scale, 0.0
        )
        return out.transpose(1, 2), *rest

    return call


def _attention_qkvpacked_backward_cpu(
    grad, qkv, key_lengths, seed, out, max_log_sum, dropout_p, is_causal, scale
) -> Tensor:
    *dqkv, _ = _attention_backward_cpu(
        grad.transpose(1, 2),
        *split_qkv(qkv),
        None,
        key_lengths,
        seed,
        out.transpose(1, 2),
        max_log_sum,
        dropout_p,
        is_causal,
        scale,
        0.0,
        False,
    )
    return torch.stack([d.transpose(1, 2) for d in dqkv], dim=2)


# --- CUDA: the Triton kernels, imported at the first call ----------------------------------------


@unless_empty(_attention_cpu, 2)
def _attention_cuda(
    query, key, value, attn_mask, key_lengths, seed, dropout_p, is_causal, scale, softcap
) -> tuple[Tensor, Tensor]:
    from leaner_kernels.ops.attention import launch

    out, max_log_sum = new_out(query), new_max_log_sum(query)
    params = dropout_p, is_causal, scale, softcap
    call = new_call(query, key, value, attn_mask, key_lengths, seed, *params)
    launch.forward(call, out, max_log_sum)
    return out, max_log_sum


@unless_empty(_attention_with_stats_cpu, 2)
def _attention_with_stats_cuda(
    query, key, value, attn_mask, key_lengths, seed, sample, dropout_p, is_causal, scale, softcap
) -> tuple[Tensor, ...]:
    from leaner_kernels.ops.attention import launch

    out, max_log_sum = new_out(query), new_max_log_sum(query)
    *stats, heads = new_stats(query, sample)
    params = dropout_p, is_causal, scale, softcap
    call = new_call(query, key, value, attn_mask, key_lengths, seed, *params)
    launch.forward(call, out, max_log_sum, stats)
    if sample is not None:
        launch.capture(call, sample, heads)
    return out, *stats, heads, max_log_sum


@unless_empty(_attention_backward_cpu, 3)
def _attention_backward_cuda(
    grad,
    query,
    key,
    value,
    attn_mask,
    key_lengths,
    seed,
    out,
    max_log_sum,
    dropout_p,
    is_causal,
    scale,
    softcap,
    mask_grad,
) -> tuple[Tensor, ...]:
    from leaner_kernels.ops.attention import launch

    dq, dk, dv, dmask = new_gradients(query, key, value, attn_mask, mask_grad)
    params = dropout_p, is_causal, scale, softcap
    call = new_call(query, key, value, attn_mask, key_lengths, seed, *params)
    launch.backward(grad, call, out, max_log_sum, dq, dk, dv, dmask if dmask.numel() else None)
    return dq, dk, dv, dmask


@unless_empty(_attention_qkvpacked_cpu, 1)
def _attention_qkvpacked_cuda(
    qkv, key_lengths, seed, dropout_p, is_causal, scale
) -> tuple[Tensor, Tensor]:
    from leaner_kernels.ops.attention import launch

    query, key, value = split_qkv(qkv)
    out, max_log_sum = new_packed_out(qkv), new_max_log_sum(query)
    call = new_call(query, key, value, None, key_lengths, seed, dropout_p, is_causal, scale)
    launch.forward(call, out.transpose(1, 2), max_log_sum)
    return out, max_log_sum


@unless_empty(_attention_qkvpacked_backward_cpu, 2)
def _attention_qkvpacked_backward_cuda(
    grad, qkv, key_lengths, seed, out, max_log_sum, dropout_p, is_causal, scale
) -> Tensor:
    from leaner_kernels.ops.attention import launch

    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    query, key, value = split_qkv(qkv)
    call = new_call(query, key, value, None, key_lengths, seed, dropout_p, is_causal, scale)
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    launch.backward(grad, call, out, max_log_sum, *split_qkv(dqkv), None)
    return dqkv


for _name, _cpu, _cuda in (
    ("attention", _attention_cpu, _attention_cuda),
    ("attention_with_stats", _attention_with_stats_cpu, _attention_with_stats_cuda),
    ("attention_backward", _attention_backward_cpu, _attention_backward_cuda),
    ("attention_qkvpacked", _attention_qkvpacked_cpu, _attention_qkvpacked_cuda),
    (
        "attention_qkvpacked_with_stats",
        _packed_with_stats(_attention_with_stats_cpu),
        _packed_with_stats(_attention_with_stats_cuda),
    ),
    (
        "attention_qkvpacked_backward",
        _attention_qkvpacked_backward_cpu,
        _attention_qkvpacked_backward_cuda,
    ),
):
    library.impl(_name, on_cpu(_cpu), "CPU")
    library.impl(_name, on_device(_cuda), "CUDA")


# --- Fakes: what each operator returns, without computing it -------------------------------------


@torch.library.register_fake("leaner_kernels::attention", lib=library)
def _(query, *_):
    return new_out(query), new_max_log_sum(query)


@torch.library.register_fake("leaner_kernels::attention_with_stats", lib=library)
def _(query, key, value, attn_mask, key_lengths, seed, sample, *_):
    return new_out(query), *new_stats(query, sample), new_max_log_sum(query)


@torch.library.register_fake("leaner_kernels::attention_backward", lib=library)
def _(grad, query, key, value, attn_mask, *rest):
    return new_gradients(query, key, value, attn_mask, rest[-1])


@torch.library.register_fake("leaner_kernels::attention_qkvpacked", lib=library)
def _(qkv, *_):
    return new_packed_out(qkv), new_max_log_sum(split_qkv(qkv)[0])


@torch.library.register_fake("leaner_kernels::attention_qkvpacked_with_stats", lib=library)
def _(qkv, key_lengths, seed, sample, *_):
    query = split_qkv(qkv)[0]
    return new_packed_out(qkv), *new_stats(query, sample), new_max_log_sum(query)


@torch.library.register_fake("leaner_kernels::attention_qkvpacked_backward", lib=library)
def _(grad, qkv, *_):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


# --- Autograd ------------------------------------------------------------------------------------

attention_backward = direct("attention_backward", _attention_backward_cuda, 5)
attention_qkvpacked_backward = direct(
    "attention_qkvpacked_backward", _attention_qkvpacked_backward_cuda, 2
)


class _Attention(SingleLevelFunction):
    """Runs ``attention`` or ``attention_with_stats``; everything after ``out`` is a statistic."""

    @staticmethod
    def forward(ctx, op, keyset, *args):
        out, *stats = below_autograd(op, keyset, args)
        ctx.num_args, ctx.params = len(args), args[-4:]
        ctx.save_for_backward(*args[:6], out, stats[-1])
        ctx.mark_non_differentiable(*stats)
        # Zeros for the statistics would be a launch each.
        ctx.set_materialize_grads(False)
        return out, *stats

    @staticmethod
    def backward(ctx, grad, *_):
        nothing = (None,) * (ctx.num_args - 4)
        if grad is None:
            return None, None, None, None, None, None, *nothing
        mask_grad = ctx.needs_input_grad[5]
        *grads, dmask = attention_backward(
            rows_contiguous(grad), *ctx.saved_tensors, *ctx.params, mask_grad
        )
        return None, None, *grads, dmask if mask_grad else None, *nothing


class _AttentionPacked(SingleLevelFunction):
    """Runs ``attention_qkvpacked`` or ``attention_qkvpacked_with_stats``, as above."""

    @staticmethod
    def forward(ctx, op, keyset, *args):
        out, *stats = below_autograd(op, keyset, args)
        ctx.save_for_backward(*args[:3], out, stats[-1])
        ctx.num_args, ctx.params = len(args), args[-3:]
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        return out, *stats

    @staticmethod
    def backward(ctx, grad, *_):
        dqkv = None
        if grad is not None:
            grad = rows_contiguous(grad)
            dqkv = attention_qkvpacked_backward(grad, *ctx.saved_tensors, *ctx.params)
        return None, None, dqkv, *(None,) * (ctx.num_args - 1)


def rows_contiguous(grad: Tensor) -> Tensor:
    """Return a gradient of the output as the kernels take it."""
    # A gradient that was expanded (a sum's, say) has stride 0 along the axis the kernels load by,
    # and one of another layout may have its rows too far apart.
    *rows, last = grad.stride()[grad.dim() > 3 :]  # the first axis of four is the batch's
    return grad.contiguous() if last != 1 or max(rows) > MAX_ROW_STRIDE else grad


for _name, _function, _decomposition, _narrow in (
    ("attention", _Attention, _attention_cpu, 4),
    ("attention_with_stats", _Attention, _attention_with_stats_cpu, 4),
    ("attention_qkvpacked", _AttentionPacked, _attention_qkvpacked_cpu, 1),
    (
        "attention_qkvpacked_with_stats",
        _AttentionPacked,
        _packed_with_stats(_attention_with_stats_cpu),
        1,
    ),
):
    differentiable(_name, _function, _decomposition)
    autocast_rule(_name, _narrow)
differentiable_backward(ops.attention_backward.default, _attention_backward_cpu, 5)
differentiable_backward(
    ops.attention_qkvpacked_backward.default, _attention_qkvpacked_backward_cpu, 2
)


# How the functions of this package call them.
attention = direct("attention", _attention_cuda, 4, _Attention)
attention_with_stats = direct("attention_with_stats", _attention_with_stats_cuda, 4, _Attention)
attention_qkvpacked = direct("attention_qkvpacked", _attention_qkvpacked_cuda, 1, _AttentionPacked)
attention_qkvpacked_with_stats = direct(
    "attention_qkvpacked_with_stats",
    _packed_with_stats(_attention_with_stats_cuda),
    1,
    _AttentionPacked,
)


# --- vmap: into the batch ------------------------------------------------------------------------

_QKV = 0, 0, 0, _vmap.BROADCAST, 0, None
for _name, _given, _found in (
    ("attention", _QKV, (0,) * 2),
    ("attention_with_stats", (*_QKV, _vmap.ENTRIES), (0,) * 8),
    ("attention_backward", (0, *_QKV, 0, 0), (0, 0, 0, _vmap.BROADCAST)),
    ("attention_qkvpacked", (0, 0, None), (0,) * 2),
    ("attention_qkvpacked_with_stats", (0, 0, None, _vmap.ENTRIES), (0,) * 8),
    ("attention_qkvpacked_backward", (0, 0, 0, None, 0, 0), (0,)),
):
    _vmap.register(library, _name, _given, _found, apart=has_dropout(_name))
