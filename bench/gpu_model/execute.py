"""Launch Triton kernels on CPU tensors: compiled for a GPU, executed in software."""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePath
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.gpu_model import compile_ahead, decode, library, ptx
from bench.gpu_model.compile_ahead import WARP, Launch

MAX_REPORTS = 1000
MAX_RECORDED = 8  # programs
MAX_EVENTS = 4_000_000  # of all that are recorded
DEADLOCK = "waits for ever"
MAX_INSTRUCTIONS = 50_000_000  # of a warp between two barriers


class Finding(NamedTuple):
    """Something that a GPU would do wrong, or that depends on timing there."""

    what: str
    where: str  # file:line of the kernel
    instruction: str
    text: str

    def __str__(self) -> str:
        return f"{self.what}: {self.text} [{self.where}] {self.instruction}"


class ExecutionError(RuntimeError):
    """A kernel that cannot continue, or that has findings."""


class Recorded(NamedTuple):
    """What warps of some programs did, where partitions of warps differ.

    Attributes:
        executed: (programs, warps, instructions), how often each ran.
        events: in order, with the fields of machine.h's ``Event``.
        complete: whether every event is there.
    """

    executed: np.ndarray
    events: np.ndarray
    complete: bool


@dataclass(frozen=True)
class Execution:
    """A launch that was executed.

    Attributes:
        program: the executed program; ``counts`` holds an entry of each of its instructions.
        grid: programs of the launch.
        findings: messages about mistakes, the first 999 and the last.
        found: number of findings of each kind.
        tensor_bytes: bytes of its tensors, each once: what memory gives and takes at least.
        launch: the request of the launch, if Triton made it.
        recorded: of a counted kernel whose warps meet at barriers of their own.
    """

    program: decode.Program
    grid: tuple[int, int, int]
    findings: list[Finding]
    found: dict[str, int]
    counts: Any
    tensor_bytes: float
    launch: Launch | None = None
    recorded: Recorded | None = None

    @property
    def name(self) -> str:
        """The kernel's function."""
        return self.program.kernel.name

    @property
    def programs(self) -> int:
        """How many ran."""
        return prod(self.grid)

    @property
    def wavefronts(self) -> float:
        """Of shared memory, of a program, where they were counted."""
        return sum(n.wavefronts for n in self.counts) / self.programs

    @property
    def warps(self) -> int:
        """Of a program."""
        return self.program.kernel.threads // WARP


@contextmanager
def executing(
    capability: int,
    *,
    check: bool = True,
    count: bool = False,
) -> Iterator[list[Execution]]:
    """Execute every launch of a Triton kernel inside, as compiled for a GPU; yield what ran.

    Args:
        capability: one of ``units.MODELS``.
        check: look for races, accesses outside of tensors, memory that is read before it is
            written, and what is touched while cp.async or wgmma is under way.
        count: note executed instructions, bank conflicts and sectors.

    Raises:
        library.NoCompilerError: there is nothing to build the executor with.
        ptx.UnsupportedError: a kernel has an instruction that the executor does not support.
        ExecutionError: a kernel cannot go on, or is given memory of another device; what is found
            besides is left to the caller.
    """
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    from leaner_kernels.ops import _tiles

    executor = library.load()
    log: list[Execution] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = Launch(kernel, args, kwargs)
        found = compile_ahead.specialise(launch, capability)
        if found.key not in _programs:
            compiled = found.compile()
            program = decode.Program(ptx.parse(compiled.asm["ptx"]), executor)
            _programs[found.key] = program, compiled.metadata
        program, metadata = _programs[found.key]
        execution = execute(
            executor,
            program,
            metadata.shared,
            dict(_expand(found.arguments, metadata)),
            (*grid, 1, 1)[:3],
            check=check,
            count=count,
        )
        log.append(replace(execution, launch=launch))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(_tiles, "capability", return_value=capability))
        # Machine code is not needed, and ptxas would take most of the time. In a cache of its own.
        stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        stack.enter_context(knobs.cache.scope())
        knobs.cache.dir = str(library.BUILD / "triton")
        yield log


_programs: dict[tuple[str, str, int], tuple[decode.Program, Any]] = {}


class TensorBoxes(NamedTuple):
    """A tensor that TMA copies boxes of; the innermost axis of ``strides`` and ``box`` is the last.

    Attributes:
        tensor: tensor that holds the elements.
        shape: shape of the copied box; elements outside are read as zero or NaN and not written.
        strides: elements.
        box: elements of a copy.
        swizzle: bytes of a row of shared memory whose pieces are exchanged, 0 for none.
        nan: whether NaN is read outside.
    """

    tensor: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int
    nan: bool = False


