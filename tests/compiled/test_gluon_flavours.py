"""The kernels in Gluon with masks, dropout and shared key heads, executed."""

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("set LEANER_EXECUTE=1, in a process of its own", allow_module_level=True)

from bench.gpu_model.execute import check_findings, executing
from leaner_kernels import attention
from leaner_kernels.ops import _gluon, _tiles
from tests.attention_cases import AttentionTestCase, Inputs
from tests.compiled.cases import BF16, HALF, OPERATORS
from tests.compiled.test_gluon import GPUS, RUNS, run_without_statistics

# Masks and dropout in both directions, and key heads that rows share in the forward.
ON_HOPPER = {
    "dropout": AttentionTestCase("dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    "causal dropout": AttentionTestCase(
        "causal dropout", 1, 2, 2, 128, 128, 32, causal=True, dropout_p=0.2
    ),
    "additive": AttentionTestCase("additive", 1, 2, 2, 100, 100, 64, mask="additive"),
    "float32": AttentionTestCase("float32", 1, 2, 2, 100, 100, 64, mask="float32"),
    "boolean": AttentionTestCase("boolean", 2, 2, 2, 197, 197, 64, mask="boolean"),
    "over keys": AttentionTestCase("over keys", 2, 2, 2, 160, 160, 64, mask="keys"),
    "all": AttentionTestCase(
        "all", 2, 2, 2, 160, 160, 64, mask="additive", dropout_p=0.2, lengths=(50, 160)
    ),
    "narrow": AttentionTestCase("narrow", 2, 2, 2, 250, 250, 16, mask="boolean", dropout_p=0.1),
    "wide": AttentionTestCase("wide", 1, 2, 2, 100, 100, 128, dropout_p=0.1),
    "shared": AttentionTestCase("shared", 1, 4, 1, 128, 128, 32, mask="shared", dropout_p=0.1),
}
CHOSEN_ON_HOPPER = {
    ("dropout", HALF, "plain"),
    ("boolean", BF16, "plain"),
    ("float32", BF16, "plain"),
    ("all", BF16, "statistics"),
}


def flavours() -> Iterator[Any]:
    for name, dtype, run in product(ON_HOPPER, (BF16, HALF), RUNS):
        marks = () if (name, dtype, run) in CHOSEN_ON_HOPPER else pytest.mark.nightly
        yield pytest.param(name, dtype, run, marks=marks, id=f"{name}-{dtype}-{run}")


