"""How long each unit of a multiprocessor is busy with a program: a floor, not a time.

A unit that is busy for so many cycles takes them, however well everything else overlaps. A kernel
comes close to its floor only where enough warps are at hand to hide latencies and barriers; the
floor says what binds it then, and by how much the next unit would.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from bench.compile_ahead import WARP


class Card(NamedTuple):
    """Peak rates of a card: dense bfloat16 products with float32 sums, boost clock."""

    capability: int
    bytes_per_s: float
    flop_per_s: float
    multiprocessors: int
    clock_hz: float


# NVIDIA's data sheets: "H200 Tensor Core GPU" (SXM), "H100 Tensor Core GPU" (SXM), "A100 80GB"
# (SXM), "RTX A6000". The clock is the one at which the multiprocessors' tensor cores make the rate.
CARDS = {
    "H200": Card(90, 4.80e12, 989e12, 132, 1.83e9),
    "H100": Card(90, 3.35e12, 989e12, 132, 1.83e9),
    "A100": Card(80, 2.04e12, 312e12, 108, 1.41e9),
    "RTX A6000": Card(86, 0.768e12, 154.8e12, 84, 1.80e9),
}
ATTAINED_BYTES = 0.9  # of the peak, by a copy: 4.3 TB/s on an H200

SCHEDULERS = 4  # of a multiprocessor, an instruction each a cycle
# Lanes a cycle of a multiprocessor. Source: CUDA C++ Programming Guide, "Arithmetic Instructions".
FLOAT32 = {80: 64, 86: 128, 90: 128}
INTEGER_PRODUCTS = OTHER_ARITHMETIC = 64
SPECIAL = 16
FLOAT32_OPCODES = {"FADD", "FMUL", "FFMA"}
OTHER_OPCODES = {
    *("FMNMX", "FSEL", "FSETP", "ISETP", "IADD3", "LOP3", "SEL", "SHF", "PRMT", "LEA", "IMNMX"),
    *("VIADD", "VIMNMX", "VIADDMNMX", "FMNMX3", "F2FP", "PLOP3", "IABS", "MOV", "I2FP"),
}
LOCAL = {"LDL", "STL"}
# Of the rate of tensor cores, on Hopper, what HMMA reaches. Source: Luo et al., arXiv:2402.13499.
HMMA_ON_HOPPER = 0.62

_HGMMA = re.compile(r"HGMMA\.64x(\d+)x(\d+)")
_HMMA = re.compile(r"HMMA\.(16)(8)(16|8|4)")


def flops(opcode: str) -> float:
    """Return what one warp's product adds and multiplies, 0 for what is none."""
    if found := _HGMMA.match(opcode):  # of four warps
        return 2 * 64 * int(found[1]) * int(found[2]) / 4
    if found := _HMMA.match(opcode):
        rows, cols, depth = map(int, found.groups())
        return 2 * rows * cols * depth
    return 0.0


def cycles(executed: Mapping[str, float], wavefronts: float, card: Card) -> dict[str, float]:
    """Return cycles by unit of one program, alone on a multiprocessor of the card.

    Args:
        executed: instructions of all warps, as ``machine_code.executed`` names them.
        wavefronts: of shared memory.
        card: one of ``bench.predict.CARDS``.
    """
    peak = card.flop_per_s / card.multiprocessors / card.clock_hz
    tensor = 0.0
    for opcode, n in executed.items():
        if work := flops(opcode):
            slow = HMMA_ON_HOPPER if card.capability == 90 and opcode.startswith("HMMA") else 1.0
            # TF32 runs at half the rate.
            tensor += n * work / (peak * slow * (0.5 if "TF32" in opcode else 1.0))

    def total(opcodes: set[str]) -> float:
        return WARP * sum(executed.get(opcode, 0.0) for opcode in opcodes)

    # Integer products share the units of float32 ones, and have the half of them at most.
    products = total({"IMAD"})
    multiply = (total(FLOAT32_OPCODES) + products) / FLOAT32[card.capability]
    return {
        "issue": sum(executed.values()) / SCHEDULERS,
        "tensor cores": tensor,
        "multiply-add": max(multiply, products / INTEGER_PRODUCTS),
        "other arithmetic": total(OTHER_OPCODES) / OTHER_ARITHMETIC,
        "special functions": total({"MUFU"}) / SPECIAL,
        "shared memory": wavefronts,
    }


def card_of(capability: int) -> tuple[str, Card]:
    """Return the first card of a compute capability that times are given for."""
    return next((name, card) for name, card in CARDS.items() if card.capability == capability)
