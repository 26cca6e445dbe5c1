"""Argument checks that operators share; each error is one line that shows the offending value."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

MAX_HEAD_DIM = 128
ANY_HEAD_DIM = 2**31 - 1  # for calls that PyTorch's function computes if our kernels cannot
MAX_HEAD_DIM_CUDA = 64  # for kernels that keep several matrices of a head in registers
NO_WINDOW = -1, -1
# Kernels use 32-bit offsets within a tile of up to 256 rows.
MAX_ROW_STRIDE = 2**23 - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = sys.float_info.max
INTEGERS = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
INT32 = torch.iinfo(torch.int32)


class ArgumentError(ValueError, RuntimeError):
    """An invalid argument; also a RuntimeError, which PyTorch's own functions raise."""


def autocast(*tensors: Any) -> Any:
    """Cast tensors to the dtype of the enclosing autocast region, if any, as PyTorch does."""
    # The checks report arguments that are not tensors.
    if not isinstance(tensors[0], Tensor):
        return tensors
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    # PyTorch has no autocast on meta; a query where it does breaks a graph in PyTorch 2.11.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # Compare first: a cast to the same dtype costs as much as the rest of this function.
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.dtype != dtype and t.dtype in DTYPES else t
        for t in tensors
    ]


def check_device(device: torch.device) -> None:
    """Raise ValueError for a device on which the operators have no implementation."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"the tensors must be on cpu or cuda, got {device}")


def scale_or_default(scale: float | None, dim: int) -> float:
    """Return the scale, 1 / sqrt(dim) by default; raise ValueError unless it is a finite number."""
    scale = check_scale(scale)
    return dim**-0.5 if scale is None else scale


def check_scale(scale: float | None) -> float | None:
    """Return the scale, None without one; raise ValueError unless it is a finite number.

    The default is not computed here: in a graph it would be a constant, and so would D.
    """
    if scale is None:
        return None
    # Compare instead of converting: an int may be too large for a float.
    numbers = int | float | torch.SymInt | torch.SymFloat
    if not isinstance(scale, numbers) or not -LARGEST <= scale <= LARGEST:
        raise ArgumentError(f"scale must be a finite number, got {shown(scale)}")
    return float(scale)


def shown(value: object) -> str:
    """Return a value as one line of at most 100 characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def check_tensor(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a tensor with strides."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a tensor, got {type(value).__name__}")
    # A nested tensor may report a strided layout, but has no shape.
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        raise ArgumentError(f"{name} must be a dense tensor, got {kind}")


def int32_of(name: str, integers: Any) -> Any:
    """Return integers as int32: a tensor's on its device, those of a list or tuple on the host.

    Anything else is returned unchanged, for the checks to report. On a GPU nothing is read back: an
    int64 beyond int32 loses its upper half, since clamping it first would be a second launch.

    Raises:
        ValueError: if an element of a list is not an int, or exceeds int32.
    """
    if isinstance(integers, list | tuple):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in integers):
            raise ArgumentError(f"{name} must be a tensor or a list of ints, got {shown(integers)}")
        for n in integers:
            if not INT32.min <= n <= INT32.max:
                raise ArgumentError(f"{name} must fit int32, got {shown(n)}")
        return torch.tensor(integers, dtype=torch.int32, device="cpu")
    if not isinstance(integers, Tensor) or integers.dtype == torch.int32:
        return integers
    if integers.dtype not in INTEGERS or integers.layout is not torch.strided or integers.is_nested:
        return integers
    # In int64 every dtype has a minimum, and numbers that only uint64 holds are negative.
    check_range(name, integers.to(torch.int64), INT32.min, INT32.max)
    return integers.to(torch.int32)


