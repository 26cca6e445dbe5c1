"""What only double backward and FLOP counters need: no plain call comes here.

Second derivatives come from the operator's decomposition, with all scores in memory.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from .dispatcher import (
    SingleLevelFunction,
    apply,
    in_forward_mode,
    library,
    wants_gradient,
    without_autocast,
)


class Products(NamedTuple):
    """FLOPs of a forward: of its last product, whose result is the output, and of all others."""

    last: int
    others: int


# ``Products`` of the arguments of each operator, by its name.
PRODUCTS: dict[str, Callable[..., Products]] = {}


def flop_formulas() -> Iterator[tuple[str, Callable[..., int]]]:
    """Yield each operator's name and FLOPs, a function of the arguments that it is called with.

    Only products count, 2 per multiply-add, whatever a mask hides, less those that give a captured
    head its precision. A backward has every product of the forward but the last, and two gradients
    of each.
    """
    for name, products in PRODUCTS.items():

        def forward(*args: Any, out_val: Any = None, products=products) -> int:
            return sum(products(*args))

        def backward(grad: Tensor, *args: Any, out_val: Any = None, products=products) -> int:
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


def register_double_backward(name: str, decomposition: Callable[..., Any], variables: int) -> None:
    """Register the derivatives of ``NAME_backward``, which returns ``dNAME`` of each input.

    Args:
        name: of the operator.
        decomposition: computes ``NAME_backward`` by operations that PyTorch can differentiate.
        variables: how many leading arguments of ``NAME_backward`` have derivatives.
    """
    op = getattr(ops, f"{name}_backward").default

    def differentiable(keyset: Any, *args: Any) -> Any:
        if in_forward_mode():
            return without_autocast(decomposition, args)
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if not wants_gradient(args):
            return results
        one = isinstance(results, Tensor)
        results = (results,) if one else tuple(results)
        recorded = apply(_DoubleBackward, decomposition, variables, results, *args)
        return recorded[0] if one else recorded

    library.impl(f"{name}_backward", differentiable, "Autograd", with_keyset=True)


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
