"""Predict the time of a launch by replaying the instructions of its warps on one SM.

ptxas writes into each machine instruction how long the next one of the warp waits and which
scoreboards it sets and needs, so the code itself contains all dependencies. csrc/replay.cpp issues
it cycle by cycle: four schedulers, the units of each, shared memory and a part of the bandwidth of
L2 and memory for all four, barriers, cp.async, wgmma, mbarriers and TMA, with as many programs as
fit at once.
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
# Groups of TMA's stores are waited for as those of cp.async are.
SAME_AS = {"UTMACMDFLUSH": "LDGDEPBAR", "UTMAREDG": "UTMASTG"}


class Access(NamedTuple):
    """What one instruction of a warp moves: wavefronts of shared memory, bytes of global."""

    wavefronts: float = 0.0
    bytes: float = 0.0


class Event(NamedTuple):
    """A use of an mbarrier or of TMA by a warp.

    Attributes:
        phase: of the program's, by number; -1 for none.
        bytes: that are copied.
        arrives: whether the phase ends no earlier; otherwise the warp waits for its end.
    """

    phase: int
    bytes: int
    arrives: bool


class WarpTrace(NamedTuple):
    """What one warp executes: the numbers of its instructions, and its events, each in order."""

    instructions: Sequence[int]
    events: Sequence[Event] = ()


class Work(NamedTuple):
    """A launch as the model times it.

    Attributes:
        code: the kernel's machine code.
        traces: instructions of a warp, numbered, in order; of each kind of program, as many each.
        warps: number of warps of a program.
        programs: number of programs of the launch.
        programs_per_sm: how many are resident at once.
        accesses: of machine instructions whose accesses are known; others use their full width.
        memory_bytes: bytes that must move to and from memory; the rest comes from L2.
        partitions: warps of each kind of program, instead of ``traces``, if the warps differ.
    """

    code: MachineCode
    traces: Sequence[Sequence[int]]
    warps: int
    programs: float
    programs_per_sm: int
    accesses: Mapping[Key, Access]
    memory_bytes: float
    partitions: Sequence[Sequence[WarpTrace]] = ()


class Timing(NamedTuple):
    """The prediction of the model for a launch.

    Attributes:
        seconds: seconds of the launch.
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
        """Return the busiest unit, or "latency" if no unit is busy for most of the time."""
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
    every = work.partitions or [[WarpTrace(trace)] * work.warps for trace in work.traces]
    lengths = [sum(len(warp.instructions) for warp in kind) for kind in every]
    kinds = min(len(every), programs)
    # Of more kinds than programs, evenly.
    places = [(2 * n + 1) * len(every) // (2 * kinds) for n in range(kinds)]
    longer = np.mean([lengths[n] for n in places]) / np.mean(lengths)
    if abs(longer - 1) > machine_code.MAX_DIFFERENCE:
        raise ValueError(f"{programs} programs in a row take paths {longer:.2f} times the mean")
    traces = _Traces([every[n] for n in places])
    sizes = np.array([access.bytes for access in accessed])
    issued = sum(lengths[n] for n in places)
    moved = sum(sizes[trace].sum() for trace in traces.of_warps())
    bytes_moved = float(moved + traces.event_bytes.sum()) / kinds * work.programs
    from_memory = min(1.0, work.memory_bytes / bytes_moved) if bytes_moved else 0.0
    steps = (library.Step * len(work.code.instructions))()
    for step, one, access in zip(steps, work.code.instructions, accessed, strict=True):
        _fill(step, one, access, access.bytes * from_memory, executor, gpu)
    most = max(4 * work.programs_per_sm * kinds, MAX_ISSUED * kinds // issued)
    replayed = min(programs, most)
    finished = np.zeros(replayed)
    waited_at = np.zeros(len(steps))
    job = library.Replay(
        steps=steps,
        **{name: value.ctypes.data for name, value in traces.arrays.items()},
        phases=traces.phases,
        kinds=kinds,
        warps=work.warps,
        residents=min(work.programs_per_sm, replayed),
        programs=replayed,
        cache_bytes=model.cache_bytes,
        dram_bytes=memory_bytes,
        cache_latency=model.cache_latency,
        dram_latency=model.memory_latency,
        from_memory=from_memory,
        bulk=model.bulk,
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


class _Traces:
    """The arrays of replay.cpp that hold what warps of each kind of program execute.

    ``phases`` is the number of phases of a program, ``event_bytes`` what each event copies.
    """

    def __init__(self, kinds: Sequence[Sequence[WarpTrace]]) -> None:
        warps = [warp for kind in kinds for warp in kind]
        distinct = {id(warp.instructions): warp.instructions for warp in warps}
        starts = dict(zip(distinct, np.cumsum([0, *map(len, distinct.values())])))
        begins = [starts[id(warp.instructions)] for warp in warps]
        events = [event for warp in warps for event in warp.events]
        self.event_bytes = np.array([event.bytes for event in events], dtype=float)
        self.phases = 1 + max((event.phase for event in events), default=-1)
        missing = np.zeros((len(kinds), self.phases), dtype=np.int32)
        for of_kind, kind in zip(missing, kinds):
            for event in (event for warp in kind for event in warp.events):
                if event.arrives and event.phase >= 0:
                    of_kind[event.phase] += 1
        self.arrays = {
            "trace": np.concatenate([np.array(t, dtype=np.int32) for t in distinct.values()]),
            "begins": np.array(begins, dtype=np.int64),
            "ends": np.array(
                [n + len(w.instructions) for n, w in zip(begins, warps)], dtype=np.int64
            ),
            "events": np.cumsum([0, *(len(w.events) for w in warps)], dtype=np.int64),
            "event_phases": np.array([event.phase for event in events], dtype=np.int32),
            "missing": missing,
            "event_bytes": self.event_bytes,
        }

    def of_warps(self) -> Iterator[np.ndarray]:
        """Yield the instructions of each warp of each kind."""
        for begin, end in zip(self.arrays["begins"], self.arrays["ends"]):
            yield self.arrays["trace"][begin:end]


WAITS = "SYNCS.PHASECHK"
EVENTS = {WAITS, "SYNCS.ARRIVE", "UTMALDG", "UTMASTG", "UTMAREDG"}


class _Way(NamedTuple):
    """Instructions in order, how often blocks run, and of ``EVENTS`` name and landmark."""

    instructions: list[int]
    of_block: np.ndarray
    events: list[tuple[str, int]]


def _way(code: MachineCode, passed: Sequence[machine_code.Landmark]) -> _Way:
    steps = machine_code.way(code, passed)
    instructions = [n for n, _ in steps]
    times = np.bincount(instructions, minlength=len(code.instructions))
    of_block = times[[start for start, _ in code.blocks]]
    named = ((code.instructions[n].name, place) for n, place in steps)
    return _Way(instructions, of_block, [one for one in named if one[0] in EVENTS])


def partitions(
    execution: Execution, code: MachineCode
) -> tuple[machine_code.Runs, list[list[WarpTrace]]]:
    """Return how often the mean warp runs each block, and what each warp executes.

    Of a kernel whose warps meet at barriers of their own: of each program that was recorded, its
    warps. Those that passed the same landmarks share their way through the code.

    Raises:
        ValueError: not everything was recorded, or no way through the code passes it.
    """
    recorded = execution.recorded
    if recorded is None or not recorded.complete:
        raise ValueError("a program has more barriers, products and copies than are recorded")
    operations = execution.program.operation_names
    names = [machine_code.kept(operations[i.operation]) or "" for i in execution.program.code]
    of_barrier = zip(names, execution.program.code, strict=True)
    names = [f"BAR {one.size}" if name == "BAR" else name for name, one in of_barrier]
    ways: dict[tuple[machine_code.Landmark, ...], _Way] = {}
    of_block = np.zeros(len(code.blocks))
    programs: list[list[WarpTrace]] = []
    for number in range(len(recorded.executed)):
        of_program = recorded.events[recorded.events["program"] == number]
        phases: dict[tuple[int, int], int] = {(-1, 0): -1}
        warps = []
        for warp in range(execution.warps):
            rows = of_program[of_program["warp"] == warp].tolist()
            found = [library.Event(*row) for row in rows]
            passed = tuple(
                machine_code.Landmark(names[one.instruction], not one.lanes) for one in found
            )
            if passed not in ways:
                ways[passed] = _way(code, passed)
            way = ways[passed]
            events = []
            for name, place in way.events:
                one = found[place] if place >= 0 else library.Event(mbarrier=-1)
                phase = phases.setdefault((one.mbarrier, one.phase), len(phases) - 1)
                events.append(Event(phase, one.bytes, name != WAITS))
            of_block += way.of_block
            warps.append(WarpTrace(way.instructions, events))
        programs.append(warps)
    of_block /= execution.warps * len(programs)
    executed = recorded.executed.mean((0, 1))
    counts: Counter[Key] = Counter()
    for (key, _), n in zip(kept_counts(execution), executed[[bool(name) for name in names]]):
        counts[key] += n
    off = machine_code.off(code, of_block, counts)
    return machine_code.Runs(list(of_block), [], off), programs


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
    name = SAME_AS.get(name, name)
    step.kind = executor.kinds.get("store" if name in units.STORES else name, 0)
    if name == "BAR" and not one.counted:
        step.kind = 0
    elif name == "BAR":
        meeting = _BARRIER.fullmatch(one.operands)
        if not meeting or ".ARV" in one.opcode or int(meeting[1], 16) > MAX_BARRIERS:
            raise ValueError(f"{one.opcode} {one.operands} is not modelled")
        step.argument, step.warps = int(meeting[1], 16), int(meeting[2] or "0", 16) // WARP
    elif name == "HGMMA":
        step.argument = "gsb0" in one.operands
    elif name in ("DEPBAR", "WARPGROUP.DEPBAR"):
        step.argument = int(one.operands.split(", ")[1], 0)
