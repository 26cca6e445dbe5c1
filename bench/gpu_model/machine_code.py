"""Read the machine code of a kernel, and compute how often each instruction runs.

ptxas moves, joins and unrolls PTX, but keeps nearly every product, barrier and memory access. The
executor has counted how often those ran, by source line, and the flow into a block of machine code
equals the flow out of it. Together they determine how often each block ran, and so every
instruction, including those that PTX lacks, such as spills.
"""

import heapq
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from bench.gpu_model import ptx

# Machine instructions that PTX's become, one for one, by how the executor's operations begin.
KEPT = {
    "mma": "HMMA",
    "wgmma.k": "HGMMA",
    "bar": "BAR",
    "ldmatrix": "LDSM",
    "stmatrix": "STSM",
    "ld.shared": "LDS",
    "st.shared": "STS",
    "cp.async": "LDGSTS",
    "ld.global": "LDG",
    "st.global": "STG",
    "shfl": "SHFL",
    "mbarrier.init": "SYNCS.EXCH",
    "mbarrier.inval": "SYNCS.CCTL",
    "mbarrier.arrive": "SYNCS.ARRIVE",
    "mbarrier.try_wait": "SYNCS.PHASECHK",
    "bulk.load": "UTMALDG",
    "bulk.store": "UTMASTG",
    "bulk.reduce": "UTMAREDG",
    "bulk.commit": "UTMACMDFLUSH",
    "setmaxnreg": "USETMAXREG",
}
NOT_KEPT = "cp.async."  # begins like another, and becomes another instruction
MAX_OFF = 0.25  # of counts
MAX_DIFFERENCE = 0.1  # of executed instructions, that the way through a kernel differs from counts
WITHIN = 0.02  # a way that is due so nearly is taken
ENTERED = 0.01  # less than any count weighs
FLOW = 1000.0  # how much more a block that loses or gains runs weighs than a count that is off

PRODUCTS = "HMMA", "HGMMA"
SPILLS = "LDL", "STL"
ENDS = "BRA", "BRX", "EXIT", "RET"
_LINE = re.compile(r'//## File "([^"]*)", line (\d+)')
_LABEL = re.compile(r"^(\.L_x_\d+):")
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]+)"')
_BARRIER = re.compile(r"0x([0-9a-f]+)")
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/$")

Key = tuple[str, str, int]  # machine instruction, file, line
WITHOUT_LINE = {"HGMMA", "SYNCS.PHASECHK"}  # ptxas gives them the line of another


class MachineInstruction(NamedTuple):
    """One of a kernel's; ``opcode`` has its modifiers: LDS.128.

    ``control`` is the upper half of its code, whose upper bits say what it waits for.
    """

    opcode: str
    operands: str
    guard: str
    file: str
    line: int
    control: int = 0

    @property
    def name(self) -> str:
        """Return the opcode without modifiers; that of an mbarrier includes its operation."""
        parts = self.opcode.split(".")
        return ".".join(parts[:2]) if parts[0] == "SYNCS" else parts[0]

    @property
    def landmark(self) -> str:
        """The opcode without modifiers, of a barrier with its number: partitions have their own."""
        found = _BARRIER.match(self.operands) if self.name == "BAR" else None
        return f"BAR {int(found[1], 16)}" if found else self.name

    @property
    def counted(self) -> bool:
        """Whether it runs as often as its block; a guard keeps warps from a barrier."""
        return not (self.name == "BAR" and self.guard)


class MachineCode(NamedTuple):
    """Instructions, and the blocks that branches cut them into.

    ``blocks`` are (start, end); ``edges`` (from, to), the last block number + 1 being the end.
    """

    instructions: list[MachineInstruction]
    blocks: list[tuple[int, int]]
    edges: list[tuple[int, int]]

    def spills(self) -> int:
        """Return how many instructions use a thread's stack."""
        return sum(one.name in SPILLS for one in self.instructions)

    def looped_spills(self) -> int:
        """Return how many of them stand in loops that have no loop inside."""
        inside = [self.blocks[n] for n in innermost_loops(self) if n < len(self.blocks)]
        return sum(
            self._replace(instructions=self.instructions[slice(*b)]).spills() for b in inside
        )