SWIZZLES = 0, 32, 64, 128  # bytes, by Triton's numbers
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # machine.h; 0 is an integer


def _expand(arguments: dict[str, Any], metadata: Any) -> Iterator[tuple[str, Any]]:
    """Yield the kernel's parameters: of a tensor descriptor its tensor map, shape and strides.

    Raises:
        ptx.UnsupportedError: a descriptor is one of im2col or of TF32, or the GPU has no TMA.
    """
    described = iter(metadata.tensordesc_meta or ())
    for name, value in arguments.items():
        if not hasattr(value, "block_shape"):
            yield name, value
            continue
        found = next(described, None)
        rounds = getattr(value, "round_f32_to_tf32", False)
        if found is None or found.get("is_im2col") or found["fp4_padded"] or rounds:
            raise ptx.UnsupportedError(
                f"{name}: a tensor descriptor that is not a plain one of TMA"
            )
        swizzle, nan = SWIZZLES[found["swizzle"]], value.padding == "nan"
        yield (
            name,
            TensorBoxes(value.base, value.shape, value.strides, found["block_size"], swizzle, nan),
        )
        for kind, numbers in ("shape", value.shape), ("strides", value.strides):
            yield from ((f"{name}.{kind}.{axis}", n) for axis, n in enumerate(numbers))


