"""Hugging Face transformers: ``attn_implementation="leaner"`` in every model that dispatches.

    from leaner_kernels.adapters import transformers as leaner
    leaner.register()
    model = AutoModel.from_pretrained(..., attn_implementation="leaner")
    model.set_attn_implementation("leaner")  # or for an existing model

or, for an existing model, with a report and an undo:

    print(leaner.use(model))  # what was swapped, what was left and why
    leaner.undo(model)

Weights are unchanged. ``KappaMonitor(model)`` finds the modules by name and reads their statistics,
since transformers treats a second output as attention weights.

Calls that ``leaner_kernels.attention`` does not support fall back: to transformers' call of
PyTorch's attention if the head dimension is above 128 or differs from that of the values, and to
the model's own eager function if that reads a keyword of the call, such as ``output_attentions``. A
warning names the first fallback of each module, and the report names all. Keywords that the eager
function does not read are ignored, with one exception: a keyword that the module itself passes,
such as ``indices`` of sparse attention, may replace a mask that it creates for "eager" and "sdpa"
only, and raises a ValueError. So do a paged cache, arguments that exclude varlen sequences, and a
model that computes attention itself but lets transformers create its masks. A model that creates
its masks too runs unchanged under the name; ``use`` raises a ValueError for it.
"""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..nn.capture import refuse_tracing
from ..ops import _hooks
from ..ops._checks import MAX_HEAD_DIM
from ..ops.attention import attention, attention_varlen
from ..ops.attention.checks import boolean_mask, is_causal_bias
from ..ops.attention.reference import visible
from ._transformers_models import (
    NAME,
    Swapped,
    eager_attention,
    keyword_use,
    models_dispatch,
    supports_sdpa,
    swap,
    undo,
)

__all__ = ["attention_forward", "mask", "register", "undo", "use"]

# Keywords that models pass but that never change the output. Positions are already applied to the
# queries and keys, and to the mask if they restart.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",  # of flash-attn's backward
        "encoder_hidden_states",  # the source of the keys and values of cross attention
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",  # comes with position_ids
        "use_cache",
    }
)
# A sink needs one dimension; with eight, rows stay aligned for the kernels' loads.
SINK_DIMS = 8
INSTEAD = {
    "output_attentions": "weights are never stored, KappaMonitor(model) keeps their statistics",
    "cache": "generate without continuous batching",
}


def use(model: nn.Module) -> Swapped:
    """Switch the transformers models in a model to our attention, if they dispatch theirs.

    Args:
        model: a model of transformers, or one that contains some. The attention that its
            configurations name is changed in place. Weights, hooks, optimizers and the computed
            function are unchanged. Models that share a configuration share the change.

    Returns:
        A report of what was swapped, what was left and why, and, as calls are made, which fell
        back; it has an ``undo()``.

    Raises:
        ValueError: if no module dispatches; the model is then unchanged.
    """
    register()
    return swap(model)


