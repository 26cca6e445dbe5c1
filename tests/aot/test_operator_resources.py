"""The kernels of the other operators, compiled for GPUs this machine does not have.

The benchmark's cases on every GPU are in bench/results/resources.json; here are other dtypes and
head dimensions, with what takes the most registers.
"""

import os
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET=1, on backend cpu", allow_module_level=True)

from bench.attention.operators import OperatorCase
from bench.gpu_model.compile_ahead import GPUS, compile_launch
from bench.gpu_model.launches import call_of
from bench.resources import SUPPORTED

BF16, FP32 = torch.bfloat16, torch.float32
EVERY = "forward", "statistics", "capture", "backward"


def vision(op: str, dim: int, dtype: torch.dtype = BF16, window: int = 7) -> OperatorCase:
    side = 4 * window if op == "window" else 28 if op == "outlook" else 14
    return OperatorCase(op, "cuda", op, 2, side, 12, dim, dtype, window=window)


CALLS: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [
    *(
        (vision("cross_covariance", dim, dtype), ("statistics", "backward"), SUPPORTED)
        for dtype in (BF16, FP32)
        for dim in (10, 30, 48)
    ),
    (vision("cross_covariance", 64), ("capture",), SUPPORTED),
    (vision("channel", 32), ("capture", "backward"), SUPPORTED),
    (vision("channel", 16), ("backward",), SUPPORTED),
    # What the models run, whole windows of a head dimension that fills no tile, and two that take
    # several tiles, forward.
    (vision("window", 32), EVERY, SUPPORTED),
    (vision("window", 16), EVERY, SUPPORTED),
    (vision("window", 42, window=8), ("backward",), SUPPORTED),
    (vision("window", 32, window=12), ("statistics",), SUPPORTED),
    (vision("window", 32, FP32), ("forward", "capture"), SUPPORTED),
    # Both ways to hold a row; statistics do what the forward does and more.
    (vision("outlook", 32), ("statistics", "backward"), (80, 90)),
    (vision("outlook", 16), ("forward",), (80,)),
    (vision("outlook", 10), ("statistics",), (86,)),
    (vision("outlook", 48, FP32), ("capture",), (80,)),
    (vision("outlook", 48, FP32), ("backward",), (86,)),
]


@pytest.mark.parametrize(
    ("case", "launches", "gpus"), CALLS, ids=lambda part: getattr(part, "op", None)
)
def test_kernels_fit_supported_gpus(
    case: Any, launches: tuple[str, ...], gpus: tuple[int, ...]
) -> None:
    wanted = [gpu for gpu in gpus if gpu in SUPPORTED]
    if not wanted:
        pytest.skip(f"none of {gpus} is among --gpus")
    for gpu in wanted:
        found = call_of(case).launches(gpu)
        for one in (one for launch in launches for one in found[launch]):
            used = compile_launch(one, gpu)
            assert not used.faults, f"sm_{gpu} {one.name}: {used.faults}, {used}"
            assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu} {one.name}: {used}"
            assert used.programs_per_sm >= 1, f"sm_{gpu} {one.name}: {used}"


@pytest.mark.parametrize("op", ["cross_covariance", "channel", "window", "outlook"])
def test_a_gpu_that_triton_does_not_compile_for_is_refused_in_one_line(op: str) -> None:
    with pytest.raises(ValueError, match=r"of compute capability 7.5 or newer, got 7.0$") as error:
        call_of(vision(op, 32)).launches(70)
    assert "\n" not in str(error.value)
