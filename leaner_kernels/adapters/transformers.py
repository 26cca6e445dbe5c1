"""Hugging Face transformers: ``attn_implementation="leaner"`` in every model that dispatches.

    from leaner_kernels.adapters import transformers as leaner
    leaner.register()
    model = AutoModel.from_pretrained(..., attn_implementation="leaner")
    model.set_attn_implementation("leaner")  # or for an existing model

or, for an existing model, with a report and an undo:

    print(leaner.use(model))  # what was swapped, what was left and why
    leaner.undo(model)

Weights are unchanged. ``KappaMonitor(model)`` finds the modules by name and reads their statistics.
``use`` leaves the modules that ``leaner_kernels.attention`` cannot compute on the attention that
they had. By name they raise a ValueError when they run, as does a model that computes attention
itself but lets transformers create its masks.
"""

import inspect
import sys
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import needed_by
from ..nn.capture import refuse_tracing
from ..ops import _hooks
from ..ops._checks import MAX_HEAD_DIM
from ..ops.attention import attention, attention_varlen
from ..ops.attention.reference import visible
from ..removed import refuse_removed_arguments
from . import swap

with needed_by(__name__):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedConfig,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.masking_utils import sdpa_mask

__all__ = ["attention_forward", "mask", "register", "undo", "use"]

NAME = "leaner"
# The attribute in which ``use`` stores the former attention of a module's configuration.
_BEFORE = "_attention_before"
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
INSTEAD = {"output_attentions": "KappaMonitor(model) has statistics of the attention weights"}


def use(model: nn.Module) -> swap.Swapped:
    """Switch the transformers models in a model to our attention, if they dispatch theirs.

    Args:
        model: a model of transformers, or one that contains some. The attention that its
            configurations name is changed in place. Weights, hooks, optimizers and the computed
            function are unchanged. Models that share a configuration share the change.

    Returns:
        A report of what was swapped, and what was left and why; it has an ``undo()``.

    Raises:
        ValueError: if no module dispatches; the model is then unchanged.
    """
    register()
    configs: dict[str, Any] = {
        name: module.config
        for name, module in model.named_modules()
        if isinstance(getattr(module, "config", None), PreTrainedConfig)
    }
    before = {name: config._attn_implementation for name, config in configs.items()}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(NAME)
    report, left = swap.Swapped(lambda: undo(model)), dict[str, str]()
    dispatching = {
        name: config
        for name, config in configs.items()
        if swap.calls(type(model.get_submodule(name)), "get_interface")
    }
    refused: dict[int, str] = {}
    for name, config in dispatching.items():
        if (reason := _unsupported(model.get_submodule(name))) is not None:
            refused.setdefault(id(config), reason)
    for name, config in configs.items():
        alone = _self_made(type(config))
        if alone is not None and _creates_masks(type(model.get_submodule(name))):
            refused.setdefault(
                id(config), f"it shares its masks with {alone}, which computes its attention itself"
            )
    ours = {id(config) for config in dispatching.values()} - refused.keys()
    for name, config in configs.items():
        if id(config) in refused or (id(config) not in ours and _self_made(type(config))):
            # Not through the setter, which would also set the inner configurations.
            own = before[name] if before[name] != NAME else "eager"
            config._attn_implementation_internal = own
        if before[name] != NAME and config._attn_implementation == NAME:
            vars(model.get_submodule(name)).setdefault(_BEFORE, before[name])
    for name, module in model.named_modules():
        cls = swap.class_name(type(module))
        if isinstance(module, PreTrainedModel):
            continue
        if not swap.calls(type(module), "get_interface"):
            if swap.is_attention(module):
                left[name] = f"{cls} computes its attention itself"
        elif name in configs and id(configs[name]) in refused:
            left[name] = f"{cls}: {refused[id(configs[name])]}"
        elif name in configs and configs[name]._attn_implementation == NAME:
            report.swapped[name] = f"{cls} -> leaner_kernels.attention"
        else:
            left[name] = f"the enclosing model sets the attention of {cls}"
    report.left = swap.without_holders(left, [*report.swapped])
    if not report.swapped:
        report.undo()
        raise ValueError(report.nothing_in(model))
    return report


