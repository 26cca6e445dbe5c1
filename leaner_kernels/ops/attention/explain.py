"""Say which implementation a call of softmax attention runs, and why."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _tiles
from .._checks import ANY_HEAD_DIM, MAX_HEAD_DIM, ArgumentError, check_scale
from . import library
from .call import (
    check_packed,
    check_params,
    check_query_key_value,
    check_softcap,
    check_varlen,
    draw_seed,
    new_call,
    online_tile,
)
from .causal_bias import plain_mask
from .operators import new_out, split_qkv


class Route(NamedTuple):
    """What computes one direction of a call.

    Attributes:
        implementation: a kernel by its name in ``tuned/*.toml``, such as ``hopper_forward``;
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
    stats: bool = False,
    backward: bool | None = None,
    capability: int | None = None,
) -> Explanation:
    """Return which implementation a call runs, forward and backward, and why; run nothing.

    Args:
        query: of the call: (B, H, N, D) as for ``attention``; a projection (B, N, 3, H, D) alone as
            for ``attention_qkvpacked``; (T, H, D) with ``cu_seqlens`` as for ``attention_varlen``.
            Of tensors of the meta device, shapes and strides count.
        key: as ``query``.
        value: as ``query``.
        attn_mask: as in ``attention``, and so are all arguments up to ``softcap``.
        dropout_p: as in ``attention``.
        is_causal: as in ``attention``.
        scale: as in ``attention``.
        enable_gqa: as in ``attention``.
        key_lengths: as in ``attention``.
        softcap: as in ``attention``.
        cu_seqlens: as in ``attention_varlen``.
        max_seqlen: as in ``attention_varlen``.
        stats: whether the call is one ``_with_stats``.
        backward: whether gradients will be asked for; by default, whether autograd would record it.
        capability: explain the call on a GPU of this compute capability (90 for 9.0), wherever the
            tensors are.

    Returns:
        Explanation, which prints as one line.

    Raises:
        ValueError: what the call itself would refuse.
    """
    check_params(dropout_p, is_causal, enable_gqa)
    scale, softcap = check_scale(scale), check_softcap(softcap)
    with _assumed(capability):
        if cu_seqlens is not None:
            if key is None or value is None:
                raise ArgumentError("cu_seqlens need query, key and value, got no key or value")
            starts, _ = check_varlen(
                query, key, value, cu_seqlens, max_seqlen, None, None, enable_gqa
            )
            tensors = query, key, value
            if backward is None:
                backward = _recorded(tensors)
            return _varlen(tensors, starts, dropout_p, is_causal, scale, stats, backward)
        max_head_dim = MAX_HEAD_DIM if stats else ANY_HEAD_DIM
        tensors: tuple[Tensor, ...] = (query,)
        if key is None or value is None:
            lengths = check_packed(query, key_lengths, None, max_head_dim)
            query, key, value = split_qkv(query)
        else:
            attn_mask, is_causal = plain_mask(attn_mask, is_causal, query, key)
            lengths = check_query_key_value(
                *(query, key, value, attn_mask, is_causal, enable_gqa, key_lengths),
                max_head_dim=max_head_dim,
            )
            tensors = query, key, value
        if backward is None:
            backward = _recorded(tensors)
        seed = draw_seed(dropout_p, query.device)
        operands = query, key, value, attn_mask, lengths, seed
        params = dropout_p, is_causal, scale, softcap
        return _dense(operands, params, stats, backward)


@contextmanager
def _assumed(capability: int | None) -> Iterator[None]:
    _tiles.assumed = capability
    try:
        yield
    finally:
        _tiles.assumed = None


def _recorded(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _both(route: Route, backward: bool) -> Explanation:
    return Explanation(route, route if backward else None)


def _on_gpu(query: Tensor) -> bool:
    return query.is_cuda or _tiles.assumed is not None


def _dense(
    operands: tuple[Any, ...], params: tuple[Any, ...], stats: bool, backward: bool
) -> Explanation:
    query, key, value, attn_mask, lengths, _ = operands
    dropout_p, is_causal, scale, softcap = params
    if query.shape[-1] > MAX_HEAD_DIM:
        reason = f"head dimension {query.shape[-1]} is above {MAX_HEAD_DIM}"
        return _both(Route("sdpa", {}, reason), backward)
    if not _on_gpu(query):
        name = "reference" if stats or softcap else "sdpa"
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

    call = new_call(*operands, *params)
    reason = _why_ours(query, stats or size[0] != size[1] or any(o is not None for o in others[:2]))
    out = new_out(query)
    forward = launch.choose_forward(call, out, stats)
    if not backward:
        return Explanation(Route(forward.kernel, forward.tile.arguments, reason), None)
    dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
    done = launch.choose_backward(call, torch.empty_like(out), out, dq, dk, dv)
    return Explanation(
        Route(forward.kernel, forward.tile.arguments, reason),
        Route(done.kernel, done.tile.arguments, reason),
    )


def _varlen(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    stats: bool,
    backward: bool,
) -> Explanation:
    query = tensors[0]
    if not _on_gpu(query):
        reason = f"the kernels run on CUDA, not on {query.device}"
        return _both(Route("reference", {}, reason), backward)
    if not stats:
        rule = library.faster_varlen(*tensors, starts, is_causal, scale, dropout_p, backward)
        if rule is not None:
            return _both(Route("varlen_attn", {}, _faster(rule)), backward)
    seed = draw_seed(dropout_p, query.device)
    call = new_call(*tensors, None, None, seed, dropout_p, is_causal, scale)
    reason = _why_ours(query, stats)
    routes = [
        Route(name, online_tile(name, call, varlen=True).arguments, reason)
        for name in ("online_forward", "online_backward")
    ]
    return Explanation(routes[0], routes[1] if backward else None)


def _faster(rule: library.Rule) -> str:
    if rule.last is None:
        lengths = f"from {rule.first} tokens on"
    else:
        lengths = f"at {rule.first} to {rule.last} tokens"
    return f"faster {lengths} ({rule.source})"


def _why_ours(query: Tensor, needed: bool) -> str:
    gpu = _tiles.capability(query.device)
    on = f"compute capability {gpu // 10}.{gpu % 10}"
    if needed:
        return f"{on}; statistics, a mask, lengths or other keys than queries stay with our kernels"
    if torch.are_deterministic_algorithms_enabled():
        return f"{on}; deterministic algorithms are on, and PyTorch's gradients are not"
    return f"{on}; no rule of library.toml sends it to PyTorch"
