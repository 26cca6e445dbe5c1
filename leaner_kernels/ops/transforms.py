"""FLOPs of the operators, which PyTorch's counters read: no plain call comes here."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .._ops import ops


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
