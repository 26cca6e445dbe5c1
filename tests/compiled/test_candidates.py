"""Variants of kernels that no call gets yet, executed: within the error budget, and in use."""

import os

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model.candidates import CANDIDATES
from bench.gpu_model.execute import executing
from leaner_kernels.ops import _gluon, _tiles
from tests import attention_cases
from tests.attention_cases import AttentionTestCase, aligned, make_inputs, run_operators
from tests.backends import check_findings
from tests.compiled.test_gluon import run_without_statistics

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

BF16 = torch.bfloat16
ONE_TILE = (
    AttentionTestCase("window", 2, 3, 3, 49, 49, 32),
    AttentionTestCase("causal", 1, 2, 2, 64, 64, 64, causal=True),
    AttentionTestCase("lengths", 3, 2, 2, 50, 50, 32, lengths=(1, 50, 23)),
)
ONE_TILE_OF_ROWS = (
    *ONE_TILE,
    AttentionTestCase("more keys than rows", 1, 4, 2, 20, 60, 32),
    AttentionTestCase("boolean mask, a hidden row", 2, 2, 2, 20, 32, 32, mask="boolean"),
    AttentionTestCase("additive mask", 2, 2, 2, 32, 32, 64, mask="additive"),
    AttentionTestCase("dropout", 1, 2, 2, 60, 60, 32, dropout_p=0.2),
)
# Calls that each candidate changes, and the constant that shows it.
CHANGED = {
    "one_tile_forward": (ONE_TILE_OF_ROWS, "ONE_TILE"),
    "one_tile_statistics": (ONE_TILE_OF_ROWS, "ONE_TILE"),
    "one_tile_backward": (ONE_TILE, "ONE_TILE"),
}


def test_every_candidate_is_executed() -> None:
    assert set(CHANGED) == set(CANDIDATES)


@pytest.mark.parametrize("gpu", [90, pytest.param(80, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name, (cases, _) in CHANGED.items()
        for case in cases
    ],
)
def test_a_candidate_computes_what_ships(
    name: str, case: AttentionTestCase, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    candidate, constant = CANDIDATES[name], CHANGED[name][1]
    run = run_without_statistics if candidate.direction == "forward" else run_operators
    results = []
    for _ in range(2):
        on_gpu = make_inputs(case, BF16, "cuda", aligned)
        with candidate.selected(), executing(gpu) as executions:
            results.append(run(on_gpu))
        check_findings(executions)
        assert any(e.launch is not None and e.launch.kwargs.get(constant) for e in executions)
    first, second = results
    assert all(torch.equal(first[name], second[name]) for name in first)
    attention_cases.check(make_inputs(case, BF16, "cpu", aligned), first)
