"""What the classes of transformers do with an attention implementation, read from their code."""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel


# Constants to torch.compile, which would warn of the caches and trace through every class.
@torch.compiler.assume_constant_result
def supports_sdpa(config: type) -> bool:
    """Whether the models of a configuration all support PyTorch's attention.

    Those that do not were written for eager attention, which takes no mask for nothing hidden,
    whatever ``is_causal`` says. Without a model the caller knows what it asks for.
    """
    return all(model._supports_sdpa for model in _models(config))


@torch.compiler.assume_constant_result
def models_dispatch(config: type) -> bool:
    """Whether the models of a configuration call the attention that they are told to."""
    # What is typed into an interpreter has no source in which transformers could look.
    models = (model for model in _models(config) if model.__module__ != "__main__")
    return all(model._can_set_attn_implementation() for model in models)


def eager_attention(cls: type) -> Callable[..., Any] | None:
    """Return the function that modules of a class call for "eager", or None."""
    place = _eager_place(cls)
    return None if place is None else getattr(sys.modules[place[0]], place[1])


# A function is no constant to torch.compile.
@torch.compiler.assume_constant_result
def _eager_place(cls: type) -> tuple[str, str] | None:
    for function in _dispatching(cls):
        for name in function.__code__.co_names:
            if "eager" in name and callable(getattr(sys.modules[function.__module__], name, None)):
                return function.__module__, name
    return None


def dispatches(module: nn.Module) -> bool:
    """Whether a module asks transformers' ``AttentionInterface`` what to call."""
    return bool(_dispatching(type(module)))


@cache
def _dispatching(cls: type) -> tuple[FunctionType, ...]:
    """Return the methods of a class that call ``get_interface`` of an ``AttentionInterface``."""
    return tuple(function for function in _methods(cls) if _asks(function))


def _methods(cls: type) -> Iterator[FunctionType]:
    for base in cls.__mro__:
        if base not in (nn.Module, PreTrainedModel):
            methods = (inspect.unwrap(m) for m in vars(base).values() if callable(m))
            yield from (method for method in methods if isinstance(method, FunctionType))


def _asks(function: FunctionType) -> bool:
    names = function.__code__.co_names
    found = (function.__globals__.get(name) for name in names)
    return "get_interface" in names and any(isinstance(f, AttentionInterface) for f in found)


@cache
def _models(config: type) -> list[type[PreTrainedModel]]:
    """Return the models in the file beside that of a configuration, or else those made for it."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    known, classes = [PreTrainedModel], list[type[PreTrainedModel]]()
    while known:
        classes += (found := known.pop().__subclasses__())
        known += found
    beside = [model for model in classes if model.__module__ == name]
    return beside or [model for model in classes if model.config_class is config]
