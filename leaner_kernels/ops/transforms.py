"""What only torch.func, double backward and FLOP counters need: no plain call comes here.

vmap folds the mapped axis into one that the operator has, one call for all; where that would change
what is computed, each example is a call of its own: as many launches. Second derivatives come from
the operator's decomposition, with all scores in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from .dispatcher import (
    SingleLevelFunction,
    apply,
    in_forward_mode,
    library,
    wants_gradient,
    without_autocast,
)

# In place of an axis of batch entries: indices of them, which move with the entries they name.
ENTRIES = "entries"
# In place of one: what is broadcast to (B, ...) of four axes, a mask, and its gradient.
BROADCAST = "broadcast"
BATCH, HEADS = 0, 1

Axis = int | str | None
Pair = tuple[Axis, Axis]
Result = tuple[Any, Any]


class Products(NamedTuple):
    """FLOPs of a forward: of its last product, whose result is the output, and of all others."""

    last: int
    others: int


class Declaration(NamedTuple):
    """What an operator says of itself to torch.func and FLOP counters.

    There are ``NAME``, ``NAME_with_stats`` and ``NAME_backward``, which returns ``dNAME`` of each
    input.

    Attributes:
        name: of the operator.
        axes: of each tensor by its name in the schemas, the axis of batch entries and that of
            heads, None for one that it has not; a tensor that is not named has neither. ``grad`` is
            as ``out``, ``max_log_sum`` as ``lse``, a gradient as its input.
        backward: computes ``NAME_backward`` by operations that PyTorch can differentiate.
        variables: how many leading arguments of ``NAME_backward`` have derivatives.
        flops: gives ``Products`` of the arguments of ``NAME``.
        fold: what vmap folds its axis into, ``BATCH`` or ``HEADS``.
        loop: an argument that, unless None or False, makes vmap call for each example.
    """

    name: str
    axes: Mapping[str, Any]
    backward: Callable[..., Any]
    variables: int
    flops: Callable[..., Products]
    fold: int = BATCH
    loop: str = ""

    def pair(self, name: str) -> Pair:
        """Return the axes of batch entries and of heads of a tensor, by its name in a schema."""
        alike = {"grad": "out", "max_log_sum": "lse"}
        axes = {**_ALWAYS, **self.axes}
        return axes.get(alike.get(name, name)) or axes.get(name.removeprefix("d"), (None, None))


_ALWAYS: dict[str, Pair] = {
    "key_lengths": (0, None),
    "stats": (1, 2),
    "heads": (0, 2),
    "sample": (ENTRIES, None),
}
DECLARATIONS: dict[str, Declaration] = {}


def declare(operator: Declaration) -> None:
    """Register what a declaration says; FLOP counters read the rest of it."""
    DECLARATIONS[operator.name] = operator
    for suffix in ("", "_with_stats", "_backward"):
        _register_vmap(operator.name + suffix, operator)
    _register_double_backward(f"{operator.name}_backward", operator)


# --- FLOPs, as PyTorch counts its own attention's -------------------------------------------------


def flop_formulas() -> Iterator[tuple[str, Callable[..., int]]]:
    """Yield each operator's name and FLOPs, a function of the arguments that it is called with.

    Only products count, 2 per multiply-add, whatever a mask hides, less those that give a captured
    head its precision. A backward has every product of the forward but the last, and two gradients
    of each.
    """
    for name, declared in DECLARATIONS.items():

        def forward(*args: Any, out_val: Any = None, products=declared.flops) -> int:
            return sum(products(*args))

        def backward(grad: Tensor, *args: Any, out_val: Any = None, products=declared.flops) -> int:
            last, others = products(*args)
            return 2 * last + 3 * others

        yield name, forward
        yield f"{name}_with_stats", forward
        yield f"{name}_backward", backward


def register_flops() -> None:
    """Register all with ``torch.utils.flop_counter``, which this imports."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in flop_formulas():
        register_flop_formula(getattr(ops, name), get_raw=True)(formula)


# --- vmap -----------------------------------------------------------------------------------------


def _register_vmap(name: str, declared: Declaration) -> None:
    op = getattr(ops, name).default
    names = [argument.name for argument in op._schema.arguments]
    inputs = [declared.pair(argument)[declared.fold] for argument in names]
    outputs = [declared.pair(result.name)[declared.fold] for result in op._schema.returns]
    place = names.index(declared.loop) if declared.loop else None

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Result:
        in_dims = *in_dims, *(None,) * (len(args) - len(in_dims))
        if info.batch_size == 0:
            return of_nothing(op, in_dims, args)
        shared = all(axis is not None or dim is None for axis, dim in zip(inputs, in_dims))
        apart = place is not None and args[place] is not None and args[place] is not False
        if apart or not shared:
            return one_by_one(op, info.batch_size, in_dims, args)
        return folded(op, info.batch_size, in_dims, args, inputs, outputs)

    torch.library.register_vmap(add_op_namespace_prefix(name), rule, lib=library)


