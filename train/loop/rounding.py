"""Round float32 weights to bfloat16 for a forward and its backward.

This does the work of FSDP2's MixedPrecisionPolicy for parameters that are not sharded. The
parameters of every block, and of the rest of the model, are rounded just before its forward by one
autograd function, whose backward returns float32 gradients. So gradients are summed in float32, and
DDP can reduce those of one block during the backward of the next. Autocast would round each weight
in a separate call and keep the residual stream in float32.

Source: MixedPrecisionPolicy of torch.distributed.fsdp, whose results these are bit for bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map


class _Round(torch.autograd.Function):
    """Tensors in bfloat16, whose gradients become float32."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _copies(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_copies([grad for grad in grads if grad is not None], torch.float32))
        return tuple(None if grad is None else next(wide) for grad in grads)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, tensors)
    return tuple(made)


class _Rounding:
    """The attributes that ``round_weights`` adds to a model.

    Attributes:
        kept: the float32 parameters that rounded ones currently replace in their modules.
    """

    def __init__(self, model: nn.Module):
        self.kept: dict[tuple[nn.Module, str], nn.Parameter] = {}
        placed: set[tuple[nn.Module, str]] = set()
        for group in [*model.blocks, model]:
            places = [(m, name) for m in group.modules() for name in m._parameters]
            own = [place for place in places if place not in placed]
            placed.update(own)
            hook = partial(self._before, own, model if group is model else None)
            group.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(
        self, places: list[tuple[nn.Module, str]], model: nn.Module | None, _: nn.Module, *call: Any
    ) -> Any:
        """Round parameters and inputs; ``model`` is set if this is the start of its forward."""
        if model is not None:
            self.restore()
        parameters = {
            place: parameter
            for place in places
            if place not in self.kept and (parameter := place[0]._parameters[place[1]]) is not None
        }
        self.kept |= parameters
        # Parameters that modules share have one copy.
        found = {id(parameter): parameter for parameter in parameters.values()}
        frozen = [p for p in found.values() if not p.requires_grad]
        trained = [p for p in found.values() if p.requires_grad]
        with torch.no_grad():
            rounded = dict(zip(map(id, frozen), _copies(frozen)))
        if trained:
            rounded |= zip(map(id, trained), _Round.apply(*trained))
        for (module, name), parameter in parameters.items():
            module._parameters[name] = rounded[id(parameter)]
        return tree_map(_round_input, call)

    def _after(self, *_call: Any) -> None:
        if not torch.is_grad_enabled():
            self.restore()

    def restore(self) -> None:
        for (module, name), parameter in self.kept.items():
            module._parameters[name] = parameter
        self.kept.clear()


def round_weights(model: nn.Module) -> None:
    """Make a model compute in bfloat16; its floating-point inputs are rounded too.

    In training its parameters are the rounded ones from a forward until ``restore`` of
    ``model._rounding``; without
    gradients until the forward ends.

    Args:
        model: with ``blocks``.
    """
    model._rounding = _Rounding(model)


def _round_input(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value
