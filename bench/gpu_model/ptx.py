"""PTX as Triton writes it: parse the text, and find where the sides of a branch meet.

Source: PTX ISA 9.0.
"""

import re
from collections.abc import Callable, Collection, Mapping
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
    """One .entry. ``labels`` are indices of the statements that follow them."""

    name: str
    parameters: list[tuple[str, str]]  # name and type
    threads: int
    registers: dict[str, int]  # bits by prefix: "%r"
    statements: list[Statement]
    labels: dict[str, int]
    files: dict[int, str]


BITS = {"pred": 1, "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32, "tf32": 32, "f32x2": 64}
BITS |= {f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}


def parse(text: str) -> Kernel:
    """Split the text of one kernel into statements.

    Raises:
        UnsupportedError: it declares local or shared memory, or a register inside a block.
    """
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\{", text, re.DOTALL)
    if entry is None:
        raise UnsupportedError("no .entry")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    if threads is None:
        raise UnsupportedError(".entry without .reqntid")
    declared_parameters = filter(None, map(str.split, entry[2].split(",")))
    parameters = [(words[-1], words[1].lstrip(".")) for words in declared_parameters]
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    body = text[entry.end() :]
    end = re.search(r"^\}", body, re.MULTILINE)
    body = re.sub(r"//[^\n]*", "", body[: end.start() if end else len(body)])
    body = body.replace(".shared::cta", ".shared")  # of this program, as .shared is

    registers: dict[str, int] = {}
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    file = line = 0
    for row in map(str.strip, body.split("\n")):
        if row.startswith(".loc"):
            file, line = map(int, row.split()[1:3])
        elif declared := re.match(r"\.reg\s+\.(\w+)\s+(%\w+?)<\d+>;", row):
            registers[declared[2]] = BITS[declared[1]]
        elif row.startswith((".local", ".shared", ".reg")):
            raise UnsupportedError(row)
        elif not row.startswith("."):
            for piece in row.split(";"):
                statement = piece.strip()
                if label := re.match(r"(\$?[\w$]+):", statement):
                    labels[label[1]] = len(statements)
                    statement = statement[label.end() :].strip()
                if statement.startswith("{"):  # of inline assembly
                    statement = statement[1:].strip()
                if statement.startswith(".reg"):
                    raise UnsupportedError(statement)
                if statement not in ("", "}"):
                    statements.append(_statement(statement, file, line))
    return Kernel(entry[1], parameters, int(threads[1]), registers, statements, labels, files)


def _statement(text: str, file: int, line: int) -> Statement:
    guard, rest = "", text
    if text.startswith("@"):
        guard, rest = text[1:].split(None, 1)
    opcode, _, operands = rest.partition(" ") if " " in rest else rest.partition("\t")
    parts = re.split(r",(?![^{\[]*[}\]])", operands)  # at commas outside of brackets
    return Statement(
        opcode.strip(), tuple(filter(None, map(str.strip, parts))), guard, text, file, line
    )


def basic_blocks(
    count: int, targets: Mapping[int, int], ends: Collection[int], always: Callable[[int], bool]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide instructions into basic blocks; return (start, end) of each, and edges (from, to).

    The edges are between numbers of blocks; the end of the kernel is the last number + 1.

    Args:
        count: number of instructions.
        targets: by branch, the instruction that it leads to.
        ends: the branches, and what ends the kernel.
        always: whether one of ``ends`` never goes on with the next instruction.
    """
    starts = sorted({0, *targets.values(), *(n + 1 for n in ends if n + 1 < count)})
    blocks = list(zip(starts, [*starts[1:], count]))
    number_of = {start: number for number, start in enumerate(starts)}
    edges: list[tuple[int, int]] = []
    for number, (_, end) in enumerate(blocks):
        last = end - 1
        if last in targets:
            edges.append((number, number_of[targets[last]]))
        elif last in ends:
            edges.append((number, len(blocks)))
        if not (last in ends and always(last)) and number + 1 < len(blocks):
            edges.append((number, number + 1))
    return blocks, list(dict.fromkeys(edges))


def reconvergence(kernel: Kernel) -> dict[int, int]:
    """Return, by conditional branch, the statement where its sides meet: -1 where they never do.

    That is the immediate postdominator of its block: what dominates it in the reversed graph.
    """
    import networkx

    statements = kernel.statements
    ends = {n for n, s in enumerate(statements) if s.opcode.startswith(("bra", "ret", "exit"))}
    targets = {n: kernel.labels[statements[n].operands[0]] for n in ends if statements[n].operands}
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
