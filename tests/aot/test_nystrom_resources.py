"""The kernels of Nyström attention, compiled for GPUs this machine does not have."""

import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench.gpu_model.compile_ahead import GPUS, Launch, compile_launch, distinct, recorded
from bench.resources import SUPPORTED
from leaner_kernels.ops.nystrom import launch
from leaner_kernels.ops.operator import Results
from leaner_kernels.ops.statistics import STATISTICS

BATCH, HEADS, SAMPLES = 2, 2, 4
FP32 = torch.float32


def launches(dim: int, tokens: int, landmarks: int) -> list[Launch]:
    """Return what a sampled step launches; only shapes, strides and dtypes matter."""

    def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = empty(BATCH, tokens, 3, HEADS, dim, dtype=torch.bfloat16)
    heads_first = packed.permute(2, 0, 3, 1, 4).unbind(0)
    inputs = *heads_first, empty(BATCH, dtype=torch.int32)
    params = landmarks, 0.5, 6, False
    out = empty(BATCH, tokens, HEADS, dim, dtype=torch.bfloat16)
    lse = empty(BATCH, HEADS, tokens)
    stats = empty(len(STATISTICS), BATCH, HEADS), empty(SAMPLES, tokens, HEADS * dim)
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in heads_first]
    with recorded() as found:
        launch.forward(inputs, params, Results(out, lse, *stats, empty(SAMPLES, dtype=torch.int32)))
        launch.backward(out, inputs, params, lse, grads)
    return found


def is_inverse(one: Launch) -> bool:
    return "inverse" in one.name


# The number of tokens is no constant of any kernel. What other sizes take of every GPU is in
# docs/resources.md; the inverse of one matrix of 64 landmarks compiles for as long as all of these.
CALLS = [
    pytest.param(32, 64, 90, False, id="heads of 32"),
    pytest.param(64, 32, 86, False, id="heads of 64"),
    pytest.param(16, 16, 80, True, id="the inverse"),
]


@pytest.mark.parametrize(("dim", "landmarks", "gpu", "inverse"), CALLS)
def test_kernels_fit_a_supported_gpu(dim: int, landmarks: int, gpu: int, inverse: bool) -> None:
    if gpu not in SUPPORTED:
        pytest.skip(f"sm_{gpu} is not among --gpus")
    wanted = [one for one in launches(dim, 2048, landmarks) if is_inverse(one) == inverse]
    assert len(wanted) == (3 if inverse else 8)
    for one in distinct(wanted, gpu):
        used = compile_launch(one, gpu)
        assert not used.spill_faults, f"sm_{gpu} {one.name} spills: {used}"
        assert used.shared <= GPUS[gpu].shared_per_program, f"sm_{gpu} {one.name}: {used}"
        assert used.programs_per_sm >= 1, f"sm_{gpu} {one.name}: {used}"


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """The measurement can fail: so much does not stay in the registers of four warps."""
    one = launches(32, 2048, 64)[0]
    used = compile_launch(replace(one, kwargs={**one.kwargs, "BLOCK_M": 128}), 80)
    assert used.stack > 0
    assert used.spills > 0
