"""How DTensor may split the operators over the ranks of a mesh: by heads or by batch entries.

Heads never meet in attention, and neither do batch entries, so each rank computes its own with the
same kernels and nothing is sent. Tensors that arrive otherwise are redistributed to where that
holds, or gathered on every rank.
"""

import warnings
from functools import partial
from typing import Any

import torch

from .._ops import ops
from ._checks import ArgumentError
from .transforms import BATCH, BROADCAST, DECLARATIONS, HEADS, Declaration


def register() -> None:
    """Register all with ``torch.distributed.tensor``, which this imports."""
    from torch.distributed.tensor import DTensor

    # Importing DTensor runs this, so what changes in a PyTorch to come must not break the import.
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        propagator = DTensor._op_dispatcher.sharding_propagator
    except (ImportError, AttributeError) as error:
        warnings.warn(f"DTensor will not know leaner_kernels' operators: {error}", stacklevel=2)
        return
    for name, declared in DECLARATIONS.items():
        for suffix in ("", "_with_stats", "_backward"):
            operator = getattr(ops, name + suffix).default
            register_sharding(operator)(partial(acceptable, operator, declared))
            # Decisions are remembered by the arguments from this one on: by default by the tensors
            # alone, so that one decided without dropout, say, would serve a call with it.
            propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(0, needs_pytree=True)


def acceptable(
    operator: Any, declared: Declaration, *args: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Return what ``register_sharding`` takes: placements of the outputs and of the inputs.

    ``args`` are what the operator is called with, a specification (``shape``, ``mesh``) for each
    tensor. Dropout is a ValueError: its masks depend on the place of a head among all of them.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    schema = operator._schema
    named = {a.name: value for a, value in zip(schema.arguments, args)}
    if named.get("dropout_p"):
        raise ArgumentError(
            f"dropout_p must be 0 for attention of DTensors, got {named['dropout_p']}: "
            "ranks have seeds of their own"
        )
    tensors = {name: value for name, value in named.items() if hasattr(value, "placements")}
    backward = schema.name.endswith("_backward")
    returned = [result.name for result in schema.returns]

    def axis_of(name: str, kind: int) -> int | None:
        axis = declared.pair(name)[kind]
        if axis == BROADCAST:
            mask = tensors.get("attn_mask")
            return None if mask is None else _mask_axes(mask.shape)[kind]
        # What is sampled is named by its number in the whole batch.
        return axis if isinstance(axis, int) and (name, kind) != ("heads", BATCH) else None

    def along(kind: int) -> tuple[list[Any], list[Any]]:
        def placed(name: str, otherwise: Any) -> Any:
            axis = axis_of(name, kind)
            return otherwise if axis is None else Shard(axis)

        def placed_output(name: str) -> Any:
            # An empty tensor stands for the gradient of a mask that has none.
            if name == "dattn_mask" and not ("attn_mask" in tensors and named["mask_grad"]):
                return Replicate()
            return placed(name, Partial() if backward else Replicate())

        inputs = [placed(n, Replicate()) if n in tensors else None for n in named]
        return [placed_output(name) for name in returned], inputs

    def may_split(kind: int) -> bool:
        """Whether the operator's work falls apart along the batch or the heads."""
        axes = {n: axis for n in declared.axes if (axis := axis_of(n, kind)) is not None}
        split = {n: axis for n, axis in axes.items() if n in tensors and n not in ("out", "lse")}
        # The published start of Nystroem's pseudo-inverse is a maximum over all matrices.
        if not split or named.get("whole_batch"):
            return False
        sampled = "sample" in tensors
        if kind == BATCH:
            return not sampled
        counts = {tensors[n].shape[axis] for n, axis in split.items() if n != "attn_mask"}
        # Equal heads stay together however they are dealt out; groups of heads, and the heads of a
        # sample side by side, where every rank gets as many.
        ranks = next(iter(tensors.values())).mesh.size()
        return (len(counts) == 1 and not sampled) or all(count % ranks == 0 for count in counts)

    nowhere = [Replicate()] * len(returned), [Replicate() if n in tensors else None for n in named]
    return [nowhere, *(along(kind) for kind in (BATCH, HEADS) if may_split(kind))]


def _mask_axes(shape: torch.Size) -> tuple[int | None, int | None]:
    missing = 4 - len(shape)
    batch, heads = (
        axis - missing if axis >= missing and shape[axis - missing] > 1 else None for axis in (0, 1)
    )
    return batch, heads
