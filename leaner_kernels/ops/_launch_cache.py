"""Repeat the launch of a kernel on inputs of the same kind, at a fraction of the host time.

Triton inspects every argument at every launch. With forty arguments this takes longer than a short
kernel runs. Inputs of equal shapes, strides and dtypes differ only in their addresses, so the first
launch stores an entry: the compiled kernel, its grid and its arguments, with places for the
addresses. The cache key consists of the properties by which the caller distinguishes inputs, and of
the alignment for which Triton compiled each tensor.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ._checks import MAX_ROW_STRIDE, NO_WINDOW, ArgumentError

ALIGNMENT = 16  # Triton specializes a kernel on whether an address is a multiple of this
MAX_CACHED = 4096
MAX_ROWS = 256  # rows of a tile, whose inner offsets are 32-bit
LARGEST_OFFSET = 2**31 - 1
RIGHT_PTXAS = 12, 9  # the first release that keeps operands of wgmma
MAX_PROGRAMS = 2**31 - 1  # of a launch; the kernels count programs and heads in 32 bits


class View(NamedTuple):
    """The form in which kernels take a tensor: its address, and the strides of entry, head and row.

    Any named tuple that begins with ``ptr`` is launched in the same way. In Gluon a stride may be a
    constant.
    """

    ptr: Tensor
    stride_b: Any
    stride_h: Any
    stride_n: Any


class MapView(NamedTuple):
    """The form in which kernels take a map: its address; strides of entry, row, column and head."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_h: int


# --- The assembler ------------------------------------------------------------------------------
#
# Triton 3.6 brings ptxas 12.8 for GPUs up to Hopper and 12.9 for newer ones. 12.8 drops some
# instructions that compute the address of a wgmma operand: on an H200 such a product read shared
# memory out of bounds. The code that 12.9 generates from the same PTX has all of them.


@contextmanager
def assembling() -> Iterator[None]:
    """Have Triton compile with a correct ptxas, if it has one."""
    path = _other_ptxas()
    if path is None:
        yield
        return
    from triton import knobs

    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        yield


@cache
def _other_ptxas() -> str | None:
    """Return the path of the ptxas to use instead of Triton's, or None if Triton's is correct."""
    from triton import knobs

    if knobs.runtime.interpret:
        return None
    try:
        chosen, other = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # another Triton, or one without NVIDIA's tools
        return None
    wrong = _release(chosen.version) < RIGHT_PTXAS <= _release(other.version)
    return other.path if wrong else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class Scratch(NamedTuple):
    """A buffer that every launch allocates, and its reduction to a result.

    Attributes:
        pointer: the kernel's argument; the name of another result, which is reduced instead of a
            buffer, if ``of_result``.
        target: the result that the buffer is reduced to, if any is.
        reduce: called with the buffer and the target after the launch.
        zero: whether the kernel expects zeros.
        of_result: see ``pointer``.
    """

    pointer: str
    target: str | None = None
    reduce: Callable[[Tensor, Tensor], None] | None = None
    zero: bool = False
    of_result: bool = False


class Launch(NamedTuple):
    """A kernel with all arguments and options of its launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    scratch: tuple[Scratch, ...] = ()

    def start(self) -> Any:
        """Launch, and return the compiled kernel, which is None in Triton's interpreter.

        Raises:
            ValueError: more programs than a launch may have.
        """
        # A program that owns several heads counts them in 32 bits.
        count = prod(self.grid) * self.arguments.get("HEADS", 1)
        if count > MAX_PROGRAMS:
            raise ArgumentError(
                f"a launch must have at most {MAX_PROGRAMS} programs, each head counted, "
                f"got {count}: split the batch"
            )
        with assembling():
            return self.kernel[self.grid](**self.arguments)

    def first(
        self,
        pointers: Mapping[str, str],
        operands: Mapping[str, Tensor | None],
        results: Mapping[str, Tensor],
    ) -> "CachedLaunch | None":
        """Launch, reduce any scratch, and return what repeats the launch.

        Args:
            pointers: for each pointer of the kernel, the name of the tensor that it points into.
            operands: tensors by name, in the order of the addresses that ``CachedLaunch.run`` gets.
            results: likewise; their addresses follow.

        Returns:
            The cached launch. None in Triton's interpreter, which compiles nothing, and if the
            kernel reads a copy of an operand, which a later call would have to make again.
        """
        compiled = self.start()
        for one in self.scratch:
            if one.reduce is not None and one.target is not None:
                source = results if one.of_result else self.arguments
                one.reduce(source[one.pointer], results[one.target])
        if compiled is None:
            return None
        places, buffers = {}, {**operands, **results}
        position = {name: number for number, name in enumerate(buffers)}
        for pointer, name in pointers.items():
            tensor = _tensor_of(self.arguments.get(pointer))
            if tensor is None:
                continue
            buffer = buffers[name]
            assert buffer is not None
            if buffer.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                return None
            places[pointer] = position[name], tensor.data_ptr() - buffer.data_ptr()
        return CachedLaunch(compiled, self, places, list(results))


def _tensor_of(value: Any) -> Tensor | None:
    """Return the tensor of an argument: a tensor, a view, or a descriptor of Triton's for TMA."""
    value = value[0] if isinstance(value, tuple) else getattr(value, "base", value)
    return value if isinstance(value, Tensor) else None


