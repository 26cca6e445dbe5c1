"""Cross-entropy from a classifier's weight, without materialising all logits.

A vocabulary of 50,257 makes the logits of 8,192 tokens 1.6 GB in float32, several times over in a
training step. Here the logits of about a thousand tokens are computed at a time, in the forward and
again in the backward; only the tokens, the weight and one number per token are kept. Logits that
fit in one chunk, 256 MiB in float32, are not recomputed: their gradient is kept for the backward,
where recomputed logits would need the same memory. That takes 0.83 to 0.97 of the time of PyTorch's
plain loss (on a CPU core, float32 and bfloat16, 2 to 256 MiB), recomputation 1.1 to 1.4 times as
long.

PyTorch's ``linear_cross_entropy`` can do the same from 2.15 on, but rounds the losses to the dtype
of the tokens; the older versions that this package supports have none.

Sizes: T tokens, D width of a token, V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leaner_kernels.ops._checks import autocast, has_values

# Largest number of logits in a chunk: 256 MiB in float32, enough tokens to keep the matrix units of
# a large GPU busy. No more logits are kept for the backward.
_MAX_LOGITS = 2**26
# A GPU's matrix units read rows that begin at multiples of 16 bytes, and tiles of this many
# columns: a vocabulary of 50,257 is padded with words that never occur. On a CPU the copy gains
# nothing.
_COLUMNS = {"cpu": 1}


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Return each token's cross-entropy of the logits ``x @ weight.T + bias``.

    Args:
        x: (..., D), floating point.
        weight: (V, D), as ``x``.
        targets: (...), int64, each in [0, V) or ``ignore_index``.
        bias: (V,), as ``x``.
        ignore_index: the target of a token that has no loss.
        chunk: number of tokens whose logits are computed at once; by default the largest power of
            two with at most 2**26 logits (256 MiB in float32). If all tokens fit, the backward
            recomputes no logits.

    Returns:
        (...), float32 (float64 for such ``x``), zero where ignored. First derivatives only.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or, on the CPU, a target outside the
            vocabulary. On a GPU such a loss is infinite, or the process ends.

    Numerics: products and gradients of logits in the dtype of ``x``, or of the autocast region
    around, as a linear layer's; softmax, losses and the sums over chunks in float32.
    Deterministic: chunks are added up in order.
    """
    x, weight, bias = autocast(x, weight, bias)
    _check(x, weight, targets, bias, ignore_index)
    if chunk is None:
        most = max(_MAX_LOGITS // len(weight), 1)
        chunk = 1 << (most.bit_length() - 1)
    elif chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    flat = x.reshape(-1, x.shape[-1])
    # The tensors have the dtype of the autocast region, which would promote a softmax.
    with _without_autocast(x.device.type):
        keep = torch.is_grad_enabled() and len(flat) <= chunk
        return _Chunked.apply(flat, weight, bias, targets, ignore_index, chunk, keep)


def _check(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int
) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must be (..., D) and weight (V, D), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != x.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be {tuple(x.shape[:-1])} int64, "
            f"got {tuple(targets.shape)} {targets.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({len(weight)},), got {tuple(bias.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} as x is, got {other.dtype}")
    if has_values(targets):
        wrong = targets[((targets < 0) | (targets >= len(weight))) & (targets != ignore_index)]
        if len(wrong):
            raise ValueError(
                f"targets must be in [0, {len(weight)}) or {ignore_index}, got {int(wrong[0])}"
            )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunk: int,
        keep: bool,
    ) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        # Allocated in the returned shape: FSDP warns about a model that returns a view.
        losses = x.new_empty(targets.shape, dtype=exact)
        flat, targets = losses.view(-1), targets.reshape(-1)
        filled, kept = _fill_up(weight, bias), None
        for rows in _chunks(len(x), chunk):
            logits = F.linear(x[rows], *filled)
            ignored, named = _named(targets[rows], ignore_index)
            own = F.log_softmax(logits, dim=1, dtype=exact).gather(1, named)[:, 0]
            flat[rows] = -own.masked_fill(ignored, 0)
            if keep:
                kept = _gradient_of_logits(logits, named, flat[rows])
        ctx.save_for_backward(x, weight, bias, targets, losses, kept)
        ctx.ignore_index, ctx.chunk = ignore_index, chunk
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A backward may be called inside an autocast region, too.
        with _without_autocast(grad.device.type):
            return _gradients(ctx, grad)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # PyTorch has no autocast on meta.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _gradient_of_logits(logits: Tensor, named: Tensor, losses: Tensor) -> Tensor:
    """Return the gradient of tokens' logits over that of their losses: (T, V), as ``logits``."""
    # The probabilities, minus one at the target. There the difference of two numbers near one would
    # lose precision, so it is computed from the loss.
    at_target = torch.expm1(-losses).view(-1, 1).to(logits.dtype)
    return logits.softmax(dim=1).scatter_(1, named, at_target)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, targets, losses, kept = ctx.saved_tensors
    wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    wide, wide_bias = _fill_up(weight, bias)
    chunks = _chunks(len(x), ctx.chunk)
    # Sums are float32; one chunk needs no sum.
    exact = losses.dtype if len(chunks) > 1 else x.dtype
    dx = torch.empty_like(x) if wants_x else None
    dweight = dbias = None
    losses = losses.view(-1)
    grad = grad.reshape(-1).masked_fill(targets == ctx.ignore_index, 0)[:, None]
    for rows in chunks:
        dlogits = kept
        if dlogits is None:
            _, named = _named(targets[rows], ctx.ignore_index)
            logits = F.linear(x[rows], wide, wide_bias)
            dlogits = _gradient_of_logits(logits, named, losses[rows])
            del logits
        # Scale the tokens by the losses' gradients, which saves a pass over the logits.
        if dx is not None:
            dx[rows] = (dlogits @ wide) * grad[rows]
        if wants_weight:
            dweight = _sum(dweight, dlogits.T @ (x[rows] * grad[rows]).to(x.dtype), exact)
        if wants_bias:
            dbias = _sum(dbias, (dlogits.T @ grad[rows].to(x.dtype))[:, 0], exact)
    dweight = None if dweight is None else dweight[: len(weight)].to(weight.dtype)
    dbias = None if dbias is None else dbias[: len(weight)].to(weight.dtype)
    return dx, dweight, dbias, None, None, None, None


def _sum(total: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.to(dtype) if total is None else total.add_(part)


def _fill_up(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add words of probability 0 until the vocabulary is a multiple of the device's tile."""
    words = len(weight)
    more = -words % _COLUMNS.get(weight.device.type, 64)
    if more == 0:
        return weight, bias
    bias = weight.new_zeros(words) if bias is None else bias
    return F.pad(weight, (0, 0, 0, more)), F.pad(bias, (0, more), value=-math.inf)


def _named(targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return which of ``targets`` (T,) are ignored, (T,), and all, (T, 1), with 0 for those."""
    ignored = targets == ignore_index
    return ignored, targets.masked_fill(ignored, 0)[:, None]


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, max(tokens, 1), chunk)]
