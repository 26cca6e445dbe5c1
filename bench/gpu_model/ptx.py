"""PTX as Triton writes it: parse the text, and find where the sides of a branch meet.

Source: PTX ISA 9.0.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple


class UnsupportedError(Exception):
    """The executor supports no such instruction or declaration; the message is its text."""


class Statement(NamedTuple):
    """One instruction as text, with the source line that it came from."""

    opcode: str
    operands: tuple[str, ...]
    guard: str  # "", "%p1" or "!%p1"
    text: str
    file: int
    line: int


class Kernel(NamedTuple):
    """One .entry. ``labels`` are indices of the statements that follow them.

    ``tables`` holds the labels that each brx.idx chooses from, and ``max_registers`` the value of
    .maxnreg, 0 if the kernel has none.
    """

    name: str
    parameters: list[tuple[str, str]]  # name and type
    threads: int
    max_registers: int
    registers: dict[str, int]  # bits by prefix: "%r"
    statements: list[Statement]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]
    files: dict[int, str]


BITS = {"pred": 1, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "tf32": 32, "f32x2": 64}
BITS |= {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}


_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?(\w+)(?:\[\d+\])?\s*(?:,|$)")
_TABLE = re.compile(r"([\w$]+):\s*\.branchtargets([^;]*);")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+([^;<]+?)(?:<\d+>)?\s*;?$")


def parse(text: str) -> Kernel:
    """Split the text of one kernel into statements.

    Labels and registers of a block of inline assembly are its own: they get the block's number.

    Raises:
        UnsupportedError: it declares local or shared memory.
    """
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\{", text, re.DOTALL)
    if entry is None:
        raise UnsupportedError("no .entry")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    if threads is None:
        raise UnsupportedError(".entry without .reqntid")
    limit = re.search(r"\.maxnreg\s+(\d+)", entry[3])
    parameters = [(name, kind) for kind, name in _PARAMETER.findall(entry[2])]
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    body = _block(re.sub(r"//[^\n]*", "", text[entry.end() :]))
    # Of this program, as .shared is; the one program of a cluster shares nothing else.
    body = re.sub(r"\.shared::(?:cta|cluster)\b", ".shared", body)
    tables = {name: tuple(map(str.strip, to.split(","))) for name, to in _TABLE.findall(body)}
    body = _TABLE.sub("", body)

    registers: dict[str, int] = {}
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    file = line = blocks = 0
    local: dict[str, str] = {}  # of the open block: its names, as they are here
    inside = False
    for row in map(str.strip, body.split("\n")):
        if row.startswith(".loc"):
            file, line = map(int, row.split()[1:3])
        elif row.startswith((".local", ".shared")):
            raise UnsupportedError(row)
        elif not row.startswith(".") or row.startswith(".reg"):
            for piece in row.split(";"):
                statement = piece.strip()
                if statement.startswith("{"):  # of inline assembly
                    statement = statement[1:].strip()
                    inside, blocks, local = True, blocks + 1, {}
                if statement == "}":
                    inside, local = False, {}
                    continue
                if declared := _DECLARED.match(statement):
                    for name in map(str.strip, declared[2].split(",")):
                        if inside:
                            local[name] = f"%block{blocks}_{name.lstrip('%')}"
                        registers[local.get(name, name).rstrip("0123456789")] = BITS[declared[1]]
                    continue
                if label := re.match(r"(\$?[\w$]+):(?!:)", statement):
                    labels[f"{label[1]}@{blocks}" if inside else label[1]] = len(statements)
                    statement = statement[label.end() :].strip()
                if not statement:
                    continue
                for name, renamed in local.items():
                    statement = re.sub(rf"(?<![\w$%]){name}(?![\w$])", renamed, statement)
                found = _statement(statement, file, line)
                if inside and found.opcode.startswith("bra"):
                    found = found._replace(operands=(f"{found.operands[0]}@{blocks}",))
                statements.append(found)
    return Kernel(
        entry[1],
        parameters,
        int(threads[1]),
        int(limit[1]) if limit else 0,
        registers,
        statements,
        labels,
        tables,
        files,
    )


def _block(text: str) -> str:
    """Return the text before the brace that closes the block which it begins in."""
    depth = 1
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[: brace.start()]
    return text


def _statement(text: str, file: int, line: int) -> Statement:
    guard, rest = "", text
    if text.startswith("@"):
        guard, rest = text[1:].split(None, 1)
    opcode, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
    return Statement(opcode.strip(), tuple(_operands(operands)), guard, text, file, line)


def _operands(text: str) -> Iterator[str]:
    """Yield what stands between commas outside of brackets."""
    depth = start = 0
    for found in re.finditer(r"[\[{,\]}]", f"{text},"):
        if found[0] == "," and not depth:
            if operand := text[start : found.start()].strip():
                yield operand
            start = found.end()
        depth += (found[0] in "[{") - (found[0] in "]}")


def basic_blocks(
    count: int,
    targets: Mapping[int, Sequence[int]],
    ends: Collection[int],
    always: Callable[[int], bool],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide instructions into basic blocks; return (start, end) of each, and edges (from, to).

    The edges are between numbers of blocks; the end of the kernel is the last number + 1.

    Args:
        count: number of instructions.
        targets: by branch, the instructions that it leads to.
        ends: the branches, and what ends the kernel.
        always: whether one of ``ends`` never goes on with the next instruction.
    """
    starts = sorted({0, *chain(*targets.values()), *(n + 1 for n in ends if n + 1 < count)})
    blocks = list(zip(starts, [*starts[1:], count]))
    number_of = {start: number for number, start in enumerate(starts)}
    edges: list[tuple[int, int]] = []
    for number, (_, end) in enumerate(blocks):
        last = end - 1
        if last in targets:
            edges += [(number, number_of[target]) for target in targets[last]]
        elif last in ends:
            edges.append((number, len(blocks)))
        if not (last in ends and always(last)) and number + 1 < len(blocks):
            edges.append((number, number + 1))
    return blocks, list(dict.fromkeys(edges))


BRANCHES = "bra", "brx", "ret", "exit"


def branch_targets(kernel: Kernel, branch: Statement) -> list[int]:
    """Return the statements that a branch may lead to, in the order of a table."""
    last = branch.operands[-1]
    return [kernel.labels[name] for name in kernel.tables.get(last, (last,))]


def reconvergence(kernel: Kernel) -> dict[int, int]:
    """Return, by conditional branch, the statement where its sides meet: -1 where they never do.

    That is the immediate postdominator of its block: what dominates it in the reversed graph.
    """
    import networkx

    statements = kernel.statements
    ends = {n for n, s in enumerate(statements) if s.opcode.startswith(BRANCHES)}
    targets = {n: branch_targets(kernel, statements[n]) for n in ends if statements[n].operands}
    blocks, edges = basic_blocks(len(statements), targets, ends, lambda n: not statements[n].guard)
    leave = len(blocks)
    reversed_flow = networkx.DiGraph((to, start) for start, to in edges)
    reversed_flow.add_node(leave)
    above = networkx.immediate_dominators(reversed_flow, leave)
    meets: dict[int, int] = {}
    for number, (_, end) in enumerate(blocks):
        if end - 1 in targets and statements[end - 1].guard:
            meet = above.get(number, leave)
            meets[end - 1] = blocks[meet][0] if meet != leave else -1
    return meets