def folded(
    op: Callable[..., Any],
    size: int,
    in_dims: tuple[int | None, ...],
    args: tuple[Any, ...],
    axes: Sequence[Axis],
    outputs: Sequence[Axis],
) -> Result:
    """Return the results of one call for all ``size`` examples, and where their axis is."""
    batch = _example(args[0], in_dims[0])[0]
    shape = torch.Size()
    mask_grad = BROADCAST in outputs and args[-1]
    if BROADCAST in axes and args[axes.index(BROADCAST)] is not None:
        shape = _example(args[axes.index(BROADCAST)], in_dims[axes.index(BROADCAST)])
    mask_shape = *(1,) * (4 - len(shape)), *shape

    def fold(t: Any, dim: int | None, axis: Axis) -> Any:
        if axis is None or t is None:
            return t
        if axis == BROADCAST and dim is None and mask_shape[0] == 1 and not mask_grad:
            return t
        t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        if axis == BROADCAST:
            return t.reshape(size, *mask_shape).expand(size, batch, -1, -1, -1).flatten(0, 1)
        if axis == ENTRIES:
            inside = (t >= 0) & (t < batch)
            offsets = batch * torch.arange(size, dtype=t.dtype, device=t.device)[:, None]
            return (t + offsets).where(inside, -1).flatten()
        assert isinstance(axis, int)
        t = t.movedim(0, axis).flatten(axis, axis + 1)
        return t if t.stride(-1) == 1 else t.contiguous()

    def unfold(t: Tensor, axis: Axis) -> tuple[Tensor, int | None]:
        if isinstance(axis, int):
            return t.unflatten(axis, (size, t.shape[axis] // size)), axis
        if not mask_grad:
            return t, None
        t = t.unflatten(0, (size, batch)).sum_to_size(size, *mask_shape)
        return t.reshape(size, *shape), 0

    results = op(*map(fold, args, in_dims, axes))
    if isinstance(results, Tensor):
        return unfold(results, outputs[0])
    both = tuple(map(unfold, results, outputs))
    return tuple(t for t, _ in both), tuple(dim for _, dim in both)


def _example(t: Tensor, dim: int | None) -> torch.Size:
    """Return the shape of one example."""
    # No example need be there.
    return t.shape if dim is None else t.movedim(dim, 0).shape[1:]


def of_nothing(
    op: Callable[..., Any], in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> Result:
    """Return results of no example, shaped as those of one of zeros, and where their axis is."""
    zeros = tuple(
        a if dim is None else a.new_zeros(_example(a, dim)) for a, dim in zip(args, in_dims)
    )
    results, dims = one_by_one(op, 1, (None,) * len(zeros), zeros)
    return (results[:0] if isinstance(results, Tensor) else tuple(t[:0] for t in results)), dims


def one_by_one(
    op: Callable[..., Any], size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> Result:
    """Return the results of a call for each example, stacked, and where their axis is."""
    results = [
        op(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims)))
        for i in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


# --- Second derivatives ---------------------------------------------------------------------------


def _register_double_backward(name: str, declared: Declaration) -> None:
    op, decomposition = getattr(ops, name).default, declared.backward

    def differentiable(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            return without_autocast(decomposition, args)
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if not wants_gradient(args):
            return results
        one = isinstance(results, Tensor)
        results = (results,) if one else tuple(results)
        recorded = apply(_DoubleBackward, decomposition, declared.variables, results, *args)
        return recorded[0] if one else recorded

    library.impl(name, differentiable, "Autograd", with_keyset=True)


class _DoubleBackward(SingleLevelFunction):
    """Put the results of a backward on the graph; their derivatives are its decomposition's."""

    @staticmethod
    def forward(ctx, decomposition, variables, results, *args):
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in args))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.decomposition, ctx.variables = decomposition, variables
        return results

    @staticmethod
    def backward(ctx, *grads):
        args = [b if a is None else a for a, b in zip(ctx.saved_tensors, ctx.others)]
        wanted = [i for i in range(ctx.variables) if ctx.needs_input_grad[3 + i]]

        def compute(*variables):
            filled = list(args)
            for i, variable in zip(wanted, variables):
                filled[i] = variable
            return without_autocast(ctx.decomposition, filled)

        # Of a function, not of the graph around: the gradient may itself depend on the inputs.
        _, pull, *_ = torch.func.vjp(compute, *(args[i] for i in wanted))
        gradients = dict(zip(wanted, pull(grads[0] if len(grads) == 1 else grads)))
        return None, None, None, *(gradients.get(i) for i in range(len(args)))
