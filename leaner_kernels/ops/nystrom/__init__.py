"""Nyström attention: softmax attention through landmarks, linear in the tokens, with statistics.

Limits: head dimension 1 to 64 on a GPU (128 elsewhere) and 1 to 256 landmarks, because a tile of
each stays in registers; fewer landmarks than tokens, and segments of equal length, as in the
published method; the last axes contiguous, because loads are vectors along them. Anything else
raises a ValueError: no silent copy.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._ops import ops
from .._checks import (
    ArgumentError,
    autocast,
    check_narrow_layout,
    check_tensor,
    checked_lengths,
    scale_or_default,
    shown,
)
from ..operator import run_with_stats
from ..statistics import AttentionStats
from .op import decomposition

__all__ = ["check_landmarks", "nystrom_attention", "nystrom_attention_with_stats"]

MAX_LANDMARKS = 256
MAX_ITERATIONS = 32
INITS = {"matrix": False, "batch": True}


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
            whose last axis is contiguous; D from 1 to 64, on the CPU to 128.
        key: as ``query``.
        value: as ``query``.
        num_landmarks: m, 1 to 256, less than N and a divisor of it.
        scale: multiplies the scores, a number; ``D ** -0.5`` when omitted.
        key_lengths: as in ``attention``: (B,), each in [1, N]; tokens at or past a length are
            padding.
        iterations: of the pseudo-inverse, 1 to 32.
        init: the divisor of its start: the largest column sum of each ``"matrix"``, or of all
            matrices of the ``"batch"``, the default of the published code; the result of a sample
            then depends on the other samples of the batch.

    Returns:
        (B, H, N, D) in ``query.dtype``: a view of a contiguous (B, N, H, D).

    Raises:
        ValueError: if a shape, dtype, stride, device or number is not supported.

    Gradients are those of this computation, through the iterations and the maximum. The backward is
    deterministic. On CUDA, second derivatives and forward mode are computed by PyTorch, with the
    three matrices in memory.

    Numerics: float32 landmarks, scores, softmax, pseudo-inverse and sums. On a GPU, for
    half-precision inputs and up to 64 landmarks, the pseudo-inverse multiplies three bfloat16 parts
    of each number, 24 bits together. With more than 128 landmarks, or for the ``"batch"``, PyTorch
    multiplies the matrices of the pseudo-inverse, in TF32 if the user allows it.
    Source: Xiong et al. 2021, Nyströmformer, section 4 and algorithm 1 (arXiv:2102.03902); padding
    as in its published code.
    """
    query, key, value = autocast(query, key, value)
    params = _check(query, key, value, key_lengths, num_landmarks, scale, iterations, init)
    if query.device.type == "cuda":
        out = ops.nystrom_attention(query, key, value, *params)[0]
    else:
        out = decomposition(query, key, value, *params)
    return out.transpose(1, 2)


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

    Numerics: as ``nystrom_attention``; for ``heads`` the probabilities enter each product as sums
    of numbers of ``query.dtype``, and the float32 sum is stored.
    """
    query, key, value = autocast(query, key, value)
    params = _check(query, key, value, key_lengths, num_landmarks, scale, iterations, init)
    operator = ops.nystrom_attention_with_stats
    lengths, *numbers = params
    stats = run_with_stats(operator, (query, key, value, lengths), sample, *numbers)
    return stats._replace(out=stats.out.transpose(1, 2))


def check_landmarks(num_landmarks: int, iterations: int, init: str) -> None:
    """Raise ValueError unless the operator supports these parameters."""
    limits = {
        "num_landmarks": (num_landmarks, MAX_LANDMARKS),
        "iterations": (iterations, MAX_ITERATIONS),
    }
    for name, (number, most) in limits.items():
        if not isinstance(number, int) or not 1 <= number <= most:
            raise ArgumentError(
                f"{name} must be a whole number in [1, {most}], got {shown(number)}"
            )
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
) -> tuple[Any, ...]:
    """Check all arguments; return those of the operator after the three tensors."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t)
        if t.dim() != 4:
            raise ArgumentError(f"{name} must be (B, H, N, D), got {tuple(t.shape)}")
        if (t.shape, t.dtype, t.device) != (query.shape, query.dtype, query.device):
            raise ArgumentError(
                f"{name} must be {tuple(query.shape)} {query.dtype} on {query.device} as query is, "
                f"got {tuple(t.shape)} {t.dtype} on {t.device}"
            )
        check_narrow_layout(name, t, t.stride(2))
    batch, _, tokens, dim = query.shape
    check_landmarks(num_landmarks, iterations, init)
    if num_landmarks >= tokens or tokens % num_landmarks:
        raise ArgumentError(
            f"num_landmarks must be less than the {tokens} tokens and divide them, "
            f"got {num_landmarks}"
        )
    lengths = checked_lengths(key_lengths, batch, tokens, query.device)
    return lengths, num_landmarks, scale_or_default(scale, dim), iterations, INITS[init]