def to_device(counts: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to ``device`` if it is elsewhere, without waiting for the copy."""
    return counts if counts.device == device else counts.to(device, non_blocking=True)


def described(integers: Any) -> str:
    """Describe integers, a tensor, list or tuple, in a few words for an error message."""
    if isinstance(integers, Tensor):
        return f"{tuple(integers.shape)} {integers.dtype} on {integers.device}"
    return f"a {type(integers).__name__} of {len(integers)}"


def checked_lengths(lengths: Any, batch: int, most: int, device: torch.device) -> Tensor | None:
    """Return ``key_lengths`` (B,) as int32; raise ValueError unless each is in [1, ``most``].

    They are integers on ``device``, or a list or tuple of ints; None stays None.
    """
    if lengths is None:
        return None
    counts = int32_of("key_lengths", lengths)
    check_tensor("key_lengths", counts)
    elsewhere = counts.device != device and isinstance(lengths, Tensor)
    if counts.shape != (batch,) or counts.dtype != torch.int32 or elsewhere:
        raise ArgumentError(
            f"key_lengths must be ({batch},) integers on {device}, got {described(lengths)}"
        )
    check_range("key_lengths", counts, 1, most)
    return to_device(counts, device)


def check_layout(name: str, t: Tensor, max_head_dim: int = MAX_HEAD_DIM) -> None:
    """Raise ValueError unless kernels support the dtype and the last axis, the head dimension."""
    shape, strides = t.shape, t.stride()
    if t.dtype not in DTYPES and (t.is_cuda or t.dtype != torch.float64):
        allowed = DTYPES if t.is_cuda else (*DTYPES, torch.float64)
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ArgumentError(f"{name} on {t.device.type} must be one of {names}, got {t.dtype}")
    if shape[-1] < 1:
        raise ArgumentError(f"{name} must have a head dimension of at least 1, got {shape[-1]}")
    if shape[-1] > max_head_dim:
        raise ArgumentError(
            f"{name} must have a head dimension up to {max_head_dim}, got {shape[-1]}"
        )
    if strides[-1] != 1 and shape[-1] != 1:
        raise ArgumentError(f"{name} must be contiguous along its last axis, got strides {strides}")


def check_narrow_layout(name: str, t: Tensor, row_stride: int) -> None:
    """Apply ``check_layout``, with the limits of kernels for narrower heads and 32-bit rows."""
    check_layout(name, t)
    if t.device.type == "cuda" and t.shape[-1] > MAX_HEAD_DIM_CUDA:
        raise ArgumentError(
            f"{name} on cuda must have a head dimension up to {MAX_HEAD_DIM_CUDA}, "
            f"got {t.shape[-1]}"
        )
    if row_stride > MAX_ROW_STRIDE:
        raise ArgumentError(
            f"{name} must have rows at most {MAX_ROW_STRIDE} elements apart, got {row_stride}"
        )


def check_sample(sample: Tensor, batch: int, device: torch.device) -> None:
    """Raise ValueError unless ``sample`` names entries of the batch, on ``device``."""
    check_tensor("sample", sample)
    if sample.dim() != 1 or sample.dtype != torch.int32 or sample.device != device:
        raise ArgumentError(
            f"sample must be (S,) int32 on {device}, "
            f"got {tuple(sample.shape)} {sample.dtype} on {sample.device}"
        )
    check_range("sample", sample, torch.iinfo(torch.int32).min, batch - 1)


def check_range(name: str, values: Tensor, low: int, high: int) -> None:
    """Raise ValueError unless all values that can be read lie in [low, high]."""
    if not has_values(values):
        return
    smallest, largest = int(values.min()), int(values.max())
    if smallest < low or largest > high:
        wrong = smallest if smallest < low else largest
        limits = f"below {high + 1}" if name == "sample" else f"in [{low}, {high}]"
        raise ArgumentError(f"{name} must be {limits}, got {wrong}")


def has_values(t: Tensor) -> bool:
    """Return whether the values of ``t`` can be read without a synchronisation."""
    # Reading values back would stall a GPU, and a traced or mapped tensor has no values.
    if t.device.type != "cpu" or torch.compiler.is_compiling() or t.numel() == 0:
        return False
    return not isinstance(t, torch._subclasses.FakeTensor) and not is_functorch_wrapped_tensor(t)


def is_mapped(t: Tensor) -> bool:
    """Return whether a tensor was computed inside ``vmap``, which hides an axis of it."""
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False
