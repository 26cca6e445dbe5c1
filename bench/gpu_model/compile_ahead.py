"""Compile kernels for GPUs that this machine lacks, and read the resources that they use.

A launcher is called on tensors without memory (the meta device). Meanwhile ``recorded`` records its
launches instead of running them. Triton's own binder then compiles each launch, so the
specialisation is the one that the same call would run on a GPU. Triton is imported at the first
use, because the benchmarks also run without it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple
from unittest import mock

from bench.gpu_model.machine_code import MachineCode, disassemble, dump
from leaner_kernels.ops import gpus
from leaner_kernels.ops.gpus import GPU

# The architectures for which tiles are chosen.
GPUS = {capability: gpu for capability, gpu in gpus.GPUS.items() if gpu.tiles is not None}
WARP = 32
# Each of the four parts of an SM has 16K registers and gives them out to a warp by 256;
# shared memory is given out by 128 bytes, and the system keeps 1 KiB of it for each program.
SM_PARTS, REGISTERS_PER_PART, REGISTER_UNIT = 4, 16 * 1024, 256
SHARED_UNIT, SHARED_RESERVED = 128, 1024

# Bytes of a thread: a few words outside of innermost loops allow one more program on an SM.
MAX_STACK = 192
# Tiles are chosen with these releases of Triton, in whose innermost loops nothing spills. Of what
# another allocates registers for, a few words may.
TUNED_WITH = "3.6", "3.9"
MAX_LOOPED = 4
_USAGE = re.compile(r"\b(REG|STACK|SHARED):(\d+)")


def tuned() -> bool:
    """Return whether tiles were chosen with the Triton that is installed."""
    return version("triton").startswith(TUNED_WITH)


def spill_faults(stack: int, looped_spills: int) -> list[str]:
    """Return the faults in a kernel's use of local memory."""
    found = []
    if stack > MAX_STACK:
        found.append(f"{stack} bytes of stack, {MAX_STACK} are allowed")
    limit = 0 if tuned() else MAX_LOOPED
    if looped_spills > limit:
        found.append(f"{looped_spills} spills in an innermost loop, {limit} are allowed")
    return found


@dataclass(frozen=True)
class Resources:
    """The resources of a program of a kernel.

    Attributes:
        registers: number of registers of a thread.
        shared: bytes.
        stack: bytes of a thread.
        threads: number of threads of a program.
        programs_per_sm: how many programs one SM holds at once.
        cubin: its machine code.
    """

    registers: int
    shared: int
    stack: int
    threads: int
    programs_per_sm: int
    cubin: bytes = field(repr=False)

    @cached_property
    def code(self) -> MachineCode:
        """The machine code, read."""
        return disassemble(self.cubin)

    @property
    def spills(self) -> int:
        """Instructions that read or write a thread's stack; a kernel without a stack has none."""
        return self.code.spills() if self.stack else 0

    @property
    def looped_spills(self) -> int:
        """Those of ``spills`` that stand in a loop with no loop inside."""
        return self.code.looped_spills() if self.stack else 0

    @property
    def faults(self) -> list[str]:
        """The faults in the use of local memory."""
        return spill_faults(self.stack, self.looped_spills)


@dataclass(frozen=True)
class Launch:
    """One ``kernel[grid](*args, **kwargs)`` that was requested."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's function."""
        return self.kernel.fn.__name__


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Yield a list that gathers every launch of a Triton kernel inside; none of them runs."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel, args, kwargs))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


def distinct(
    launches: Sequence[Launch], capability: int, besides: Sequence[Launch] = ()
) -> list[Launch]:
    """Return one launch of each specialisation, in order, without those ``besides`` runs too."""
    taken = {specialise(launch, capability).key for launch in besides}
    by_key = {specialise(launch, capability).key: launch for launch in launches}
    return [launch for key, launch in by_key.items() if key not in taken]


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a launch for a GPU, once in a process for each specialisation."""
    found = specialise(launch, capability)
    if found.key not in _compiled:
        compiled = found.compile()
        _compiled[found.key] = _read(compiled, GPUS[capability])
    return _compiled[found.key]


_compiled: dict[tuple[str, str, int], Resources] = {}


class Specialisation(NamedTuple):
    """What Triton compiles a launch to; ``arguments`` are those that the compiled kernel takes."""

    key: tuple[str, str, int]
    source: Any
    target: Any
    options: dict[str, Any]
    arguments: dict[str, Any]

    def compile(self) -> Any:
        """Return Triton's compiled kernel."""
        import triton

        from leaner_kernels.ops._launch_cache import assembling

        with assembling():
            return triton.compile(self.source, target=self.target, options=self.options)


def specialise(launch: Launch, capability: int) -> Specialisation:
    """Return the specialisation that the launch would run on a GPU, using Triton's own binder."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    target = GPUTarget("cuda", capability, WARP)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, launch.kwargs, bound, specialization, options
    )
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(kernel, signature, constexprs, attrs)
    key = source.hash(), options.hash(), capability
    arguments = dict(_flat(bound, signature))
    return Specialisation(key, source, target, options.__dict__, arguments)


def _flat(bound: dict[str, Any], signature: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the compiled kernel, the fields of a named tuple one by one."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            fields: Any = bound[name]
            kinds = dict(zip(fields._fields, kind))
            for field_name, value in _flat(fields._asdict(), kinds):
                yield f"{name}.{field_name}", value
        elif kind != "constexpr":
            yield name, bound[name]


def _read(compiled: Any, gpu: GPU) -> Resources:
    cubin, metadata = compiled.asm["cubin"], compiled.metadata
    usage = {
        name: int(number) for name, number in _USAGE.findall(dump(cubin, "cuobjdump", "-res-usage"))
    }
    shared, threads = max(usage["SHARED"], metadata.shared), metadata.num_warps * WARP
    columns = metadata.tmem_size
    return Resources(
        registers=usage["REG"],
        shared=shared,
        stack=usage["STACK"],
        threads=threads,
        programs_per_sm=programs_per_sm(gpu, usage["REG"], shared, threads, columns),
        cubin=cubin,
    )


def programs_per_sm(
    gpu: GPU, registers: int, shared: int, threads: int, tensor_columns: int = 0
) -> int:
    """Return how many programs one SM holds at once; 0 if not even one fits."""
    if shared > gpu.shared_per_program:
        return 0
    warps = -(-threads // WARP)
    registers_of_warp = _round_up(registers * WARP, REGISTER_UNIT)
    limits = [
        SM_PARTS * (REGISTERS_PER_PART // registers_of_warp) // warps,
        gpu.shared_per_sm // _round_up(shared + SHARED_RESERVED, SHARED_UNIT),
        gpu.threads_per_sm // (warps * WARP),
        gpu.programs_per_sm,
    ]
    if tensor_columns:
        limits.append(gpu.tensor_columns // tensor_columns)
    return min(limits)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