class _Address(NamedTuple):
    """The address of a tensor, in place of the tensor that a descriptor names."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class CachedLaunch:
    """A compiled kernel and its arguments, less the addresses.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        launch: what it was launched with.
        places: for each pointer of the kernel, the position of its buffer among the addresses that
            ``run`` gets, and its distance in bytes from the start of this buffer.
        results: the names of the results, in the order in which ``run`` gets them.
    """

    def __init__(
        self,
        compiled: Any,
        launch: Launch,
        places: Mapping[str, tuple[int, int]],
        results: Sequence[str] = (),
    ) -> None:
        names = launch.kernel.arg_names
        # A compiled kernel wants all three axes, unlike one that is still to be compiled.
        x, y, z = (*launch.grid, 1, 1)[:3]
        self._start, before = _starter(compiled, (x, y, z))
        self._arguments = [*before, *(launch.arguments[name] for name in names)]
        self._pointers: list[tuple[int, int, int]] = []
        self._views: list[tuple[int, int, int, tuple[Any, ...]]] = []
        self._descriptors: list[tuple[int, int, int, Any]] = []
        self._buffers: list[tuple[int, Any, torch.dtype, bool]] = []
        self._reductions: list[tuple[Callable[[Tensor, Tensor], None], int, int, bool]] = []
        for one in launch.scratch:
            if one.reduce is not None and one.target is not None:
                named = results if one.of_result else [*map(str, before), *names]
                place, target = named.index(one.pointer), results.index(one.target)
                self._reductions.append((one.reduce, place, target, one.of_result))
        buffers = {one.pointer: one.zero for one in launch.scratch if not one.of_result}
        for place, name in enumerate(names, start=len(before)):
            value = self._arguments[place]
            if (zero := buffers.get(name)) is not None:
                self._buffers.append((place, value.shape, value.dtype, zero))
            elif isinstance(value, Tensor):
                self._pointers.append((place, *places[name]))
            elif isinstance(value, tuple) and isinstance(value[0], Tensor):
                _, *strides = value
                self._views.append((place, *places[name], tuple(strides)))
            elif _tensor_of(value) is not None:
                descriptor: Any = copy(value)
                descriptor.base = None
                self._descriptors.append((place, *places[name], descriptor))
            else:
                continue
            self._arguments[place] = None  # so that the entry keeps no tensor alive

    def run(self, addresses: Sequence[int], results: Sequence[Tensor]) -> None:
        """Launch on other tensors of the same kind, and reduce any scratch into its result."""
        arguments = self._arguments.copy()
        for place, position, offset in self._pointers:
            arguments[place] = addresses[position] + offset
        for place, position, offset, strides in self._views:
            arguments[place] = (addresses[position] + offset,) + strides  # noqa: RUF005 - faster
        for place, position, offset, descriptor in self._descriptors:
            arguments[place] = described = copy(descriptor)
            described.base = _Address(addresses[position] + offset)
        for place, shape, dtype, zero in self._buffers:
            allocate = results[0].new_zeros if zero else results[0].new_empty
            arguments[place] = allocate(shape, dtype=dtype)
        self._start(arguments)
        for reduce, place, target, of_result in self._reductions:
            reduce((results if of_result else arguments)[place], results[target])


def _starter(
    compiled: Any, grid: tuple[int, int, int]
) -> tuple[Callable[[list[Any]], None], list[Any]]:
    """Return a function that launches a compiled kernel on a list, and that list's first items.

    The kernel's arguments follow by position. Triton's own launcher collects information for hooks
    and calls them before and after every launch, even if its chains of hooks are empty.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    own = compiled[grid]  # which also loads the kernel
    hooks, run = knobs.runtime, compiled.run
    stream = len(grid)
    before = [*grid, None, compiled.function, compiled.packed_metadata, None, None, None]
    count = len(before)

    def start(arguments: list[Any]) -> None:
        # Triton's own chain of hooks is present even if it is empty.
        for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
            if hook is not None and getattr(hook, "calls", True):
                own(*arguments[count:])
                return
        active: Any = driver.active
        device_of = active.get_current_device
        if device_of is torch.cuda.current_device:
            # Without three Python calls that initialise CUDA: the first launch has done so.
            device_of = torch._C._cuda_getDevice
        arguments[stream] = active.get_current_stream(device_of())
        run(*arguments)

    return start, before


# --- Calls that nothing but autograd may see: they need no dispatcher -----------------------------

