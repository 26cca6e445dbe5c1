"""Host builds of the native solver: its core by one thread, all of it on an emulated device."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch import Tensor

from leaner_kernels.kappa import ConditionNumber, native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("leaner_kernels/csrc", "tests/native")
# Shared memory a block may have, float32 over float64 rate, and the tensor cores' shape.
DEVICES = {"sm_80": (166_912, 2, 800), "sm_86": (101_376, 64, 860), "sm_90": (232_448, 2, 900)}


def compiler() -> str:
    """The C++ compiler, or a skip that says why there is none to use."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux: the emulator's fibers are those of glibc")
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("needs a C++ compiler: c++ is not on PATH")
    return found


def compile_host(root: Path, arch: int, out: Path) -> ctypes.CDLL:
    """Compile the sources under ``root`` for the host and open the library."""
    # Two floats need every rounding, and their storage serves as that of doubles too.
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing"]
    if platform.machine() == "x86_64":
        flags.append("-mfma")  # otherwise a function call each
    flags += ["-Wall", "-Werror", "-Wno-unknown-pragmas", f"-DLEANER_ARCH={arch}"]
    include = f"-I{root / 'tests/native/emulator'}"
    source = root / "tests/native/host.cpp"
    command = [compiler(), *flags, "-shared", "-fPIC", include, str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = native.declare(out)
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    library.serial_condition.argtypes = [
        *(pointer, long, long, pointer, integer, integer, integer, ctypes.c_bool),
        *(pointer, pointer, pointer, pointer, pointer),
    ]
    library.serial_condition.restype = None
    return library


@functools.cache
def host(arch: int = 800) -> ctypes.CDLL:
    """The host build of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_host(ROOT, arch, Path(folder) / "host.so")


def emulate(device: str, order: int = 0, shared: int | None = None) -> ctypes.CDLL:
    """The host build whose emulated device is as ``device``; threads run in this order."""
    limit, ratio, arch = DEVICES[device]
    library = host(900 if arch >= 900 else 800)
    library.emulate(shared or limit, ratio, order)
    return library


def solve_serially(
    a: Tensor, two_float: bool, lengths: Tensor | None = None
) -> tuple[ConditionNumber, Tensor]:
    """Condition numbers (B,) and spectrum (B, min(N, M)) of (B, N, M) by one thread."""
    a = a.contiguous()
    batch, rows, cols = a.shape
    report = native.new_report(a, spectrum=True)
    host().serial_condition(
        *(a.data_ptr(), a.stride(0), a.stride(1)),
        None if lengths is None else lengths.data_ptr(),
        *(batch, rows, cols, two_float),
        *(t.data_ptr() for t in report),
    )
    return ConditionNumber(*report[:4]), report[4]


def solve_emulated(
    a: Tensor, library: ctypes.CDLL, lengths: Tensor | None = None
) -> tuple[ConditionNumber, Tensor]:
    """As ``solve_serially``, by the whole CUDA source on the emulated device."""
    report = native.solve(library, a, lengths, True, 0)
    return ConditionNumber(*report[:4]), report[4]
