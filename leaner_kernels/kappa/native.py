"""The native solver: batched condition numbers in one call on a CUDA device.

CMake builds ``leaner_kernels/csrc`` into a library next to the Python files when a CUDA compiler
exists. It has a plain C interface, so that one build works with any version of torch and Python.
"""

import ctypes
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..ops._checks import ArgumentError
from . import reference

LIBRARY = Path(__file__).resolve().parent.parent / "libleaner_kernels_native.so"

LIMIT = 512  # limit of min(N, M) in the library

_torch_library = torch.library.Library(ops.name, "FRAGMENT")
_torch_library.define(
    "condition_report(Tensor a, Tensor? lengths, bool spectrum) -> "
    "(Tensor kappa, Tensor sigma_max, Tensor sigma_min, Tensor resolved, Tensor spectrum)"
)


def declare(path: Path) -> ctypes.CDLL:
    """Open the library and give its functions their types."""
    library = ctypes.CDLL(str(path))
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    library.leaner_condition.argtypes = [
        *(pointer, long, long, pointer, integer, integer, integer),
        *(pointer, pointer, pointer, pointer, pointer, pointer, pointer),
    ]
    library.leaner_condition_workspace.argtypes = [integer, integer, integer]
    library.leaner_condition_workspace.restype = long
    library.leaner_error.argtypes = [integer]
    library.leaner_error.restype = ctypes.c_char_p
    return library


# Only successes are cached. A failure may be temporary: a file half copied, or too little memory.
_opened: dict[Path, ctypes.CDLL] = {}
_ready: set[int] = set()


def library() -> ctypes.CDLL | None:
    """Return the library, or None if it was not built; warn if it cannot be opened."""
    if LIBRARY in _opened:
        return _opened[LIBRARY]
    if not LIBRARY.exists():
        return None
    try:
        return _opened.setdefault(LIBRARY, declare(LIBRARY))
    except (OSError, AttributeError) as error:
        warnings.warn(f"{LIBRARY.name} is not used: {error}", stacklevel=2)
        return None


def runs_on(device: int) -> bool:
    """Return whether the library has code for this CUDA device; otherwise warn once, with why."""
    if device in _ready:
        return True
    opened = library()
    if opened is None:
        if not LIBRARY.exists():
            _warn_of_its_absence()
        return False
    with torch.cuda.device(device):
        error = opened.leaner_condition_ready()
    if error:
        reason = opened.leaner_error(error).decode()
        warnings.warn(f"{LIBRARY.name} is not used on device {device}: {reason}", stacklevel=2)
        return False
    _ready.add(device)
    return True


@cache
def _warn_of_its_absence() -> None:
    warnings.warn(
        f"{LIBRARY.name} was not built, for lack of nvcc: torch.linalg computes kappa, more slowly",
        stacklevel=3,
    )


def takes(a: Tensor) -> bool:
    """Return whether the operator supports the matrices: float32, on CUDA, without a gradient."""
    differentiable = a.requires_grad and torch.is_grad_enabled()
    if not a.is_cuda or a.dtype != torch.float32 or differentiable:
        return False
    # The library uses 32-bit counts of matrices, rows and columns.
    return min(a.shape[-2:]) <= LIMIT and max(a.shape) < 2**31


def new_report(a: Tensor, spectrum: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of ``solve`` for (B, N, M) matrices."""
    batch, rows, cols = a.shape
    kappa, sigma_max, sigma_min = (a.new_empty(batch, dtype=torch.float64) for _ in range(3))
    places = min(rows, cols) if spectrum else 0
    return (
        kappa,
        sigma_max,
        sigma_min,
        a.new_empty(batch, dtype=torch.bool),
        a.new_empty(batch, places, dtype=torch.float64),
    )


def _check(a: Tensor, lengths: Tensor | None) -> None:
    """Check tensors that are passed by address: the library would read past their end otherwise."""
    if a.dim() != 3 or a.dtype != torch.float32:
        raise ArgumentError(f"a must be (B, N, M) in float32, got {tuple(a.shape)} in {a.dtype}")
    if lengths is None:
        return
    whole = lengths.dtype == torch.int32 and lengths.is_contiguous()
    if not whole or lengths.shape != a.shape[:1] or lengths.device != a.device:
        raise ArgumentError(
            f"lengths must be ({len(a)},) in int32, contiguous, on {a.device}, got "
            f"{tuple(lengths.shape)} in {lengths.dtype} on {lengths.device}"
        )


def solve(
    opened: ctypes.CDLL, a: Tensor, lengths: Tensor | None, spectrum: bool, stream: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Call the library on (B, N, M) float32; ``lengths`` (B,) int32 on the same device.

    Results are those of ``new_report``; the singular values, descending, only with ``spectrum``.

    Raises:
        ValueError: if a shape, dtype or device is not supported.
        RuntimeError: on a CUDA error, with its name.
    """
    _check(a, lengths)
    if a.stride(-1) != 1:
        a = a.contiguous()
    batch, rows, cols = a.shape
    report = new_report(a, spectrum)
    nbytes = opened.leaner_condition_workspace(batch, rows, cols)
    workspace = a.new_empty(nbytes // 8, dtype=torch.float64)
    error = opened.leaner_condition(
        *(a.data_ptr(), a.stride(0), a.stride(1)),
        None if lengths is None else lengths.data_ptr(),
        *(batch, rows, cols, workspace.data_ptr()),
        *(t.data_ptr() for t in report[:4]),
        report[4].data_ptr() if spectrum else None,
        stream,
    )
    if error:
        reason = opened.leaner_error(error).decode()
        raise RuntimeError(f"condition numbers of {tuple(a.shape)} failed on CUDA: {reason}")
    return report


@torch.library.impl(_torch_library, "condition_report", "CUDA")
def _(a: Tensor, lengths: Tensor | None, spectrum: bool):
    if not runs_on(a.device.index):
        return reference.condition_report(a, lengths, spectrum)
    opened = library()
    assert opened is not None
    with torch.cuda.device(a.device):
        stream = torch.cuda.current_stream().cuda_stream
        return solve(opened, a, lengths, spectrum, stream)


@torch.library.register_fake(add_op_namespace_prefix("condition_report"), lib=_torch_library)
def _(a: Tensor, lengths: Tensor | None, spectrum: bool):
    return new_report(a, spectrum)
