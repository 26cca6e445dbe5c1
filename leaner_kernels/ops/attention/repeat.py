"""The short way of a call like one before: allocate the results, launch, and no more.

Shapes, strides, dtypes, device and numbers decide what the checks say of a call and which kernel
runs it. So once a call has gone the long way, through checks, choice of kernel and launch cache,
the next of its kind launches the same kernel on other addresses. This serves calls on a GPU that
nothing but autograd may see, of aligned tensors and without mask, lengths and dropout.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from leaner_kernels.ops import _hooks
from leaner_kernels.ops._checks import check_scale
from leaner_kernels.ops._launch_cache import MAX_CACHED, CachedLaunch, aligned, noted
from leaner_kernels.ops._operators import (
    NUMBERS,
    TENSORS,
    SingleLevelFunction,
    below_other_operator,
    intercepted,
    observed,
    on_current_device,
)

Parameters = ParamSpec("Parameters")
_kinds: dict[Hashable, "Kind"] = {}
PARAMS = "max_seqlen", "is_causal", "softcap"


class Way(NamedTuple):
    """What is particular to an operator.

    Attributes:
        count: how many leading arguments of its function are tensors.
        rank: how many axes the first of them has.
        pointers: gives the addresses in them that kernels take first, 0 for None.
        new_rows: allocates what the backward needs of every row, from the first tensor.
        new_gradients: allocates them, of the tensors.
        gradient_pointers: gives the addresses in them that kernels take.
        rows_contiguous: copies a gradient of the output that kernels do not take.
        backward: calls the operator: (grad, tensors, out, rows), and by name the scale and those of
            ``PARAMS`` that its function has.
    """

    count: int
    rank: int
    pointers: Callable[[Sequence[Tensor]], list[int]]
    new_rows: Callable[[Tensor], Tensor]
    new_gradients: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    gradient_pointers: Callable[[tuple[Tensor, ...]], list[int]]
    rows_contiguous: Callable[[Tensor], Tensor]
    backward: Callable[..., tuple[Tensor, ...]]


class Kind:
    """Calls that differ in the addresses of their tensors alone.

    Args:
        way: of the operator.
        forward: what such a call launched.
        out: what it returned.
        params: of ``way.backward``.
    """

    def __init__(
        self, way: Way, forward: CachedLaunch, out: Tensor, params: dict[str, Any]
    ) -> None:
        self.way, self.forward, self.params = way, forward, params
        self.shape, self.strides = out.shape, out.stride()
        self.backward: dict[Hashable, CachedLaunch] = {}  # by the layouts of what it takes

    def attend(self, tensors: Sequence[Tensor], pointers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the output, and what the backward needs of every row."""
        first = tensors[0]
        out = first.new_empty_strided(self.shape, self.strides)
        rows = self.way.new_rows(first)
        self.forward.run([*pointers, out.data_ptr(), rows.data_ptr()])
        return out, rows

    def gradients(
        self, grad: Tensor, tensors: Sequence[Tensor], out: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Return those of the tensors: by the operator, unless something like it was launched."""
        way = self.way
        pointers = [*way.pointers(tensors), grad.data_ptr(), out.data_ptr(), rows.data_ptr()]
        short = (
            not torch.is_grad_enabled()
            and not intercepted((grad, *tensors))
            and not grad.is_neg()
            and aligned(pointers)
            and on_current_device(grad)
        )
        # Of what was saved too: hooks may have made other tensors of it.
        key = grad.dtype, tensors[0].dtype, *[t.stride() for t in (grad, *tensors, out, rows)]
        if short and (entry := self.backward.get(key)) is not None:
            found = way.new_gradients(tensors)
            entry.run([*pointers, *way.gradient_pointers(found)])
            return found
        given = way.rows_contiguous(grad)
        with noted() as entries:
            found = way.backward(given, tensors, out, rows, **self.params)
        if short and given is grad and len(entries) == 1:
            self.backward[key] = entries[0]
        return found


class _Repeat(SingleLevelFunction):
    @staticmethod
    def forward(ctx, kind, pointers, *tensors):
        out, rows = kind.attend(tensors, pointers)
        ctx.save_for_backward(*tensors, out, rows)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, grad):
        *tensors, out, rows = ctx.saved_tensors
        found = () if grad is None else ctx.kind.gradients(grad, tensors, out, rows)
        return None, None, *found, *(None,) * (len(tensors) - len(found))


def repeated(
    way: Way,
) -> Callable[[Callable[Parameters, Tensor]], Callable[Parameters, Tensor]]:
    """Give an attention function its short way."""
    count = way.count

    def decorate(function: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
        signature = inspect.signature(function)

        def learn(entry: CachedLaunch, out: Tensor, args: Any, kwargs: Any) -> Kind:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            params = {name: given[name] for name in PARAMS if name in given}
            return Kind(way, entry, out, params | {"scale": check_scale(given["scale"])})

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            tensors: Any = args[:count]
            key = _key_of(way, tensors, (*args[count:], *kwargs.values()), tuple(kwargs))
            if key is None:
                return function(*args, **kwargs)
            pointers = way.pointers(tensors)
            if not aligned(pointers):
                return function(*args, **kwargs)
            key = function, key
            kind = _kinds.get(key)
            if kind is None:
                with noted() as entries:
                    out = function(*args, **kwargs)
                # Of these alone the short way has addresses.
                places = {place for place, address in enumerate(pointers) if address}
                places |= {len(pointers), len(pointers) + 1}
                if len(entries) == 1 and entries[0].places <= places and _as_given(tensors):
                    if len(_kinds) >= MAX_CACHED:
                        _kinds.clear()
                    _kinds[key] = learn(entries[0], out, args, kwargs)
                return out
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if wanted and not below_other_operator():
                repeat: Any = _Repeat
                return repeat.apply(kind, pointers, *tensors)
            return kind.attend(tensors, pointers)[0]

        return call

    return decorate


def _as_given(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a launch takes these themselves: of other integers, an int32 copy of its own."""
    return all(t.is_floating_point() or t.dtype == torch.int32 for t in tensors)


def _key_of(
    way: Way, tensors: tuple[Any, ...], others: tuple[Any, ...], names: tuple[str, ...]
) -> Hashable:
    """Return what sets calls apart beside addresses, None where one must go the long way."""
    types = (*map(type, others),)  # for 1 is True
    if (
        len(tensors) < way.count
        or not TENSORS.issuperset(map(type, tensors))
        or not NUMBERS.issuperset(types)
        or not tensors[0].is_cuda
        or observed()
        or _hooks.current is not None
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    key = [names, others, types, torch.are_deterministic_algorithms_enabled()]
    for t in tensors:
        if t.layout is not torch.strided or t.is_nested or t.is_neg():
            return None
        key += t.shape, t.stride(), t.dtype, t.device
    first = tensors[0]
    return tuple(key) if first.dim() == way.rank and on_current_device(first) else None
