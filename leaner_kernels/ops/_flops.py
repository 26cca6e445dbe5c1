"""FLOPs of the operators for PyTorch's ``FlopCounterMode``, counted as it counts its own attention.

Only products count, 2 per multiply-add, and all of them: what a mask or causality hides is not
subtracted, nor are the further products by which a captured head gets its precision added. A
backward computes every product of the forward but the last again, and two gradients of each.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .._ops import ops


class Products(NamedTuple):
    """FLOPs of a forward: of its last product, whose result is the output, and of all others."""

    last: int
    others: int


PRODUCTS: dict[str, Callable[..., Products]] = {}  # by operator, of its arguments


def formulas() -> Iterator[tuple[str, Callable[..., int]]]:
    """Yield each operator's name and FLOPs, a function of the arguments that it is called with."""
    for name, products in PRODUCTS.items():

        def forward(*args: Any, out_val: Any = None, products=products) -> int:
            return sum(products(*args))

        def backward(grad: Tensor, *args: Any, out_val: Any = None, products=products) -> int:
            last, others = products(*args)
            return 2 * last + 3 * others

        yield name, forward
        yield f"{name}_with_stats", forward
        yield f"{name}_backward", backward


def register() -> None:
    """Register all with ``torch.utils.flop_counter``, which this imports."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in formulas():
        operator = getattr(ops, name)
        register_flop_formula(operator, get_raw=True)(formula)
