"""The kernels of attention between channels, compiled for GPUs this machine does not have."""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench.gpu_model.compile_ahead import GPUS, Launch, compile_launch, recorded
from bench.resources import SUPPORTED
from leaner_kernels.ops.covariance import launch
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.statistics import STATISTICS

BATCH, TOKENS, HEADS, SAMPLES = 2, 197, 12, 4
BF16, FP32 = torch.bfloat16, torch.float32


def launches(operator: str, dtype: torch.dtype, dim: int) -> dict[str, Launch]:
    """Return what a sampled step launches; only shapes, strides and dtypes matter."""
    kernels = getattr(launch, operator)

    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = [empty(BATCH, TOKENS, 3, HEADS, dim, dtype=dtype)]
    if operator == "cross_covariance":
        inputs.append(empty(HEADS))
    out, lse = empty(BATCH, TOKENS, HEADS, dim, dtype=dtype), empty(BATCH, HEADS, dim)
    stats = empty(len(STATISTICS), BATCH, HEADS), empty(SAMPLES, TOKENS, HEADS * dim)
    sample, grads = empty(SAMPLES, dtype=torch.int32), tuple(map(torch.empty_like, inputs))
    with recorded() as found:
        kernels.forward(inputs, (0.5,), Results(out, lse))
        kernels.forward(inputs, (0.5,), Results(out, lse, *stats, sample))
        kernels.backward(out, inputs, (0.5,), lse, grads)
    return dict(zip(("forward", "statistics", "capture", "backward"), found, strict=True))


# Every rule of the data, with what takes the most registers: statistics, lengths
# and channels that are no power of two. A launch of the other operator needs fewer, but ptxas is
# then tempted to fit one more program beside.
CALLS = [
    *(
        pytest.param(kind, "cross_covariance", dtype, dim)
        for dtype in (BF16, FP32)
        for dim in (10, 30, 48)
        for kind in ("statistics", "backward")
    ),
    pytest.param("capture", "cross_covariance", BF16, 64),
    pytest.param("capture", "channel", BF16, 32),
    pytest.param("backward", "channel", BF16, 16),
    pytest.param("backward", "channel", BF16, 32),
]


@pytest.mark.parametrize(("kind", "operator", "dtype", "dim"), CALLS)
def test_kernel_fits_every_supported_gpu(
    kind: str, operator: str, dtype: torch.dtype, dim: int
) -> None:
    one = launches(operator, dtype, dim)[kind]
    for gpu in SUPPORTED:
        used = compile_launch(one, gpu)
        assert not used.spill_faults, f"sm_{gpu} {one.name} spills: {used}"
        assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu}: {used}"
        assert used.programs_per_sm >= 1, f"sm_{gpu}: {used}"


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """The measurement can fail: so much does not stay in the registers of four warps."""
    one = launches("cross_covariance", BF16, 64)["backward"]
    used = compile_launch(replace(one, kwargs={**one.kwargs, "BLOCK_N": 128}), 80)
    assert used.stack > 0
    assert used.spills > 0
