"""Nyström attention: softmax attention through landmarks, linear in the tokens, with statistics.

Two calls of ``attention``, with landmarks as queries and as keys, around an iterated pseudo-inverse
of a matrix of landmarks by landmarks, which PyTorch multiplies.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _hooks
from .._checks import (
    ArgumentError,
    autocast,
    check_device,
    check_layout,
    check_sample,
    check_scale,
    check_tensor,
    checked_lengths,
    shown,
)
from ..attention import attention, attention_with_stats
from ..dispatcher import in_forward_mode, no_autocast, upcast
from ..statistics import AttentionStats
from .reference import hide, iterates, iterates_backward, landmarks

__all__ = ["check_landmarks", "nystrom_attention", "nystrom_attention_with_stats"]

INITS = {"matrix": False, "batch": True}
# The largest entry of Z (K3 V) in float16, whose range ends at 65,504.
LARGEST = 2.0**14


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int = 64,
    *,
    scale: float | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    iterations: int = 6,
    init: str = "matrix",
) -> Tensor:
    """Approximate softmax attention through landmarks, the means of consecutive tokens.

    With q~ and k~ the m landmarks of q and k, each the mean of N / m tokens, and s the scale:
    ``softmax(s q k~^T) Z softmax(s q~ k^T) v``, where Z is an iterated pseudo-inverse of
    ``softmax(s q~ k~^T)``. Queries and keys of padded tokens count as zeros, in the means too; no
    row gives them weight in the last softmax.

    Args:
        query: (B, H, N, D), float32, float16 or bfloat16 (on the CPU also float64), any strides
            whose last axis is contiguous; D from 1 to 128.
        key: as ``query``.
        value: as ``query``.
        num_landmarks: m, less than N and a divisor of it.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        key_lengths: as in ``attention``: (B,), each in [1, N]; tokens at or past a length are
            padding.
        iterations: iterations of the pseudo-inverse, at least 1.
        init: the divisor of its start: the largest column sum of each ``"matrix"``, or of all
            matrices of the ``"batch"``, the default of the published code; the result of a sample
            then depends on the other samples of the batch.

    Returns:
        (B, H, N, D) in ``query.dtype``.

    Raises:
        ValueError: if a shape, dtype, stride, device or number is not supported.

    Gradients are those of this computation, through the iterations and the maximum. The backward is
    as deterministic as that of ``attention``; of the pseudo-inverse it keeps K2 alone, and iterates
    again. Second derivatives work as in ``attention``.

    Numerics: the means are float32 sums, rounded to ``query.dtype``. The pseudo-inverse is float32,
    in TF32 if the user allows PyTorch that; its product with the values of the landmarks is rounded
    to ``query.dtype``. The rest is as in ``attention``.
    Source: Xiong et al. 2021, Nyströmformer, section 4 and algorithm 1 (arXiv:2102.03902); padding
    as in its published code.
    """
    query, key, value = autocast(query, key, value)
    params = _check(query, key, value, key_lengths, num_landmarks, scale, iterations, init)
    return _forward(query, key, value, params)


def nystrom_attention_with_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int = 64,
    *,
    scale: float | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    iterations: int = 6,
    init: str = "matrix",
    sample: Tensor | None = None,
) -> AttentionStats:
    """Compute ``nystrom_attention`` with statistics of every head, and capture sampled entries.

    Arguments and errors are those of ``nystrom_attention``, and ``sample``: (S,) int32 on the
    device of ``query``, the batch entries whose heads are captured. A negative index leaves its
    slot of ``heads`` unwritten. So does an index past the batch on a GPU; the CPU rejects it.

    Returns:
        AttentionStats: out (B, H, N, D), as from ``nystrom_attention``; lse (B, H, N) of the rows
            of the first softmax, tokens by landmarks; max_logit (B, H), the largest visible score
            of the three softmaxes; entropy and prob_norm (B, H) of the first softmax, rows of
            padded tokens included; head_norm (B, H); heads (S, N, H * D), None without ``sample``.

    Numerics: ``out`` is as from ``nystrom_attention``; all else is computed separately in float32.
    """
    query, key, value = autocast(query, key, value)
    params = _check(query, key, value, key_lengths, num_landmarks, scale, iterations, init)
    if sample is not None:
        check_sample(sample, query.shape[0], query.device)
    check_device(query.device)
    out = _forward(query, key, value, params)
    with torch.no_grad():
        wide = upcast(query), upcast(key), upcast(value)
        return _statistics(*wide, sample, params)._replace(out=out)


class _Params(NamedTuple):
    """The checked arguments other than query, key and value."""

    lengths: Tensor | None
    num_landmarks: int
    scale: float | None
    iterations: int
    whole_batch: bool


def _forward(query: Tensor, key: Tensor, value: Tensor, params: _Params) -> Tensor:
    lengths, num_landmarks, scale, iterations, whole_batch = params
    # Neither call below is one that a monitor should see: their heads are not the layer's.
    with no_autocast(query), _hooks.untraced():
        query, q_land, k_land = _landmarks(query, key, lengths, num_landmarks)
        k3v = attention(q_land, key, value, scale=scale, key_lengths=lengths)
        core, _ = _core(q_land, k_land, k3v, scale, iterations, whole_batch)  # (B, H, M, D)
        if query.dtype != torch.float16:
            return attention(query, k_land, core.to(query.dtype), scale=scale)
        # Powers of two, by which both roundings are exact.
        largest = core.detach().abs().amax((2, 3), keepdim=True)
        divisor = (largest / LARGEST).clamp(min=1).log2().ceil().exp2()
        return attention(query, k_land, (core / divisor).half(), scale=scale) * divisor.half()


def _statistics(
    query: Tensor, key: Tensor, value: Tensor, sample: Tensor | None, params: _Params
) -> AttentionStats:
    lengths, num_landmarks, scale, iterations, whole_batch = params
    with no_autocast(query), _hooks.untraced():
        query, q_land, k_land = _landmarks(query, key, lengths, num_landmarks)
        k3 = attention_with_stats(q_land, key, value, scale=scale, key_lengths=lengths)
        core, largest = _core(q_land, k_land, k3.out, scale, iterations, whole_batch)
        k1 = attention_with_stats(query, k_land, core, scale=scale, sample=sample)
        largest = torch.maximum(largest.to(k3.max_logit.dtype), k3.max_logit)
        return k1._replace(max_logit=torch.maximum(k1.max_logit, largest))


def _landmarks(
    query: Tensor, key: Tensor, lengths: Tensor | None, num_landmarks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``query`` with padded tokens zero, and the landmarks of queries and of keys."""
    query, key = hide(query, lengths), hide(key, lengths)
    q_land, k_land = (landmarks(t, num_landmarks).to(t.dtype) for t in (query, key))
    return query, q_land, k_land


