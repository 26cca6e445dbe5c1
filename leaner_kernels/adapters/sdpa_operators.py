"""PyTorch's attention operators with the signatures of their schemas, by ``ops.attention.aten``.

Each function returns the results of its operator, or None if PyTorch's kernel computes the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.attention import aten

NO_WINDOW, CAUSAL_WINDOW = (-1, -1), (-1, 0)
VARLEN_OPTIONS = {"scale", "window_size_left", "window_size_right"}
LSE_ALIGNMENT = 32  # rows to which the memory-efficient operator pads the log-sum-exp
_empty: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _dense(dropout_p: float, is_causal: bool, scale: float | None) -> aten.Numbers:
    """Return the numbers of ``aten.Fused`` and ``aten.Efficient``."""
    return aten.Numbers(float(dropout_p), bool(is_causal), scale)


def _without_elements(query: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor, cached because ``new_empty`` takes a third of the query's time.

    Tensors with memory are not cached: the memory could belong to the pool of a CUDA graph.
    """
    key = query.device, dtype
    if key not in _empty:
        with torch.inference_mode(False):  # a later call may be recorded
            _empty[key] = query.new_empty(0, dtype=dtype)
    return _empty[key]


# --- Flash ----------------------------------------------------------------------------------------


def flash_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):  # fmt: skip
    """Compute ``_scaled_dot_product_flash_attention``."""
    if return_debug_mask:
        return None
    # Visible below autograd too, except in compiled code, which runs without a gradient mode.
    wanted = query.requires_grad or key.requires_grad or value.requires_grad
    recorded = wanted and torch.is_grad_enabled()
    tensors, numbers = (query, key, value, None, None), _dense(dropout_p, is_causal, scale)
    if (done := aten.forward(aten.Fused, tensors, numbers, recorded)) is None:
        return None
    return done.out, done.lse, None, None, query.shape[2], key.shape[2], *_flash_state(query, done)


def _flash_state(query: Tensor, done: aten.Forward) -> tuple[Tensor, Tensor, Tensor]:
    """Return rng_state (2,) and a scalar, both uint64, and an empty debug mask."""
    numbers, debug_mask = (_without_elements(query, t) for t in (torch.uint64, query.dtype))
    state = numbers.new_empty(2) if done.seed is None else done.seed.view(torch.uint64)
    return state, numbers.new_empty(()), debug_mask


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_flash_attention_backward``."""
    tensors, numbers = (query, key, value, None, None), _dense(dropout_p, is_causal, scale)
    seed = philox_seed.view(torch.int64) if dropout_p else None
    return aten.backward(aten.Fused, grad_out, tensors, numbers, seed=seed, out=out, lse=logsumexp)


# --- cuDNN ----------------------------------------------------------------------------------------


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_cudnn_attention``."""
    if return_debug_mask:
        return None
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    wanted = bool(compute_log_sumexp)
    done = aten.forward(aten.Fused, tensors, numbers, wanted, with_lse=wanted, paired=True)
    if done is None:
        return None
    lse = done.lse
    if lse is None:
        lse = _without_elements(query, torch.float32).new_empty(query.shape[:3])
    ends = None, None, query.shape[2], key.shape[2]
    return done.out, lse.unsqueeze(-1), *ends, *_philox(query, done), None


