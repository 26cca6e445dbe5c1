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
from . import library
from .call import (
    check_packed,
    check_params,
    check_query_key_value,
    check_softcap,
    check_varlen,
    four_axes,
    new_call,
    online_tile,
)
from .causal_bias import plain_mask
from .operators import new_out, split_qkv


class Route(NamedTuple):
    """What computes one direction of a call.

    Attributes:
        implementation: a kernel by its table's name, such as ``hopper_forward``;
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
        attn_mask: as in ``attention``, and so are all arguments up to ``softcap``.
        dropout_p: as in ``attention``.
        is_causal: as in ``attention``.
        scale: as in ``attention``.
        enable_gqa: as in ``attention``.
        key_lengths: as in ``attention``.
        softcap: as in ``attention``.
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
    check_params(dropout_p, is_causal, enable_gqa)
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
            params = dropout_p, is_causal, scale
            return _varlen(tensors, starts, key_starts, params, stats, backward)
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
        # Of a seed, only that there is one counts: drawing one would change what is drawn later.
        seed = query.new_empty(1, dtype=torch.int64) if dropout_p else None
        operands = query, key, value, attn_mask, lengths, seed
        return _dense(operands, (dropout_p, is_causal, scale, softcap), stats, backward)


def _refuse(function: str, **arguments: Any) -> None:
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) or argument not in (None, 0, False):
            raise ArgumentError(f"{function} has no {name}")


def _check_dtype(query: Tensor) -> None:
    if _on_gpu(query) and query.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"query on cuda must be one of {names}, got {query.dtype}")


def _recorded(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _both(route: Route, backward: bool) -> Explanation:
    return Explanation(route, route if backward else None)


def _on_gpu(query: Tensor) -> bool:
    return query.is_cuda or _tiles.assumed() is not None


def _dense(
    operands: tuple[Any, ...], params: tuple[Any, ...], stats: bool, backward: bool
) -> Explanation:
    query, key, value, attn_mask, lengths, _ = operands
    dropout_p, is_causal, scale, softcap = params
    if query.shape[-1] > MAX_HEAD_DIM:
        library.check_wide(query, softcap)
        reason = f"head dimension {query.shape[-1]} is above {MAX_HEAD_DIM}"
        return _both(Route("sdpa", {}, reason), backward)
    if not _on_gpu(query):
        name = "reference" if stats or softcap or library.transformed(query) else "sdpa"
        return _both(Route(name, {}, f"the kernels run on CUDA, not on {query.device}"), backward)
    others = attn_mask, lengths, dropout_p, softcap
    size = query.shape[2], key.shape[2]
    if not stats:
        rule = library.faster_library(
            (query, key, value), *size, is_causal, scale, *others, backward=backward
        )
        if rule is not None:
            return _both(Route("sdpa", {}, _faster(rule)), backward)
    from . import launch

    kept = {
        "statistics": stats,
        "a mask": attn_mask is not None,
        "lengths": lengths is not None,
        "dropout": dropout_p,
        "a softcap": softcap,
        "other keys than queries": size[0] != size[1],
    }
    reason = _why_ours(query, scale, kept)
    call, out = new_call(*operands, *params), new_out(query)
    forward = launch.choose_forward(call, out, stats)
    route = Route(forward.kernel, forward.tile.arguments, reason)
    if not backward:
        return Explanation(route, None)
    dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
    done = launch.choose_backward(call, torch.empty_like(out), out, dq, dk, dv)
    return Explanation(route, Route(done.kernel, done.tile.arguments, reason))


def _varlen(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    key_starts: Tensor | None,
    params: tuple[float, bool, float | None],
    stats: bool,
    backward: bool,
) -> Explanation:
    query, (dropout_p, is_causal, scale) = tensors[0], params
    if not _on_gpu(query):
        reason = f"the kernels run on CUDA, not on {query.device}"
        return _both(Route("reference", {}, reason), backward)
    if not stats and key_starts is None:
        rule = library.faster_varlen(*tensors, starts, is_causal, scale, dropout_p, backward)
        if rule is not None:
            return _both(Route("varlen_attn", {}, _faster(rule)), backward)
    seed = query.new_empty(1, dtype=torch.int64) if dropout_p else None
    call = new_call(*tensors, None, None, seed, dropout_p, is_causal, scale)
    other_keys = key_starts is not None or tensors[1].shape != query.shape
    kept = {"statistics": stats, "dropout": dropout_p, "other keys than queries": other_keys}
    reason = _why_ours(query, scale, kept)
    from .kernels import online_backward, online_forward

    routes = [
        Route(tiles.name, online_tile(tiles, call, varlen=True).arguments, reason)
        for tiles in (online_forward.TILES, online_backward.TILES)
    ]
    return Explanation(routes[0], routes[1] if backward else None)


def _faster(rule: library.Rule) -> str:
    if rule.last is None:
        lengths = f"from {rule.first} tokens on"
    else:
        lengths = f"at {rule.first} to {rule.last} tokens"
    return f"faster {lengths} ({rule.source})"


def _why_ours(query: Tensor, scale: float | None, kept: dict[str, Any]) -> str:
    """Return why a call stays with our kernels: what PyTorch's does not take, or no rule."""
    gpu = _tiles.capability(query.device)
    on = f"compute capability {gpu // 10}.{gpu % 10}"
    needs = [name for name, present in kept.items() if present]
    if query.dtype == torch.float32:
        needs.append("float32")
    if query.shape[-1] % 8:
        needs.append(f"a head dimension of {query.shape[-1]}, no multiple of 8")
    if scale is not None and scale < library.LEAST_SCALE:
        needs.append("a scale that is not positive")
    if torch.are_deterministic_algorithms_enabled():
        needs.append("deterministic algorithms")
    if needs:
        return f"{on}; {', '.join(needs)}: only our kernels"
    return f"{on}; no rule of library.toml sends it to PyTorch"
