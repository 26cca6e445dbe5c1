"""Nyström attention on a GPU: the same cases and the same budget, bfloat16 included."""

import pytest
import torch
from torch import Tensor

from leaner_kernels import condition_number
from leaner_kernels.ops.nystrom import nystrom_attention, nystrom_attention_with_stats
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn
from tests.nystrom_cases import (
    CASES,
    NAMES,
    NystromTestCase,
    make_inputs,
    peers_of,
    reference_results,
    run_operator,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Of tests that the same call gives the same bits: how much runs at once, and how often.
BATCH, REPEATS = 8, 20
INITS = "matrix", "batch"
# Tokens, landmarks and channels of a head: the Long-Range Arena's, and the ends of the range.
MODELS = [(1024, 64, 32), (2048, 32, 32), (4096, 128, 32), (1024, 256, 64), (1056, 48, 40)]


def tensors(
    batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Return query, key and value (B, H, N, D), views of one packed projection."""
    packed = randn(batch, tokens, 3, heads, dim, dtype=dtype)
    return [t.detach().requires_grad_() for t in packed.permute(2, 0, 3, 1, 4).unbind(0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: NystromTestCase, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    for name, actual in run_operator(make_inputs(case, dtype, "cuda")).items():
        assert actual.is_cuda
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize(("tokens", "landmarks", "dim"), MODELS)
def test_shapes_of_the_models_stay_within_the_error_budget(
    tokens: int, landmarks: int, dim: int, whole_batch: bool, dtype: torch.dtype
) -> None:
    lengths = tokens, tokens * 2 // 3
    case = NystromTestCase(
        "model", 2, tokens, 2, dim, landmarks, lengths, 0.1, whole_batch=whole_batch
    )
    inputs = make_inputs(case, dtype)
    exact, peers = reference_results(inputs, torch.float64), peers_of(inputs)
    for name, actual in run_operator(make_inputs(case, dtype, "cuda")).items():
        assert_within_budget(actual, peers[name], exact[name])


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(("tokens", "landmarks", "dim"), MODELS)
def test_the_backward_is_bitwise_deterministic(
    tokens: int, landmarks: int, dim: int, init: str
) -> None:
    given = tensors(BATCH, 4, tokens, dim)
    grad = randn(*given[0].shape, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        out = nystrom_attention(*given, landmarks, init=init)
        return [out, *torch.autograd.grad(out, given, grad)]

    first = run()
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_a_second_call_gives_what_its_own_tensors_say() -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first = [t.detach() for t in tensors(2, 4, 96, 32, torch.float32)]
    other = [randn(*t.shape) for t in first]
    # Addresses that are no multiples of 16 bytes.
    shifted = [randn(1 + t.numel())[1:].view(2, 96, 4, 32).transpose(1, 2) for t in first]
    lengths = torch.tensor([96, 40], dtype=torch.int32, device="cuda")
    for given in (first, other, shifted, first):
        for key_lengths in (None, lengths, lengths.flip(0)):
            cpu = None if key_lengths is None else key_lengths.cpu()
            wide = (t.cpu().double() for t in given)
            expected = nystrom_attention(*wide, 12, key_lengths=cpu)
            actual = nystrom_attention(*given, 12, key_lengths=key_lengths).cpu().double()
            torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("measured", [False, True])
def test_compiles_without_a_graph_break(measured: bool, dtype: torch.dtype) -> None:
    given = tensors(2, 4, 96, 32, dtype)
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([96, 40], dtype=torch.int32, device="cuda")

    def call(*x: Tensor) -> Tensor:
        if not measured:
            return nystrom_attention(*x, 12, key_lengths=lengths)
        stats = nystrom_attention_with_stats(*x, 12, key_lengths=lengths, sample=sample)
        return stats.out + stats.heads.mean() + stats.entropy[..., None, None]

    compiled = torch.compile(call, fullgraph=True)
    expected, actual = call(*given), compiled(*given)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), given) for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


@pytest.mark.parametrize("init", INITS)
def test_autocast_rounds_the_inputs_alone(init: str) -> None:
    given = tensors(2, 4, 96, 32, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = nystrom_attention(*given, 12, init=init)
    autocast_rule = (t.bfloat16() for t in given)
    assert torch.equal(found, nystrom_attention(*autocast_rule, 12, init=init))


@pytest.mark.parametrize("init", INITS)
def test_a_captured_graph_may_skip_a_sample(init: str) -> None:
    """The index lives on the device, and nothing between the stages waits for it."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    given = [t.detach() for t in tensors(4, 4, 96, 32)]
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    expected = nystrom_attention_with_stats(*given, 12, init=init, sample=sample).heads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = nystrom_attention_with_stats(*given, 12, init=init, sample=sample)
    graph.replay()
    assert stats.heads is not None
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_capture_shows_condition_numbers_that_half_precision_hides(dtype: torch.dtype) -> None:
    """Softmax rows that are nearly one another: the heads' small singular values are small."""
    case = NystromTestCase("kappa", 1, 64, 2, 16, 32, scale=0.014)
    wanted = condition_number(reference_results(make_inputs(case, dtype), torch.float64)["heads"])
    assert wanted.kappa.min().item() > 1e5
    heads = run_operator(make_inputs(case, dtype, "cuda"))["heads"]
    found = condition_number(heads).kappa.cpu().double()
    torch.testing.assert_close(found, wanted.kappa, rtol=0.01, atol=0)


def test_what_kernels_cannot_do_is_refused() -> None:
    wide = [randn(1, 2, 8, 65)] * 3
    with pytest.raises(ValueError, match="on cuda must have a head dimension up to 64, got 65"):
        nystrom_attention(*wide, 4)
    given = tensors(1, 2, 8, 16, torch.float64)
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        nystrom_attention(*given, 4)
