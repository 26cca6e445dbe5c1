"""Compute how long each unit of an SM is busy with a program: a lower bound on its time.

A launch takes at least as long as each unit is busy, however well everything else overlaps. A
kernel approaches this floor only if enough warps hide latencies and barriers. The floor names the
limiting unit, and how close the next one is.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from bench.gpu_model.compile_ahead import WARP


class GPU(NamedTuple):
    """Peak rates of a GPU: dense bfloat16 products with float32 sums.

    ``clock_hz`` is the clock at which tensor cores make that rate, ``boost_hz`` the highest,
    ``sustained_hz`` the one that a GPU keeps while such kernels run.
    """

    capability: int
    bytes_per_s: float
    flop_per_s: float
    num_sms: int
    clock_hz: float
    boost_hz: float
    sustained_hz: float


# NVIDIA's data sheets: "H200 Tensor Core GPU" (SXM), "H100 Tensor Core GPU" (SXM), "A100 80GB"
# (SXM), "RTX A6000". The sustained clock was measured on the H200 alone (Nsight Compute, six of the
# attention kernels: 1.72 to 1.79 GHz). The H100 is taken to keep the same, the others theirs.
GPUS = {
    "H200": GPU(90, 4.80e12, 989e12, 132, 1.83e9, 1.98e9, 1.755e9),
    "H100": GPU(90, 3.35e12, 989e12, 132, 1.83e9, 1.98e9, 1.755e9),
    "A100": GPU(80, 2.04e12, 312e12, 108, 1.41e9, 1.41e9, 1.41e9),
    "RTX A6000": GPU(86, 0.768e12, 154.8e12, 84, 1.80e9, 1.80e9, 1.80e9),
}
ATTAINED_BYTES = 0.9  # of the peak, by a copy: 4.3 TB/s on an H200

SCHEDULERS = 4  # of an SM, an instruction each a cycle
# Lanes a cycle of an SM. Source: CUDA C++ Programming Guide, "Arithmetic Instructions".
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


SECTOR, WAVEFRONT = 32, 128  # bytes
SHARED = {"LDS", "STS", "LDSM", "STSM", "SHFL", "ATOMS"}
STORES = {"STG", "RED", "REDG"}
GLOBAL = {"LDG", "LDGSTS", "ATOMG", *STORES}
BINDS = 0.7  # of the time that a unit is busy


class Model(NamedTuple):
    """Constants in cycles that no manual states: latencies, and costs of barriers and programs.

    Attributes:
        cache_latency: latency of a load that L2 answers, and until it acknowledges a store;
            ``memory_latency`` of a load that memory answers.
        cache_bytes: from L2 to one SM, a cycle.
        hmma_latency: latency of a product of a warp.
        barrier: from the arrival of the last warp until the first one goes on.
        start: from the end of a program to the first instruction of the next one in its place.
        shared_queue: how far shared memory may lag behind the issue; so for ``wgmma_queue``.
        wgmma_tail: from the end of a product to the warps that wait for it.
        bulk: from a TMA copy to its first request of L2.
        launch: seconds that the start and the end of a launch add.
    """

    cache_latency: float
    memory_latency: float
    cache_bytes: float
    hmma_latency: float
    barrier: float = 36
    start: float = 700
    shared_queue: float = 24
    wgmma_queue: float = 256
    wgmma_tail: float = 26
    bulk: float = 150
    launch: float = 3e-6


# Latencies of an idle GPU are from microbenchmarks (Luo et al., arXiv:2402.13499 and
# arXiv:2501.12084): 260 cycles for L2, 560 (Ampere) or 600 (Hopper) for memory. What differs from
# them on sm_90, and the defaults of barrier, start and launch, were set by Nsight Compute's stall
# samples and the times of six kernels on an H200: ViT-B, BERT and GPT-2 of 512 tokens, forward and
# backward. Under load L2 takes 300 cycles and memory 800, and L2 hands an SM 22 bytes a cycle
# (5.1 TB/s in all). On sm_80 and sm_86 the rate of L2 is a guess, latencies are those of an idle
# GPU and the defaults are the H200's: none of their GPUs has been measured. Nor has any kernel with
# TMA. ``bulk`` is an assumption, and so is the delay after the end of an mbarrier's phase, which is
# that of a barrier.
MODELS = {
    80: Model(260, 560, 40, 25),
    86: Model(260, 560, 32, 33),
    90: Model(300, 800, 22, 32),
}


class Unit(NamedTuple):
    """Which unit takes an instruction, for how many cycles, and when its result is there."""

    name: str
    interval: float = 0.0
    latency: float = 4.0


CONVERSIONS = {"I2F", "F2I", "F2F", "FRND", "I2I"}
UNIFORM = {"R2UR", "S2UR"}


def unit_of(opcode: str, gpu: GPU) -> Unit:
    """Return the unit of one of a warp's machine instructions."""
    name = opcode.partition(".")[0]
    model = MODELS[gpu.capability]
    lanes = WARP * SCHEDULERS  # an instruction of each scheduler
    if name in ("HMMA", "HGMMA"):
        latency = model.hmma_latency if name == "HMMA" else Unit._field_defaults["latency"]
        return Unit("tensor cores", SCHEDULERS * tensor_cycles(opcode, gpu), latency)
    if name in GLOBAL:
        return Unit("global memory", latency=40)
    if name in SHARED or name in LOCAL or name == "SYNCS":
        return Unit("shared memory", latency=31 if name == "LDSM" else 24)
    if name == "MUFU" or name in CONVERSIONS:
        return Unit("special functions", lanes / SPECIAL, 20 + lanes / SPECIAL)
    if name in FLOAT32_OPCODES:
        return Unit("multiply-add", lanes / FLOAT32[gpu.capability])
    if name == "IMAD":
        return Unit("multiply-add", lanes / INTEGER_PRODUCTS)
    if name in OTHER_OPCODES:
        return Unit("other arithmetic", lanes / OTHER_ARITHMETIC)
    if name in UNIFORM or name.startswith("U"):
        return Unit("uniform", 2, 12)
    return Unit("issue", latency=30 if name == "S2R" else 12)


