"""Launching a kernel again on inputs of a kind seen before, at a fraction of the host time.

Triton inspects every argument at every launch; with forty of them that takes longer than a short
kernel runs. For inputs of equal shapes, strides and dtypes only the addresses differ, so the first
launch leaves a plan: the compiled kernel, its grid and its arguments, with places for the
addresses.
"""

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

ALIGNMENT = 16  # Triton compiles for addresses that are multiples of it, or are not
MOST_PLANS = 4096
MOST_ROWS = 256  # of a tile; an offset inside one is 32-bit
LARGEST_OFFSET = 2**31 - 1
MOST_PROGRAMS = 2**31 - 1  # of one launch; numbers of programs and heads are 32-bit in the kernels


class Launch(NamedTuple):
    """A kernel with everything that it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def start(self) -> Any:
        """Launch, and return what Triton compiled: nothing, in its interpreter.

        Raises:
            ValueError: more programs than a launch may have.
        """
        # Where a program owns several heads it counts these in 32 bits.
        count = prod(self.grid) * self.arguments.get("HEADS", 1)
        if count > MOST_PROGRAMS:
            raise ValueError(
                f"the tensors must take at most {MOST_PROGRAMS} programs of a launch, got {count}, "
                "heads counted one by one: split the batch"
            )
        return self.kernel[self.grid](**self.arguments)


class Plan:
    """A compiled kernel and its arguments, less the addresses.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        launch: what it was launched with.
        pointers: names of the kernel's arguments, in the order in which ``run`` gets their tensors.
    """

    def __init__(self, compiled: Any, launch: Launch, pointers: Sequence[str]) -> None:
        names = launch.kernel.arg_names
        # A compiled kernel wants all three axes, unlike one that is still to be compiled.
        self._start = compiled[(*launch.grid, 1, 1)[:3]]
        self._arguments = [launch.arguments[name] for name in names]
        self._places = [
            (place, pointers.index(name))
            for place, name in enumerate(names)
            if isinstance(launch.arguments[name], Tensor)
        ]
        for place, _ in self._places:
            self._arguments[place] = None  # so that the plan keeps no tensor alive

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on other tensors of the same kind."""
        arguments = self._arguments.copy()
        for place, index in self._places:
            arguments[place] = tensors[index]
        self._start(*arguments)


class Plans:
    """The plans of one operator, by what sets its inputs apart beside their addresses."""

    def __init__(self, pointers: Sequence[str]) -> None:
        self._pointers = tuple(pointers)
        self._plans: dict[Hashable, Plan] = {}

    def run(self, kind: Hashable, tensors: Sequence[Tensor | None]) -> bool:
        """Launch from a plan; return False, having done nothing, where there is none."""
        plan = self._plans.get(kind)
        if plan is None or not _aligned(tensors):
            return False
        plan.run(tensors)
        return True

    def start(self, kind: Hashable, launch: Launch, tensors: Sequence[Tensor | None]) -> None:
        """Launch, and keep a plan for the next inputs of this kind."""
        compiled = launch.start()
        if compiled is None or not _aligned(tensors):
            return
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[kind] = Plan(compiled, launch, self._pointers)


def check_tile(name: str, rows: int, stride: int) -> None:
    """Raise ValueError where a tile of rows spans more than 32-bit offsets reach."""
    steps = min(rows, MOST_ROWS) - 1
    if steps * stride > LARGEST_OFFSET:
        raise ValueError(
            f"{name} must be at most {LARGEST_OFFSET // steps} elements apart, got {stride}"
        )


def _aligned(tensors: Sequence[Tensor | None]) -> bool:
    addresses = 0
    for t in tensors:
        if t is not None:
            addresses |= t.data_ptr()
    return addresses % ALIGNMENT == 0


def layout(t: Tensor | None) -> Hashable:
    """Return what sets a tensor apart for a compiled kernel, beside its address."""
    return None if t is None else (t.shape, t.stride(), t.dtype)