@cache
def cuda_tools() -> Path:
    """Return the folder of ptxas, cuobjdump and nvdisasm that come with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def dump(cubin: bytes, tool: str, *flags: str) -> str:
    """Return what cuobjdump or nvdisasm prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [cuda_tools() / tool, *flags, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> MachineCode:
    """Return the machine code of a kernel.

    Functions that it calls, slow paths of divisions and roots, are taken never to run.

    Raises:
        ValueError: it branches by a register, or cannot be read.
    """
    code = parse(dump(cubin, "nvdisasm", "-c", "-g", "-hex"))
    if not all(one.control for one in code.instructions):
        raise ValueError("nvdisasm gives no code beside some instruction")
    return code


def parse(text: str) -> MachineCode:
    """Return the machine code of nvdisasm's text; see ``disassemble``."""
    instructions: list[MachineInstruction] = []
    labels: dict[str, int] = {}
    file, line = "?", 0
    for row in text.split("\n"):
        if found := _LINE.search(row):
            file, line = PurePath(found[1]).name, int(found[2])
        elif found := _LABEL.match(row):
            labels[found[1]] = len(instructions)
        elif found := _CODE.match(row):
            guard, opcode, operands = found.groups()
            instructions.append(MachineInstruction(opcode, operands, guard or "", file, line))
        elif found := _CONTROL.match(row):
            instructions[-1] = instructions[-1]._replace(control=int(found[1], 16))
    targets: dict[int, list[int]] = {}
    for number, one in enumerate(instructions):
        if one.name == "BRX" and (found := _TARGETS.search(one.operands)):
            targets[number] = [labels[name.strip()] for name in found[1].split(",")]
        elif one.name in ("BRX", "JMX"):
            raise ValueError(f"the machine code has {one.opcode}, whose target is not known")
        if one.name in ("BRA", "CALL") and (found := _TARGET.search(one.operands)):
            targets[number] = [labels[found[1]]]
    # ptxas also leaves loops by calls that nothing returns from.
    for number in [n for n in targets if instructions[n].name == "CALL"]:
        if _returns(instructions, targets, targets[number][0]):
            del targets[number]
    ends = {n for n, one in enumerate(instructions) if n in targets or one.name in ENDS}
    blocks, edges = ptx.basic_blocks(
        len(instructions), targets, ends, lambda n: _always(instructions[n])
    )
    return MachineCode(instructions, blocks, edges)


def innermost_loops(code: MachineCode) -> set[int]:
    """Return the blocks of loops that have no loop inside; a wait for an mbarrier is no loop."""
    import networkx

    def waits(block: int) -> bool:
        instructions = code.instructions[slice(*code.blocks[block])]
        return any(one.name == "SYNCS.PHASECHK" for one in instructions)

    def innermost(flow: "networkx.DiGraph") -> Iterator[int]:
        for loop in networkx.strongly_connected_components(flow):
            inside = flow.subgraph(loop).copy()
            entered = [to for start, to in flow.in_edges(loop) if start not in loop]
            # What stands behind the end of a kernel is not entered.
            if inside.edges and entered:
                inside.remove_edges_from(list(inside.in_edges(entered)))
                yield from list(innermost(inside)) or loop

    # ptxas may put the turns of a wait into a block or two of their own.
    flow = networkx.DiGraph(code.edges)
    own = {block for block in flow if block < len(code.blocks) and waits(block)}
    flow.remove_edges_from([(start, to) for start, to in flow.edges if {start, to} <= own])
    for start in own:
        flow.remove_edges_from(
            [(to, start) for to in list(flow[start]) if set(flow[to]) == {start}]
        )
    return set(innermost(flow))


def _always(one: MachineInstruction) -> bool:
    """Return whether a branch or an end hangs on no predicate, of its own or among its operands."""
    return not one.guard and "P" not in one.operands[:3]


def _returns(
    instructions: list[MachineInstruction], targets: dict[int, list[int]], number: int
) -> bool:
    """Return whether what begins at an instruction leads to a RET."""
    seen: set[int] = set()
    left = [number]
    while left:
        number = left.pop()
        if number in seen or number >= len(instructions):
            continue
        seen.add(number)
        one = instructions[number]
        if one.name == "RET":
            return True
        if one.name == "BRA":
            left += targets[number]
        if one.name not in ENDS or not _always(one):
            left.append(number + 1)
    return False


def key_of(name: str, file: str, line: int) -> Key:
    """Return under what machine instructions and what PTX became are compared."""
    return (name, "", 0) if name in WITHOUT_LINE else (name, file, line)


def kept(operation: str) -> str | None:
    """Return the machine instruction that an operation of the executor becomes, if it does."""
    if operation.startswith(NOT_KEPT):
        return None
    return next((name for start, name in KEPT.items() if operation.startswith(start)), None)


class Runs(NamedTuple):
    """``of_block``: how often a warp runs each block; ``off``: by how much counts differ.

    ``of_edge`` holds the same of each of the code's ``edges``. ``off`` is the sum of differences
    over the sum of counts: 0 where every count is met.
    """

    of_block: list[float]
    of_edge: list[float]
    off: float

    @property
    def usable(self) -> bool:
        """Whether counts are met well enough to be used."""
        return self.off <= MAX_OFF


def runs(code: MachineCode, counts: dict[Key, float]) -> Runs:
    """Return how often each block runs, so that flow is kept and ``counts`` is met best."""
    from scipy.optimize import nnls

    end = len(code.blocks)
    edges = [(-1, 0), *code.edges]
    into: dict[int, list[int]] = defaultdict(list)
    for number, (_, to) in enumerate(edges):
        into[to].append(number)
    rows: list[np.ndarray] = []
    wanted: list[float] = []

    def equation(terms: Iterable[tuple[int, float]], value: float, weight: float) -> None:
        row = np.zeros(len(edges))
        for number, factor in terms:
            row[number] += factor * weight
        rows.append(row)
        wanted.append(value * weight)

    equation([(0, 1.0)], 1.0, FLOW)
    for block in range(end):
        out = [(n, -1.0) for n, (start, _) in enumerate(edges) if start == block]
        equation([*((n, 1.0) for n in into[block]), *out], 0.0, FLOW)
    static = _static(code)
    met = [key for key in counts if key in static]
    for key in met:
        terms = [(n, float(times)) for block, times in static[key].items() for n in into[block]]
        equation(terms, counts[key], 1.0 / sum(static[key].values()))
    found, _ = nnls(np.array(rows), np.array(wanted))
    # Flow alone lets a loop run that nothing enters: where counts allow it is entered once.
    seen: list[set[int]] = []
    while unequal := [blocks for blocks in _unequal(edges, found) if blocks not in seen]:
        seen += unequal
        for blocks in unequal:
            ways = [n for n, (start, to) in enumerate(edges) if start not in blocks >= {to}]
            equation([(n, 1.0) for n in ways], 1.0, ENTERED)
        found, _ = nnls(np.array(rows), np.array(wanted))
    of_block = [float(sum(found[n] for n in into[block])) for block in range(end)]
    return Runs(of_block, list(map(float, found[1:])), off(code, of_block, counts))


def _static(code: MachineCode) -> dict[Key, Counter[int]]:
    """Return how often each block has each instruction."""
    static: dict[Key, Counter[int]] = defaultdict(Counter)
    for block, (start, stop) in enumerate(code.blocks):
        for one in code.instructions[start:stop]:
            if one.counted:
                static[key_of(one.name, one.file, one.line)][block] += 1
    return static


def off(code: MachineCode, of_block: Sequence[float], counts: Mapping[Key, float]) -> float:
    """Return ``Runs.off`` of blocks that run so often."""
    static = _static(code)
    differences = sum(
        abs(n - sum(of_block[block] * times for block, times in static[key].items()))
        for key, n in counts.items()
        if key in static
    )
    missing = sum(n for key, n in counts.items() if key not in static)
    return (differences + missing) / (sum(counts.values()) or 1.0)


def _unequal(edges: list[tuple[int, int]], times: np.ndarray) -> list[set[int]]:
    """Return blocks that run but that no way from the start leads to, each loop together."""
    import networkx

    taken = networkx.DiGraph([(-1, 0), *(edge for edge, n in zip(edges, times) if n > 0.01)])
    left = set(taken) - networkx.descendants(taken, -1) - {-1}
    return list(networkx.weakly_connected_components(taken.subgraph(left)))


def walks(code: MachineCode, found: Runs, most: int = 48) -> list[list[int]]:
    """Return the numbers of the instructions that warps execute, of each in a likely order.

    Each branch goes its most frequent way, and the others as often as they are taken, evenly: a
    loop of seven rounds is left every seventh time. Warps one after the other share that: what a
    fourth of them runs is in every fourth walk. As many are returned as bring every branch out
    even, or ``most``.

    Raises:
        ValueError: the counts lead to no end, or the walks differ from them.
    """
    ways: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for (start, to), times in zip(code.edges, found.of_edge, strict=True):
        ways[start].append((round(times, 6), to))
    due: dict[tuple[int, int], float] = defaultdict(float)
    sizes = [end - start for start, end in code.blocks]
    expected = sum(n * size for n, size in zip(found.of_block, sizes, strict=True))
    visits: Counter[int] = Counter()
    made: list[list[int]] = []
    while len(made) < most and not (made and max(map(abs, due.values())) < WITHIN):
        trace: list[int] = []
        block = 0
        while block < len(code.blocks):
            trace += range(*code.blocks[block])
            visits[block] += 1
            if len(trace) > 2 * most * (expected + len(code.instructions)):
                raise ValueError("how often its blocks run leads to no end of the kernel")
            total = sum(times for times, _ in ways[block])
            # Of equals a loop goes on, and what follows directly is not jumped over.
            ranked = sorted(ways[block], key=lambda way: (way[0], way[1] <= block, -way[1]))
            chosen = ranked[-1][1]
            for times, to in reversed(ranked):
                share = times / total if total else 0.0
                due[block, to] += share
                if due[block, to] > 1 - min(WITHIN, share / 2):
                    chosen = to
            due[block, chosen] -= 1
            block = chosen
        made.append(trace)
    difference = sum(
        abs(visits[block] / len(made) - n) * sizes[block] for block, n in enumerate(found.of_block)
    )
    if difference > MAX_DIFFERENCE * expected:
        raise ValueError(
            f"the way through its blocks differs from counts by {difference / expected:.0%}"
        )
    return made


class Landmark(NamedTuple):
    """An instruction that ptxas keeps in its place, as a warp ran it.

    ``idle`` says that no lane took part: ptxas may have the warp jump over it.
    """

    name: str
    idle: bool


LANDMARKS = {
    *("BAR", "HGMMA", "USETMAXREG", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMACMDFLUSH"),
    *("SYNCS.EXCH", "SYNCS.CCTL", "SYNCS.ARRIVE", "SYNCS.PHASECHK"),
}


def way(code: MachineCode, passed: Sequence[Landmark]) -> list[tuple[int, int]]:
    """Return the instructions that one warp executes, in order, and of landmarks which it passes.

    That is the shortest way through the blocks that passes all landmarks in their order; -1 stands
    for none. A landmark with a guard may be one that does not run. Where a branch has none on
    either side, the shorter side is taken.

    Raises:
        ValueError: no way passes them.
    """
    ways: dict[int, list[int]] = defaultdict(list)
    for start, to in code.edges:
        ways[start].append(to)
    landmarks = [
        [code.instructions[n] for n in range(*block) if code.instructions[n].name in LANDMARKS]
        for block in code.blocks
    ]

    def through(block: int, at: int) -> dict[int, tuple[int, ...]]:
        """Return, by the landmarks that are passed after a block, those that it passes."""
        reached: dict[int, tuple[int, ...]] = {at: ()}
        for one in landmarks[block]:
            after: dict[int, tuple[int, ...]] = {}
            for place, matched in reached.items():
                n = place
                while n < len(passed) and passed[n].name != one.landmark and passed[n].idle:
                    n += 1
                if n < len(passed) and passed[n].name == one.landmark:
                    after.setdefault(n + 1, (*matched, n))
                if one.guard:
                    after.setdefault(place, (*matched, -1))
            reached = after
        return reached

    # By block and number of landmarks before it: the block before, and the landmarks on the way.
    before: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, ...]] | None] = {}
    end = len(code.blocks)
    queue: list[Any] = [(0, 0, 0, None)]
    while queue:
        length, block, at, origin = heapq.heappop(queue)
        if (block, at) in before:
            continue
        before[block, at] = origin
        if block == end:
            break
        size = code.blocks[block][1] - code.blocks[block][0]
        for place, matched in through(block, at).items():
            for to in ways[block]:
                if to != end or all(landmark.idle for landmark in passed[place:]):
                    heapq.heappush(queue, (length + size, to, place, ((block, at), matched)))
    else:
        raise ValueError("no way through the machine code passes what a warp did in order")
    steps: list[list[tuple[int, int]]] = []
    node = block, at
    while (origin := before[node]) is not None:
        node, matched = origin
        left = iter(matched)
        steps.append(
            [
                (n, next(left) if code.instructions[n].name in LANDMARKS else -1)
                for n in range(*code.blocks[node[0]])
            ]
        )
    return list(chain(*reversed(steps)))


def executed(code: MachineCode, of_block: list[float], warps: int = 1) -> Counter[str]:
    """Return how often so many warps run each machine instruction.

    By opcode without modifiers, but of a product with them: they are its shape and format.
    """
    found: Counter[str] = Counter()
    for (start, end), times in zip(code.blocks, of_block):
        for one in code.instructions[start:end]:
            opcode = one.opcode if one.name in PRODUCTS else one.name
            found[opcode] += warps * times  # type: ignore[assignment] - a float
    return found