def _core(
    q_land: Tensor,
    k_land: Tensor,
    k3v: Tensor,
    scale: float | None,
    iterations: int,
    whole_batch: bool,
) -> tuple[Tensor, Tensor]:
    """Return Z (K3 V), (B, H, M, D), and the largest score of K2, (B, H); half as float32."""
    factor = q_land.shape[-1] ** -0.5 if scale is None else scale
    s = factor * (upcast(q_land) @ upcast(k_land).mT)  # (B, H, M, M)
    # An autograd Function has no forward mode unless it is written out.
    inverse = _inverse if in_forward_mode() else _PseudoInverse.apply
    z = inverse(torch.softmax(s, dim=-1), iterations, whole_batch)
    return z @ upcast(k3v), s.detach().amax((2, 3))


def _inverse(k2: Tensor, iterations: int, whole_batch: bool) -> Tensor:
    return iterates(k2, iterations, whole_batch)[-1]


class _PseudoInverse(torch.autograd.Function):
    """Keep K2 alone for the backward: its iterates are larger than all else that is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(k2: Tensor, iterations: int, whole_batch: bool) -> Tensor:
        return _inverse(k2, iterations, whole_batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        k2, *ctx.numbers = inputs
        ctx.save_for_backward(k2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (k2,) = ctx.saved_tensors
        iterations, whole_batch = ctx.numbers
        with no_autocast(k2):
            steps = iterates(k2, iterations, whole_batch)
            return iterates_backward(grad, k2, steps, whole_batch), None, None


def check_landmarks(num_landmarks: int, iterations: int, init: str) -> None:
    """Raise ValueError unless the operator supports these parameters."""
    for name, number in (("num_landmarks", num_landmarks), ("iterations", iterations)):
        if not isinstance(number, int) or number < 1:
            raise ArgumentError(f"{name} must be a whole number of at least 1, got {shown(number)}")
    if not isinstance(init, str) or init not in INITS:
        raise ArgumentError(f"init must be one of {', '.join(INITS)}, got {shown(init)}")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Any,
    num_landmarks: int,
    scale: float | None,
    iterations: int,
    init: str,
) -> _Params:
    """Check all arguments; return those other than the three tensors."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t)
        if t.dim() != 4:
            raise ArgumentError(f"{name} must be (B, H, N, D), got {tuple(t.shape)}")
        if (t.shape, t.dtype, t.device) != (query.shape, query.dtype, query.device):
            raise ArgumentError(
                f"{name} must be {tuple(query.shape)} {query.dtype} on {query.device} as query is, "
                f"got {tuple(t.shape)} {t.dtype} on {t.device}"
            )
        check_layout(name, t)
    batch, _, tokens, _ = query.shape
    check_landmarks(num_landmarks, iterations, init)
    if num_landmarks >= tokens or tokens % num_landmarks:
        raise ArgumentError(
            f"num_landmarks must be less than the {tokens} tokens and divide them, "
            f"got {num_landmarks}"
        )
    lengths = checked_lengths(key_lengths, batch, tokens, query.device)
    return _Params(lengths, num_landmarks, check_scale(scale), iterations, INITS[init])
