"""Find products of wgmma whose operand in shared memory may be anywhere.

A descriptor in uniform registers says where such an operand lies: 14 bits of an address, and what
is added to them. ptxas 12.8, which Triton 3.6 has for Hopper, leaves out part of what computes some
of them: on one way to the product the register still holds another number, a float say. PTX is
right, so that executing it shows nothing. Here every register that a product's descriptor begins
with is followed back to all instructions that may have written it, through sums and copies, to the
14 bits of an address. Not found is the address of another buffer.
"""

import re
from collections.abc import Iterable
from functools import cache

from bench.gpu_model.machine_code import MachineCode, MachineInstruction

ADDRESS, NUMBER = "an address", "a number"
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_REGISTER = re.compile(r"-?(U?R)(\d+)(?:\.reuse)?|\[(R1\+?)(\w*)\]")  # or a place on the stack
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+|U?RZ)")
_PREDICATE = re.compile(r"!?U?PT?\d*")
# What ends so adds up, copies, or keeps on the stack.
_PASSES_ON = ("IADD3", "VIADD", "MOV", "IMAD", "R2UR", "SEL", "PRMT", "STL", "LDL")
_MASKS = {"0x3fff", "0x7fff", "0x3fff3fff", "0x7fff7fff"}  # of two addresses at once, too
# Or, exclusive or, and one of two addresses that PRMT has put into a register.
_LOGIC = {"0xfc", "0x3c", "0xffff"}

Register = tuple[str, int]


def _register(found: re.Match[str]) -> Register:
    return (found[1], int(found[2])) if found[1] else ("stack", int(found[4] or "0", 16))


def strays(code: MachineCode) -> list[str]:
    """Return the products with an operand that may be anywhere, each with what is in its place."""
    instructions = code.instructions
    before: list[list[int]] = [[] for _ in instructions]
    for number in range(1, len(instructions)):
        before[number] = [number - 1]
    for start, _ in code.blocks:
        before[start] = []
    for origin, target in code.edges:
        if target < len(code.blocks):
            before[code.blocks[target][0]].append(code.blocks[origin][1] - 1)
    written = [_written(one) for one in instructions]

    @cache
    def writers(number: int, register: Register) -> frozenset[int]:
        """Return the instructions whose value a register may have before one; -1 is none."""
        seen, found, left = set(), set(), [*before[number]]
        if number == 0:
            return frozenset({-1})
        while left:
            other = left.pop()
            if other in seen:
                continue
            seen.add(other)
            if register in written[other]:
                found.add(other)
                if not instructions[other].guard:
                    continue
            left += before[other]
            if other == 0:
                found.add(-1)
        return frozenset(found)

    known: dict[int, str] = {}

    def value(number: int) -> str:
        """Return what an instruction writes: an address, a number, or its own text."""
        if number < 0:
            return "nothing"
        if number not in known:
            one = instructions[number]
            known[number] = ADDRESS  # round a loop
            inputs = _inputs(one)
            if _passes_on(one, inputs):
                known[number] = joined(kind for word in inputs for kind in sources(number, word))
            elif not _cuts(one, inputs):
                known[number] = f"{one.opcode} {one.operands}"
        return known[number]

    def joined(kinds: Iterable[str]) -> str:
        found = set(kinds)
        others = found - {ADDRESS, NUMBER}
        return min(others) if others else ADDRESS if ADDRESS in found else NUMBER

    def sources(number: int, word: str) -> set[str]:
        found = _REGISTER.fullmatch(word)
        if found is None:
            return {NUMBER} if _NUMBER.fullmatch(word) else {word}
        return {value(other) for other in writers(number, _register(found))}

    found = []
    for number, one in enumerate(instructions):
        if one.name != "HGMMA" or not (descriptor := _DESCRIPTOR.search(one.operands)):
            continue
        first = int(descriptor[1])
        # Four registers are two descriptors; with a left operand in registers the first is unused.
        left = bool(re.match(r"R\d+, R\d+,", one.operands))
        for place in (first + 2,) if left else (first, first + 2):
            kinds = {value(other) for other in writers(number, ("UR", place))} - {ADDRESS}
            words = f"{one.opcode} {one.operands}: UR{place} may be "
            found += [words + kind for kind in sorted(kinds)]
    return found


def _cuts(one: MachineInstruction, inputs: list[str]) -> bool:
    """Return whether an instruction keeps the bits that a descriptor has of an address.

    They are 14; Triton 3.8 keeps 15, of which the last is 0.
    """
    if one.name.endswith("SGXT"):
        return inputs[-1] in ("0xe", "0xf")
    return one.name.endswith("LOP3") and not _MASKS.isdisjoint(inputs)


def _passes_on(one: MachineInstruction, inputs: list[str]) -> bool:
    """Return whether a result is of the kind of what it is made from."""
    if one.name == "IMAD":
        return one.opcode == "IMAD.IADD" or "RZ" in inputs[:2]
    if one.name.endswith("LOP3"):
        return not _LOGIC.isdisjoint(inputs)
    return one.name.endswith(_PASSES_ON)


def _inputs(one: MachineInstruction) -> list[str]:
    """Return what an instruction reads, less predicates."""
    words = [word.strip() for word in one.operands.split(",")]
    words = [word for word in words if not _PREDICATE.fullmatch(word)][1:]
    return [word.removesuffix(".reuse") for word in words]


def _written(one: MachineInstruction) -> set[Register]:
    """Return the registers that an instruction writes."""
    for word in one.operands.split(","):
        if _PREDICATE.fullmatch(word.strip()):
            continue
        found = _REGISTER.fullmatch(word.strip())
        if found is None:
            return set()
        kind, first = _register(found)
        step = 4 if kind == "stack" else 1
        return {(kind, first + step * n) for n in range(_width(one))}
    return set()


def _width(one: MachineInstruction) -> int:
    """Return how many registers hold a result."""
    if one.name == "HGMMA":
        columns = re.search(r"64x(\d+)x", one.opcode)
        return int(columns[1]) // 2 if columns else 1
    if ".128" in one.opcode or ".x4" in one.opcode or one.opcode.endswith(".4"):
        return 4
    wide = ".64" in one.opcode or "WIDE" in one.opcode or one.opcode == "CS2R"
    return 2 if wide else 1
