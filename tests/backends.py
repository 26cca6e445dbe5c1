"""Where a test computes: the CPU, Triton's interpreter, compiled code in software, or a GPU.

A process serves one backend, ``pytest --backend NAME``: Triton decides when it is imported whether
kernels are interpreted or compiled. A test runs on the backends that ``@pytest.mark.backends``
names, or that its case names (``on_cpu`` and the functions after it); any other runs on the CPU.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

CPU, INTERPRETER, EXECUTED, GPU = BACKENDS = "cpu", "interpreter", "executed", "gpu"
# Folders whose tests all run on one backend, and the variable that a process of it starts with.
FOLDERS = {"tests/interpreter": INTERPRETER, "tests/compiled": EXECUTED, "tests/gpu": GPU}
VARIABLES = {INTERPRETER: "TRITON_INTERPRET", EXECUTED: "LEANER_EXECUTE"}
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


class Target(NamedTuple):
    """A backend and how it computes.

    Attributes:
        backend: one of ``BACKENDS``.
        dtype: of a test's tensors.
        rounding: of the interpreter: "exact" to nearest, "gpu" as tensor cores do.
        capability: of the GPU whose code is executed, such as 90.
    """

    backend: str
    dtype: torch.dtype
    rounding: str = "exact"
    capability: int | None = None

    def __str__(self) -> str:
        more = self.capability or (self.rounding if self.backend == INTERPRETER else "")
        return f"{self.backend}-{self.dtype}" + (f"-{more}" if more else "")

    @property
    def device(self) -> str:
        """Where tensors of a test lie; the executor's GPU is pretended."""
        return "cuda" if self.backend in (EXECUTED, GPU) else "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute as this target does; fail with the first findings of the executor."""
        if self.backend == EXECUTED:
            from bench.gpu_model.execute import executing

            with executing(self.capability) as executions:
                yield
            assert executions
            check_findings(executions)
        elif self.rounding == "gpu":
            from tests.interpreter.rounding import like_a_gpu

            with like_a_gpu():
                yield
        else:
            yield


def check_findings(executions: list[Any]) -> None:
    """Fail with the first findings of these executed launches, if there are any."""
    findings = [f"{e.name}: {finding}" for e in executions for finding in e.findings]
    total = sum(sum(e.found.values()) for e in executions)
    assert not findings, "\n".join([f"{total} findings, the first of them:", *findings[:5]])


# --- Parameters ("case", "target") of a test ------------------------------------------------------


def one(case: Any, target: Target, *marks: pytest.MarkDecorator) -> Any:
    """Return a case on a target."""
    marks = pytest.mark.backends(target.backend), *marks
    return pytest.param(case, target, marks=marks, id=f"{case.name}-{target}")


def on_cpu(
    cases: Iterable[Any], dtypes: Iterable[torch.dtype] = (FLOAT32, FLOAT16, BFLOAT16)
) -> list[Any]:
    """Return every case in each dtype on the CPU."""
    return [one(case, Target(CPU, dtype)) for case in cases for dtype in dtypes]


def in_interpreter(cases: Iterable[Any], half_first: bool = False) -> list[Any]:
    """Return every case in Triton's interpreter, the rarer arithmetic marked slow and nightly.

    Args:
        cases: have a name.
        half_first: of kernels whose float32 is that of others: bfloat16 in every run, no float32.
    """
    slow, nightly = pytest.mark.slow, pytest.mark.nightly
    if half_first:
        arithmetic = [(BFLOAT16, "exact"), (FLOAT16, "exact", slow)]
    else:
        arithmetic = [
            *((FLOAT32, "exact"), (BFLOAT16, "exact", slow), (FLOAT16, "exact", nightly)),
            (FLOAT32, "gpu", nightly),  # a hundred times as long as on a GPU
        ]
    arithmetic += [(FLOAT16, "gpu", nightly), (BFLOAT16, "gpu", nightly)]
    return [
        one(case, Target(INTERPRETER, dtype, rounding), *marks)
        for case in cases
        for dtype, rounding, *marks in arithmetic
    ]


def executed(cases: Iterable[Any], each_commit: set[tuple[str, torch.dtype, int]]) -> list[Any]:
    """Return every case in half precision as code of sm_80 and sm_90, executed in software.

    Args:
        cases: have a name.
        each_commit: name, dtype and compute capability of those that are not nightly; other GPUs
            run these alone, since their rules and kernels are those of sm_80.
    """
    rows, left = [], set(each_commit)
    for case in cases:
        for dtype in (BFLOAT16, FLOAT16):
            for capability in (80, 89, 90, 100, 120):
                row = case.name, dtype, capability
                left.discard(row)
                if row in each_commit:
                    rows.append(one(case, Target(EXECUTED, dtype, capability=capability)))
                elif capability in (80, 90):
                    target = Target(EXECUTED, dtype, capability=capability)
                    rows.append(one(case, target, pytest.mark.nightly))
    assert not left, f"no such case: {left}"
    return rows


def on_gpu(
    cases: Iterable[Any], dtypes: Iterable[torch.dtype] = (BFLOAT16, FLOAT16, FLOAT32)
) -> list[Any]:
    """Return every case in each dtype on a GPU."""
    return [one(case, Target(GPU, dtype)) for case in cases for dtype in dtypes]


# --- The backend of a process ---------------------------------------------------------------------


def prepare(backend: str | None, rehearse: str | None) -> None:
    """Set the variable that Triton or the executor reads, before anything imports them."""
    variable = VARIABLES.get(INTERPRETER if rehearse else backend or "")
    if variable:
        os.environ[variable] = "1"


def selected(config: pytest.Config) -> tuple[str, ...]:
    """Return the backends whose tests run: the option's, the environment's, or the CPU's.

    Without either, tests of a GPU that is visible run too.
    """
    backend = config.getoption("backend")
    if config.getoption("rehearse"):
        return (GPU,)
    wrong = [v for name, v in VARIABLES.items() if os.environ.get(v) == "1" and backend != name]
    if backend and wrong:
        raise pytest.UsageError(f"--backend {backend} needs a process without {wrong[0]}=1")
    if backend:
        return (backend,)
    of_environment = [name for name, v in VARIABLES.items() if os.environ.get(v) == "1"]
    if of_environment:
        return (of_environment[0],)
    return (CPU, GPU) if torch.cuda.is_available() else (CPU,)


def backends_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the backends on which a test runs."""
    mark = item.get_closest_marker("backends")
    if mark is not None:
        return mark.args
    return (FOLDERS.get(folder_of(item.path, item.config), CPU),)


def folder_of(path: Path, config: pytest.Config) -> str:
    """Return the folder of tests that a file is in, such as "tests/ops"."""
    return "/".join(path.relative_to(config.rootpath).parts[:2])
