"""Attention between channels on a GPU: the same cases and the same budget, bfloat16 included."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leaner_kernels import condition_number
from leaner_kernels.ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from tests.covariance_cases import (
    CASES,
    CHANNEL,
    CROSS,
    NAMES,
    CovarianceTestCase,
    make_inputs,
    peers_of,
    reference_results,
    run_operator,
)
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Of tests that the same call gives the same bits: how much runs at once, and how often.
BATCH, REPEATS = 16, 20
FUNCTIONS = {
    CROSS: (cross_covariance_attention, cross_covariance_attention_with_stats),
    CHANNEL: (channel_attention, channel_attention_with_stats),
}
# Tokens, heads and channels of a head: XCiT at 224 and 384 pixels, and the stages of DaViT, lean
# ones too.
MODELS = [
    (CROSS, 196, 8, 64),
    (CROSS, 196, 16, 48),
    (CROSS, 576, 16, 32),
    (CHANNEL, 3136, 4, 32),
    (CHANNEL, 784, 8, 32),
    (CHANNEL, 196, 48, 16),
    (CHANNEL, 49, 32, 32),
]


def tensors(operator: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return qkv (B, N, 3, H, D) and what else the operator takes; all want a gradient."""
    found = [randn(*shape, dtype=dtype)]
    if operator == CROSS:
        found.append(torch.linspace(0.5, 3, shape[3], device="cuda"))
    return [t.requires_grad_() for t in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: CovarianceTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    for name, actual in run_operator(make_inputs(case, dtype, "cuda")).items():
        assert actual.is_cuda
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operator", "tokens", "heads", "dim"), MODELS)
def test_shapes_of_the_models_stay_within_the_error_budget(
    operator: str, tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    case = CovarianceTestCase("model", operator, 2, tokens, heads, dim, scale=dim**-0.5 / 8)
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    for name, actual in run_operator(make_inputs(case, dtype, "cuda")).items():
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize(("operator", "tokens", "heads", "dim"), MODELS)
def test_the_backward_is_bitwise_deterministic(
    operator: str, tokens: int, heads: int, dim: int
) -> None:
    given = tensors(operator, BATCH, tokens, 3, heads, dim)
    grad = randn(BATCH, tokens, heads, dim, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        out = FUNCTIONS[operator][0](*given)
        return [out, *torch.autograd.grad(out, given, grad)]

    first = run()
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_a_second_call_gives_what_its_own_tensors_say(operator: str) -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    function = FUNCTIONS[operator][0]
    first, *rest = tensors(operator, 2, 100, 3, 4, 32, dtype=torch.float32)
    padded = randn(1 + first.numel())
    shifted = padded[1:].view(first.shape)  # an address that is no multiple of 16 bytes
    for qkv in (first, randn(*first.shape), shifted, first):
        expected = function(*(t.detach().cpu().double() for t in (qkv, *rest)))
        actual = function(qkv, *rest).detach().cpu().double()
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("operator", FUNCTIONS)
def test_compiles_without_a_graph_break(operator: str, measured: bool, dtype: torch.dtype) -> None:
    given = tensors(operator, 2, 100, 3, 4, 32, dtype=dtype)
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call(*x: Tensor) -> Tensor:
        if not measured:
            return FUNCTIONS[operator][0](*x)
        stats = FUNCTIONS[operator][1](*x, sample=sample)
        return stats.out + stats.heads.mean() + stats.entropy[:, None, :, None]

    compiled: Callable[..., Tensor] = torch.compile(call, fullgraph=True)
    expected, actual = call(*given), compiled(*given)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), given) for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


def test_a_captured_graph_may_skip_a_sample() -> None:
    """The index lives on the device: a negative one leaves the slot as it was."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    given = [t.detach() for t in tensors(CROSS, 4, 100, 3, 4, 32)]
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    expected = cross_covariance_attention_with_stats(*given, sample=sample).heads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = cross_covariance_attention_with_stats(*given, sample=sample)
    graph.replay()
    assert stats.heads is not None
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


def test_the_capture_shows_condition_numbers_that_bfloat16_hides() -> None:
    """Softmax rows that are nearly one another: the heads' small singular values are small."""
    qkv = randn(1, 196, 3, 4, 32, dtype=torch.bfloat16)
    temperature = torch.full((4,), 0.2, device="cuda")
    sample = torch.zeros(1, dtype=torch.int32, device="cuda")
    stats = cross_covariance_attention_with_stats(qkv, temperature, sample=sample)
    assert stats.heads is not None
    exact = cross_covariance_attention(qkv.cpu().double(), temperature.cpu().double())
    wanted = condition_number(exact.flatten(2)).kappa
    assert wanted.item() > 1e5
    found = condition_number(stats.heads).kappa.cpu().double()
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)


def test_what_kernels_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="on cuda must have a head dimension up to 64, got 65"):
        channel_attention(randn(1, 9, 3, 2, 65))
    given = tensors(CROSS, 1, 9, 3, 2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        cross_covariance_attention(*given)