def register() -> None:
    """Register ``attn_implementation="leaner"`` with transformers; repeated calls are harmless.

    Masks are those of transformers for PyTorch's attention: none if a batch is causal or full
    without padding, otherwise boolean; models that do not support PyTorch's attention get boolean
    masks for causal batches too.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    *sizes: Any, config: Any = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """Create a mask as transformers does for PyTorch's attention.

    Args:
        sizes: sizes of the batch, the queries and the keys, as in ``sdpa_mask``.
        config: configuration of the model.
        allow_is_causal_skip: whether None may represent a causal mask; this also requires a model
            that supports PyTorch's attention, since others interpret None differently.
        kwargs: further arguments of ``sdpa_mask``.

    Returns:
        (B, 1, N, M) boolean, True is visible; None if nothing, or only the future, is hidden.

    Raises:
        ValueError: if the model computes attention itself, and would read this mask as numbers.
    """
    if not models_dispatch(type(config)):
        raise ValueError(
            f'the models of {type(config).__name__} do not dispatch their attention, so "leaner" '
            'would not run in them: use attn_implementation="eager"'
        )
    skip = allow_is_causal_skip and supports_sdpa(type(config))
    return sdpa_mask(*sizes, config=config, allow_is_causal_skip=skip, **kwargs)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the calling convention of transformers, including GQA.

    Args:
        module: the caller. Its ``is_causal`` (True by default) applies if the argument is None and
            its model supports PyTorch's attention; otherwise None hides nothing.
        query: (B, H, N, D), or a batch of 1 for all; as ``leaner_kernels.attention`` takes it.
        key: (B, Hkv, M, D).
        value: (B, Hkv, M, D).
        attention_mask: boolean (True is visible) or additive, broadcastable to (B, H, N, M), and
            including causality, window and padding. None hides nothing, or the future if the module
            is causal and N > 1; keys past N then belong to unwritten entries of a cache.
        dropout: probability of dropping a probability, in [0, 1).
        scaling: multiplies the scores; ``D ** -0.5`` when omitted.
        is_causal: as above.
        position_bias: added to the scores, broadcastable to (B, H, N, M); differentiable.
        s_aux: (H,), the score of an attention sink per head, without a value; differentiable. With
            a head dimension above 120, and while ``KappaMonitor`` samples, it needs an additive
            mask of (B, H, N, M + 1).
        sliding_window: without a mask, row i sees keys nearer than this many positions.
        cu_seq_lens_q: (S + 1,), without a mask: the starts of the sequences packed into a batch of
            1, and the end of the last. Requires the next three.
        cu_seq_lens_k: (S + 1,), the same for the keys.
        max_length_q: length of the longest sequence.
        max_length_k: length of the longest sequence of keys.
        softcap: bounds the scores, as ``softcap * tanh(scores / softcap)``.
        kwargs: arguments of the module's eager function, if it reads them; others are ignored.

    Returns:
        (B, N, H, D), contiguous, and None, or the attention weights if the eager function returned
        some. Rows without a visible key are zero, or the mean of the values if the mask is additive
        and finite (on a GPU: above -1e38).

    Raises:
        ValueError: if a keyword is not supported, and the module has no eager function or one that
            does not read it; if ``leaner_kernels.attention`` does not support a shape, dtype or
            device; if ``torch.jit.trace`` runs the call.

    Source: the calling convention is that of transformers' ``sdpa_attention_forward``; the sink
    is Agarwal et al. 2025 (arXiv:2508.10925).
    """
    refuse_tracing(module)
    _refuse(module, {"cache": kwargs.pop("cache", None)})
    if attention_mask is not None and is_causal_bias(attention_mask):
        attention_mask = boolean_mask(attention_mask, query, key)
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    if is_causal is None:
        supported = supports_sdpa(type(getattr(module, "config", None)))
        is_causal = supported and bool(getattr(module, "is_causal", True))
    if attention_mask is None and cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise ValueError("cu_seq_lens_q needs cu_seq_lens_k, max_length_q and max_length_k")
        longest = int(max_length_q), int(max_length_k)
        windowed = sliding_window is not None and longest[1] > sliding_window
        others: dict[str, Any] = {"position_bias": position_bias, "s_aux": s_aux}
        others["sliding_window"] = sliding_window if windowed else None
        others |= _counted(module, kwargs) | {"softcap": softcap}
        _refuse(module, others, "the sequences of a varlen batch")
        # The batch is packed: its sequences follow one another.
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        others = {"cu_seqlens_k": cu_seq_lens_k.to(torch.int32), "max_seqlen_k": longest[1]}
        others |= {"dropout_p": dropout, "is_causal": is_causal, "scale": scaling}
        others["enable_gqa"] = q.shape[1] != k.shape[1]
        out = attention_varlen(q, k, v, cu_seq_lens_q.to(torch.int32), longest[0], **others)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None

    rows = query.shape[2]
    # In this order, so that the outcome is a bool where rows is a symbol of torch.compile.
    causal: bool = rows > 1 and attention_mask is None and is_causal
    if causal and key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]
        position_bias = None if position_bias is None else position_bias[..., :rows]
    cols = key.shape[2]

    why, only_eager = _fallback_reason(module, query, value, kwargs, softcap, position_bias, s_aux)
    windowed = attention_mask is None and sliding_window is not None and cols > sliding_window
    masked = position_bias is not None or s_aux is not None or only_eager
    if windowed or (causal and masked):
        left = sliding_window - 1 if windowed and sliding_window is not None else -1
        window = left, 0 if causal else left
        attention_mask, causal = visible(rows, cols, None, False, query.device, window), False
    if why is not None:
        _record_fallback(
            module, f"{why}: {'its eager function' if only_eager else 'sdpa'} computes it"
        )
        params: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
        params["position_bias"] = position_bias
        tensors = module, query, key, value
        if not only_eager:
            return sdpa_attention_forward(*tensors, attention_mask, is_causal=causal, **params)
        params |= {"s_aux": s_aux, "softcap": softcap, "sliding_window": sliding_window} | kwargs
        params = {name: value for name, value in params.items() if value is not None}
        # Eager functions read a causal mask and add it, whatever ``is_causal`` is.
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = _add_bias(attention_mask, query.new_zeros(()))
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[None, None]
        function: Any = eager_attention(module)
        return function(*tensors, attention_mask, **params)
    if position_bias is not None:
        attention_mask = _add_bias(attention_mask, position_bias.to(query.dtype))
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    dim = query.shape[-1]
    scale = dim**-0.5 if scaling is None else scaling
    tensors, options = (query, key, value, attention_mask), (dropout, causal, scale)
    capped = 0.0 if softcap is None else softcap
    out = None
    if _hooks.current is not None:
        attends = partial(_attend, tensors, s_aux, options, capped)
        # A monitor would take the dimensions of a sink for those of the heads.
        seen = tensors if s_aux is None else _with_sink(*tensors, s_aux, scale, in_mask=True)
        shared = query.shape[1] != key.shape[1]
        named: dict[str, Any] = {"softcap": capped, "attends": attends}
        out = _hooks.current.attend(module, *seen, *options, shared, **named)
    if out is None:
        out = _attend(tensors, s_aux, options, capped)
    out = out.reshape(*query.shape[:2], rows, out.shape[-1])[..., :dim]
    return out.transpose(1, 2).contiguous(), None


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    s_aux: Tensor | None,
    options: tuple[float, bool, float],
    softcap: float,
) -> Tensor:
    """Return (B, H, N, D), with heads and rows perhaps regrouped, and perhaps a larger D."""
    if s_aux is not None:
        in_mask = tensors[0].shape[-1] + SINK_DIMS > MAX_HEAD_DIM
        tensors = _with_sink(*tensors, s_aux, options[-1], in_mask)
    query, key, value, mask = tensors
    batch, heads, rows, dim = query.shape
    if rows == 1 and (mask is None or mask.dim() < 3 or mask.shape[-3] == 1):
        # Query heads that share a key become rows of one head, so that K and V are read once.
        query = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    shared = query.shape[1] != key.shape[1]
    return attention(query, key, value, mask, *options, shared, softcap=softcap)


