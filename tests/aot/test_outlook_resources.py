"""The kernels of outlook attention, compiled for GPUs this machine does not have."""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench.gpu_model.compile_ahead import GPUS, Launch, compile_launch, recorded
from bench.resources import SUPPORTED
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.outlook import launch
from leaner_kernels.ops.outlook.reference import num_windows
from leaner_kernels.ops.statistics import STATISTICS

BATCH, MAP, HEADS, SAMPLES = 2, 28, 8, 4
BF16, FP32 = torch.bfloat16, torch.float32
VOLO = (3, 2, 1)


def launches(dtype: torch.dtype, dim: int) -> dict[str, Launch]:
    """Return what a sampled step launches; only shapes, strides and dtypes matter."""

    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    count, places = num_windows(MAP, VOLO), VOLO[0] ** 2
    value = empty(BATCH, MAP, MAP, HEADS, dim, dtype=dtype)
    logits = empty(BATCH, count, count, HEADS, places, places, dtype=dtype)
    inputs, params = (value, logits), (*VOLO, 0.5)
    out, lse = torch.empty_like(value), empty(BATCH, HEADS, count, count, places)
    stats = empty(len(STATISTICS), BATCH, HEADS), empty(SAMPLES, MAP**2, HEADS * dim)
    sample, grads = empty(SAMPLES, dtype=torch.int32), tuple(map(torch.empty_like, inputs))
    with recorded() as found:
        launch.forward(inputs, params, Results(out, lse))
        launch.forward(inputs, params, Results(out, lse, *stats, sample))
        launch.backward(out, inputs, params, lse, grads)
    return dict(zip(("forward", "statistics", "capture", "backward"), found, strict=True))


# Both ways to hold a row; statistics do what the forward does and more, on each GPU.
CALLS = [
    pytest.param("statistics", BF16, 32, SUPPORTED),
    pytest.param("backward", BF16, 32, SUPPORTED),
    pytest.param("forward", BF16, 16, (80,)),
    pytest.param("statistics", BF16, 10, (86,)),
    pytest.param("capture", FP32, 48, (80,)),
    pytest.param("backward", FP32, 48, (86,)),
]


@pytest.mark.parametrize(("kind", "dtype", "dim", "gpus"), CALLS)
def test_kernel_fits_every_supported_gpu(
    kind: str, dtype: torch.dtype, dim: int, gpus: tuple[int, ...]
) -> None:
    one = launches(dtype, dim)[kind]
    for gpu in gpus:
        used = compile_launch(one, gpu)
        assert not used.spill_faults, f"sm_{gpu} {one.name} spills: {used}"
        assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu}: {used}"
        assert used.programs_per_sm >= 2, f"sm_{gpu}: {used}"


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """The measurement can fail: sixteen sums a thread of each pixel do not fit."""
    one = launches(BF16, 32)["backward"]
    used = compile_launch(replace(one, kwargs={**one.kwargs, "BLOCK": 128}), 80)
    assert used.spills > 0
