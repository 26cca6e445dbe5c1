"""Variants of kernels that no call gets yet, executed: within the error budget, and in use."""

import os
from itertools import product
from typing import Any, NamedTuple

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
PARTIAL = (
    AttentionTestCase("ViT", 1, 2, 2, 197, 197, 64),
    AttentionTestCase("ViT-H, lengths", 2, 1, 1, 257, 257, 80, lengths=(70, 257)),
    AttentionTestCase("a tail, causal", 1, 1, 1, 160, 160, 64, causal=True),
    AttentionTestCase("a last tile in part", 1, 2, 2, 100, 100, 64),
    AttentionTestCase("BERT, dropout", 1, 2, 2, 128, 128, 32, dropout_p=0.2),
    AttentionTestCase("heads of 16, boolean mask", 1, 2, 2, 120, 120, 16, mask="boolean"),
    AttentionTestCase(
        "additive mask, lengths", 2, 2, 1, 80, 80, 64, lengths=(3, 80), mask="additive"
    ),
)
PAIRED = (
    AttentionTestCase("GPT-2", 1, 1, 1, 512, 512, 32, causal=True),
    AttentionTestCase("an odd number of tiles, lengths", 2, 1, 1, 300, 300, 32, lengths=(90, 300)),
)


class Change(NamedTuple):
    """Calls that a candidate changes, and the constant that shows it."""

    cases: tuple[AttentionTestCase, ...]
    constant: str
    value: Any = True
    gpus: tuple[int, ...] = (90,)


CHANGED = {
    "one_tile_forward": Change(ONE_TILE_OF_ROWS, "ONE_TILE", gpus=(90, 80)),
    "one_tile_statistics": Change(ONE_TILE_OF_ROWS, "ONE_TILE", gpus=(90, 80)),
    "one_tile_backward": Change(ONE_TILE, "ONE_TILE", gpus=(90, 80)),
    "partial_statistics": Change(PARTIAL, "PARTIAL"),
    "paired_statistics": Change(PAIRED, "PAIRED"),
    "tnt_registers": Change((AttentionTestCase("TNT", 5, 4, 4, 16, 16, 10),), "maxnreg", 80),
}


def test_every_candidate_is_executed() -> None:
    assert set(CHANGED) == set(CANDIDATES)


@pytest.mark.parametrize(
    ("name", "case", "gpu"),
    [
        pytest.param(
            name,
            case,
            gpu,
            id=f"{name}-{case.name}-{gpu}",
            marks=pytest.mark.nightly if gpu != 90 else (),
        )
        for name, change in CHANGED.items()
        for case, gpu in product(change.cases, change.gpus)
    ],
)
def test_a_candidate_stays_within_the_error_budget_and_repeats_its_bits(
    name: str, case: AttentionTestCase, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    candidate, change = CANDIDATES[name], CHANGED[name]
    run = run_without_statistics if candidate.direction == "forward" else run_operators
    results = []
    for _ in range(2):
        on_gpu = make_inputs(case, BF16, "cuda", aligned)
        with candidate.selected(), executing(gpu) as executions:
            results.append(run(on_gpu))
        check_findings(executions)
        constants = [e.launch.kwargs.get(change.constant) for e in executions if e.launch]
        assert change.value in constants
    first, second = results
    assert all(torch.equal(first[name], second[name]) for name in first)
    attention_cases.check(make_inputs(case, BF16, "cpu", aligned), first)