def _unsupported(module: Any) -> str | None:
    """Return why ``attention_forward`` cannot compute a module that dispatches, or None."""
    if unknown := _unknown_keywords(type(module)):
        return f"it may pass {', '.join(unknown)}, which leaner_kernels.attention does not support"
    dim = getattr(module, "qk_head_dim", getattr(module, "head_dim", None))
    if dim is None:
        return None
    value_dim = getattr(module, "v_head_dim", dim)
    if value_dim != dim:
        return f"keys have a head dimension of {dim}, values of {value_dim}: they must be equal"
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None and dim > MAX_HEAD_DIM:
        return f"a softcap needs a head dimension up to {MAX_HEAD_DIM}, got {dim}"
    return None


def _creates_masks(cls: type) -> bool:
    """Return whether a class has transformers create masks of its configuration."""
    return any(swap.calls(cls, name) for name in vars(masking_utils) if name.startswith("create_"))


def undo(model: nn.Module) -> None:
    """Make a model, or a copy of it, call the attention that it called before ``use``.

    If another attention has been set since, nothing happens.
    """
    for module in model.modules():
        before, config = vars(module).pop(_BEFORE, None), vars(module).get("config")
        if config is not None and before is not None and config._attn_implementation == NAME:
            config._attn_implementation_internal = before


@refuse_removed_arguments
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
        ValueError: if an attention of the model computes it itself, and would read this mask as
            numbers.
    """
    if (alone := _self_made(type(config))) is not None:
        raise ValueError(
            f'{alone} computes its attention itself, so it would not run "leaner": '
            'use attn_implementation="eager"'
        )
    skip = allow_is_causal_skip and _supports_sdpa(type(config))
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
) -> tuple[Tensor, None]:
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
        s_aux: (H,), the score of an attention sink per head, without a value; differentiable. It
            needs an additive mask of (B, H, N, M + 1).
        sliding_window: without a mask, row i sees keys nearer than this many positions.
        cu_seq_lens_q: (S + 1,), without a mask: the starts of the sequences packed into a batch of
            1, and the end of the last. Requires the next three.
        cu_seq_lens_k: (S + 1,), the same for the keys.
        max_length_q: length of the longest sequence.
        max_length_k: length of the longest sequence of keys.
        softcap: bounds the scores, as ``softcap * tanh(scores / softcap)``.
        kwargs: arguments that never change the result, or None or False.

    Returns:
        (B, N, H, D), contiguous, and None. Rows without a visible key are zero, or the mean of the
        values if the mask is additive and finite (on a GPU: above -1e38).

    Raises:
        ValueError: if a keyword is not supported; if ``leaner_kernels.attention`` does not support
            a shape, dtype or device, such as a ``softcap`` of heads wider than 128; if
            ``torch.jit.trace`` runs the call.

    Source: the calling convention is that of transformers' ``sdpa_attention_forward``; the sink
    is Agarwal et al. 2025 (arXiv:2508.10925).
    """
    refuse_tracing(module)
    if not HARMLESS.issuperset(kwargs):
        _refuse(module, {name: value for name, value in kwargs.items() if name not in HARMLESS})
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)
    if is_causal is None:
        supported = _supports_sdpa(type(getattr(module, "config", None)))
        is_causal = supported and bool(getattr(module, "is_causal", True))
    params: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    params["enable_gqa"] = query.shape[1] != key.shape[1]
    if attention_mask is None and cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise ValueError("cu_seq_lens_q needs cu_seq_lens_k, max_length_q and max_length_k")
        longest = int(max_length_q), int(max_length_k)
        windowed = sliding_window is not None and longest[1] > sliding_window
        others = {"position_bias": position_bias, "s_aux": s_aux, "softcap": softcap}
        others["sliding_window"] = sliding_window if windowed else None
        _refuse(module, others, "the sequences of a varlen batch")
        # The batch is packed: its sequences follow one another.
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        params |= {"cu_seqlens_k": cu_seq_lens_k.to(torch.int32), "max_seqlen_k": longest[1]}
        starts = cu_seq_lens_q.to(torch.int32)
        out = attention_varlen(q, k, v, starts, longest[0], is_causal=is_causal, **params)
        return out.unflatten(0, (query.shape[0], query.shape[2])), None

    if softcap is not None and (position_bias is not None or s_aux is not None):
        # Ours bounds the products only, before any bias.
        _refuse(module, {"softcap": softcap}, "attention with a bias")
    rows = query.shape[2]
    # In this order, so that the outcome is a bool where rows is a symbol of torch.compile.
    causal: bool = rows > 1 and attention_mask is None and is_causal
    if causal and key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]
        position_bias = None if position_bias is None else position_bias[..., :rows]
    cols = key.shape[2]
    windowed = attention_mask is None and sliding_window is not None and cols > sliding_window
    if windowed or (causal and (position_bias is not None or s_aux is not None)):
        left = sliding_window - 1 if windowed and sliding_window is not None else -1
        right = 0 if causal else left
        attention_mask = visible(
            rows, cols, None, query.device, window_left=left, window_right=right
        )
        causal = False
    if position_bias is not None:
        attention_mask = _add_bias(attention_mask, position_bias.to(query.dtype))
    if s_aux is not None:
        # A key with a value of zero, whose score for each head is a column of the mask.
        key, value = (nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))
        scores = _add_bias(attention_mask, query.new_zeros(1, 1, 1, 1))
        sink = s_aux.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
        attention_mask = torch.cat([scores.expand(*query.shape[:3], cols), sink], dim=-1)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
    params |= {"is_causal": causal, "softcap": softcap or 0.0}
    shape = query.shape
    shared = attention_mask is None or attention_mask.dim() < 3 or attention_mask.shape[-3] == 1
    folded = rows == 1 and shared
    if folded:
        # Query heads that share a key become rows of one head, so that K and V are read once.
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
        params["enable_gqa"] = False
    if not folded:
        out = attention(query, key, value, attention_mask, **params)
    else:
        # A monitor skips calls of a single query, but these rows are a layer.
        with _hooks.untraced():
            out = attention(query, key, value, attention_mask, **params)
    return out.reshape(shape).transpose(1, 2).contiguous(), None


