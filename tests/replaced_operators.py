"""PyTorch's fused operators of attention on the CPU: stand-ins for its kernels, and ours over them.

PyTorch has no such kernels for the CPU. The stand-ins note their calls, and return empty tensors
with the layouts that PyTorch's fake kernels promise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from leaner_kernels.adapters.sdpa import Handle
from leaner_kernels.adapters.sdpa_operators import OPERATORS
from leaner_kernels.ops import _tiles

aten: Any = torch.ops.aten


class BelowCall(NamedTuple):
    """A call that reached a stand-in."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def stand_ins() -> Iterator[list[BelowCall]]:
    """Let the CPU have kernels of the operators, and give the calls that reach them."""
    calls: list[BelowCall] = []

    def note(name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(BelowCall(name, args, kwargs))
        return promised(name, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL", "CPU")
    for name in OPERATORS:
        library.impl(name, partial(note, name), "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@contextmanager
def replaced(capability: int = 90) -> Iterator[list[BelowCall]]:
    """Have our kernels replace the stand-ins, on a GPU of a compute capability."""
    with stand_ins() as calls, _tiles.assume(capability):
        handle = Handle("CPU")
        try:
            yield calls
        finally:
            handle.remove()


def promised(name: str, *args: Any, **kwargs: Any) -> Any:
    """Return empty tensors with the layouts of PyTorch's fake kernel."""
    with FakeTensorMode() as fake:
        args, kwargs = tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
        results = getattr(aten, name)(*args, **kwargs)

    def empty(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)

    return tree_map_only(Tensor, empty, results)


def assert_as_promised(actual: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Assert that results have the shapes, strides and dtypes of PyTorch's fake kernel."""
    expected = promised(name, *args, **kwargs)
    assert len(actual) == len(expected)
    for place, (result, promise) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(promise, Tensor):
            layouts = list(map(_layout, (result, promise)))
            assert layouts[0] == layouts[1], f"result {place}: {layouts[0]}, not {layouts[1]}"
        else:
            assert result == promise, f"result {place}: {result}, not {promise}"


def _layout(t: Tensor) -> tuple[Any, ...]:
    """The shape, the strides along axes longer than 1, as compiled graphs assert, and the dtype."""
    return t.shape, [stride for size, stride in zip(t.shape, t.stride()) if size > 1], t.dtype
