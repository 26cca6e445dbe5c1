"""Call PyTorch's attention where our kernels do not run, or PyTorch's are faster."""

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

# Bound here, so that PyTorch's function may be replaced by ``attention`` itself.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from ..._ops import ops
from .. import _tiles
from .._checks import MAX_HEAD_DIM, ArgumentError, has_values
from ..gpus import TUNED
from ..route import draw_seed
from .call import Call
from .reference import visible, without_padding

# With a maximum below this, rounding removes the log of the sum from the log-sum-exp.
LOWEST_MAXIMUM = -1e3


class _Passing(threading.local):
    """Whether this thread calls PyTorch's attention in order to run PyTorch's own kernels.

    ``adapters.sdpa`` may have replaced the operators below by ours.
    """

    on = False


passing = _Passing()


def _below_ours(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a function of PyTorch so that PyTorch's own kernels compute it."""
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    passing.on = True
    try:
        return function(*args, **kwargs)
    finally:
        passing.on = False


def transformed(query: Tensor) -> bool:
    """Return whether torch.func or forward mode is active: libraries lack second derivatives."""
    if torch.compiler.is_compiling():
        return False
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return False
    return query.device.type in ("cpu", "cuda")


def library_attention(call: Call, enable_gqa: bool) -> Tensor:
    """Return (B, H, N, D) of a checked call, in which one mask hides all hidden keys.

    Raises:
        ValueError: if heads are too wide for our kernels and there is a softcap.
    """
    query, dim = call.query, call.query.shape[-1]
    if dim > MAX_HEAD_DIM:
        check_wide(query, call.softcap)
        if not torch.compiler.is_compiling():
            _warn_of_width(dim)
    if transformed(query):
        # PyTorch's fused kernels have neither forward mode nor second derivatives.
        with sdpa_kernel(SDPBackend.MATH):
            return _attend(call, enable_gqa)
    return _attend(call, enable_gqa)


def _attend(call: Call, enable_gqa: bool) -> Tensor:
    query, key, value = call.operands
    key_lengths, dropout_p, scale = call.key_lengths, call.dropout_p, call.scale

    def with_all_scores() -> Tensor:
        *arguments, sequences = call._replace(seed=draw_seed(dropout_p, query.device))
        assert sequences is None
        out, *_ = ops.attention(*arguments)
        return out

    on_gpu = query.device.type == "cuda"
    if call.softcap:  # which PyTorch's function does not have
        return with_all_scores()
    # On the CPU, PyTorch applies the causal mask before the scale, and -inf times such a scale is
    # not -inf. On a GPU it takes the maximum of a row before it scales.
    if scale is not None and scale <= 0 and (call.is_causal or on_gpu):
        query, scale = (-query, -scale) if scale else (0 * query, 1.0)
    seen = None
    if key_lengths is not None or call.hides_by_position:
        shape = query.shape[2], key.shape[2]
        if key_lengths is not None:  # lengths on a GPU were not checked, and our kernels clamp them
            key_lengths = key_lengths.clamp(1, shape[1])
        seen = visible(*shape, key_lengths, query.device, **call.visibility)
        key, value = (without_padding(t, key_lengths) for t in (key, value))
    mask = call.attn_mask
    if seen is not None:
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, float("-inf"))
    if mask is not None:
        if query.dtype == torch.float64 != mask.dtype and mask.dtype != torch.bool:
            mask = mask.double()  # PyTorch's fused function on the CPU misreads a float32 one
        mask = torch.atleast_2d(mask)
        leaves = query, key, value
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
        if not on_gpu:
            if recorded and _sinks(mask):
                return with_all_scores()
        elif mask.dtype != torch.bool:
            mask = mask.to(query.dtype)  # cuDNN misreads a float32 mask with half-precision tensors
    # A traced comparison of sizes is not a bool, but PyTorch's function accepts only a bool.
    causal = True if call.is_causal and seen is None else False  # noqa: SIM210
    shared = True if enable_gqa else False  # noqa: SIM210
    tensors, options = (query, key, value, mask), {"scale": scale, "enable_gqa": shared}
    out = _below_ours(_sdpa, *tensors, dropout_p, causal, **options)
    # With dropout on a CPU, and under transforms, PyTorch uses its composite implementation, which
    # has all derivatives. In half precision on newer GPUs the Function below would cost host time.
    composed = dropout_p or torch._C._are_functorch_transforms_active()
    once = on_gpu and (
        query.shape[-1] > MAX_HEAD_DIM
        or (query.dtype != torch.float32 and _tiles.capability(query.device) >= TUNED)
    )
    if composed or once or torch.compiler.is_compiling() or not out.requires_grad:
        return out
    return _TwiceDifferentiable.apply(call, out, *call.operands, call.attn_mask)


