"""Our attention in the models of transformers: set in their configurations, found in their code."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..ops._checks import MAX_HEAD_DIM
from ..ops._hooks import FALLBACK
from . import swap as swapping

# The attribute in which a module keeps what its configurations named before: copies are undone too.
_ORIGINS = "_attention_origins"
NAME = "leaner"
OURS = "leaner_kernels.attention"
KeywordUse = Literal["eager", "other", "none"]


class Swapped(swapping.Swapped):
    """As ``swap.Swapped``; it also reports calls that fall back to another attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    @property
    def fallbacks(self) -> dict[str, str]:
        """By module name, which calls fall back to another attention, and why.

        Before any call only a head dimension that is too large; else those made so far.
        """
        reasons = {name: _fallback(module) for name, module in self._modules.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def undo(self) -> None:
        """Have the model call what it called before."""
        undo(self._model)

    def _sections(self) -> dict[str, dict[str, str]]:
        fallbacks = self.fallbacks
        return super()._sections() | ({"fallbacks": fallbacks} if fallbacks else {})


def swap(model: nn.Module) -> Swapped:
    """Set our attention in the configurations of a model whose modules dispatch theirs.

    Where no module does, a ValueError is raised and the model is as it was.
    """
    before = {id(config): config._attn_implementation for _, _, config in _configs(model)}
    try:
        _set_name(model)
        report = _report(model, before)
    except Exception:
        _restore(model, before)
        raise
    if not report.swapped:
        _restore(model, before)
        raise ValueError(report.nothing_in(model))
    for module, path, config in _configs(model):
        if config._attn_implementation != before[id(config)]:
            vars(module).setdefault(_ORIGINS, {})[path] = before[id(config)]
    return report


def undo(model: nn.Module) -> None:
    """Have a model, or a copy of one, call what it called before ``use``.

    Where another attention has been set since, nothing happens.
    """
    for module in model.modules():
        for path, before in vars(module).pop(_ORIGINS, {}).items():
            config: Any = dict(_nested(module.config))[path]
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = before
        vars(module).pop(FALLBACK, None)


def _set_name(model: nn.Module) -> None:
    """Have transformers set the name in every model of its own; what it warns of is reported."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    roots: list[str] = []
    try:
        for path, module in model.named_modules():
            inside = any(not root or path.startswith(f"{root}.") for root in roots)
            if isinstance(module, PreTrainedModel) and not inside:
                roots.append(path)
                module.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(verbosity)


def _report(model: nn.Module, before: dict[int, str | None]) -> Swapped:
    """Report what dispatches to the name now, and unset it where masks would not fit."""
    report, inner, dispatching = Swapped(model), dict[str, str](), dict[str, nn.Module]()
    configs, owners = {}, list[tuple[str, Any]]()
    roots = [path for path, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    for path, module in model.named_modules():
        while owners and owners[-1][0] and not f"{path}.".startswith(f"{owners[-1][0]}."):
            owners.pop()
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            owners.append((path, module.config))
        configs[path] = owners[-1][1] if owners else None
        if dispatches(module) and not isinstance(module, PreTrainedModel):
            dispatching[path] = module
        elif swapping.is_attention(module):
            inner[path] = _why_left(module)
    inner = swapping.without_holders(model, inner, [*dispatching])
    for path in inner:
        config = configs[path]
        shared = any(configs[other] is config for other in dispatching)
        # A module with attention of its own can read masks made for the name if sdpa is supported.
        if config is not None and not (shared and supports_sdpa(type(config))):
            config._attn_implementation_internal = before[id(config)]
    for path, module in dispatching.items():
        named = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if named == NAME:
            report.swapped[path] = f"{swapping.class_name(type(module))} -> {OURS}"
            report._modules[path] = module
        else:
            inside = any(not root or path.startswith(f"{root}.") for root in roots)
            report.left[path] = f"{swapping.class_name(type(module))} stays on {named!r}, " + (
                "with what shares its configuration and computes attention itself"
                if inside
                else "whose configuration is set through the model of transformers around it"
            )
    report.left |= inner
    return report


def _restore(model: nn.Module, before: dict[int, str | None]) -> None:
    for _, _, config in _configs(model):
        config._attn_implementation_internal = before[id(config)]


def _configs(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield every module with a configuration, and that and all in it by their dotted paths."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            yield from ((module, path, part) for path, part in _nested(config))


def _nested(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from _nested(inner, f"{path}.{key}")


def _fallback(module: nn.Module) -> str | None:
    dim, noted = getattr(module, "head_dim", None), vars(module).get(FALLBACK)
    if noted is None and isinstance(dim, int) and dim > MAX_HEAD_DIM:
        return f"head dimension {dim} is above {MAX_HEAD_DIM}"
    return noted


def _why_left(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "leaner_kernels.adapters.pytorch swaps it"
    name = swapping.class_name(type(module))
    return f"{name} computes its attention itself, whatever its configuration names"


# Constants to torch.compile, which would warn of the caches and trace through every class.
@torch.compiler.assume_constant_result
def supports_sdpa(config: type) -> bool:
    """Whether the models of a configuration all support PyTorch's attention.

    Others were written for eager attention, in which no mask means that nothing is hidden, whatever
    ``is_causal`` is. A configuration without models counts as supported.
    """
    return all(model._supports_sdpa for model in _models(config))


@torch.compiler.assume_constant_result
def models_dispatch(config: type) -> bool:
    """Whether the models of a configuration call the attention that it names."""
    # What is typed into an interpreter has no source in which transformers could look.
    models = (model for model in _models(config) if model.__module__ != "__main__")
    return all(model._can_set_attn_implementation() for model in models)


def eager_attention(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that a module calls for "eager", or None."""
    place = _eager_place(type(module))
    return None if place is None else getattr(sys.modules[place[0]], place[1])


# A function is no constant to torch.compile.
@torch.compiler.assume_constant_result
def _eager_place(cls: type) -> tuple[str, str] | None:
    for function in _dispatching_methods(cls):
        for name in function.__code__.co_names:
            if "eager" in name and callable(getattr(sys.modules[function.__module__], name, None)):
                return function.__module__, name
    return None


@torch.compiler.assume_constant_result
def keyword_use(cls: type, name: str) -> KeywordUse:
    """Return what a keyword, in calls of attention by modules of a class, is for.

    "eager" where the eager function reads it, or there is none to tell; "other" where that does
    not, but the module writes the keyword itself, for the functions of other names; "none" where
    the module only hands it on with what else its model was called with.
    """
    return _keyword_use(cls, name)


@cache
def _keyword_use(cls: type, name: str) -> KeywordUse:
    place = _eager_place(cls)
    # Weights are what the eager function returns in any case.
    if place is None or name == "output_attentions":
        return "eager"
    if _reads(inspect.unwrap(getattr(sys.modules[place[0]], place[1])), name):
        return "eager"
    for function in _dispatching_methods(cls):
        for constant in function.__code__.co_consts:
            # The keywords of a call are strings of their own, or together in a tuple.
            if name == constant or (isinstance(constant, tuple) and name in constant):
                return "other"
    return "none"


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names a keyword, as a parameter or as a string to look it up by."""
    if not isinstance(function, FunctionType):
        return True
    return name in inspect.signature(function).parameters or name in function.__code__.co_consts


def dispatches(module: nn.Module) -> bool:
    """Whether a module calls what transformers' ``AttentionInterface`` returns."""
    return bool(_dispatching_methods(type(module)))


@cache
def _dispatching_methods(cls: type) -> tuple[FunctionType, ...]:
    """Return the methods of a class that call ``get_interface`` of an ``AttentionInterface``.

    Read off the code: a list of classes would age with each release, a probe needs inputs of every
    model, and transformers' own test is of a whole file, whose models may differ (SAM, Git).
    """
    bases = (base for base in cls.__mro__ if base not in (nn.Module, PreTrainedModel))
    values = (value for base in bases for value in vars(base).values() if callable(value))
    methods = (m for m in map(inspect.unwrap, values) if isinstance(m, FunctionType))
    return tuple(
        method
        for method in methods
        if "get_interface" in (names := method.__code__.co_names)
        and any(isinstance(method.__globals__.get(n), AttentionInterface) for n in names)
    )


@cache
def _models(config: type) -> list[type[PreTrainedModel]]:
    """Return the models in the file beside that of a configuration, or else those made for it."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    known, classes = [PreTrainedModel], list[type[PreTrainedModel]]()
    while known:
        classes += (subclasses := known.pop().__subclasses__())
        known += subclasses
    beside = [model for model in classes if model.__module__ == name]
    return beside or [model for model in classes if model.config_class is config]
