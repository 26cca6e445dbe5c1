"""The warp-specialised kernels for Hopper, which no call gets yet, executed."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model.candidates import TMA
from bench.gpu_model.execute import Execution, ExecutionError, executing
from leaner_kernels.ops import _gluon, _tiles
from tests import attention_cases
from tests.attention_cases import (
    AttentionTestCase,
    aligned,
    make_inputs,
    run_operators,
    side_by_side,
)
from tests.backends import check_findings
from tests.compiled.test_mutations import Mutation

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

BF16, HALF = torch.bfloat16, torch.float16
SYNCHRONISING = "bar", "mbarrier", "fence", "wgmma.fence", "wgmma.wait", "cp.async.bulk.wait"
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


def run(
    inputs: attention_cases.Inputs, count: bool = False
) -> tuple[dict[str, Tensor], list[Execution]]:
    """Return results, and what was executed: the warp-specialised kernels."""
    with ExitStack() as stack:
        for candidate in TMA:
            stack.enter_context(candidate.selected())
        executions = stack.enter_context(executing(90, count=count))
        found = run_operators(inputs)
    assert {e.name for e in executions} >= {"_hopper_tma_fwd_kernel", "_hopper_tma_bwd_kernel"}
    return found, executions


@pytest.mark.parametrize("layout", [aligned, side_by_side], ids=["apart", "beside"])
@pytest.mark.parametrize(
    ("case", "dtype", "programs"), [pytest.param(*row, id=row[0].name) for row in CASES]
)
def test_outputs_statistics_and_gradients_are_within_the_error_budget(
    case: AttentionTestCase,
    dtype: torch.dtype,
    programs: int,
    layout: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tiles, "multiprocessors", lambda _: programs)
    on_cpu, on_gpu = (make_inputs(case, dtype, device, layout) for device in ("cpu", "cuda"))
    found, executions = run(on_gpu)
    attention_cases.check(on_cpu, found)
    check_findings(executions)


def synchronising(execution: Execution) -> Iterator[Mutation]:
    """Yield the barriers, waits, arrivals and fences that ran, each taken away."""
    for index, count in enumerate(execution.counts):
        mutation = Mutation(execution.program, index)
        if count.executed and mutation.kind.startswith(SYNCHRONISING):
            yield mutation


def is_noticed(
    mutation: Mutation, inputs: attention_cases.Inputs, whole: dict[str, Tensor]
) -> bool:
    try:
        with mutation:
            found, executions = run(inputs)
    except (ExecutionError, AssertionError):
        return True
    pairs = ((found[name].cpu().nan_to_num(7), t.cpu().nan_to_num(7)) for name, t in whole.items())
    return any(e.found for e in executions) or not all(torch.equal(*pair) for pair in pairs)


# How many of a kind may go unnoticed, and why. Barriers between the warps of a warpgroup are
# Triton's: some stand where an mbarrier orders the same. The last product of a loop adds to what
# nothing else reads before the next wait.
BARRIERS = 30
# Triton's own code has no fence after the init of mbarriers, CUDA's guide has one.
AFTER_INIT = 1
FORWARD_REDUNDANT = {"bar": BARRIERS, "fence.proxy.async": AFTER_INIT}
BACKWARD_REDUNDANT = {
    "bar": BARRIERS,
    "wgmma.wait_group": 2,
    # A consumer that waits for deltas waits for what these were computed from, and a product of dQ
    # waits for dS, which K came before. With more tiles of rows than stages, a block's rows are
    # released after the keys of the block before.
    "mbarrier.try_wait": 4,
    # Where the log-sum-exp needs no correction, dO is stored as it was.
    "fence.proxy.async": 1 + AFTER_INIT,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernel", "redundant"),
    [
        ("_hopper_tma_fwd_kernel", FORWARD_REDUNDANT),
        ("_hopper_tma_bwd_kernel", BACKWARD_REDUNDANT),
    ],
)
def test_barriers_waits_arrivals_and_fences_are_missed(
    kernel: str, redundant: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "multiprocessors", lambda _: 1)
    inputs = make_inputs(AttentionTestCase("mutated", 1, 3, 3, 320, 320, 32), BF16, "cuda", aligned)
    whole, executions = run(inputs, count=True)
    mutations = list(synchronising(next(e for e in executions if e.name == kernel)))
    assert len({mutation.kind for mutation in mutations}) > 5
    unnoticed = Counter(m.kind for m in mutations if not is_noticed(m, inputs, whole))
    assert {kind: n for kind, n in unnoticed.items() if n > redundant.get(kind, 0)} == {}


# In each commit, the first of each kind that matters.
@pytest.mark.parametrize("kind", ["mbarrier.try_wait", "mbarrier.arrive", "fence.proxy.async"])
def test_what_orders_partitions_is_missed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "multiprocessors", lambda _: 1)
    inputs = make_inputs(AttentionTestCase("mutated", 1, 3, 3, 128, 128, 32), BF16, "cuda", aligned)
    whole, executions = run(inputs, count=True)
    backward = next(e for e in executions if e.name == "_hopper_tma_bwd_kernel")
    mutations = (m for m in synchronising(backward) if m.kind == kind)
    assert any(is_noticed(mutation, inputs, whole) for mutation in mutations)
