"""Where the memory of a test lies: between pages that nobody may touch, or terabytes apart.

For kernels in Triton's interpreter, which reads and writes by address as a GPU does: an access
outside a page ends the process, and untouched pages of a huge tensor cost nothing.
"""

import builtins
import ctypes
import faulthandler
import mmap
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PAGE = mmap.PAGESIZE
POISON = 0xFF  # as a float of any width NaN, as an integer -1
NO_ACCESS = 0
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux


class Place(NamedTuple):
    """A tensor in memory of its own, and all the bytes there that may be touched."""

    tensor: Tensor
    usable: Tensor


def tensor_of(argument: Any) -> Tensor | None:
    """Return the tensor that a kernel's argument is, or is a view of."""
    argument = getattr(argument, "ptr", argument)
    return argument if isinstance(argument, Tensor) else None


def own_elements(t: Tensor) -> Tensor:
    """Return every element once: an expanded axis has one."""
    for axis, (size, stride) in enumerate(zip(t.shape, t.stride())):
        if size > 1 and stride == 0:
            t = t.narrow(axis, 0, 1)
    return t


def span(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Return how many elements lie from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def guarded(t: Tensor, at_end: bool) -> Place:
    """Copy to pages of its own, with the same strides, poison around it and no page beside them.

    The last element ends its page, or the first one begins it.
    """
    length = span(t.shape, t.stride()) * t.element_size()
    size = -(-length // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + size):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), PAGE, NO_ACCESS):
            raise OSError("mprotect refused a page")
    usable = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE, count=size)
    usable.fill_(POISON)
    first = size - length if at_end else 0
    copy = within(usable, first, t)
    own_elements(copy).copy_(own_elements(t))
    return Place(copy, usable)


def within(usable: Tensor, first: int, like: Tensor) -> Tensor:
    """Return the view from byte ``first`` on that has the dtype and strides of ``like``."""
    length = span(like.shape, like.stride()) * like.element_size()
    return usable[first : first + length].view(like.dtype).as_strided(like.shape, like.stride())


@contextmanager
def behind_guards(at_end: bool) -> Iterator[list[str]]:
    """Give every tensor of every launch such pages; yield the names of what was launched.

    Raises:
        AssertionError: a kernel wrote between the elements of a tensor, or beside them.
    """
    from triton.runtime import interpreter

    launched: list[str] = []

    def moved(value: Any, place: Place) -> Any:
        return value._replace(ptr=place.tensor) if isinstance(value, tuple) else place.tensor

    def place(self: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert not args, "launches name their arguments"
        self.places = {
            name: guarded(tensor, at_end)
            for name, value in kwargs.items()
            if (tensor := tensor_of(value)) is not None and tensor.numel()
        }
        self.before = {name: one.usable.clone() for name, one in self.places.items()}
        return args, kwargs | {name: moved(kwargs[name], one) for name, one in self.places.items()}

    def take_back(self: Any, _: Any, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        for name, (tensor, usable) in self.places.items():
            before = self.before[name]
            first = tensor.data_ptr() - usable.data_ptr()
            # What it may write is no difference.
            own_elements(within(before, first, tensor)).copy_(own_elements(tensor))
            assert torch.equal(before, usable), f"{self.fn.__name__} wrote outside {name}"
            original = tensor_of(kwargs[name])
            assert original is not None
            own_elements(original).copy_(own_elements(tensor))
        launched.append(self.fn.__name__)

    executor = interpreter.GridExecutor
    with (
        mock.patch.object(executor, "_init_args_hst", place),
        mock.patch.object(executor, "_restore_args_dev", take_back),
    ):
        yield launched


def in_a_process(run: Callable[[], None]) -> int:
    """Run in a forked process; return its exit status, negative where a signal ended it."""

    def alone() -> None:
        # pytest's own goes to the terminal: of a crash that a test is about, it captures this.
        faulthandler.enable(2)
        torch.set_num_threads(1)  # no thread of the pool came along
        run()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    process.join(900)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def sparse(shape: tuple[int, ...], dtype: torch.dtype, strides: Iterable[int] | None = None):
    """Return a tensor of zeros, contiguous without ``strides``; what is not touched is free."""
    strides = torch.empty(shape, device="meta").stride() if strides is None else tuple(strides)
    length = max(1, span(shape, strides)) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    flat = torch.frombuffer(mmap.mmap(-1, length, flags), dtype=dtype)
    return flat.as_strided(shape, strides)


class _Sparse(TorchFunctionMode):
    """New tensors without values cost nothing until they are written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.empty, torch.empty_like, Tensor.new_empty):
            return func(*args, **kwargs)
        like = args[0] if isinstance(args[0], Tensor) else None
        shape = like.shape if func is torch.empty_like else args[like is not None :]
        if len(shape) == 1 and not isinstance(shape[0], int):
            (shape,) = shape
        dtype = kwargs.get("dtype") or (torch.float32 if like is None else like.dtype)
        return sparse(tuple(shape), dtype)


@contextmanager
def without_wrapping(programs: Callable[[int], Iterable[int]] | None = None) -> Iterator[None]:
    """Let no 32-bit number of a kernel overflow, whatever a tensor's size; copy nothing.

    ``programs`` returns which programs of a grid run, by its size.

    Raises:
        InterpreterError: a sum, difference or product of 32-bit integers left its range.
    """
    from triton.runtime import interpreter

    def chosen(*args: int) -> Iterable[int]:
        at_grid = programs is not None and args == (interpreter.interpreter_builder.grid_dim[0],)
        return programs(*args) if at_grid else builtins.range(*args)

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with (
            mock.patch.object(builder, "options", replace(builder.options, debug=True)),
            mock.patch.object(executor, "_init_args_hst", lambda _, *given: given),
            mock.patch.object(executor, "_restore_args_dev"),
            mock.patch.object(interpreter, "range", chosen, create=True),
            _Sparse(),
        ):
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filling
