"""Operators whose backward needs their inputs and the log-sum-exp of each row of softmax.

``NAME`` returns (out, lse), ``NAME_with_stats`` (out, lse, stats, heads) and ``NAME_backward`` the
gradient of each input that may have one. An operator is a class that says what is its own.
"""

from collections.abc import Callable
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from . import dispatcher
from ._checks import check_device, check_sample
from .dispatcher import upcast
from .statistics import STATISTICS, AttentionStats, attention_stats
from .transforms import Products


class Shapes(NamedTuple):
    """Shapes of an output, lse, statistics (B, H), and heads (tokens, H * D) of one sample."""

    out: tuple[int, ...]
    lse: tuple[int, ...]
    per_head: tuple[int, int]
    heads: tuple[int, int]


class Results(NamedTuple):
    """What kernels fill: output, lse, statistics (STATISTICS, B, H), heads (S, tokens, H * D).

    ``sample`` (S,) int32, contiguous, names the entries of the heads; None where there are none.
    """

    out: Tensor
    lse: Tensor
    stats: Tensor | None = None
    heads: Any = None
    sample: Tensor | None = None


class Operator:
    """What is an operator's own; its methods take the operator's arguments, in order.

    Attributes:
        name: of the operator.
        kernels: what launches it on a GPU, a module or an object in one; imports Triton.
        inputs: its tensors, as in a schema; those that may have a gradient first.
        numbers: its numbers, as in a schema.
        gradients: what its backward returns, as in a schema: ``dNAME`` of an input.
        differentiable: how many inputs may have a gradient.
        cast: how many inputs a region of autocast casts.
    """

    name: str
    kernels: str
    inputs: str
    numbers: str
    gradients: str
    differentiable: int
    cast: int

    @staticmethod
    def shapes(*args: Any) -> Shapes:
        """Return the shapes of the results."""
        raise NotImplementedError

    @staticmethod
    def attend(*args: Any) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Return output, lse and what computes the statistics (B, H), by the reference."""
        raise NotImplementedError

    @staticmethod
    def differentiate(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        """Return the gradients, by the reference."""
        raise NotImplementedError

    @classmethod
    @cache
    def launcher(cls) -> Any:
        """Import and return what has ``forward`` and ``backward`` on a GPU."""
        return resolve_name(f"{__package__}.{cls.kernels}")

    @staticmethod
    def flops(*args: Any) -> Products:
        """Return the FLOPs of the products."""
        raise NotImplementedError


def run_with_stats(
    operator: Callable[..., Any], inputs: tuple[Any, ...], sample: Tensor | None, *numbers: Any
) -> AttentionStats:
    """Return what ``NAME_with_stats`` gives of checked inputs, batches first, and a sample."""
    first = inputs[0]
    if sample is not None:
        check_sample(sample, first.shape[0], first.device)
    check_device(first.device)
    out, lse, stats, heads = operator(*inputs, sample, *numbers)
    return attention_stats(out, lse, stats, None if sample is None else heads)


class _Attention(dispatcher.SingleLevelFunction):
    """Put results on the graph that were computed already, and differentiate them."""

    @staticmethod
    def forward(ctx, of, count, results, *args):
        ctx.of, ctx.numbers = of, args[count:]
        ctx.save_for_backward(*args[:count], results[1])
        ctx.mark_non_differentiable(*results[1:])
        # Zeros for the others would be a launch each.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, grad, *_):
        saved, numbers = ctx.saved_tensors, ctx.numbers
        others = len(saved) - 1 + len(numbers)
        if grad is None:
            return (None,) * (3 + others)
        op = getattr(ops, f"{ctx.of.name}_backward").default
        launch = partial(_differentiate, ctx.of, len(saved) - 1, True)
        gradients = dispatcher.run_backward(op, launch, grad, *saved, *numbers)
        gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
        return None, None, None, *gradients, *(None,) * (others - len(gradients))


def _attend(
    of: type[Operator], count: int, stats: bool, on_gpu: bool | None, *args: Any
) -> tuple[Tensor, ...]:
    """Compute ``NAME``, or ``NAME_with_stats``; with neither device, allocate their results."""
    sample = args[count] if stats else None
    args = _without_sample(count, args) if stats else args
    shapes, first = of.shapes(*args), args[0]

    def float32(*shape: int) -> Tensor:
        return first.new_empty(shape, dtype=torch.float32)

    results: tuple[Any, ...] = first.new_empty(shapes.out), float32(*shapes.lse)
    if stats:
        slots = 0 if sample is None else sample.shape[0]
        results += float32(len(STATISTICS), *shapes.per_head), float32(slots, *shapes.heads)
    if on_gpu is None:
        return results
    out, lse, *others = results
    per_head, heads = others or (None, None)
    tensors, numbers = args[:count], args[count:]
    if on_gpu and not _empty(tensors):
        sampled = None if sample is None or not len(sample) else sample.contiguous()
        given = Results(out, lse, per_head, heads, sampled)
        of.launcher().forward(tensors, numbers, given)
        return results
    a, row_lse, statistics = of.attend(*map(_upcast, tensors), *numbers)
    out.copy_(a)
    lse.copy_(row_lse)
    if per_head is not None and heads is not None:
        per_head.copy_(statistics())
        if sample is not None:
            wanted = sample >= 0
            heads[wanted] = a[sample[wanted]].flatten(1, -3).flatten(2).to(heads.dtype)
    return results


def _without_sample(count: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of ``NAME_with_stats`` less the sample, after the other tensors."""
    return *args[:count], *args[count + 1 :]


