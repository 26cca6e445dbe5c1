"""PyTorch's fused operators of attention on the CPU: stand-ins for its kernels, and ours over them.

PyTorch has no such kernels for the CPU. The stand-ins note their calls, and return empty tensors
with the layouts that PyTorch's fake kernels promise.
"""

import warnings
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
        library.impl(name, partial(note, name), "CPU", allow_override=True)
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


@contextmanager
def behind_sdpa(capability: int = 90) -> Iterator[list[BelowCall]]:
    """Have ``scaled_dot_product_attention`` on the CPU call the replaced operators of cuDNN.

    PyTorch chooses its operator for the CPU, which hands the call on to cuDNN's.
    """

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
        attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        args = q, k, v, attn_mask, True, dropout_p, is_causal
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*args, scale=scale)
        return out, lse[..., 0].transpose(1, 2).contiguous().transpose(1, 2)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
        is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        state, ends = torch.empty((), dtype=torch.int64), (None, None, q.shape[2], k.shape[2])
        args = grad, q, k, v, out, lse[..., None], state, state, attn_mask, *ends
        return aten._scaled_dot_product_cudnn_attention_backward(
            *args, dropout_p, is_causal, scale=scale
        )

    library = torch.library.Library("aten", "IMPL", "CPU")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    with warnings.catch_warnings(action="ignore"):
        library.impl(name, forward, "CPU", allow_override=True)
        library.impl(f"{name}_backward", backward, "CPU", allow_override=True)
    try:
        with replaced(capability) as below:
            yield below
    finally:
        library._destroy()
