"""The GPUs that kernels are compiled for, one row each; all GPU-dependent code reads this table.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; tensor
memory: PTX ISA, "Tensor Memory".
"""

from typing import NamedTuple

KIB = 1024
LEAST_CAPABILITY = 75  # the oldest GPU that Triton compiles for
TUNED = 80  # the first compute capability that tiles were chosen for
TUNED_GPUS = 80, 86, 90  # tests compile all tiles for each of these


class GPU(NamedTuple):
    """A compute capability.

    Attributes:
        tiles: the tuned capability whose tiles it uses: the closest by instructions and shared
            memory. Desktop and laptop GPUs have 99 KiB of shared memory per program, the others at
            least 163 KiB. None for GPUs that no tile was chosen for.
        kernels: the family of kernels whose programs own a head: ``hopper`` has wgmma.
        crossover: the capability whose sections of ``library.toml`` apply; None for those of all
            other GPUs.
        shared_per_program: bytes of shared memory.
        shared_per_sm: bytes of shared memory.
        threads_per_sm: resident threads.
        programs_per_sm: resident programs (CTAs).
        tensor_columns: columns of tensor memory, to which products of sm_100 write.
    """

    tiles: int | None
    kernels: str | None
    crossover: int | None
    shared_per_program: int
    shared_per_sm: int
    threads_per_sm: int
    programs_per_sm: int
    tensor_columns: int = 0


GPUS = {
    75: GPU(None, None, None, 64 * KIB, 64 * KIB, 1024, 16),
    80: GPU(80, "ampere", 80, 163 * KIB, 164 * KIB, 2048, 32),
    86: GPU(86, "ampere", 86, 99 * KIB, 100 * KIB, 1536, 16),
    89: GPU(86, "ampere", 86, 99 * KIB, 100 * KIB, 1536, 24),
    90: GPU(90, "hopper", 90, 227 * KIB, 228 * KIB, 2048, 32),
    100: GPU(80, "ampere", None, 227 * KIB, 228 * KIB, 2048, 32, tensor_columns=512),
    120: GPU(86, "ampere", 86, 99 * KIB, 100 * KIB, 1536, 24),
}