def _differentiate(
    of: type[Operator], count: int, on_gpu: bool | None, grad: Tensor, *args: Any
) -> Any:
    """Compute ``NAME_backward``; with neither device, allocate its results."""
    tensors, lse, numbers = args[:count], args[count], args[count + 1 :]
    gradients = [t.new_empty(t.shape) for t in tensors[: of.differentiable]]
    if on_gpu and not _empty(tensors):
        of.launcher().backward(grad, tensors, numbers, lse, gradients)
    elif on_gpu is not None:
        computed = of.differentiate(*map(_upcast, (grad, *tensors)), *numbers)
        for slot, gradient in zip(gradients, computed, strict=True):
            slot.copy_(gradient)
    return tuple(gradients) if len(gradients) > 1 else gradients[0]


def _empty(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether there is nothing to launch."""
    return any(t is not None and 0 in t.shape for t in tensors)


def _upcast(t: Tensor | None) -> Any:
    return None if t is None else upcast(t)


OPERATORS: dict[str, type[Operator]] = {}


def computed_by(of: type[Operator], on_gpu: bool | None) -> tuple[Callable[..., Any], ...]:
    """Return what computes ``NAME``, ``NAME_with_stats`` and ``NAME_backward``.

    ``on_gpu`` is None where they only allocate.
    """
    count = len(of.inputs.split(","))
    attends = (partial(_attend, of, count, stats, on_gpu) for stats in (False, True))
    return *attends, partial(_differentiate, of, count, on_gpu)


def register(of: type[Operator]) -> None:
    """Register an operator for every device, autograd, autocast and transform."""
    count = len(of.inputs.split(","))
    results, stats = "Tensor out, Tensor lse", "Tensor stats, Tensor heads"
    schemas = (
        f"({of.inputs}, {of.numbers}) -> ({results})",
        f"({of.inputs}, Tensor? sample, {of.numbers}) -> ({results}, {stats})",
        f"(Tensor grad, {of.inputs}, Tensor lse, {of.numbers}) -> ({of.gradients})",
    )
    OPERATORS[of.name] = of
    by_device = [computed_by(of, on_gpu) for on_gpu in (False, True, None)]

    def record(results: tuple[Tensor, ...], args: tuple[Any, ...]) -> Any:
        # The sample is no input of the backward.
        inputs = _without_sample(count, args) if len(results) > 2 else args
        return dispatcher.apply(_Attention, of, count, results, *inputs)

    dispatcher.register(of.name, schemas, by_device, record, of.cast, of.differentiable, of.flops)
