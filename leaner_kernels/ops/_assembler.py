"""Which ptxas assembles our kernels.

Triton 3.6 brings ptxas 12.8 for GPUs up to Hopper and 12.9 for newer ones. 12.8 leaves out some of
the instructions that compute where an operand of wgmma lies: on an H200 such a product read shared
memory out of bounds. ``bench.gpu_model.operands`` finds it in machine code; 12.9 has none of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

RIGHT = 12, 9  # the first release


@contextmanager
def assembling() -> Iterator[None]:
    """Let Triton use a ptxas that is right while it compiles, where it has one."""
    path = _other_ptxas()
    if path is None:
        yield
        return
    from triton import knobs

    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = path
        yield


@cache
def _other_ptxas() -> str | None:
    """Return the path of the ptxas to use in place of Triton's choice, None where that is right."""
    from triton import knobs

    if knobs.runtime.interpret:
        return None
    try:
        chosen, other = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):  # another Triton, or one without NVIDIA's tools
        return None
    wrong = _release(chosen.version) < RIGHT <= _release(other.version)
    return other.path if wrong else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