# Plain types: no subclass of a tensor, and no number that a trace follows.
TENSORS = {Tensor, torch.nn.Parameter}
NUMBERS = {type(None), bool, int, float}
PLAIN = TENSORS | NUMBERS
NAMED = NUMBERS | {str, tuple}  # values that may distinguish calls
_AUTOGRAD = torch._C.DispatchKey.AutogradCUDA


# A key that is equal for calls that differ only in the addresses of their tensors; those addresses,
# 0 for None; and whether autograd records the call. A plain tuple takes a quarter of the time to
# create.
Signature = tuple[Hashable, list[int], bool]


def signature_of(
    tensors: Sequence[Any],
    numbers: Sequence[Any],
    window_size: Any = NO_WINDOW,
    *,
    eager: bool = False,
) -> Signature | None:
    """Return the signature of a call on the current GPU, or None if more than autograd may see it.

    The dispatcher enters Python once for autograd and once for the implementation, and converts all
    arguments for each, which takes longer than a short kernel runs. Calls with a signature skip it.
    ``eager`` means that the caller has checked that nothing is being compiled.
    """
    if not eager and torch.compiler.is_compiling():
        return None
    # The types count too: True, 1 and 1.0 are equal, but not all of them are accepted.
    first, types = tensors[0], (*map(type, numbers),)
    if window_size is not NO_WINDOW:
        sides = window_size if type(window_size) is tuple else ()
        types = *types, type(window_size), *map(type, sides)
    if type(first) not in TENSORS or not first.is_cuda or not NAMED.issuperset(types):
        return None
    if _observed() or first.get_device() != torch._C._cuda_getDevice():
        return None
    try:
        return key_of(tensors, (*numbers, window_size, types), plain=True)
    except RuntimeError:  # a sparse tensor has no address, and a nested one no shape
        return None


def key_of(tensors: Sequence[Any], numbers: Sequence[Any], plain: bool = False) -> Any:
    """Return the signature of a call that is known to be on the current GPU.

    With ``plain``, return None unless every tensor is a plain one on the device of the first.
    """
    device = tensors[0].get_device()
    key = [*numbers, device, torch._C._get_deterministic_algorithms()]
    addresses, low_bits, wanted = [], 0, False
    for t in tensors:
        if t is None:
            key.append(None)
            addresses.append(0)
            continue
        # A tensor with the negative bit is a view that is negated when it is read.
        if plain and (type(t) not in TENSORS or t.is_neg() or t.get_device() != device):
            return None
        address = t.data_ptr()
        addresses.append(address)
        low_bits |= address
        wanted = wanted or t.requires_grad
        key += t.shape, t.stride(), t.dtype
    if low_bits % ALIGNMENT:  # Triton specializes on aligned addresses
        key.append(residues(addresses))
    # Rules send calls to PyTorch by whether a backward follows. Inside another operator autograd
    # records nothing.
    recorded = wanted and plain and torch.is_grad_enabled()
    recorded = recorded and not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    key.append(recorded)
    return tuple(key), addresses, recorded


def needs_no_dispatcher(args: Sequence[Any]) -> bool:
    """Return whether a call is on a GPU and nothing but autograd can intercept it."""
    return args[0].is_cuda and PLAIN.issuperset(map(type, args)) and not _observed()


def _observed() -> bool:
    """Return whether a mode, a transform, a trace or a profiler is active."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and not _places_alone())
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or _profiler_enabled()
    )


def _places_alone() -> bool:
    """Return whether every active mode only sets a default device."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def rows_contiguous(grad: Tensor) -> Tensor:
    """Return the gradient of an output in a layout that the kernels accept."""
    # An expanded gradient, such as that of a sum, has stride 0 along the axis that the kernels
    # load, and the rows of another layout may be too far apart.
    *rows, last = grad.stride()[grad.dim() > 3 :]  # the first axis of four is the batch's
    return grad.contiguous() if last != 1 or max(rows) > MAX_ROW_STRIDE else grad


def on_current_device(t: Tensor) -> bool:
    """Return whether a tensor is on the GPU on which Triton launches."""
    return t.device.index == torch._C._cuda_getDevice()


# --- What launches are made from ------------------------------------------------------------------


def check_tile(name: str, rows: int, stride: int) -> None:
    """Raise ValueError if a tile of rows exceeds the reach of 32-bit offsets."""
    steps = min(rows, MAX_ROWS) - 1
    if steps * stride > LARGEST_OFFSET:
        raise ArgumentError(
            f"{name} must be at most {LARGEST_OFFSET // steps} elements apart, got {stride}"
        )


def residues(addresses: Sequence[int]) -> Hashable:
    """Return the remainders of addresses modulo ``ALIGNMENT``, or 0 if all are multiples of it.

     A pointer that Triton assumes to be aligned may lie at a fixed distance from an address.
    
    """
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT and (*(address % ALIGNMENT for address in addresses),)