@pytest.mark.parametrize(("name", "dtype", "run"), list(flavours()))
def test_masks_dropout_and_shared_keys_on_hopper(
    name: str, dtype: torch.dtype, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    with executing(90) as executions:
        OPERATORS["attention"]._replace(run=RUNS[run]).check(ON_HOPPER[name], dtype)
    check_findings(executions)
    names = {execution.name for execution in executions}
    no_rule = name == "wide" and run == "statistics"
    assert ("_hopper_fwd_kernel" in names) == (not no_rule)
    dropout = ON_HOPPER[name].dropout_p > 0
    assert ("_hopper_resident_bwd_kernel" in names) == (not dropout)
    fenced_dropout = dropout and _gluon.KEEPS_FENCES
    assert ("_hopper_bwd_kernel" in names) == (name != "shared" and fenced_dropout)


ON_AMPERE = {
    "additive mask": AttentionTestCase("additive mask", 1, 2, 2, 197, 197, 64, mask="additive"),
    "additive mask, lengths": AttentionTestCase(
        "additive mask, lengths", 2, 2, 2, 100, 100, 32, mask="shared", lengths=(30, 100)
    ),
    "float32 mask": AttentionTestCase("float32 mask", 2, 2, 2, 100, 100, 32, mask="float32"),
    "boolean mask, a hidden row": AttentionTestCase(
        "boolean mask", 1, 2, 2, 197, 197, 64, mask="boolean"
    ),
    "boolean mask over keys": AttentionTestCase("over keys", 2, 2, 2, 110, 110, 32, mask="keys"),
    "dropout": AttentionTestCase("dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    "dropout, causal, lengths": AttentionTestCase(
        "dropout, causal", 2, 2, 2, 100, 100, 32, causal=True, lengths=(7, 100), dropout_p=0.5
    ),
    "shared key heads": AttentionTestCase("shared key heads", 1, 4, 2, 197, 197, 64),
}
BACKWARDS = {80: "_ampere_bwd_kernel", 90: "_hopper_resident_bwd_kernel"}
CHOSEN_ON_AMPERE = {
    ("additive mask", BF16, 80),
    ("additive mask, lengths", HALF, 86),
    ("float32 mask", BF16, 80),
    ("boolean mask, a hidden row", HALF, 80),
    ("dropout", BF16, 80),
    ("shared key heads", BF16, 80),
}


def flavoured() -> Iterator[Any]:
    for name, dtype, gpu in product(ON_AMPERE, (BF16, HALF), (80, 86)):
        marks = () if (name, dtype, gpu) in CHOSEN_ON_AMPERE else pytest.mark.nightly
        yield pytest.param(name, dtype, gpu, marks=marks, id=f"{name}-{dtype}-{gpu}")


@pytest.mark.parametrize(("name", "dtype", "gpu"), list(flavoured()))
def test_masks_dropout_and_shared_key_heads_on_ampere(
    name: str, dtype: torch.dtype, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    expected = {"_ampere_fwd_kernel"}
    if name != "shared key heads":
        expected |= {"_ampere_bwd_kernel"}
    for run in RUNS.values():
        with executing(gpu) as executions:
            OPERATORS["attention"]._replace(run=run).check(ON_AMPERE[name], dtype)
        check_findings(executions)
        assert expected <= {execution.name for execution in executions}


@pytest.mark.parametrize("gpu", BACKWARDS)
@pytest.mark.parametrize("number", [-1e9, -1e30])
def test_a_row_may_be_hidden_by_large_numbers(
    gpu: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside them scores are lost: a row of nothing else sees every key alike."""
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)

    def make_inputs(*arguments: Any) -> Inputs:
        inputs = OPERATORS["attention"].make_inputs(*arguments)
        assert inputs.attn_mask is not None
        inputs.attn_mask[..., 5, :] = number
        return inputs

    with executing(gpu) as executions:
        options = {"run": run_without_statistics, "make_inputs": make_inputs}
        OPERATORS["attention"]._replace(**options).check(ON_AMPERE["additive mask"], BF16)
    check_findings(executions)
    forward, backward = (execution.name for execution in executions)
    assert forward == f"_{GPUS[gpu]}_fwd_kernel"
    assert backward == BACKWARDS[gpu]


@pytest.mark.parametrize("gpu", BACKWARDS)
@pytest.mark.parametrize("tokens", [100, 197])
def test_an_additive_mask_gets_its_gradient(tokens: int, gpu: int) -> None:
    case = ON_AMPERE["additive mask"]._replace(rows=tokens, cols=tokens)
    inputs = OPERATORS["attention"].make_inputs(case, BF16)
    assert inputs.attn_mask is not None
    exact = [t.detach().double().requires_grad_() for t in (*inputs[:3], inputs.attn_mask)]
    p = (exact[0] @ exact[1].mT * inputs.scale + exact[3]).softmax(-1)
    (p @ exact[2]).backward(inputs.grad.double())
    with executing(gpu) as executions:
        tensors = [t.detach().cuda().requires_grad_() for t in (*inputs[:3], inputs.attn_mask)]
        attention(*tensors[:3], attn_mask=tensors[3]).backward(inputs.grad.cuda())
    check_findings(executions)
    assert executions[-1].name == BACKWARDS[gpu]
    expected, actual = exact[3].grad, tensors[3].grad
    assert expected is not None
    assert actual is not None
    error = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < 0.02
