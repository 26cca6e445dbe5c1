"""Operators, the cases that are executed compiled, and what runs and judges them."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.gpu_model.execute import Execution
from leaner_kernels.ops import _tiles, route
from leaner_kernels.ops.attention import op
from tests import attention_cases, operator_cases, varlen_cases
from tests.attention_cases import AttentionTestCase, poisoned
from tests.error_budget import assert_within_budget

BF16, HALF = torch.bfloat16, torch.float16


class Operator(NamedTuple):
    """``exact`` takes inputs and a dtype, ``peers`` too; ``run`` calls what users call."""

    cases: tuple[Any, ...]
    make_inputs: Callable[..., Any]
    exact: Callable[..., dict[str, Tensor]]
    peers: Callable[..., dict[str, tuple[Tensor, ...]]]
    run: Callable[..., dict[str, Tensor]]

    def check(self, case: Any, dtype: torch.dtype) -> None:
        """Assert that what the operator returns is within the error budget, gradients included."""
        exact = self.exact(self.make_inputs(case, dtype), torch.float64)
        peers = self.peers(self.make_inputs(case, dtype), dtype)
        results = self.run(self.make_inputs(case, dtype, "cuda"))
        assert results.keys() <= exact.keys()
        for name, actual in results.items():
            assert_within_budget(actual, peers[name], exact[name])


def check_findings(executions: list[Execution]) -> None:
    """Fail with the first findings of these launches, if there are any."""
    found = [f"{e.name}: {finding}" for e in executions for finding in e.findings]
    total = sum(sum(e.found.values()) for e in executions)
    assert not found, "\n".join([f"{total} findings, the first of them:", *found[:5]])


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers inside a block of NaN whose rows start at multiples of 16 elements.

    Kernels for short rows copy 16 bytes at a time, which strides that are no such multiples forbid.
    """
    return poisoned(shape, dtype, device, width=-(-shape[-1] // 16) * 16 + 16)


def make_aligned(
    case: AttentionTestCase, dtype: torch.dtype, device: str = "cpu"
) -> attention_cases.Inputs:
    """Return inputs as models have them."""
    with mock.patch.object(attention_cases, "poisoned", aligned):
        return attention_cases.make_inputs(case, dtype, device)


def beside(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random numbers (B, H, N, D) inside a block of NaN, whose heads lie side by side."""
    batch, heads, rows, dim = shape
    numbers = aligned((batch, rows, heads * dim), dtype, device)
    return numbers.unflatten(2, (heads, dim)).transpose(1, 2)


def make_beside(
    case: AttentionTestCase, dtype: torch.dtype, device: str = "cpu"
) -> attention_cases.Inputs:
    """Return inputs as projections leave them."""
    with mock.patch.object(attention_cases, "poisoned", beside):
        return attention_cases.make_inputs(case, dtype, device)


def on_cpu(make_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes inputs for functions below the dispatcher, which unwraps pretended ones."""
    return lambda case, dtype, device="cpu": make_inputs(case, dtype)


def run_sharing_lse(inputs: attention_cases.Inputs) -> dict[str, Any]:
    """Run as a GPU that has a head for every program does: kernels in Gluon, forward too."""
    with mock.patch.object(_tiles, "ENOUGH_PROGRAMS", 1):
        plain, _ = route.forward_on_gpu(op.Dense, False, *inputs.arguments)
        found = attention_cases.run_sharing_lse(inputs)
    assert torch.equal(found["out"], plain)
    return found


MODELS = (
    AttentionTestCase("ViT-B", 1, 2, 2, 197, 197, 64),
    AttentionTestCase("ViT-B, lengths", 2, 2, 2, 197, 197, 64, lengths=(50, 197)),
    AttentionTestCase("ViT-B, dropout", 1, 2, 2, 197, 197, 64, dropout_p=0.1),
    AttentionTestCase("ViT-B, additive mask", 1, 2, 2, 197, 197, 64, mask="additive"),
    AttentionTestCase("ViT-B, boolean mask", 1, 2, 2, 197, 197, 64, mask="boolean"),
    AttentionTestCase("ViT-B, head_dim 48", 1, 2, 2, 197, 197, 48),
    AttentionTestCase("ViT-B, grouped queries", 1, 4, 2, 197, 197, 64),
    AttentionTestCase("ViT-H", 1, 1, 1, 257, 257, 80),
    AttentionTestCase("ViT-B, 384 pixels", 1, 1, 1, 577, 577, 64),
    AttentionTestCase("256 tokens", 1, 2, 2, 256, 256, 64),
    AttentionTestCase("BERT", 1, 2, 2, 128, 128, 32),
    AttentionTestCase("BERT, dropout", 1, 2, 2, 128, 128, 32, dropout_p=0.2),
    AttentionTestCase("128 tokens, causal", 1, 2, 2, 128, 128, 64, causal=True),
    AttentionTestCase("64 tokens", 1, 2, 2, 64, 64, 64),
    AttentionTestCase("GPT-2, 64 tokens", 1, 2, 2, 64, 64, 32, causal=True),
    AttentionTestCase("GPT-2, 512 tokens", 1, 2, 2, 512, 512, 32, causal=True),
    AttentionTestCase("64 tokens, additive mask", 1, 2, 2, 64, 64, 32, mask="additive"),
    AttentionTestCase("a window of DaViT", 2, 3, 3, 49, 49, 32),
    AttentionTestCase("inner tokens of TNT", 3, 4, 4, 16, 16, 10),
    AttentionTestCase("inner tokens of TNT, dropout", 3, 4, 4, 16, 16, 10, dropout_p=0.1),
    AttentionTestCase("32 tokens, additive mask", 2, 2, 2, 32, 32, 64, mask="additive"),
    AttentionTestCase("16 tokens, boolean mask", 2, 2, 2, 16, 16, 16, mask="boolean"),
    AttentionTestCase("class attention", 2, 2, 2, 1, 197, 32),
    AttentionTestCase("head_dim 128, causal", 1, 1, 1, 300, 300, 128, causal=True),
)


OPERATORS = {
    "attention": Operator(
        MODELS,
        make_aligned,
        attention_cases.reference_results,
        attention_cases.peers_of,
        attention_cases.run_operators,
    ),
    "strided attention": Operator(
        (*attention_cases.CASES, *attention_cases.WINDOW_CASES),
        attention_cases.make_inputs,
        attention_cases.reference_results,
        attention_cases.peers_of,
        attention_cases.run_operators,
    ),
    "varlen": Operator(
        (*varlen_cases.CASES, *varlen_cases.WINDOW_CASES),
        varlen_cases.make_inputs,
        varlen_cases.assemble,
        varlen_cases.peers_of,
        varlen_cases.run_operators,
    ),
    "attention, shared lse": Operator(
        MODELS,
        on_cpu(make_aligned),
        attention_cases.reference_results,
        attention_cases.peers_of,
        run_sharing_lse,
    ),
    "strided attention, shared lse": Operator(
        (*attention_cases.CASES, *attention_cases.WINDOW_CASES),
        on_cpu(attention_cases.make_inputs),
        attention_cases.reference_results,
        attention_cases.peers_of,
        run_sharing_lse,
    ),
    "varlen, shared lse": Operator(
        (*varlen_cases.CASES, *varlen_cases.WINDOW_CASES),
        on_cpu(varlen_cases.make_inputs),
        varlen_cases.assemble,
        varlen_cases.peers_of,
        varlen_cases.run_sharing_lse,
    ),
    **{
        family: Operator(
            cases,
            operator_cases.make_inputs,
            operator_cases.reference_results,
            operator_cases.peers_of,
            operator_cases.run_operator,
        )
        for family, cases in operator_cases.CASES.items()
    },
}

# Of each commit: operator, case, dtype, compute capability. All others are nightly.
CHOSEN = {
    ("attention", "ViT-B", BF16, 80),
    ("attention", "ViT-B", BF16, 90),
    ("attention", "ViT-B", HALF, 90),
    ("attention", "ViT-B, lengths", BF16, 80),
    ("attention", "ViT-B, dropout", BF16, 90),
    ("attention", "ViT-B, additive mask", BF16, 80),
    ("attention", "ViT-B, grouped queries", BF16, 90),
    ("attention", "BERT", BF16, 90),
    ("attention", "128 tokens, causal", HALF, 80),
    ("attention", "GPT-2, 512 tokens", BF16, 90),
    ("attention", "inner tokens of TNT", BF16, 80),
    ("attention", "inner tokens of TNT", BF16, 90),
    ("attention", "64 tokens, additive mask", BF16, 90),
    ("attention, shared lse", "ViT-B", BF16, 80),
    ("attention, shared lse", "ViT-B", BF16, 90),
    ("attention, shared lse", "ViT-B, boolean mask", BF16, 90),
    ("attention, shared lse", "ViT-B, additive mask", BF16, 80),
    ("attention, shared lse", "GPT-2, 64 tokens", BF16, 90),
    ("attention, shared lse", "16 tokens, boolean mask", BF16, 80),
    ("attention, shared lse", "inner tokens of TNT", BF16, 80),
    ("strided attention, shared lse", "boolean mask, a hidden row", BF16, 90),
    ("varlen, shared lse", "rows without keys, keys without rows", BF16, 90),
    ("strided attention", "head_dim 48", BF16, 80),
    ("strided attention", "dropout with everything", BF16, 90),
    ("strided attention", "softcap of Gemma 2", BF16, 80),
    ("strided attention", "softcap, additive mask", BF16, 90),
    ("strided attention", "window of both sides", BF16, 80),
    ("strided attention", "window, more rows than keys", BF16, 90),
    ("varlen", "texts, causal", BF16, 80),
    ("varlen", "window, crossed", BF16, 90),
    ("varlen", "images of many sizes", BF16, 90),
    ("window", "DaViT", BF16, 80),
    ("window", "DaViT", BF16, 90),
    ("outlook", "VOLO", BF16, 80),
    ("outlook", "VOLO", HALF, 90),
    ("covariance", "cross, XCiT", BF16, 90),
    ("covariance", "channel, last stage of DaViT", BF16, 80),
    ("attention", "ViT-B", BF16, 89),
    ("attention", "inner tokens of TNT", BF16, 100),
    ("attention", "ViT-B, dropout", BF16, 100),
    ("attention", "ViT-B", BF16, 120),
    ("attention", "GPT-2, 512 tokens", HALF, 120),
    ("attention", "inner tokens of TNT", BF16, 120),
    ("strided attention", "head_dim 48", BF16, 120),
    ("varlen", "texts, causal", BF16, 120),
    ("window", "DaViT", BF16, 120),
    ("outlook", "VOLO", BF16, 120),
    ("covariance", "cross, XCiT", BF16, 120),
}