class _TwiceDifferentiable(torch.autograd.Function):
    """Give the output of PyTorch's fused function second derivatives, which it lacks.

    If a backward is differentiated itself, it is that of our operator, otherwise PyTorch's.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, out: Tensor, query, key, value, attn_mask) -> Tensor:
        ctx.call = call._replace(query=None, key=None, value=None, attn_mask=None)
        ctx.save_for_backward(query, key, value, attn_mask)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, grad, None, None, None, None
        query, key, value, attn_mask = ctx.saved_tensors
        call = ctx.call._replace(
            query=query, key=key, value=value, attn_mask=attn_mask, seed=None, dropout_p=0.0
        )
        *_, wants_mask = ctx.needs_input_grad
        *gradients, dattn_mask = _gradients(call, grad, wants_mask)
        return None, None, *gradients, dattn_mask if wants_mask else None


def _gradients(call: Call, grad: Tensor, wants_mask: bool) -> tuple[Tensor, ...]:
    """Return the gradients of a call by our operators, which have second derivatives."""
    named = call._asdict()
    del named["sequences"]
    results = ops.attention.default(*named.values())
    tensors = [named.pop(name) for name in _TENSORS]
    return ops.attention_backward.default(grad, *tensors, *results, *named.values(), wants_mask)


_TENSORS = "query", "key", "value", "attn_mask", "key_lengths", "seed"


def _sinks(mask: Tensor) -> bool:
    """Return whether an additive mask may have a row of large negative numbers, some finite.

    PyTorch's backward on the CPU computes P from the log-sum-exp, which in such a row has lost the
    log of how many keys share it: its gradient of the values is as many times too large.
    """
    if mask.dtype == torch.bool:
        return False
    if not has_values(mask):
        return True
    largest = mask.detach().amax(dim=-1)
    return bool(((largest < LOWEST_MAXIMUM) & (largest > float("-inf"))).any())


def check_wide(query: Tensor, softcap: float) -> None:
    """Raise ValueError for a softcap, which PyTorch's attention does not support."""
    if softcap:
        raise ArgumentError(
            f"softcap needs a head dimension up to {MAX_HEAD_DIM}, got {query.shape[-1]}"
        )


@cache
def _warn_of_width(head_dim: int) -> None:
    warnings.warn(
        f"head dimension {head_dim} is above {MAX_HEAD_DIM}: PyTorch's "
        "scaled_dot_product_attention computes this call, without statistics",
        stacklevel=7,  # past the functions between here and the caller of ``attention``
    )


def varlen_attention(call: Call) -> Tensor:
    """Return (T, H, D) of PyTorch's varlen attention, zero outside every sequence.

    The gradients are zero there too. PyTorch leaves tokens outside of sequences uninitialised, and
    does not check ``starts``: here they are sorted and clamped to the tensors.
    """
    (query, key, value), sequences = call.operands, call.sequences
    assert sequences is not None
    starts, max_seqlen = sequences.starts, sequences.rows
    starts = starts.clamp(0, query.shape[0]).cummax(dim=0).values
    query, key, value = _ZeroGradientsOutside.apply(starts, query, key, value)
    window = (-1, 0) if call.is_causal else (-1, -1)
    ends = starts, starts, max_seqlen, max_seqlen
    tensors, options = (query, key, value), {"scale": call.scale, "window_size": window}
    out = _below_ours(_varlen_attn(), *tensors, *ends, **options).contiguous()
    _fill_with_zeros(starts, out)
    return out


@cache
def _varlen_attn() -> Any:
    # Imported at the first call: it imports Triton, by way of FLOP counters.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


class _ZeroGradientsOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, starts: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(starts)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (starts,) = ctx.saved_tensors
        whole = [None if grad is None else grad.contiguous() for grad in grads]
        for grad in whole:
            if grad is not None:
                _fill_with_zeros(starts, grad)
        return None, *whole


def _fill_with_zeros(starts: Tensor, t: Tensor) -> None:
    # Use a kernel: autograd has saved the output, and rejects a tensor that PyTorch modifies.
    from .kernels.scores import launch_fill

    launch_fill(starts, t)
