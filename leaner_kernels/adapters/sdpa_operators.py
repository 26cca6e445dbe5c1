"""PyTorch's attention operators with the signatures of their schemas, by ``ops.attention.aten``.

Each function returns the results of its operator, or None if PyTorch's kernel computes the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import aten

NO_WINDOW = -1, -1
# Random states of calls without dropout, by operator, device and dtype: results that nobody reads.
_unread: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}


def _dense(dropout_p: float, is_causal: bool, scale: float | None) -> tuple[Any, ...]:
    """Return the numbers of ``aten.Fused`` and ``aten.Efficient``."""
    return float(dropout_p), bool(is_causal), scale, 0.0, *NO_WINDOW


def _is_capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _kept(kind: str, query: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> Any:
    """Return results that nobody reads, made once: three allocations take 3 us of host time."""
    if _is_capturing(query):
        return make(query)  # the outputs of a graph must lie in its own memory
    key = kind, query.device, query.dtype
    if key not in _unread:
        _unread[key] = make(query)
    return _unread[key]


# --- Flash ----------------------------------------------------------------------------------------


def flash_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """Compute ``_scaled_dot_product_flash_attention``."""
    if return_debug_mask:
        return None
    # Visible below autograd too, except in compiled code, which runs without a gradient mode.
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    tensors, numbers = (query, key, value, None, None), _dense(dropout_p, is_causal, scale)
    if (done := aten.attend(aten.Fused, tensors, numbers, recorded)) is None:
        return None
    return done.out, done.lse, None, None, query.shape[2], key.shape[2], *_flash_state(query, done)


def _flash_state(query: Tensor, done: aten.Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Return rng_state (2,) and a scalar, both uint64, and an empty debug mask."""
    state, unused, debug_mask = _kept("flash", query, _flash_unread)
    return state if done.seed is None else done.seed.view(torch.uint64), unused, debug_mask


def _flash_unread(query: Tensor) -> tuple[Tensor, ...]:
    numbers = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return *numbers, query.new_empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_flash_attention_backward``."""
    tensors, numbers = (query, key, value, None, None), _dense(dropout_p, is_causal, scale)
    seed = philox_seed.view(torch.int64) if dropout_p else None
    return aten.differentiate(aten.Fused, grad_out, tensors, seed, out, logsumexp, numbers)


# --- cuDNN ----------------------------------------------------------------------------------------


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_cudnn_attention``."""
    if return_debug_mask:
        return None
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    done = aten.attend(aten.Fused, tensors, numbers, bool(compute_log_sumexp))
    if done is None:
        return None
    state, lse = _philox(query, done), done.lse.unsqueeze(-1)
    return done.out, lse, None, None, query.shape[2], key.shape[2], *state, None


def _philox(query: Tensor, done: aten.Attended) -> tuple[Tensor, Tensor]:
    """Return philox_seed and philox_offset, two int64 scalars."""
    seed, offset = _kept("philox", query, _philox_unread)
    return seed if done.seed is None else done.seed[0], offset


def _philox_unread(query: Tensor) -> tuple[Tensor, ...]:
    return query.new_empty((), dtype=torch.int64), query.new_empty((), dtype=torch.int64)


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_cudnn_attention_backward``."""
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    seed, lse = philox_seed if dropout_p else None, logsumexp.reshape(query.shape[:3])
    return aten.differentiate(aten.Fused, grad_out, tensors, seed, out, lse, numbers)


# Names of operators: what computes them.
OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
