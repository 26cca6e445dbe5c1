"""Window attention on a GPU: the same cases and the same budget, bfloat16 included."""

import pytest
import torch
from torch import Tensor

from leaner_kernels.ops.window import window_attention, window_attention_with_stats
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn
from tests.window_cases import (
    CASES,
    NAMES,
    WindowTestCase,
    make_inputs,
    peers_of,
    reference_results,
    run_operators,
)

DTYPES = torch.bfloat16, torch.float16, torch.float32
REPEATS = 20  # of a test that the same call gives the same bits
# The stages of DaViT-B on images of 224 pixels, the lean third one, and windows of other models.
MODELS = (
    WindowTestCase("first stage", 2, (8, 8), (7, 7), 4, 32),
    WindowTestCase("second stage", 2, (4, 4), (7, 7), 8, 32),
    WindowTestCase("third stage", 4, (2, 2), (7, 7), 16, 32),
    WindowTestCase("third stage, lean", 4, (2, 2), (7, 7), 32, 16),
    WindowTestCase("fourth stage", 8, (1, 1), (7, 7), 32, 32),
    WindowTestCase("windows of 8", 2, (3, 2), (8, 8), 6, 30),
    WindowTestCase("windows of 12", 2, (2, 2), (12, 12), 4, 32),
    WindowTestCase("windows of 14", 1, (2, 1), (14, 14), 3, 64),
)
EVERY = CASES + MODELS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY, ids=[case.name for case in EVERY])
def test_kernels_stay_within_the_error_budget(case: WindowTestCase, dtype: torch.dtype) -> None:
    exact = reference_results(make_inputs(case, dtype), torch.float64)
    peers = peers_of(make_inputs(case, dtype), dtype)
    for name, actual in run_operators(make_inputs(case, dtype, "cuda")).items():
        assert actual.is_cuda
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("case", MODELS, ids=[case.name for case in MODELS])
def test_the_backward_is_bitwise_deterministic(case: WindowTestCase) -> None:
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    qkv = inputs.qkv.requires_grad_()

    def run() -> Tensor:
        return torch.autograd.grad(window_attention(qkv, inputs.window), qkv, inputs.grad)[0]

    first = run()
    assert all(torch.equal(run(), first) for _ in range(REPEATS))


def test_statistics_come_with_the_same_output() -> None:
    inputs = make_inputs(CASES[NAMES.index("DaViT")], torch.float32, "cuda")
    stats = window_attention_with_stats(inputs.qkv, inputs.window)
    assert stats.heads is None
    torch.testing.assert_close(stats.out, window_attention(inputs.qkv, inputs.window))


def test_a_second_call_gives_what_its_own_tensors_say() -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first, second = (randn(2, 14, 14, 3, 4, 32, dtype=torch.float16) for _ in range(2))
    padded = randn(1 + second.numel(), dtype=torch.float16)
    shifted = padded[1:].view(second.shape)  # an address that is no multiple of 16 bytes
    for qkv in (first, second, shifted, second):
        expected = window_attention(qkv.float().cpu(), 7)
        actual = window_attention(qkv, 7).float().cpu()
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiles_without_a_graph_break(dtype: torch.dtype) -> None:
    qkv = randn(2, 14, 14, 3, 4, 32, dtype=dtype).requires_grad_()
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call(x: Tensor) -> Tensor:
        stats = window_attention_with_stats(x, 7, sample=sample)
        assert stats.heads is not None
        return stats.out + window_attention(x, 7) + stats.heads.mean() + stats.entropy.mean()

    compiled = torch.compile(call, fullgraph=True)
    expected, actual = call(qkv), compiled(qkv)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), qkv)[0] for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


def test_a_captured_graph_may_skip_a_sample() -> None:
    """The index lives on the device: a negative one leaves the slot as it was."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    qkv = randn(4, 14, 14, 3, 4, 32)
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    expected = window_attention_with_stats(qkv, 7, sample=sample).heads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = window_attention_with_stats(qkv, 7, sample=sample)
    graph.replay()
    assert stats.heads is not None
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


def test_wrong_arguments_are_refused() -> None:
    qkv = randn(2, 14, 14, 3, 4, 32)
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        window_attention(qkv.double(), 7)
    with pytest.raises(ValueError, match=r"sample must be \(S,\) int32 on cuda"):
        window_attention_with_stats(qkv, 7, sample=torch.zeros(1, dtype=torch.int32))
