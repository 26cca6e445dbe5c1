"""The warp-specialised kernels for Hopper, which no call gets yet, executed."""

import os
from contextlib import ExitStack

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model.candidates import TMA
from bench.gpu_model.execute import executing
from leaner_kernels.ops import _gluon
from leaner_kernels.ops.attention.kernels import hopper_tma
from tests import attention_cases
from tests.attention_cases import (
    AttentionTestCase,
    aligned,
    make_inputs,
    run_operators,
    side_by_side,
)
from tests.backends import check_findings

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

BF16, HALF = torch.bfloat16, torch.float16
# One block and several; whole tiles, tails of 16 and 32, a last tile that is not full.
CASES = [
    (AttentionTestCase("two tiles", 2, 3, 3, 128, 128, 32), BF16, 132),
    (AttentionTestCase("a tail of 16", 2, 3, 3, 197, 197, 64), BF16, 132),
    (AttentionTestCase("programs with several heads", 3, 3, 3, 197, 197, 64), HALF, 2),
    (AttentionTestCase("causal", 1, 3, 3, 320, 320, 32, causal=True), BF16, 2),
    (AttentionTestCase("lengths", 3, 2, 2, 300, 300, 64, lengths=(300, 1, 130)), BF16, 2),
    (AttentionTestCase("heads of 48", 1, 2, 2, 90, 90, 48), HALF, 2),
    (AttentionTestCase("heads of 16", 2, 2, 2, 270, 270, 16, causal=True), BF16, 3),
    (AttentionTestCase("three blocks", 1, 2, 2, 577, 577, 64), BF16, 1),
]
FORWARD, STATISTICS, BACKWARD = TMA


@pytest.mark.parametrize("layout", [aligned, side_by_side], ids=["apart", "beside"])
@pytest.mark.parametrize(("case", "dtype", "programs"), CASES, ids=lambda value: str(value))
def test_outputs_statistics_and_gradients_are_within_the_error_budget(
    case: AttentionTestCase,
    dtype: torch.dtype,
    programs: int,
    layout: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_tma, "H200_SMS", programs)
    on_cpu, on_gpu = (make_inputs(case, dtype, device, layout) for device in ("cpu", "cuda"))
    with ExitStack() as stack:
        for candidate in TMA:
            stack.enter_context(candidate.selected())
        executions = stack.enter_context(executing(90))
        found = run_operators(on_gpu)
    attention_cases.check(on_cpu, found)
    check_findings(executions)
    ran = {execution.name for execution in executions}
    assert ran >= {"_hopper_tma_fwd_kernel", "_hopper_tma_bwd_kernel"}
