"""Variants of kernels that no call gets yet, executed: within the error budget, and in use."""

import os
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model.candidates import CANDIDATES
from bench.gpu_model.execute import executing
from leaner_kernels.ops import _gluon, _tiles, route
from leaner_kernels.ops.attention import op
from tests import attention_cases
from tests.attention_cases import AttentionTestCase, aligned, make_inputs, run_operators
from tests.backends import check_findings
from tests.compiled.test_gluon import run_without_statistics
from tests.error_budget import assert_within_budget

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


# Of a GPU with two SMs: two entries of four are whole, or none is.
SPLIT = (
    AttentionTestCase("an entry in two parts", 4, 2, 2, 300, 300, 32, causal=True),
    AttentionTestCase("a head in four parts", 1, 1, 1, 512, 512, 32, causal=True),
    AttentionTestCase("a head in four parts, in full", 1, 1, 1, 320, 320, 32),
)


class Change(NamedTuple):
    """Calls that a candidate changes, and the constant that shows it, with its values."""

    cases: tuple[AttentionTestCase, ...]
    constant: str
    values: tuple[Any, ...] = (True,)
    gpus: tuple[int, ...] = (90,)


CHANGED = {
    "one_tile_forward": Change(ONE_TILE_OF_ROWS, "ONE_TILE", gpus=(90, 80)),
    "one_tile_statistics": Change(ONE_TILE_OF_ROWS, "ONE_TILE", gpus=(90, 80)),
    "one_tile_backward": Change(ONE_TILE, "ONE_TILE", gpus=(90, 80)),
    "partial_statistics": Change(PARTIAL, "PARTIAL"),
    "paired_statistics": Change(PAIRED, "PAIRED"),
    "tnt_registers": Change((AttentionTestCase("TNT", 5, 4, 4, 16, 16, 10),), "maxnreg", (80,)),
    "split_last_heads": Change(SPLIT, "PARTS", (2, 4)),
}


def test_every_candidate_is_executed() -> None:
    """Here, or, if it is another kernel or a setting, in a file of its own."""
    tiles = {name for name, one in CANDIDATES.items() if not (one.settings or one.kernels)}
    assert set(CHANGED) == tiles


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
    monkeypatch.setattr(_tiles, "multiprocessors", lambda _: 2)
    candidate, change = CANDIDATES[name], CHANGED[name]
    run = run_without_statistics if candidate.direction == "forward" else run_operators
    results = []
    for _ in range(2):
        on_gpu = make_inputs(case, BF16, "cuda", aligned)
        with candidate.selected(), executing(gpu) as executions:
            results.append(run(on_gpu))
        check_findings(executions)
        constants = [e.launch.kwargs.get(change.constant) for e in executions if e.launch]
        assert not set(change.values).isdisjoint(constants)
    first, second = results
    assert all(torch.equal(first[name], second[name]) for name in first)
    attention_cases.check(make_inputs(case, BF16, "cpu", aligned), first)


# The kernel sums over tokens in all but the last two, whose gradients are summed afterwards.
BIASED = (
    (90, 197, 64, False, None),
    (90, 197, 48, True, (60, 197)),
    (90, 128, 32, False, None),
    (90, 100, 64, False, (1, 100)),
    (90, 250, 16, True, None),
    (90, 300, 32, False, None),
    (80, 197, 64, False, None),
)


@pytest.mark.parametrize(("gpu", "tokens", "dim", "causal", "lengths"), BIASED)
def test_a_backward_returns_the_gradient_of_the_bias_of_a_projection(
    gpu: int,
    tokens: int,
    dim: int,
    causal: bool,
    lengths: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tiles, "ENOUGH_PROGRAMS", 1)
    torch.manual_seed(0)
    qkv = torch.randn(2, tokens, 3, 2, dim, dtype=BF16)
    grad = torch.randn(2, tokens, 2, dim, dtype=BF16)
    bias = torch.zeros(6 * dim, dtype=BF16 if causal else torch.float32)  # as in autocast
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    hidden = torch.zeros(2, 1, tokens, tokens, dtype=torch.bool)
    if causal:
        hidden |= torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    if key_lengths is not None:
        hidden |= torch.arange(tokens) >= key_lengths.view(2, 1, 1, 1)

    def library(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = qkv.to(dtype).requires_grad_()
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        s = (dim**-0.5 * (q @ k.mT)).masked_fill(hidden, float("-inf"))
        out = (torch.softmax(s, dim=-1) @ v).transpose(1, 2)
        (dqkv,) = torch.autograd.grad(out, x, grad.to(dtype))
        return dqkv, dqkv.sum((0, 1), dtype=torch.float64).flatten()

    attend, _, differentiate = route.launchers(op.Biased)
    tensors, numbers = (qkv, bias, key_lengths, None), (0.0, causal, None, -1, -1)
    results = []
    for _ in range(2):
        with executing(gpu) as executions:
            saved = attend(*tensors, *numbers)
            results.append(differentiate(grad, *tensors, *saved, *numbers))
        check_findings(executions)
    (dqkv, dbias), (again, bias_again) = results
    assert torch.equal(dqkv, again)
    assert torch.equal(dbias, bias_again)
    (rounded, rounded_sum), (exact, exact_sum) = library(BF16), library(torch.float64)
    assert_within_budget(dqkv, rounded, exact)
    assert_within_budget(dbias, rounded_sum, exact_sum)
    plain, _, differentiate_plain = route.launchers(op.Packed)
    with executing(gpu):
        saved = plain(qkv, key_lengths, None, *numbers)
        expected = differentiate_plain(grad, qkv, key_lengths, None, *saved, *numbers)
    assert torch.equal(dqkv, expected)
