"""Swap modules of a model in place: each instance gets another class, with our forward.

The module object remains, and with it parameters, names, state dicts, hooks and optimizers.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import nn

from .. import removed
from ..nn.capture import Capturing

# The attribute of a swapped module with its ``Origin``, so that copies of a model can be undone.
_ORIGIN = "_origin"
SDPA = "scaled_dot_product_attention"


class Origin(NamedTuple):
    """The former state of a module: its class, added attributes, and old values of others."""

    cls: type[nn.Module]
    new_class: type[nn.Module]
    added: tuple[str, ...]
    replaced: dict[str, Any]


class Rule(NamedTuple):
    """A rule for swapping modules of one class.

    Attributes:
        cls: the exact class; a subclass may have another forward, and is left.
        new_class: its replacement, a subclass of ``cls`` at the top level of its file, so that
            models can be pickled.
        what: description for the report, such as "attention between tokens". Empty for a block
            around an attention module, which is not reported and does no harm if it outlives the
            swap of the module.
        prepare: sets the attributes that ``new_class`` has beyond those of ``cls``, and nothing
            that is a parameter, buffer or module. A ValueError or AttributeError leaves the module
            as it was, its message being the reason.
    """

    cls: type[nn.Module]
    new_class: type[nn.Module]
    what: str = ""
    prepare: Callable[[Any], None] = lambda _module: None


class Swapped:
    """A printable report of the modules of a model that were swapped, and of those that were not.

    Attributes:
        swapped: by module name, the old class and the new function, such as
            "timm.layers.attention.Attention -> attention between tokens".
        left: by module name, why an attention-like module was left, in one line: its class is
            named attention, or calls ``scaled_dot_product_attention``.
    """

    def __init__(self, undo: Callable[[], None]) -> None:
        self.swapped: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._undo = undo

    if not TYPE_CHECKING:  # where it would hide misspelt names

        def __getattr__(self, name: str) -> NoReturn:
            removed.attribute(f"{__name__}.Swapped", name)

    def undo(self) -> None:
        """Make the model call its former attention again; keep trained weights."""
        self._undo()

    def nothing_in(self, model: nn.Module) -> str:
        """Return an error message: nothing was swapped, why, and what to do instead."""
        name, reasons = type(model).__name__, "; ".join(dict.fromkeys(self.left.values()))
        if not reasons:
            return f"{name} has no attention module: there is nothing to swap or to measure"
        return (
            f"{name} has no attention module to swap ({reasons}): replace calls of "
            "F.scaled_dot_product_attention by leaner_kernels.attention, which takes the same "
            "arguments; KappaMonitor measures the model even without that"
        )

    def __repr__(self) -> str:
        """Return one line per group of modules whose names differ only in numbers."""
        lines = []
        for title, modules in (("swapped", self.swapped), ("left", self.left)):
            groups = Counter(
                (re.sub(r"\b\d+\b", "*", name) or "(the model itself)", text)
                for name, text in modules.items()
            )
            lines.append(f"{title} {len(modules)}:" if modules else f"{title} none")
            lines += [
                f"  {name}{f' ({count})' if count > 1 else ''}: {text}"
                for (name, text), count in groups.items()
            ]
        return "\n".join(lines)


def swap(model: nn.Module, rules: Sequence[Rule]) -> Swapped:
    """Swap every module that matches a rule, in place; modules already swapped count as swapped.

    If nothing is swapped, the model is unchanged and a ValueError states the reasons.
    """
    by_class = {rule.cls: rule for rule in rules}
    by_new_class = {rule.new_class: rule for rule in rules}
    report, inner = Swapped(lambda: undo(model, rules)), dict[str, str]()
    for name, module in model.named_modules():
        rule = by_class.get(type(module)) or by_new_class.get(type(module))
        if rule is None:
            if is_attention(module) and not isinstance(module, Capturing):
                inner[name] = f"{class_name(type(module))} is not supported"
            continue
        reason = _swap_one(module, rule) if type(module) is rule.cls else None
        if reason is not None and rule.what:
            report.left[name] = reason
        elif rule.what:
            report.swapped[name] = f"{class_name(rule.cls)} -> {rule.what}"
    report.left |= without_holders(inner, [*report.swapped, *report.left])
    if not report.swapped:
        report.undo()
        raise ValueError(report.nothing_in(model))
    return report


def without_holders(left: Mapping[str, str], others: Sequence[str]) -> dict[str, str]:
    """Remove from ``left`` the blocks that are only named after an attention module inside."""
    names = [*left, *others]

    def holds(name: str) -> bool:
        return any(n != name and n.startswith(f"{name}." if name else "") for n in names)

    return {name: reason for name, reason in left.items() if not holds(name)}


def undo(model: nn.Module, rules: Sequence[Rule]) -> None:
    """Undo the swaps of ``rules`` in a model or a copy of it; skip modules of these classes.

    If a module was wrapped after its swap, as by ``fully_shard``, raise a ValueError and undo none.
    """
    classes = tuple(rule.new_class for rule in rules)
    swapped = {n: m for n, m in model.named_modules() if isinstance(m, classes)}
    swapped = {name: m for name, m in swapped.items() if _ORIGIN in vars(m)}
    for name, module in list(swapped.items()):
        origin = vars(module)[_ORIGIN]
        if type(module) is origin.new_class:
            continue
        if not issubclass(origin.new_class, Capturing):
            del swapped[name]
        else:
            raise ValueError(
                f"{name or 'the model'} was wrapped in {type(module).__name__} after it was "
                "swapped: unwrap it before undo"
            )
    for module in swapped.values():
        _restore(module)


def _swap_one(module: nn.Module, rule: Rule) -> str | None:
    """Swap a module, or leave it unchanged and return the reason."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance, as by compiling or wrapping: swap first"
    before, failed = dict(vars(module)), None
    module.__class__ = rule.new_class
    try:
        rule.prepare(module)
    except (AttributeError, ValueError) as error:
        # A part may be a wrapper that lacks the attributes of the wrapped module.
        failed = str(error)
    after = vars(module)
    added = tuple(name for name in after if name not in before)
    replaced = {name: old for name, old in before.items() if after.get(name) is not old}
    after[_ORIGIN] = Origin(rule.cls, rule.new_class, added, replaced)
    if failed is not None:
        _restore(module)
    return failed


def _restore(module: nn.Module) -> None:
    attributes = vars(module)
    origin: Origin = attributes.pop(_ORIGIN)
    for name in origin.added:
        attributes.pop(name, None)
    attributes.update(origin.replaced)
    module.__class__ = origin.cls


def node_of(module: nn.Module, *args: Any) -> Any:
    """Return the torch.fx node that calls a module as a whole, as for PyTorch's own modules."""
    tracer: Any = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is named attention, or calls PyTorch's attention function."""
    name = getattr(module, "original_name", type(module).__name__).lower()
    return "attn" in name or "attention" in name or calls(type(module), SDPA)


@cache
def calls(cls: type, name: str) -> bool:
    """Return whether a method of a class calls a function of this name."""
    values = (inspect.unwrap(v) for c in cls.__mro__ for v in vars(c).values() if callable(v))
    return any(name in v.__code__.co_names for v in values if isinstance(v, FunctionType))


def class_name(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
