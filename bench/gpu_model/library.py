"""The executor as a shared library: built by the ordinary compiler at first use, in ctypes."""

import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "gpu_model"
# A multiplication and an addition must stay two roundings where PTX has two.
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno"),
)


class NoCompilerError(RuntimeError):
    """There is nothing to build the executor with."""


TYPES = {
    **dict.fromkeys(("s32", "int32_t"), ctypes.c_int32),
    **dict.fromkeys(("s64", "int64_t"), ctypes.c_int64),
    **{"u64": ctypes.c_uint64, "double": ctypes.c_double, "char": ctypes.c_char},
}


def structures(file: str, *names: str) -> Iterator[Any]:
    """Yield structures that a source declares, by the names of their fields."""
    text = re.sub(r"//[^\n]*", "", (SOURCES / file).read_text("utf-8"))
    sizes: dict[str, int] = {}  # enumerations end with their length
    for enumeration in re.findall(r"enum \w+ \{([^}]*)\}", text):
        sizes |= {name.strip(): number for number, name in enumerate(enumeration.split(","))}
    types: dict[str, Any] = dict(TYPES)
    for name in names:
        (body,) = re.findall(rf"struct {name} \{{([^}}]*)\}}", text)
        fields = []
        for kind, star, declared in re.findall(r"(?:const )?(\w+)(\*?) ([^;]*);", body):
            for star_of_one, field, size in re.findall(r"(\*?)(\w+)(?:\[(\w+)\])?", declared):
                one = types.get(kind)
                if star or star_of_one:
                    fields_of = one is not None and issubclass(one, ctypes.Structure)
                    one = ctypes.POINTER(one) if fields_of else ctypes.c_void_p
                elif size:
                    one *= sizes.get(size) or int(size)
                fields.append((field, one))
        types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        yield types[name]


Instruction, Region, Counts, Report, TensorMap, Event, Job = structures(
    "machine.h", "Instruction", "Region", "Counts", "Report", "TensorMap", "Event", "Job"
)
Step, Replay = structures("replay.cpp", "Step", "Replay")


class Library:
    """The built executor: ``operations`` by name, with the widths of their operands in bits."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.operation_name.restype = ctypes.c_char_p
        names = map(library.operation_name, itertools.count())
        names = itertools.takewhile(lambda name: name is not None, names)
        self.operations = {name.decode(): number for number, name in enumerate(names)}
        self.widths = {name: self._widths(n) for name, n in self.operations.items()}
        self.findings = self._names("finding_names")
        self.pipes, self.reasons = self._names("pipe_names"), self._names("reason_names")
        self.kinds = {name: number for number, name in enumerate(self._names("kind_names"))}

    def _widths(self, operation: int) -> tuple[int, ...]:
        widths = (self._library.operand_width(operation, k) for k in itertools.count())
        return tuple(itertools.takewhile(bool, widths))

    def _names(self, of: str) -> list[str]:
        first = ctypes.pointer(ctypes.c_char_p.in_dll(self._library, of))
        names = itertools.takewhile(
            lambda name: name is not None, map(first.__getitem__, itertools.count())
        )
        return [name.decode() for name in names]

    def run(self, job: Any) -> bool:
        """Execute; return False where the job's ``error`` holds why it ended early."""
        return self._library.run_job(ctypes.byref(job)) == 0

    def replay(self, job: Any) -> bool:
        """Time the programs of an SM; return False where they come to no end."""
        return self._library.replay(ctypes.byref(job)) == 0


@functools.cache
def load() -> Library:
    """Return the executor, built where its sources have changed.

    Raises:
        NoCompilerError: neither CXX nor g++ nor clang++ is there, or it cannot compile C++20.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoCompilerError("the executor is built by g++ or clang++, and neither is on PATH")
    # Its release, and the features of the native processor.
    command = [compiler, *FLAGS, "-E", "-v", "-x", "c++", os.devnull]
    target = subprocess.run(command, capture_output=True, check=False).stderr
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join([target, *(source.read_bytes() for source in sources)]))
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
