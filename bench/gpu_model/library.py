"""The executor as a shared library: built by the ordinary compiler at first use, in ctypes."""

import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "gpu_model"
# A multiplication and an addition must stay two roundings where PTX has two.
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno"),
)

s32, s64, u64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
real = ctypes.c_double
FINDINGS = 20


class NoCompilerError(RuntimeError):
    """There is nothing to build the executor with."""


# As in csrc/machine.h.
class Instruction(ctypes.Structure):
    """One statement, decoded."""

    _fields_ = [
        *((name, s32) for name in ("operation", "guard", "negated", "first", "results", "count")),
        *((name, s32) for name in ("target", "reconverge", "size", "vector", "width", "variant")),
        ("offset", s64),
    ]


class Region(ctypes.Structure):
    """Of global memory."""

    _fields_ = [
        ("base", u64),
        ("size", u64),
        *((n, pointer) for n in ("owned", "writer", "reader")),
    ]


class Counts(ctypes.Structure):
    """Of one instruction, over all warps of all programs that ran.

    ``skipped`` are lanes that its guard kept from it; bank conflicts are the wavefronts of shared
    memory past the least, and sectors of 32 bytes past the least are bytes that nothing needed.
    """

    _fields_ = [
        (name, u64)
        for name in (
            *("executed", "skipped"),
            *("wavefronts", "min_wavefronts", "sectors", "min_sectors"),
        )
    ]


class Report(ctypes.Structure):
    """Something that was found."""

    _fields_ = [
        *((n, s32) for n in ("finding", "instruction", "warp", "lane", "program", "other")),
        ("address", u64),
    ]


class Job(ctypes.Structure):
    """A launch."""

    _fields_ = [
        ("code", ctypes.POINTER(Instruction)),
        ("operands", pointer),
        ("regions", ctypes.POINTER(Region)),
        ("num_regions", s64),
        ("registers", pointer),
        *((name, s64) for name in ("register_bytes", "warps", "shared_bytes")),
        ("tid", s32),
        ("ntid", s32),
        ("ctaid", s32 * 3),
        ("nctaid", s32 * 3),
        ("grid", s64 * 3),
        *((name, s64) for name in ("check", "count", "tracks_wgmma", "reversed")),
        ("counts", ctypes.POINTER(Counts)),
        ("reports", ctypes.POINTER(Report)),
        *((name, s64) for name in ("max_reports", "num_reports")),
        ("found", s64 * FINDINGS),
        *((name, s64) for name in ("limit", "executed")),
        ("error", ctypes.c_char * 256),
    ]


# As in csrc/replay.cpp.
class Step(ctypes.Structure):
    """A machine instruction as the replay needs it."""

    _fields_ = [
        *((n, s32) for n in ("pipe", "kind", "argument", "warps", "stall", "writes", "reads")),
        ("waits", s32),
        *((n, real) for n in ("interval", "latency", "wavefronts", "bytes", "dram")),
    ]


class Replay(ctypes.Structure):
    """Programs of one SM, and what came of them."""

    _fields_ = [
        ("steps", ctypes.POINTER(Step)),
        *((n, pointer) for n in ("trace", "starts")),
        *((n, s64) for n in ("kinds", "warps", "residents", "programs")),
        *((n, real) for n in ("cache_bytes", "dram_bytes", "cache_latency", "dram_latency")),
        *((n, real) for n in ("saved", "barrier", "start", "tail", "queue", "tensor_queue")),
        *((n, ctypes.POINTER(real)) for n in ("finished", "waited_at")),
        ("busy", real * 8),
        ("waited", real * 9),
        *((n, real) for n in ("issued", "cycles")),
    ]


class Library:
    """The built executor: ``operations`` by name, with the widths of their operands in bits."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        for function in (
            *(library.operation_name, library.finding_name),
            *(library.pipe_name, library.reason_name, library.kind_name),
        ):
            function.restype = ctypes.c_char_p
        for number, mirrored in enumerate((Instruction, Region, Counts, Report, Job)):
            assert library.size_of(number) == ctypes.sizeof(mirrored), mirrored
        for number, mirrored in enumerate((Step, Replay)):
            assert library.size_of_replay(number) == ctypes.sizeof(mirrored), mirrored
        self.operations = {
            name: number for number, name in enumerate(_names(library.operation_name))
        }
        self.pipes = _names(library.pipe_name)
        self.reasons = _names(library.reason_name)
        self.kinds = {name: number for number, name in enumerate(_names(library.kind_name))}
        self.widths = {name: self._widths(n) for name, n in self.operations.items()}
        self.findings = [library.finding_name(n).decode() for n in range(FINDINGS)]

    def _widths(self, operation: int) -> tuple[int, ...]:
        widths = (self._library.operand_width(operation, k) for k in itertools.count())
        return tuple(itertools.takewhile(bool, widths))

    def run(self, job: Job) -> bool:
        """Execute; return False where the job's ``error`` holds why it ended early."""
        return self._library.run_job(ctypes.byref(job)) == 0

    def replay(self, job: Replay) -> bool:
        """Time the programs of an SM; return False where they come to no end."""
        return self._library.replay(ctypes.byref(job)) == 0


def _names(name_of: Any) -> list[str]:
    names = itertools.takewhile(lambda name: name is not None, map(name_of, itertools.count()))
    return [name.decode() for name in names]


@functools.cache
def load() -> Library:
    """Return the executor, built where its sources have changed.

    Raises:
        NoCompilerError: neither CXX nor g++ nor clang++ is there, or it cannot compile C++20.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoCompilerError("the executor is built by g++ or clang++, and neither is on PATH")
    sources = sorted(SOURCES.iterdir())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(b"".join([version, *(s.read_bytes() for s in sources), _processor()]))
    path = BUILD / f"executor-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Several processes may build it at once: each its own, and the last one moved stays.
        made = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, "-o", str(made), *map(str, SOURCES.glob("*.cpp"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoCompilerError(
                f"{compiler} cannot build the executor: {done.stderr.strip()[:500]}"
            )
        made.replace(path)
    return Library(path)


def _processor() -> bytes:
    """Return what code for the native processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
