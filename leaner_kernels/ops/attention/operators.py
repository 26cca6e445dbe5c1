"""The attention operators: what they return, how each device computes them, their registration."""

from typing import Any

import torch
from torch import Tensor

from .. import _vmap
from .._checks import MAX_ROW_STRIDE
from .._operators import (
    Products,
    Shapes,
    Sharding,
    VmapAxes,
    register,
    upcast,
)
from . import reference
from .call import new_call
from .reference import keep_mask


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, N, D) of the query, key and value in (B, N, 3, H, D)."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def new_out(like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Allocate (B, H, N, D) in the memory order (B, N, H, D), which the next projection reads.

    Of so many heads that its rows would lie further apart than kernels reach, it is contiguous.
    """
    batch, heads, rows, dim = shape or like.shape
    width = heads * dim
    strides = rows * width, dim, width, 1
    if width > MAX_ROW_STRIDE:
        strides = rows * width, rows * dim, dim, 1
    return like.new_empty_strided((batch, heads, rows, dim), strides)


def new_max_log_sum(query: Tensor) -> Tensor:
    """Allocate (B, H, N, 2) float32: of each row the largest score, and the log of what it loses.

    Where a row sees a key, the probabilities are exp(score - first - second). What a score is, the
    kernels say: scaled or not. Their sum would lose the second where the first is large, as in a
    row of nothing but -1e9 from a mask.
    """
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, heads, rows, 2), dtype=torch.float32)


def _shapes(query: Tensor, *rest: Any) -> Shapes:
    batch, heads, rows, dim = query.shape
    tokens = batch, heads, rows
    return Shapes(query.shape, tokens, (batch, heads), (rows, heads * dim), (*tokens, 2))


def _packed_shapes(qkv: Tensor, *rest: Any) -> Shapes:
    batch, rows, _, heads, dim = qkv.shape
    tokens, out = (batch, heads, rows), (batch, rows, heads, dim)
    return Shapes(out, tokens, (batch, heads), (rows, heads * dim), (*tokens, 2))


# --- CPU: the reference, in float32 for half-precision inputs -----------------------------------


def upcast_each(*tensors: Tensor | None) -> list[Any]:
    """Return half precision as float32, anything else as it is."""
    return [None if t is None else upcast(t) for t in tensors]


def max_log_sum_of(p: Tensor, s: Tensor) -> Tensor:
    """Return (B, H, N, 2) as ``new_max_log_sum`` states; the backward here computes P again."""
    score = reference.largest(s, (-1,))
    score = score.masked_fill(score == float("-inf"), 0)
    return torch.stack((score, -reference.largest(p, (-1,)).clamp(min=0).log()), dim=-1).float()


class _Cpu:
    @staticmethod
    def forward(inputs, params, out, max_log_sum, stats, sample) -> None:
        *operands, key_lengths, seed = inputs
        dropout_p, *rest = params
        q, k, v, mask = upcast_each(*operands)
        k, v = (reference.without_padding(t, key_lengths) for t in (k, v))
        p, lse, s = reference.probabilities(q, k, mask, key_lengths, *rest)
        a = reference.attend(p, v, _keep(seed, p, dropout_p), dropout_p)
        out.copy_(a)
        max_log_sum.copy_(max_log_sum_of(p, s))
        if stats is None:
            return
        lse_out, per_head, heads = stats
        lse_out.copy_(lse)
        for slot, statistic in zip(per_head, reference.statistics(p, s, a), strict=True):
            slot.copy_(statistic)
        if sample is not None:
            wanted = sample >= 0
            heads[wanted] = a[sample[wanted]].transpose(1, 2).flatten(2).to(heads.dtype)

    @staticmethod
    def backward(grad, inputs, params, saved, grads) -> None:
        *operands, key_lengths, seed = inputs
        dropout_p, *rest = params
        g, q, k, v, mask = upcast_each(grad, *operands)
        k, v = (reference.without_padding(t, key_lengths) for t in (k, v))
        p, _, _ = reference.probabilities(q, k, mask, key_lengths, *rest)
        keep, (_, scale, softcap) = _keep(seed, p, dropout_p), rest
        *dqkv, ds = reference.backward(g, q, k, v, p, keep, dropout_p, scale, softcap)
        for slot, gradient in zip(grads, (*dqkv, ds)):
            slot.copy_(gradient.sum_to_size(slot.shape))


def _keep(seed: Tensor | None, p: Tensor, dropout_p: float) -> Tensor | None:
    return None if seed is None else keep_mask(seed, *p.shape, p=dropout_p)


# --- CUDA: the Triton kernels, imported at the first call ----------------------------------------


class _Cuda:
    @staticmethod
    def forward(inputs, params, out, max_log_sum, stats, sample) -> None:
        from . import launch

        call = new_call(*inputs, *params)
        lse, per_head, heads = stats or (None, None, None)
        launch.forward(call, out, max_log_sum, lse, per_head)
        if heads is not None and sample is not None:
            launch.capture(call, sample, heads)

    @staticmethod
    def backward(grad, inputs, params, saved, grads) -> None:
        from . import launch

        (out, max_log_sum), (dq, dk, dv, *dmask) = saved, grads
        results = out, max_log_sum, dq, dk, dv
        launch.backward(grad, new_call(*inputs, *params), *results, dmask[0] if dmask else None)


class _Packed:
    """The same of one projection (B, N, 3, H, D), whose gradient is written as one."""

    def __init__(self, separate: type[_Cpu] | type[_Cuda]) -> None:
        self._separate = separate

    def forward(self, inputs, params, out, max_log_sum, stats, sample) -> None:
        qkv, key_lengths, seed = inputs
        operands = *split_qkv(qkv), None, key_lengths, seed
        results = out.transpose(1, 2), max_log_sum, stats, sample
        self._separate.forward(operands, (*params, 0.0), *results)

    def backward(self, grad, inputs, params, saved, grads) -> None:
        (qkv, key_lengths, seed), (out, max_log_sum) = inputs, saved
        operands = *split_qkv(qkv), None, key_lengths, seed
        saved = out.transpose(1, 2), max_log_sum
        # One at a time: autograd lets nothing be written to what unbind gives.
        views = (grads[0].select(2, i).transpose(1, 2) for i in range(3))
        self._separate.backward(grad.transpose(1, 2), operands, (*params, 0.0), saved, views)


# --- Registration --------------------------------------------------------------------------------


def _flops(query: Tensor, key: Tensor, *rest: Any) -> Products:
    batch, heads, rows, dim = query.shape
    product = 2 * batch * heads * rows * key.shape[2] * dim
    return Products(product, product)


def _packed_flops(qkv: Tensor, *rest: Any) -> Products:
    batch, tokens, _, heads, dim = qkv.shape
    product = 2 * batch * heads * tokens**2 * dim
    return Products(product, product)


ATTENTION = register(
    "attention",
    inputs="Tensor query, Tensor key, Tensor value, Tensor? attn_mask",
    others="Tensor? key_lengths, Tensor? seed",
    params="float dropout_p, bool is_causal, float? scale, float softcap",
    shapes=_shapes,
    new=new_out,
    save_out=True,
    gradients=("dq", "dk", "dv", "dmask"),
    cpu=_Cpu(),
    cuda=_Cuda,
    flops=_flops,
    sharding=Sharding(dict.fromkeys(("query", "key", "value", "attn_mask"), (0, 1)), (0, 1)),
    vmap=VmapAxes((0, 0, 0, _vmap.BROADCAST, 0, None)),
    vmap_loop="seed",  # places in the mask of dropout are places in the batch
)
QKVPACKED = register(
    "attention_qkvpacked",
    inputs="Tensor qkv",
    others="Tensor? key_lengths, Tensor? seed",
    params="float dropout_p, bool is_causal, float? scale",
    shapes=_packed_shapes,
    save_out=True,
    cpu=_Packed(_Cpu),
    cuda=lambda: _PACKED_CUDA,
    flops=_packed_flops,
    sharding=Sharding({"qkv": (0, 3)}, (0, 2)),
    vmap=VmapAxes((0, 0, None)),
    vmap_loop="seed",
)
_PACKED_CUDA = _Packed(_Cuda)