def _tensor_maps(arguments: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return the tensor maps of a launch, and its arguments with their addresses in csrc/bulk.h.

    Raises:
        ExecutionError: TMA cannot take a tensor: its address or a stride is no multiple of 16
            bytes, or rows of a box are not as wide as the pattern of its swizzle.
    """
    values = list(arguments.values())
    boxed = [n for n, value in enumerate(values) if isinstance(value, TensorBoxes)]
    maps = (library.TensorMap * max(1, len(boxed)))()
    for number, (found, place) in enumerate(zip(maps, boxed), start=1):
        value, name = values[place], list(arguments)[place]
        size, rank = value.tensor.element_size(), len(value.shape)
        strides = [stride * size for stride in value.strides]
        row = value.box[-1] * size
        if value.tensor.data_ptr() % 16 or any(stride % 16 for stride in strides[:-1]):
            raise ExecutionError(f"{name}: TMA needs multiples of 16 bytes, got strides {strides}")
        if strides[-1] != size or row % 16 or (value.swizzle and row != value.swizzle):
            raise ExecutionError(f"{name}: TMA cannot copy rows of {row} bytes, {value.swizzle=}")
        found.base, found.size, found.rank = value.tensor.data_ptr(), size, rank
        found.dims[:rank] = value.shape[::-1]
        found.strides[:rank] = strides[::-1]
        found.box[:rank] = value.box[::-1]
        found.swizzle, found.nan = value.swizzle, value.nan
        found.kind = _KINDS.get(value.tensor.dtype, 0)
        values[place] = number * ctypes.sizeof(found)
    return maps, values


class _Memory(NamedTuple):
    regions: Any
    names: list[str]
    kept: list[np.ndarray]


def execute(
    executor: library.Library,
    program: decode.Program,
    shared: int,
    arguments: dict[str, Any],
    grid: tuple[int, int, int],
    *,
    check: bool = True,
    count: bool = False,
) -> Execution:
    """Run one launch: ``shared`` bytes of shared memory a program, otherwise as ``executing``.

    ``arguments`` are numbers, tensors of the CPU and ``TensorBoxes`` of them in the order of the
    kernel's parameters.
    """
    maps, values = _tensor_maps(arguments)
    arguments = {
        name: value.tensor if isinstance(value, TensorBoxes) else value
        for name, value in arguments.items()
    }
    memory = _memory(arguments, check)
    warps = program.kernel.threads // WARP
    registers = _registers(program, values, warps)
    counts = (library.Counts * len(program.code))()
    reports = (library.Report * MAX_REPORTS)()
    records = min(prod(grid), MAX_RECORDED) if count and program.partitioned else 0
    executed = np.zeros((records, warps, len(program.code)), dtype=np.uint32)
    events = np.empty(MAX_EVENTS if records else 0, dtype=library.Event)
    job = library.Job(
        code=program.code,
        operands=ctypes.addressof(program.operands),
        regions=memory.regions,
        num_regions=len(memory.names),
        registers=registers.ctypes.data,
        register_bytes=program.register_bytes,
        warps=warps,
        shared_bytes=shared,
        special=tuple(program.special),
        grid=grid,
        check=check,
        count=count,
        tracks_wgmma=check and program.tracks_wgmma,
        partitioned=program.partitioned,
        max_registers=program.kernel.max_registers,
        maps=maps,
        num_maps=len(maps),
        tables=ctypes.addressof(program.tables),
        recorded=records,
        num_instructions=len(program.code),
        max_events=len(events),
        events=events.ctypes.data_as(ctypes.POINTER(library.Event)),
        executed_by=executed.ctypes.data,
        counts=counts,
        reports=reports,
        max_reports=MAX_REPORTS,
        limit=MAX_INSTRUCTIONS,
    )
    whole = executor.run(job)
    tensors = {
        (value.data_ptr(), value.numel() * value.element_size())
        for value in arguments.values()
        if isinstance(value, Tensor)
    }
    findings = [
        _finding(executor, program, memory, report) for report in reports[: job.num_reports]
    ]
    if not whole:
        last = f"; {findings[-1]}" if findings else ""
        if waiting := [f for f in findings if f.what == DEADLOCK]:
            last = "".join(dict.fromkeys(f"; [{f.where}] {f.instruction}" for f in waiting))
            if waiting[0] is not findings[0]:
                last += f"; before: {findings[0]}"
        raise ExecutionError(f"{program.kernel.name}: {job.error.decode()}{last}")
    return Execution(
        program,
        grid,
        findings,
        {name: n for name, n in zip(executor.findings, job.found, strict=True) if n},
        counts,
        float(sum(size for _, size in tensors)),
        recorded=Recorded(executed, events[: job.num_events].copy(), job.num_events <= len(events))
        if records
        else None,
    )


def _memory(arguments: dict[str, Any], check: bool) -> _Memory:
    """Return the memory that tensors own: each storage a region, what lies between elements not."""
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.numel():
            if value.device.type != "cpu":
                raise ExecutionError(f"{name} must be on the CPU, got {value.device}")
            storages.setdefault(value.untyped_storage().data_ptr(), []).append((name, value))
    regions = (library.Region * max(1, len(storages)))()
    kept, names = [], []
    for region, (base, tensors) in zip(regions, sorted(storages.items())):
        region.base, region.size = base, tensors[0][1].untyped_storage().nbytes()
        names.append("/".join(name for name, _ in tensors))
        if not check:
            continue
        owned = torch.zeros(region.size, dtype=torch.uint8)
        for _, t in tensors:
            size = t.element_size()
            strides = *(step * size for step in t.stride()), 1
            # Of an expanded axis one element is all there is.
            shape = *(n if step else 1 for n, step in zip(t.shape, t.stride())), size
            owned.as_strided(shape, strides, t.storage_offset() * size).fill_(1)
        writer, reader = np.zeros((2, region.size), dtype=np.uint64)
        marks = owned.numpy()
        kept += [marks, writer, reader]
        region.owned = marks.ctypes.data
        region.writer, region.reader = writer.ctypes.data, reader.ctypes.data
    return _Memory(regions, names, kept)


def _registers(program: decode.Program, arguments: list[Any], warps: int) -> np.ndarray:
    """Return (warps, bytes), constants and arguments filled in; what nothing fills is all ones."""
    size = program.register_bytes
    found = np.full(warps * size + decode.SLOT_BYTES[1], 0xFF, dtype=np.uint8)
    start = -found.ctypes.data % decode.SLOT_BYTES[1]
    registers = found[start : start + warps * size].reshape(warps, size)

    def write_slot(slot: decode.Slot, value: int) -> None:
        width, lanes = (4, 1) if slot.bits == 1 else (slot.bits // 8, WARP)
        raw = np.frombuffer(value.to_bytes(8, "little")[:width] * lanes, dtype=np.uint8)
        registers[:, slot.offset : slot.offset + len(raw)] = raw

    for (_, value), slot in program.constants.items():
        write_slot(slot, value)
    for (place, _), slot in program.parameters.items():
        # Behind the arguments come pointers to scratch memory, which no kernel here has.
        value = arguments[place] if place < len(arguments) else 0
        write_slot(slot, _bits(value))
    return registers


def _bits(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value) & (1 << 64) - 1


def _finding(
    executor: library.Library, program: decode.Program, memory: _Memory, report: Any
) -> Finding:
    statement = program.kernel.statements[report.instruction]
    file = PurePath(program.kernel.files.get(statement.file, "?")).name
    text = f"program {report.program}, warp {report.warp}, lane {report.lane}"
    if report.other >= 0:
        text += f", other {report.other}"
    text += f", at {report.address:#x}"
    for region, name in zip(memory.regions, memory.names):
        if region.base <= report.address < region.base + region.size:
            text += f" ({name} + {report.address - region.base} bytes)"
    what = executor.findings[report.finding]
    return Finding(what, f"{file}:{statement.line}", statement.text, text)