def _add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return ``bias`` combined with a boolean or additive mask."""
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return bias + mask.to(bias.dtype)
    # Finite, as in transformers, so that PyTorch's attention gives no NaN for an empty row.
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def _refuse(module: nn.Module, keywords: dict[str, Any], where: str = "attention") -> None:
    """Raise ValueError for the first keyword that is given."""
    for name, value in keywords.items():
        if value is None or value is False:
            continue
        shown = tuple(value.shape) if isinstance(value, Tensor) else value
        instead = INSTEAD.get(name, 'use attn_implementation="eager"')
        raise ValueError(
            f"{type(module).__name__} passes {name}={shown!r} to {where}, which "
            f'"leaner" does not support: {instead}'
        )


@cache
def _unknown_keywords(cls: type) -> list[str]:
    """Return the keywords of the attention call of a class that may change the result."""
    supported = {*inspect.signature(attention_forward).parameters, *HARMLESS, *INSTEAD}
    functions = (f for f in vars(cls).values() if isinstance(f, FunctionType))
    calls = (
        names
        for function in functions
        for names in inspect.unwrap(function).__code__.co_consts
        # Every call of the interface has one of these keywords.
        if isinstance(names, tuple) and not {"dropout", "scaling"}.isdisjoint(names)
    )
    return sorted({name for names in calls for name in names if isinstance(name, str)} - supported)


# Constants to torch.compile, which would warn of the caches and trace through every class.
@torch.compiler.assume_constant_result
def _supports_sdpa(config: type) -> bool:
    """Whether the models of a configuration all support PyTorch's attention.

    Other models were written for eager attention, in which nothing is hidden without a mask,
    whatever ``is_causal`` says.
    """
    return _all_support_sdpa(config)


@cache
def _all_support_sdpa(config: type) -> bool:
    return all(cls._supports_sdpa for cls in _classes(config) if issubclass(cls, PreTrainedModel))


@torch.compiler.assume_constant_result
def _self_made(config: type) -> str | None:
    """Return the name of an attention class of a configuration that does not dispatch, or None."""
    return _find_self_made(config)


@cache
def _find_self_made(config: type) -> str | None:
    for cls in _classes(config):
        own = swap.calls(cls, "softmax") or swap.calls(cls, "scaled_dot_product_attention")
        given = inspect.signature(cls.__init__).parameters.get("config")
        if given is not None and isinstance(given.annotation, type):
            # It belongs to another part, such as the audio part of a model of text and audio.
            own = own and (given.annotation is given.empty or issubclass(config, given.annotation))
        if "Attention" in cls.__name__ and own and not swap.calls(cls, "get_interface"):
            return cls.__name__
    return None


@cache
def _classes(config: type) -> list[type[Any]]:
    """Return the modules in the modeling file that belongs to a configuration."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    values = vars(sys.modules[name]).values() if name in sys.modules else ()
    classes = (value for value in values if isinstance(value, type) and value.__module__ == name)
    return [cls for cls in classes if issubclass(cls, nn.Module)]
