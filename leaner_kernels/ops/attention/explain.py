"""Say which implementation a call of softmax attention runs, and why."""

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
from .call import Call
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
from .op import Varlen, new_out, split_qkv


class Route(NamedTuple):
    """What computes one direction of a call.

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
    """What computes a call.

    Attributes:
        forward: of the output.
        backward: of the gradients, None where none will be asked for.
    """

    forward: Route
    backward: Route | None

    def __str__(self) -> str:
        """Return one line; both directions have one reason."""
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

    Args:
        query: of the call: (B, H, N, D) and other ranks as for ``attention``, not nested; a
            projection (B, N, 3, H, D) alone as for ``attention_qkvpacked``; (T, H, D) with
            ``cu_seqlens`` as for ``attention_varlen``. Of tensors of the meta device, shapes and
            strides count.
        key: as ``query``.
        value: as ``query``.
        attn_mask: as in ``attention``, and so are all arguments up to ``window_size``.
        dropout_p: as in ``attention``.
        is_causal: as in ``attention``.
        scale: as in ``attention``.
        enable_gqa: as in ``attention``.
        key_lengths: as in ``attention``.
        softcap: as in ``attention``.
        window_size: as in ``attention``.
        cu_seqlens: as in ``attention_varlen``, and so are the next three.
        max_seqlen: as in ``attention_varlen``.
        cu_seqlens_k: as in ``attention_varlen``.
        max_seqlen_k: as in ``attention_varlen``.
        stats: whether the call is one ``_with_stats``.
        backward: whether gradients will be asked for; by default, whether autograd would record it.
        capability: explain the call on a GPU of this compute capability (90 for 9.0), wherever the
            tensors are.

    Returns:
        Explanation, which prints as one line.

    Raises:
        ValueError: what the call itself would refuse, or an argument that it does not have.
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
        if cu_seqlens is not None:
            _refuse(
                "attention_varlen", attn_mask=attn_mask, key_lengths=key_lengths, softcap=softcap
            )
            if key is None or value is None:
                raise ArgumentError("cu_seqlens need query, key and value, got a query alone")
            tensors: Any = autocast(query, key, value)
            query, key, value = tensors
            ends: Any = (cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k, enable_gqa)
            starts, key_starts = check_varlen(*tensors, *ends)
            _check_dtype(query)
            if backward is None:
                backward = _recorded(tensors)
            numbers: Any = (dropout_p, is_causal, scale, window_size)
            return _varlen(tensors, starts, key_starts, numbers, stats, backward)
        max_head_dim = MAX_HEAD_DIM if stats else ANY_HEAD_DIM
        if key is None or value is None:
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
        _check_dtype(query)
        if backward is None:
            backward = _recorded(tensors)
        operands = query, key, value, attn_mask, lengths
        numbers: Any = (dropout_p, is_causal, scale, softcap, *window_size)
        return _dense(operands, numbers, stats, backward)


def _refuse(function: str, **arguments: Any) -> None:
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) or argument not in (None, 0, False):
            raise ArgumentError(f"{function} has no {name}")


def _check_dtype(query: Tensor) -> None:
    if dispatch.on_gpu(query) and query.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"query on cuda must be one of {names}, got {query.dtype}")


def _recorded(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _by(library: Library, backward: bool) -> Explanation:
    route = Route(library.name, {}, library.reason)
    return Explanation(route, route if backward else None)


def _dense(
    operands: tuple[Any, ...], numbers: tuple[Any, ...], stats: bool, backward: bool
) -> Explanation:
    query, key, value, attn_mask, lengths = operands
    dropout_p, is_causal, scale, softcap, *window = numbers
    tensors = query, key, value, attn_mask, lengths, _seed(query, dropout_p)
    call = Call(*tensors, dropout_p, is_causal, scale, softcap, (window[0], window[1]))
    if not stats or not dispatch.on_gpu(query):
        if query.shape[-1] > MAX_HEAD_DIM:
            sdpa.check_wide(query, softcap)
        if (library := dispatch.library_of(call, backward)) is not None:
            return _by(library._replace(name="reference") if stats else library, backward)
    if not dispatch.on_gpu(query):
        reason = f"the kernels run on CUDA, not on {query.device}"
        return _by(Library("reference", reason), backward)
    needs = {
        "statistics": stats,
        "a mask": attn_mask is not None,
        "lengths": lengths is not None,
        "dropout": dropout_p,
        "a softcap": softcap,
        "a window": tuple(window) != NO_WINDOW,
        "other keys than queries": query.shape[2] != key.shape[2],
    }
    reason = _why_ours(query, scale, needs)
    forward = dispatch.choose_forward(call, stats)
    route = Route(forward.kernel, forward.tile.arguments, reason)
    if not backward:
        return Explanation(route, None)
    gradients = (torch.empty_like(t) for t in (query, key, value))
    done = dispatch.choose_backward(call, new_out(query), new_out(query), *gradients)
    return Explanation(route, Route(done.kernel, done.tile.arguments, reason))


def _varlen(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    key_starts: Tensor | None,
    numbers: tuple[float, bool, float | None, tuple[int, int]],
    stats: bool,
    backward: bool,
) -> Explanation:
    query, key, _ = tensors
    dropout_p, is_causal, scale, window_size = numbers
    if not dispatch.on_gpu(query):
        reason = f"the kernels run on CUDA, not on {query.device}"
        return _by(Library("reference", reason), backward)
    integers = starts, starts if key_starts is None else key_starts
    lengths: Any = (1, 1, dropout_p, is_causal, scale, *window_size)
    call = Varlen.call(*tensors, *integers, _seed(query, dropout_p), *lengths)
    if not stats and (library := dispatch.library_of(call, backward)) is not None:
        return _by(library, backward)
    needs = {
        "statistics": stats,
        "dropout": dropout_p,
        "a window": tuple(window_size) != NO_WINDOW,
        "other keys than queries": key_starts is not None or key.shape != query.shape,
    }
    reason = _why_ours(query, scale, needs)
    routes = [
        Route(name, dispatch.online_tile(name, call).arguments, reason)
        for name in ("online_forward", "online_backward")
    ]
    return Explanation(routes[0], routes[1] if backward else None)


def _seed(query: Tensor, dropout_p: float) -> Tensor | None:
    """Return what stands for a seed: drawing one would change what is drawn later."""
    return query.new_empty(1, dtype=torch.int64) if dropout_p else None


def _why_ours(query: Tensor, scale: float | None, present: dict[str, Any]) -> str:
    """Return why a call stays with our kernels: what PyTorch's does not take, or no rule."""
    gpu = _tiles.capability(query.device)
    on = f"compute capability {gpu // 10}.{gpu % 10}"
    needs = [name for name, needed in present.items() if needed]
    if query.dtype == torch.float32:
        needs.append("float32")
    if query.shape[-1] % 8:
        needs.append(f"a head dimension of {query.shape[-1]}, no multiple of 8")
    if scale is not None and scale < dispatch.LEAST_SCALE:
        needs.append("a scale that is not positive")
    if torch.are_deterministic_algorithms_enabled():
        needs.append("deterministic algorithms")
    if needs:
        return f"{on}; {', '.join(needs)}: only our kernels"
    return f"{on}; no rule of library.toml sends it to PyTorch"
