"""vmap over an operator: the mapped axis is folded into one that it has, one call for all.

Where that would change what is computed, each example is a call of its own: as many launches.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops

# Among axes: indices of batch entries, which move with the entries that they name.
ENTRIES = "entries"
# Among axes: what is broadcast to (B, ...) of four axes, a mask, and its gradient.
BROADCAST = "broadcast"

Axis = int | str | None
Result = tuple[Any, Any]


class VmapAxes(NamedTuple):
    """The axis of each tensor of an operator that vmap folds the mapped one into.

    Attributes:
        inputs: of each input, and of its gradient, and of others.
        params: of the leading parameters that are tensors.
        out: of the output.
        lse: of what is per row: the log-sum-exp, max_log_sum.
        per_head: of each statistic.
        heads: of the captured heads.
        sample: of the indices of what is captured.
    """

    inputs: tuple[Axis, ...]
    params: tuple[int, ...] = ()
    out: int = 0
    lse: int = 0
    per_head: int = 0
    heads: int = 0
    sample: Axis = ENTRIES


def register(
    lib: torch.library.Library,
    name: str,
    inputs: Sequence[Axis],
    outputs: Sequence[Axis],
    loop: str = "",
) -> None:
    """Let vmap map ``leaner_kernels::NAME``.

    Args:
        lib: where the operator is defined.
        name: of the operator.
        inputs: for each leading argument the axis, of one example, that the mapped axis is folded
            into, of a batch or of heads; ``ENTRIES`` for (S,) indices of the batch; ``BROADCAST``
            for a mask; None for what all examples must share. Missing ones at the end are None.
        outputs: the axis of each result that is unfolded again; ``BROADCAST`` for the gradient of
            the mask, and then the last argument is whether it is wanted.
        loop: an argument that, unless None or False, needs a call for each example.
    """
    op = getattr(ops, name).default
    names = [argument.name for argument in op._schema.arguments]
    place = names.index(loop) if loop else None

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Result:
        if info.batch_size == 0:
            return of_nothing(op, in_dims, args)
        axes = *inputs, *(None,) * (len(args) - len(inputs))
        shared = all(axis is not None or dim is None for axis, dim in zip(axes, in_dims))
        apart = place is not None and args[place] is not None and args[place] is not False
        if apart or not shared:
            return one_by_one(op, info.batch_size, in_dims, args)
        return folded(op, info.batch_size, in_dims, args, axes, outputs)

    torch.library.register_vmap(add_op_namespace_prefix(name), rule, lib=lib)


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
    each = [
        op(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims)))
        for i in range(size)
    ]
    if isinstance(each[0], Tensor):
        return torch.stack(each), 0
    return tuple(map(torch.stack, zip(*each))), (0,) * len(each[0])
