"""How long each unit of a multiprocessor is busy with a program: a floor, not a time.

A unit that is busy for so many cycles takes them, however well everything else overlaps. A kernel
comes close to its floor only where enough warps are at hand to hide latencies and barriers; the
floor says what binds it then, and by how much the next unit would.
"""

import re
from collections.abc import Iterator

from bench.compile_ahead import WARP
from bench.gpu_model.execute import Execution
from bench.gpu_model.machine_code import MachineCode, MachineInstruction
from bench.predict import CARDS, Card

SCHEDULERS = 4  # of a multiprocessor, an instruction each a cycle
# Lanes a cycle of a multiprocessor. Source: CUDA C++ Programming Guide, "Arithmetic Instructions".
FLOAT32 = {80: 64, 86: 128, 90: 128}
OTHER_ARITHMETIC, SPECIAL = 64, 16
SHARED_BYTES = 128
FLOAT32_OPCODES = {"FADD", "FMUL", "FFMA"}
OTHER_OPCODES = {
    *("FMNMX", "FSEL", "FSETP", "ISETP", "IADD3", "LOP3", "SEL", "SHF", "PRMT", "LEA", "IMNMX"),
    *("VIADD", "VIMNMX", "VIADDMNMX", "FMNMX3", "F2FP", "PLOP3", "IABS", "MOV", "IMAD", "I2FP"),
}
LOCAL = {"LDL", "STL"}
# Of the rate of tensor cores, on Hopper, what HMMA reaches. Source: Luo et al., arXiv:2402.13499.
HMMA_ON_HOPPER = 0.62

_HGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_HMMA = re.compile(r"HMMA\.(16)(8)(16|8|4)")


def flops(one: MachineInstruction) -> float:
    """Return what one warp's product adds and multiplies, 0 for what is none."""
    if found := _HGMMA.match(one.opcode):  # of four warps
        return 2 * 64 * int(found[1]) * int(found[2]) / 4
    if found := _HMMA.match(one.opcode):
        rows, cols, depth = map(int, found.groups())
        return 2 * rows * cols * depth
    return 0.0


def cycles(
    execution: Execution, code: MachineCode, of_block: list[float], card: Card
) -> dict[str, float]:
    """Return cycles by unit of one program, alone on a multiprocessor of the card."""
    warps = execution.program.kernel.threads // WARP
    peak = card.flop_per_s / card.multiprocessors / card.clock_hz
    found = dict.fromkeys(
        ("issue", "tensor cores", "float32", "other arithmetic", "special functions"), 0.0
    )
    local = 0.0
    for one, times in _warps_instructions(code, of_block):
        n = times * warps
        found["issue"] += n / SCHEDULERS
        if work := flops(one):
            slow = HMMA_ON_HOPPER if card.capability == 90 and one.name == "HMMA" else 1.0
            # TF32 runs at half the rate.
            slow *= 0.5 if "TF32" in one.opcode else 1.0
            found["tensor cores"] += n * work / (peak * slow)
        elif one.name in FLOAT32_OPCODES:
            found["float32"] += n * WARP / FLOAT32[card.capability]
        elif one.name in OTHER_OPCODES:
            found["other arithmetic"] += n * WARP / OTHER_ARITHMETIC
        elif one.name == "MUFU":
            found["special functions"] += n * WARP / SPECIAL
        elif one.name in LOCAL:
            local += n
    shared = sum(n.wavefronts for n in execution.counts) / execution.programs
    return found | {"shared memory": shared, "local memory": local}


def _warps_instructions(
    code: MachineCode, of_block: list[float]
) -> Iterator[tuple[MachineInstruction, float]]:
    for (start, end), times in zip(code.blocks, of_block, strict=True):
        for one in code.instructions[start:end]:
            yield one, times


def microseconds(by_unit: dict[str, float], programs: int, card: Card) -> dict[str, float]:
    """Return the floors of a launch of so many programs, spread evenly over the card."""
    rounds = programs / card.multiprocessors
    return {unit: 1e6 * n * rounds / card.clock_hz for unit, n in by_unit.items()}


def card_of(capability: int) -> tuple[str, Card]:
    """Return the first card of a compute capability that times are given for."""
    return next((name, card) for name, card in CARDS.items() if card.capability == capability)