def flops(opcode: str) -> float:
    """Return the operations of one warp's product, 0 for any other instruction."""
    if found := _HGMMA.match(opcode):  # of four warps
        return 2 * 64 * int(found[1]) * int(found[2]) / 4
    if found := _HMMA.match(opcode):
        rows, cols, depth = map(int, found.groups())
        return 2 * rows * cols * depth
    return 0.0


def tensor_cycles(opcode: str, gpu: GPU) -> float:
    """Return how long an SM's tensor cores take for one warp's product."""
    peak = gpu.flop_per_s / gpu.num_sms / gpu.clock_hz
    peak *= HMMA_ON_HOPPER if gpu.capability == 90 and opcode.startswith("HMMA") else 1.0
    return flops(opcode) / (peak * (0.5 if "TF32" in opcode else 1.0))


def cycles(executed: Mapping[str, float], wavefronts: float, gpu: GPU) -> dict[str, float]:
    """Return cycles by unit of one program, alone on an SM of the GPU.

    Args:
        executed: instructions of all warps, as ``machine_code.executed`` names them.
        wavefronts: wavefronts of shared memory.
        gpu: one of ``GPUS``.
    """

    def total(opcodes: set[str]) -> float:
        return WARP * sum(executed.get(opcode, 0.0) for opcode in opcodes)

    # Integer products share the units of float32 ones, and have the half of them at most.
    products = total({"IMAD"})
    multiply = (total(FLOAT32_OPCODES) + products) / FLOAT32[gpu.capability]
    return {
        "issue": sum(executed.values()) / SCHEDULERS,
        "tensor cores": sum(n * tensor_cycles(name, gpu) for name, n in executed.items()),
        "multiply-add": max(multiply, products / INTEGER_PRODUCTS),
        "other arithmetic": total(OTHER_OPCODES) / OTHER_ARITHMETIC,
        "special functions": total({"MUFU"}) / SPECIAL,
        "shared memory": wavefronts,
    }


def gpus_of(capability: int) -> dict[str, GPU]:
    """Return the GPUs of a compute capability, by name."""
    return {name: gpu for name, gpu in GPUS.items() if gpu.capability == capability}