def _fallback_reason(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    keywords: dict[str, Any],
    softcap: float | None,
    position_bias: Tensor | None,
    s_aux: Tensor | None,
) -> tuple[str | None, bool]:
    """Return why a call falls back, or None; and whether it uses the eager function."""
    extra = _counted(module, keywords)
    _refuse(module, {n: v for n, v in extra.items() if keyword_use(type(module), n) == "other"})
    # Our softcap bounds the products only, before any bias.
    if softcap is not None and (position_bias is not None or s_aux is not None):
        extra["softcap"] = softcap
    if extra and eager_attention(module) is None:
        _refuse(module, extra)
    if extra:
        return ", ".join(_format(*pair) for pair in extra.items()), True
    dims = query.shape[-1], value.shape[-1]
    if dims[0] == dims[1] <= MAX_HEAD_DIM:
        return None, False
    why = f"head dimension {dims[0]}, and {dims[1]} of its values"
    # PyTorch's attention would ignore them.
    only_eager = softcap is not None or s_aux is not None
    if only_eager and eager_attention(module) is None:
        _refuse(module, {"softcap": softcap, "s_aux": s_aux}, f"attention of {why}")
    return why, only_eager


def _record_fallback(module: nn.Module, reason: str) -> None:
    """Record for the report why a call fell back, and warn once."""
    if getattr(module, _hooks.FALLBACK, None) == reason:
        return
    setattr(module, _hooks.FALLBACK, reason)
    if not torch.compiler.is_compiling():
        warnings.warn(f"{type(module).__name__} falls back: {reason}", stacklevel=3)


def _add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return ``bias`` combined with a boolean or additive mask."""
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return bias + mask.to(bias.dtype)
    # Finite, as in transformers, so that PyTorch's attention gives no NaN for an empty row.
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def _with_sink(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor,
    scale: float,
    in_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Append a key with a value of zero and the score ``sink`` of each head.

    The score is a column of an additive mask, or a product in additional dimensions.
    """
    batch, heads, rows, _ = query.shape
    key, value = (nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))
    cols = key.shape[2]
    if in_mask:
        sink = sink.to(query.dtype)
        scores = _add_bias(mask, sink.new_zeros(1, 1, 1, cols - 1))
        batch, heads, rows, _ = torch.broadcast_shapes(scores.shape, (1, heads, 1, 1))
        column = sink[:, None, None].expand(batch, heads, rows, 1)
        scores = scores.expand(batch, heads, rows, cols - 1)
        return query, key, value, torch.cat([scores, column], dim=-1)
    score = (sink / scale).to(query.dtype)[:, None, None].expand(batch, heads, rows, 1)
    query = torch.cat([query, nn.functional.pad(score, (0, SINK_DIMS - 1))], dim=-1)
    last = key.new_zeros(cols, SINK_DIMS)
    last[-1, 0] = 1
    key = torch.cat([key, last.expand(*key.shape[:2], -1, -1)], dim=-1)
    value = nn.functional.pad(value, (0, SINK_DIMS))
    if mask is not None:
        mask = nn.functional.pad(mask, (0, 1), value=float(mask.dtype == torch.bool))
    return query, key, value, mask


def _refuse(module: nn.Module, keywords: dict[str, Any], where: str = "attention") -> None:
    """Raise ValueError for the first keyword that is given."""
    for name, value in keywords.items():
        if value is None or value is False:
            continue
        instead = INSTEAD.get(name, 'use attn_implementation="eager"')
        raise ValueError(
            f"{type(module).__name__} passes {_format(name, value)} to {where}, which "
            f'"leaner" does not support: {instead}'
        )


def _counted(module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that may change the result."""
    return {
        name: value
        for name, value in keywords.items()
        if value is not None and value is not False and name not in HARMLESS
        if keyword_use(type(module), name) != "none"
    }


def _format(name: str, value: Any) -> str:
    shown = tuple(value.shape) if isinstance(value, Tensor) else value
    return f"{name}={shown!r}"
