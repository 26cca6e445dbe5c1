"""Report which implementation a call of softmax attention runs, and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _tiles
from .._checks import (
    ANY_HEAD_DIM,
    DTYPES,
    MAX_HEAD_DIM,
    ArgumentError,
    autocast,
    check_scale,
    check_tensor,
    shown,
)
from . import dispatch, sdpa
from .call import LEAST_SCALE, Call, Sequences
from .checks import (
    NO_WINDOW,
    check_packed,
    check_params,
    check_query_key_value,
    check_softcap,
    check_varlen,
    four_axes,
    plain_mask,
)
from .dispatch import Library
from .op import new_out, split_qkv


class Route(NamedTuple):
    """The implementation of one direction of a call.

    Attributes:
        implementation: a kernel by the name of its table, such as ``hopper_forward``;
            ``sdpa``, PyTorch's ``scaled_dot_product_attention``; ``varlen_attn``, of
            ``torch.nn.attention.varlen``; or ``reference``, with all scores in memory.
        tile: block sizes and launch options of the kernel; empty for a library.
        reason: why, in one line.
    """

    implementation: str
    tile: dict[str, Any]
    reason: str

    def __str__(self) -> str:
        """Return the implementation with its tile."""
        tile = ", ".join(f"{name}={value}" for name, value in self.tile.items())
        return f"{self.implementation}({tile})" if tile else self.implementation


class Explanation(NamedTuple):
    """The implementations of a call.

    Attributes:
        forward: of the output.
        backward: of the gradients; None if no gradient is required.
    """

    forward: Route
    backward: Route | None

    def __str__(self) -> str:
        """Return one line, with the reason that both directions share."""
        backward = "" if self.backward is None else f", backward {self.backward}"
        return f"forward {self.forward}{backward}: {self.forward.reason}"


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] = NO_WINDOW,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    max_seqlen: int = 0,
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_k: int | None = None,
    stats: bool = False,
    backward: bool | None = None,
    capability: int | None = None,
) -> Explanation:
    """Return which implementation a call runs, forward and backward, and why; run nothing.

    The arguments of the call are those of ``attention``, with (B, H, N, D) and other ranks, not
    nested; of ``attention_qkvpacked``, a projection (B, N, 3, H, D) alone; or, with ``cu_seqlens``,
    of ``attention_varlen``, (T, H, D). Tensors may be on the meta device: only shapes and strides
    are read. The other arguments are:

    - stats: whether the call is to a function ``_with_stats``.
    - backward: whether a backward follows; by default, whether autograd would record the call.
    - capability: explain the call for a GPU of this compute capability (90 for 9.0), whatever the
      device of the tensors.

    Returns:
        Explanation, which prints as one line.

    Raises:
        ValueError: if the call itself would raise one, or does not have one of the arguments.
    """
    check_tensor("query", query)
    if capability is not None and (type(capability) is not int or capability < 50):
        raise ArgumentError(
            f"capability must be an int such as 90 for 9.0, got {shown(capability)}"
        )
    if (key is None) != (value is None):
        raise ArgumentError("key and value go together: give both, or a projection alone")
    check_params(dropout_p, is_causal, enable_gqa, window_size)
    scale, softcap = check_scale(scale), check_softcap(softcap)
    with _tiles.assume(capability):
        max_head_dim = MAX_HEAD_DIM if stats else ANY_HEAD_DIM
        sequences = lengths = None
        if cu_seqlens is not None:
            refused = {"attn_mask": attn_mask, "key_lengths": key_lengths, "softcap": softcap}
            _refuse("attention_varlen", **refused)
            if key is None or value is None:
                raise ArgumentError("cu_seqlens need query, key and value, got a query alone")
            tensors: Any = autocast(query, key, value)
            query, key, value = tensors
            ends: Any = (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k, enable_gqa)
            starts, key_starts = check_varlen(*tensors, *ends)
            sequences = Sequences(starts, starts if key_starts is None else key_starts, 1, 1)
        elif key is None or value is None:
            names = {"attn_mask": attn_mask, "softcap": softcap, "enable_gqa": enable_gqa}
            _refuse("attention_qkvpacked", **names)
            (qkv,) = tensors = autocast(query)
            lengths = check_packed(qkv, key_lengths, None, max_head_dim)
            query, key, value = split_qkv(qkv)
        else:
            attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
            if query.dim() != 4:
                query, key, value, attn_mask = four_axes(query, key, value, attn_mask, key_lengths)
            tensors = autocast(query, key, value, attn_mask)
            query, key, value, attn_mask = tensors
            more: Any = (is_causal, enable_gqa, key_lengths, None, max_head_dim)
            lengths = check_query_key_value(*tensors, *more)
        if dispatch.on_gpu(query) and query.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ArgumentError(f"query on cuda must be one of {names}, got {query.dtype}")
        if backward is None:
            recorded = any(t is not None and t.requires_grad for t in tensors)
            backward = torch.is_grad_enabled() and recorded
        # A placeholder: drawing a seed would advance the generator.
        seed = query.new_empty(1, dtype=torch.int64) if dropout_p else None
        operands = query, key, value, attn_mask, lengths, seed
        numbers = dropout_p, is_causal, scale, softcap, (*window_size,)
        return _explain(Call._make((*operands, *numbers, sequences)), stats, backward)


def _refuse(function: str, **arguments: Any) -> None:
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) or argument not in (None, 0, False):
            raise ArgumentError(f"{function} does not accept {name}")


def _explain(call: Call, stats: bool, backward: bool) -> Explanation:
    """Return the implementations of a checked call."""
    query, key, value = call[:3]
    on_gpu, library = dispatch.on_gpu(query), None
    if not stats or not on_gpu:
        if query.shape[-1] > MAX_HEAD_DIM:
            sdpa.check_wide(query, call.softcap)
        library = dispatch.library_of(call, backward)
        if library is None and not on_gpu:
            library = Library("reference", f"the kernels run on CUDA, not on {query.device}")
    if library is not None:
        route = Route("reference" if stats else library.name, {}, library.reason)
        return Explanation(route, route if backward else None)
    reason = _why_ours(call, stats)
    forward = dispatch.choose_forward(call, stats)
    route = Route(forward.kernel, forward.tile.arguments, reason)
    if not backward:
        return Explanation(route, None)
    out = query if call.sequences is not None else new_out(query)
    gradients = (torch.empty_like(t) for t in (query, key, value))
    done = dispatch.choose_backward(call, out, out, *gradients)
    return Explanation(route, Route(done.kernel, done.tile.arguments, reason))


def _why_ours(call: Call, stats: bool) -> str:
    """Return why our kernels compute a call: PyTorch's cannot, or no rule prefers them."""
    query, key, sequences = call.query, call.key, call.sequences
    if sequences is None:
        other_keys = query.shape[2] != key.shape[2]
    else:
        other_keys = sequences.starts is not sequences.key_starts or query.shape != key.shape
    needs = {
        "statistics": stats,
        "a mask": call.attn_mask is not None,
        "lengths": call.key_lengths is not None,
        "dropout": call.dropout_p,
        "a softcap": call.softcap,
        "a window": call.window != NO_WINDOW,
        "other keys than queries": other_keys,
        "float32": query.dtype == torch.float32,
        f"a head dimension of {query.shape[-1]}, no multiple of 8": query.shape[-1] % 8,
        "a scale that is not positive": call.scale is not None and call.scale < LEAST_SCALE,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    gpu = _tiles.capability(query.device)
    on = f"compute capability {gpu // 10}.{gpu % 10}"
    if any(needs.values()):
        wanted = ", ".join(name for name, needed in needs.items() if needed)
        return f"{on}; {wanted}: supported by our kernels only"
    return f"{on}; no rule in library.toml dispatches it to PyTorch"
