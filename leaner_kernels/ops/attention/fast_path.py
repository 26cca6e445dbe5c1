"""The fast path of a call like one before: allocate the results, launch, and no more.

Shapes, strides, dtypes, device and numbers decide what the checks find in a call and which kernel
runs it. So once a call has gone through checks, choice of kernel and launch cache,
the next one like it launches the same kernel on other addresses. This serves calls on a GPU that
nothing but autograd may see, of aligned tensors and without mask, lengths and dropout.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from .. import _hooks
from .._checks import check_scale
from .._launch_cache import MAX_CACHED, CachedLaunch, aligned, noted
from .._operators import (
    NUMBERS,
    TENSORS,
    SingleLevelFunction,
    below_other_operator,
    intercepted,
    observed,
    on_current_device,
    rows_contiguous,
)
from . import operators

Parameters = ParamSpec("Parameters")
_cached_calls: dict[Hashable, "CachedCall"] = {}
PARAMS = "max_seqlen", "is_causal", "softcap"
# What flash-attention, xFormers and others call the arguments that are named as PyTorch's here.
PYTORCHS_NAMES = {
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "dropout": "dropout_p",
    "p": "dropout_p",
    "mask": "attn_mask",
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
}


class FastPath(NamedTuple):
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


class CachedCall:
    """Calls that differ in the addresses of their tensors alone.

    Args:
        path: of the operator.
        forward: what such a call launched.
        out: what it returned.
        params: of ``path.backward``.
    """

    def __init__(
        self, path: FastPath, forward: CachedLaunch, out: Tensor, params: dict[str, Any]
    ) -> None:
        self.path, self.forward, self.params = path, forward, params
        self.shape, self.strides = out.shape, out.stride()
        self.backward: dict[Hashable, CachedLaunch] = {}  # by the layouts of what it takes

    def attend(self, tensors: Sequence[Tensor], pointers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the output, and what the backward needs of every row."""
        first = tensors[0]
        out = first.new_empty_strided(self.shape, self.strides)
        rows = self.path.new_rows(first)
        self.forward.run([*pointers, out.data_ptr(), rows.data_ptr()])
        return out, rows

    def gradients(
        self, grad: Tensor, tensors: Sequence[Tensor], out: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Return those of the tensors: by the operator, unless something like it was launched."""
        path = self.path
        pointers = [*path.pointers(tensors), grad.data_ptr(), out.data_ptr(), rows.data_ptr()]
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
            found = path.new_gradients(tensors)
            entry.run([*pointers, *path.gradient_pointers(found)])
            return found
        given = path.rows_contiguous(grad)
        with noted() as entries:
            found = path.backward(given, tensors, out, rows, **self.params)
        if short and given is grad and len(entries) == 1:
            self.backward[key] = entries[0]
        return found


class _CachedFunction(SingleLevelFunction):
    @staticmethod
    def forward(ctx, cached, pointers, *tensors):
        out, rows = cached.attend(tensors, pointers)
        ctx.save_for_backward(*tensors, out, rows)
        ctx.cached = cached
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, grad):
        *tensors, out, rows = ctx.saved_tensors
        found = () if grad is None else ctx.cached.gradients(grad, tensors, out, rows)
        return None, None, *found, *(None,) * (len(tensors) - len(found))


def with_fast_path(
    path: FastPath,
) -> Callable[[Callable[Parameters, Tensor]], Callable[Parameters, Tensor]]:
    """Give an attention function its fast path."""
    count = path.count

    def decorate(function: Callable[Parameters, Tensor]) -> Callable[Parameters, Tensor]:
        signature = inspect.signature(function)

        def learn(entry: CachedLaunch, out: Tensor, args: Any, kwargs: Any) -> CachedCall:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            params = {name: given[name] for name in PARAMS if name in given}
            return CachedCall(path, entry, out, params | {"scale": check_scale(given["scale"])})

        def checked(*args: Any, **kwargs: Any) -> Tensor:
            try:
                return function(*args, **kwargs)
            except TypeError:
                for name in kwargs.keys() - signature.parameters.keys():
                    ours = PYTORCHS_NAMES.get(name)
                    if ours in signature.parameters:
                        raise TypeError(
                            f"{function.__name__}() has no argument {name!r}: it is named {ours}, "
                            "as in PyTorch's scaled_dot_product_attention"
                        ) from None
                raise

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            tensors: Any = args[:count]
            key = _key_of(path, tensors, (*args[count:], *kwargs.values()), tuple(kwargs))
            if key is None:
                return checked(*args, **kwargs)
            pointers = path.pointers(tensors)
            if not aligned(pointers):
                return checked(*args, **kwargs)
            key = function, key
            cached = _cached_calls.get(key)
            if cached is None:
                with noted() as entries:
                    out = checked(*args, **kwargs)
                # Of these alone the fast path has addresses.
                places = {place for place, address in enumerate(pointers) if address}
                places |= {len(pointers), len(pointers) + 1}
                if len(entries) == 1 and entries[0].places <= places and _as_given(tensors):
                    if len(_cached_calls) >= MAX_CACHED:
                        _cached_calls.clear()
                    _cached_calls[key] = learn(entries[0], out, args, kwargs)
                return out
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if wanted and not below_other_operator():
                function_: Any = _CachedFunction
                return function_.apply(cached, pointers, *tensors)
            return cached.attend(tensors, pointers)[0]

        return call

    return decorate


def _as_given(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a launch takes these themselves: of other integers, an int32 copy of its own."""
    return all(t.is_floating_point() or t.dtype == torch.int32 for t in tensors)


def _key_of(
    path: FastPath, tensors: tuple[Any, ...], others: tuple[Any, ...], names: tuple[str, ...]
) -> Hashable:
    """Return what sets calls apart beside addresses, None where there is no fast path."""
    types = (*map(type, others),)  # for 1 is True
    if (
        len(tensors) < path.count
        or not TENSORS.issuperset(map(type, tensors))
        or not NUMBERS.issuperset(types)
        or not tensors[0].is_cuda
        or observed()
        or _hooks.current is not None
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    # Rules send calls to PyTorch by whether a backward follows.
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    key = [names, others, types, recorded, torch.are_deterministic_algorithms_enabled()]
    for t in tensors:
        if t.layout is not torch.strided or t.is_nested or t.is_neg():
            return None
        key += t.shape, t.stride(), t.dtype, t.device
    first = tensors[0]
    return tuple(key) if first.dim() == path.rank and on_current_device(first) else None


# --- attention and attention_qkvpacked; varlen.py has its own ------------------------------------


def _pointers(tensors):
    query, key, value = tensors
    return [query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, 0, 0]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor begins."""
    return [t.data_ptr() for t in tensors]


def _packed_addresses(tensors):
    (qkv,) = tensors
    address, step = qkv.data_ptr(), qkv.stride(2) * qkv.element_size()
    return [address, address + step, address + 2 * step]


def _new_packed_rows(qkv):
    batch, rows, _, heads, _ = qkv.shape
    return qkv.new_empty((batch, heads, rows, 2), dtype=torch.float32)


def _backward_by_operator(grad, tensors, out, rows, *, is_causal, scale, softcap):
    nothing = None, None, None
    saved = *tensors, *nothing, out, rows
    params = 0.0, is_causal, scale, float(softcap)
    return operators.ATTENTION.backward(grad, *saved, *params, False)[:3]


def _packed_backward_by_operator(grad, tensors, out, rows, *, is_causal, scale):
    saved = *tensors, None, None, out, rows
    return (operators.QKVPACKED.backward(grad, *saved, 0.0, is_causal, scale),)


ATTENTION = FastPath(
    count=3,
    rank=4,
    pointers=_pointers,
    new_rows=operators.new_max_log_sum,
    new_gradients=lambda tensors: tuple(map(operators.new_out, tensors)),
    gradient_pointers=addresses,
    rows_contiguous=rows_contiguous,
    backward=_backward_by_operator,
)
PACKED = FastPath(
    count=1,
    rank=5,
    pointers=lambda tensors: [*_packed_addresses(tensors), 0, 0, 0],
    new_rows=_new_packed_rows,
    new_gradients=lambda tensors: (
        torch.empty_like(tensors[0], memory_format=torch.contiguous_format),
    ),
    gradient_pointers=_packed_addresses,
    rows_contiguous=rows_contiguous,
    backward=_packed_backward_by_operator,
)
