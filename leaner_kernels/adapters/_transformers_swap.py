"""Our attention for the models of transformers in a model, by their configurations."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from leaner_kernels.adapters import swap as swapping
from leaner_kernels.adapters._transformers_models import dispatches, supports_sdpa
from leaner_kernels.ops._checks import MAX_HEAD_DIM
from leaner_kernels.ops._hooks import HANDED_ON

# Where a module keeps what its configurations named before, so that copies can be undone as well.
ORIGINS = "_attention_origins"
NAME = "leaner"
OURS = "leaner_kernels.attention"


class Swapped(swapping.Swapped):
    """What was swapped in a model, and what was not; printed, it is the report.

    Attributes:
        swapped: by module name, what it was and calls now.
        left: by module name, the attention-like modules that stay, and why, in one line.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    @property
    def handed_on(self) -> dict[str, str]:
        """By module name, which calls another function computes, and why.

        Of what can be told before a call, the head dimension; else of those so far.
        """
        found = {name: _handed_on(module) for name, module in self._modules.items()}
        return {name: what for name, what in found.items() if what is not None}

    def undo(self) -> None:
        """Have the model call what it called before."""
        undo(self._model)

    def _sections(self) -> dict[str, dict[str, str]]:
        handed_on = self.handed_on
        return super()._sections() | ({"handed on": handed_on} if handed_on else {})


def swap(model: nn.Module) -> Swapped:
    """Name our attention in the configurations of a model whose modules ask for a name.

    Args:
        model: changed in place.

    Returns:
        What was swapped and what was left.

    Raises:
        ValueError: nothing asks; the model is as it was.
    """
    before = {id(config): config._attn_implementation for _, _, config in _configs(model)}
    try:
        _set(model)
        report = _look(model, before)
    except Exception:
        _restore(model, before)
        raise
    if not report.swapped:
        _restore(model, before)
        raise ValueError(report.nothing_in(model))
    for module, path, config in _configs(model):
        if config._attn_implementation != before[id(config)]:
            vars(module).setdefault(ORIGINS, {})[path] = before[id(config)]
    return report


def undo(model: nn.Module) -> None:
    """Have a model, or a copy of one, call what it called before ``use``.

    Args:
        model: changed in place; weights stay, as trained. Without swapped modules, or where
            another attention has been set since, nothing happens.
    """
    for module in model.modules():
        for path, before in vars(module).pop(ORIGINS, {}).items():
            config: Any = dict(_nested(module.config))[path]
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = before
        vars(module).pop(HANDED_ON, None)


def _set(model: nn.Module) -> None:
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


def _look(model: nn.Module, before: dict[int, str | None]) -> Swapped:
    """Return what asks for the name now, and take the name back where masks would not fit."""
    report, inner, asking = Swapped(model), dict[str, str](), dict[str, nn.Module]()
    configs, owners = {}, list[tuple[str, Any]]()
    roots = [path for path, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    for path, module in model.named_modules():
        while owners and owners[-1][0] and not f"{path}.".startswith(f"{owners[-1][0]}."):
            owners.pop()
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            owners.append((path, module.config))
        configs[path] = owners[-1][1] if owners else None
        if dispatches(module) and not isinstance(module, PreTrainedModel):
            asking[path] = module
        elif swapping.is_attention(module):
            inner[path] = _why_left(module)
    inner = swapping.without_holders(model, inner, [*asking])
    for path in inner:
        config = configs[path]
        shared = any(configs[other] is config for other in asking)
        # A module of its own ways reads the masks that the name stands for, if only these.
        if config is not None and not (shared and supports_sdpa(type(config))):
            config._attn_implementation_internal = before[id(config)]
    for path, module in asking.items():
        named = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if named == NAME:
            report.swapped[path] = f"{_name(module)} -> {OURS}"
            report._modules[path] = module
        else:
            inside = any(not root or path.startswith(f"{root}.") for root in roots)
            report.left[path] = f"{_name(module)} stays on {named!r}, " + (
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
            yield from ((module, path, each) for path, each in _nested(config))


def _nested(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig):
            yield from _nested(inner, f"{path}.{key}")


def _handed_on(module: nn.Module) -> str | None:
    dim, noted = getattr(module, "head_dim", None), vars(module).get(HANDED_ON)
    if noted is None and isinstance(dim, int) and dim > MAX_HEAD_DIM:
        return f"head dimension {dim} is above {MAX_HEAD_DIM}"
    return noted


def _why_left(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "leaner_kernels.adapters.pytorch swaps it"
    return f"{_name(module)} computes its attention itself, whatever its configuration names"


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
