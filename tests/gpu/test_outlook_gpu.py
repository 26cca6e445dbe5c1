"""Outlook attention on a GPU: the same cases and the same budget, bfloat16 included."""

import pytest
import torch
from torch import Tensor

from leaner_kernels.nn.outlook import OutlookAttention
from leaner_kernels.ops.outlook import outlook_attention, outlook_attention_with_stats
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn
from tests.outlook_cases import (
    CASES,
    NAMES,
    OutlookTestCase,
    make_inputs,
    peers_of,
    reference_results,
    run_operators,
)

DTYPES = torch.bfloat16, torch.float16, torch.float32
REPEATS = 20  # of a test that the same call gives the same bits
# The first stages of VOLO-D3 and D4 on images of 224 and 448 pixels, original and lean.
MODELS = (
    OutlookTestCase("D3", 4, (28, 28), 8, 32, (3, 2, 1)),
    OutlookTestCase("D3, lean", 4, (28, 28), 16, 16, (3, 2, 1)),
    OutlookTestCase("D4", 2, (28, 28), 12, 32, (3, 2, 1)),
    OutlookTestCase("D4, lean, large images", 2, (56, 56), 24, 16, (3, 2, 1)),
    OutlookTestCase("head_dim 64", 2, (14, 14), 4, 64, (3, 2, 1)),
)
EVERY = CASES + MODELS
VOLO = CASES[NAMES.index("VOLO")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_kernels_stay_within_the_error_budget(case: OutlookTestCase, dtype: torch.dtype) -> None:
    exact = reference_results(make_inputs(case, dtype), torch.float64)
    peers = peers_of(make_inputs(case, dtype), dtype)
    for name, actual in run_operators(make_inputs(case, dtype, "cuda")).items():
        assert actual.is_cuda
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("case", [VOLO, *MODELS], ids=lambda case: case.name)
def test_the_backward_is_bitwise_deterministic(case: OutlookTestCase) -> None:
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    leaves = inputs.value.requires_grad_(), inputs.logits.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        out = outlook_attention(*leaves, stride=2)
        return torch.autograd.grad(out, leaves, inputs.grad)

    first = run()
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))


def test_statistics_come_with_the_same_output() -> None:
    inputs = make_inputs(VOLO, torch.float32, "cuda")
    stats = outlook_attention_with_stats(*inputs[:2], stride=2)
    assert stats.heads is None
    torch.testing.assert_close(stats.out, outlook_attention(*inputs[:2], stride=2))


def test_no_window_is_unfolded_in_memory() -> None:
    """A training step keeps its inputs and lse, and takes what it returns: K * K values nowhere."""
    value = randn(8, 28, 28, 8, 32, dtype=torch.bfloat16).requires_grad_()
    logits = randn(8, 14, 14, 8, 9, 9, dtype=torch.bfloat16).requires_grad_()
    grad = randn(*value.shape, dtype=torch.bfloat16)
    for _ in range(2):  # the first step compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = outlook_attention(value, logits, stride=2)
        kept = torch.autograd.grad(out, (value, logits), grad)
        taken = torch.cuda.max_memory_allocated() - before
        returned = sum(t.nbytes for t in (out, *kept))
        del out, kept
    lse = 4 * logits.numel() // 9
    assert taken <= returned + lse + (1 << 16)
    assert taken < value.nbytes * 9 // 4 + returned  # what unfolding the values would add


def test_a_second_call_gives_what_its_own_tensors_say() -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    logits = randn(2, 7, 7, 4, 9, 9, dtype=torch.float16)
    first, second = (randn(2, 14, 14, 4, 32, dtype=torch.float16) for _ in range(2))
    padded = randn(1 + second.numel(), dtype=torch.float16)
    shifted = padded[1:].view(second.shape)  # an address that is no multiple of 16 bytes
    for value in (first, second, shifted, second):
        expected = outlook_attention(value.float().cpu(), logits.float().cpu(), stride=2)
        actual = outlook_attention(value, logits, stride=2).float().cpu()
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiles_without_a_graph_break(dtype: torch.dtype) -> None:
    inputs = make_inputs(VOLO, dtype, "cuda")
    leaves = inputs.value.requires_grad_(), inputs.logits.requires_grad_()

    def call(value: Tensor, logits: Tensor) -> Tensor:
        stats = outlook_attention_with_stats(value, logits, stride=2, sample=inputs.sample)
        return stats.out + stats.heads[0].mean() + stats.entropy[:, None, None, :, None]

    compiled = torch.compile(call, fullgraph=True)
    expected, actual = call(*leaves), compiled(*leaves)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    wanted, found = (torch.autograd.grad(t.sum(), leaves) for t in (expected, actual))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, **close)


def test_module_on_a_gpu_equals_itself_on_the_cpu() -> None:
    module = OutlookAttention(96, 8, 16)
    x = torch.randn(2, 28, 28, 96)
    expected = module(x)
    actual = module.cuda()(x.cuda()).cpu()
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