def _philox(query: Tensor, done: aten.Forward) -> tuple[Tensor, Tensor]:
    """Return philox_seed and philox_offset, two int64 scalars."""
    numbers = _without_elements(query, torch.int64)
    return numbers.new_empty(()) if done.seed is None else done.seed[0], numbers.new_empty(())


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_cudnn_attention_backward``."""
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    seed, lse = philox_seed if dropout_p else None, logsumexp.reshape(query.shape[:3])
    return aten.backward(aten.Fused, grad_out, tensors, numbers, seed=seed, out=out, lse=lse)


# --- Memory-efficient: calls with a mask ----------------------------------------------------------


def efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    """Compute ``_scaled_dot_product_efficient_attention`` of a call with a mask."""
    if attn_bias is None:
        return None
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    wanted = bool(compute_log_sumexp)
    done = aten.forward(aten.Efficient, tensors, numbers, wanted, with_lse=wanted)
    if done is None:
        return None
    if done.lse is None:
        lse = _without_elements(query, torch.float32).new_empty((*query.shape[:2], 0))
    else:
        lse = pad(done.lse, (0, -query.shape[2] % LSE_ALIGNMENT), value=torch.inf)
    return done.out, lse, *_philox(query, done)


def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
    dropout_p, grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    """Compute ``_scaled_dot_product_efficient_attention_backward`` of a call with a mask."""
    if attn_bias is None:
        return None
    tensors, numbers = (query, key, value, attn_bias, None), _dense(dropout_p, is_causal, scale)
    _, _, _, mask_grad = map(bool, grad_input_mask)
    gradients = aten.backward(
        aten.Efficient,
        grad_out_,
        tensors,
        numbers,
        seed=philox_seed if dropout_p else None,
        out=out,
        lse=logsumexp[..., : query.shape[2]],
        mask_grad=mask_grad,
    )
    return gradients if gradients is None or mask_grad else (*gradients, None)


# --- Sequences side by side -----------------------------------------------------------------------


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Any, ...],
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
    last_key: bool = True,
) -> tuple[tuple[Any, ...], aten.VarlenNumbers] | None:
    """Return the tensors and numbers of ``aten.FusedVarlen``, or None if it has no such call.

    ``ends`` are cum_seq_q, cum_seq_k, max_q and max_k. Without starts, the call is one of the dense
    ones that PyTorch's outer kernels make. ``last_key`` says that the operator aligns a causal mask
    to the last key of a sequence.
    """
    starts, key_starts, max_q, max_k = ends
    left, right = (options.get(f"window_size_{side}") for side in ("left", "right"))
    window = -1 if left is None else left, -1 if right is None else right
    others = {name for name, option in options.items() if option is not None}
    if starts is None or key_starts is None or query.dim() != 3 or others - VARLEN_OPTIONS:
        return None
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in (starts, key_starts)):
        return None
    causal = bool(is_causal) or window == CAUSAL_WINDOW
    if window not in (NO_WINDOW, CAUSAL_WINDOW) or starts.shape != key_starts.shape:
        return None
    if starts.data_ptr() == key_starts.data_ptr():
        key_starts = starts
    # Our kernels align a causal mask to the first key.
    alike = key_starts is starts and query.shape[0] == key.shape[0] and max_q == max_k
    # Saved-tensor hooks may copy the starts. With dropout both directions must run the same
    # kernels.
    if causal and last_key and (dropout_p or not alike):
        return None
    numbers = aten.VarlenNumbers(max_q, max_k, float(dropout_p), causal, options.get("scale"))
    return (query, key, value, starts, key_starts), numbers


def varlen_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    return_debug_mask, **options,
):  # fmt: skip
    """Compute ``_flash_attention_forward`` of a varlen batch."""
    ends = cum_seq_q, cum_seq_k, max_q, max_k
    call = _varlen(query, key, value, ends, dropout_p, is_causal, options)
    if call is None or return_debug_mask:
        return None
    # Below ``varlen_attn`` it is unknown whether a backward follows.
    if (done := aten.forward(aten.FusedVarlen, *call, True)) is None:
        return None
    return done.out, done.lse, *_flash_state(query, done)


def varlen_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, rng_state, unused, **options,
):  # fmt: skip
    """Compute ``_flash_attention_backward`` of a varlen batch."""
    ends = cum_seq_q, cum_seq_k, max_q, max_k
    if (call := _varlen(query, key, value, ends, dropout_p, is_causal, options)) is None:
        return None
    tensors, numbers = call
    seed = rng_state.view(torch.int64) if dropout_p else None
    return aten.backward(
        aten.FusedVarlen, grad_out, tensors, numbers, seed=seed, out=out, lse=logsumexp
    )


def cudnn_varlen_forward(
    query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
    dropout_p=0.0, is_causal=False, return_debug_mask=False, **options,
):  # fmt: skip
    """Compute ``_cudnn_attention_forward`` of a varlen batch; the log-sum-exp is (H, T)."""
    ends = cum_seq_q, cum_seq_k, max_q, max_k
    call = _varlen(query, key, value, ends, dropout_p, is_causal, options, last_key=False)
    if call is None or attn_bias is not None or return_debug_mask:
        return None
    wanted = bool(compute_log_sumexp)
    if (done := aten.forward(aten.FusedVarlen, *call, wanted, paired=True)) is None:
        return None
    return done.out, done.lse, *ends, *_philox(query, done), None


def cudnn_varlen_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, **options,
):  # fmt: skip
    """Compute ``_cudnn_attention_backward`` of a varlen batch."""
    ends = cum_seq_q, cum_seq_k, max_q, max_k
    call = _varlen(query, key, value, ends, dropout_p, is_causal, options, last_key=False)
    if call is None or attn_bias is not None:
        return None
    tensors, numbers = call
    # Older releases of PyTorch have (T, H, 1).
    lse = logsumexp if logsumexp.dim() == 2 else logsumexp.squeeze(-1).transpose(0, 1)
    seed = philox_seed if dropout_p else None
    return aten.backward(aten.FusedVarlen, grad_out, tensors, numbers, seed=seed, out=out, lse=lse)


# The functions that compute the operators, by name.
OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_flash_attention_forward": varlen_forward,
    "_flash_attention_backward": varlen_backward,
    "_cudnn_attention_forward": cudnn_varlen_forward,
    "_cudnn_attention_backward": cudnn_varlen_backward,
}
