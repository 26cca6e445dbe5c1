"""Predict the time of a launch: replay on one SM what its warps execute.

ptxas writes into each machine instruction how long the next one of the warp waits and which
scoreboards it sets and needs, so the code itself holds what depends on what. csrc/replay.cpp issues
it cycle by cycle: four schedulers, the units of each, shared memory and a part of the bandwidth of
L2 and memory for all four, barriers, cp.async and wgmma, with as many programs as fit at once.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from bench.gpu_model import library, machine_code, units
from bench.gpu_model.compile_ahead import WARP
from bench.gpu_model.execute import Execution
from bench.gpu_model.machine_code import Key, MachineCode, MachineInstruction

MAX_ISSUED = 3_000_000  # by one SM; beyond, the rate so far goes on

_SHARED_WIDTH = re.compile(r"88\.?([24])")
_BARRIER = re.compile(r"0x([0-9a-f]+)(?:, 0x([0-9a-f]+))?")
MAX_BARRIERS = 15


class Access(NamedTuple):
    """What one instruction of a warp moves: wavefronts of shared memory, bytes of global."""

    wavefronts: float = 0.0
    bytes: float = 0.0


class Work(NamedTuple):
    """A launch as the model times it.

    Attributes:
        code: the kernel's machine code.
        traces: instructions of a warp, numbered, in order; of each kind of program, as many each.
        warps: of a program.
        programs: of the launch.
        programs_per_sm: how many are resident at once.
        accesses: of machine instructions whose accesses are known; others use their full width.
        memory_bytes: what the launch moves to and from memory at least; the rest comes from L2.
    """

    code: MachineCode
    traces: Sequence[Sequence[int]]
    warps: int
    programs: float
    programs_per_sm: int
    accesses: Mapping[Key, Access]
    memory_bytes: float


class Timing(NamedTuple):
    """What the model predicts of a launch.

    Attributes:
        seconds: of the launch.
        busy: part of the time, by unit.
        waited: part of the warps' time, by reason.
        waited_at: cycles of warps that each machine instruction waited.
    """

    seconds: float
    busy: dict[str, float]
    waited: dict[str, float]
    waited_at: list[float]

    @property
    def binds(self) -> str:
        """The busiest unit, or latency where none is busy for most of the time."""
        unit = max(self.busy, key=lambda name: self.busy[name])
        return unit if self.busy[unit] >= units.BINDS else "latency"


def time(work: Work, gpu: units.GPU) -> Timing:
    """Predict how long a launch takes on a GPU.

    Raises:
        ValueError: it has barriers that the model does not support, its warps wait for each other,
            or its ways differ in length and too few programs run one after the other to take
            them all.
    """
    executor = library.load()
    model = units.MODELS[gpu.capability]
    # An SM's part of the bandwidth of memory, where all of them want some.
    memory_bytes = gpu.bytes_per_s * units.ATTAINED_BYTES / (gpu.num_sms * gpu.sustained_hz)
    accessed = [_access(one, work.accesses) for one in work.code.instructions]
    programs = int(-(-work.programs // gpu.num_sms))
    kinds = min(len(work.traces), programs)
    # Of more kinds than programs, evenly.
    chosen = [work.traces[(2 * n + 1) * len(work.traces) // (2 * kinds)] for n in range(kinds)]
    longer = np.mean([*map(len, chosen)]) / np.mean([*map(len, work.traces)])
    if abs(longer - 1) > machine_code.MAX_DIFFERENCE:
        raise ValueError(f"{programs} programs in a row take paths {longer:.2f} times the mean")
    trace = np.concatenate([np.array(one, dtype=np.int32) for one in chosen])
    starts = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    sizes = np.array([access.bytes for access in accessed])
    bytes_moved = float(sizes[trace].sum()) / kinds * work.warps * work.programs
    from_memory = min(1.0, work.memory_bytes / bytes_moved) if bytes_moved else 0.0
    steps = (library.Step * len(work.code.instructions))()
    for step, one, access in zip(steps, work.code.instructions, accessed, strict=True):
        _fill(step, one, access, access.bytes * from_memory, executor, gpu)
    most = max(4 * work.programs_per_sm * kinds, MAX_ISSUED * kinds // (len(trace) * work.warps))
    replayed = min(programs, most)
    finished = np.zeros(replayed)
    waited_at = np.zeros(len(steps))
    job = library.Replay(
        steps=steps,
        trace=trace.ctypes.data,
        starts=starts.ctypes.data,
        kinds=kinds,
        warps=work.warps,
        residents=min(work.programs_per_sm, replayed),
        programs=replayed,
        cache_bytes=model.cache_bytes,
        dram_bytes=memory_bytes,
        cache_latency=model.cache_latency,
        dram_latency=model.memory_latency,
        saved=work.memory_bytes / work.programs / memory_bytes,
        barrier=model.barrier,
        start=model.start,
        tail=model.wgmma_tail,
        queue=model.shared_queue,
        tensor_queue=model.wgmma_queue,
        finished=finished.ctypes.data,
        waited_at=waited_at.ctypes.data,
    )
    if not executor.replay(job):
        raise ValueError("its warps wait for each other at barriers")
    cycles = job.cycles
    if programs > replayed:
        ends = np.sort(finished)
        first = work.programs_per_sm - 1
        each = (ends[-1] - ends[first]) / (replayed - 1 - first)
        memory = job.busy[executor.pipes.index("global memory")] / replayed
        cycles += (programs - replayed) * max(each, memory)
    each = 1.0 / job.cycles
    busy = dict(zip(executor.pipes, (n * each for n in job.busy), strict=True))
    for unit in executor.pipes[1:6]:  # of each scheduler
        busy[unit] /= units.SCHEDULERS
    busy["issue"] = job.issued * each / units.SCHEDULERS
    total = sum(job.waited) + job.issued
    waited = dict(zip(executor.reasons, (n / total for n in job.waited), strict=True))
    seconds = model.launch + cycles / gpu.sustained_hz
    return Timing(seconds, busy, waited, list(waited_at))


def kept_counts(execution: Execution) -> Iterator[tuple[Key, Any]]:
    """Yield the counts of each instruction that ptxas keeps."""
    program = execution.program
    for instruction, statement, counts in zip(
        program.code, program.kernel.statements, execution.counts, strict=True
    ):
        if name := machine_code.kept(program.operation_names[instruction.operation]):
            file = PurePath(program.kernel.files.get(statement.file, "?")).name
            yield machine_code.key_of(name, file, statement.line), counts


def counted(execution: Execution) -> dict[Key, float]:
    """Return how often a warp ran each of what ptxas keeps, by file and line."""
    warps = execution.programs * execution.warps
    found: Counter[Key] = Counter()
    for key, counts in kept_counts(execution):
        found[key] += counts.executed
    return {key: n / warps for key, n in found.items()}


def accesses(execution: Execution) -> dict[Key, Access]:
    """Return what instructions of each kind and line moved, on average."""
    totals: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, n in kept_counts(execution):
        if n.executed and (n.wavefronts or n.sectors):
            total = totals[key]
            total[0] += n.executed
            total[1] += n.wavefronts
            total[2] += units.SECTOR * n.sectors
    return {key: Access(waves / n, size / n) for key, (n, waves, size) in totals.items()}


def _width(opcode: str) -> int:
    """Return the bytes of a lane that a load or store moves."""
    for suffix, size in ((".128", 16), (".64", 8), ("16", 2), (".U8", 1), (".S8", 1)):
        if opcode.endswith(suffix) or suffix + "." in opcode:
            return size
    return 4


def _access(one: MachineInstruction, accesses: Mapping[Key, Access]) -> Access:
    found = accesses.get(machine_code.key_of(one.name, one.file, one.line))
    if one.name in units.GLOBAL:
        size = found.bytes if found else WARP * _width(one.opcode)
        # Through the first cache, by 128 bytes; a copy writes shared memory besides.
        waves = max(1.0, size / units.WAVEFRONT) * (2 if one.name == "LDGSTS" else 1)
        return Access(waves, size)
    if one.name in ("LDSM", "STSM"):
        matrices = _SHARED_WIDTH.search(one.opcode)
        waves = float(matrices[1]) if matrices else 1.0
    elif one.name in units.SHARED or one.name in units.LOCAL:
        waves = max(1.0, WARP * _width(one.opcode) / units.WAVEFRONT)
    elif one.name == "HGMMA":
        columns = int(one.opcode.split("x")[1])
        # A row of the left operand, where shared memory holds it, and a quarter of the right.
        rows = 4.0 if one.operands.split(", ")[1].startswith("gdesc") else 0.0
        return Access(rows + columns / 16)
    else:
        return Access()
    return Access(found.wavefronts if found and found.wavefronts else waves)


def _fill(
    step: Any,
    one: MachineInstruction,
    access: Access,
    dram: float,
    executor: library.Library,
    gpu: units.GPU,
) -> None:
    unit = units.unit_of(one.opcode, gpu)
    control = one.control >> 41
    step.pipe = executor.pipes.index(unit.name)
    step.interval, step.latency = unit.interval, unit.latency
    step.stall = control & 15
    step.writes, step.reads = control >> 5 & 7, control >> 8 & 7
    step.waits = control >> 11 & 63
    step.wavefronts, step.bytes, step.dram = access.wavefronts, access.bytes, dram
    name = one.name
    if name == "WARPGROUP":
        name = ".".join(one.opcode.split(".")[:2])
    step.kind = executor.kinds.get("store" if name in units.STORES else name, 0)
    if name == "BAR":
        meeting = _BARRIER.fullmatch(one.operands)
        if not meeting or ".ARV" in one.opcode or int(meeting[1], 16) > MAX_BARRIERS:
            raise ValueError(f"{one.opcode} {one.operands} is not modelled")
        step.argument, step.warps = int(meeting[1], 16), int(meeting[2] or "0", 16) // WARP
    elif name == "HGMMA":
        step.argument = "gsb0" in one.operands
    elif name in ("DEPBAR", "WARPGROUP.DEPBAR"):
        step.argument = int(one.operands.split(", ")[1], 0)
