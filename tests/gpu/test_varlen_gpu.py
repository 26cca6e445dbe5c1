"""Attention over varlen sequences on a GPU: the same cases and the same budget."""

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention_varlen, attention_varlen_with_stats
from leaner_kernels.ops.attention import dispatch
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn
from tests.varlen_cases import (
    CASES,
    NAMES,
    VarlenTestCase,
    case_named,
    check,
    make_inputs,
    run_operators,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REPEATS = 20  # of a test that the same call gives the same bits
MODELS = (
    VarlenTestCase("NaViT", (49, 256, 100, 197, 81, 64, 144, 225), 16, 64, slack=8),
    VarlenTestCase("texts", (512, 3, 77, 130, 290), 12, 32, causal=True, after=12),
    VarlenTestCase("a long text", (2048, 5, 1000), 2, 128, causal=True),
    VarlenTestCase("many short sequences", (16, 9, 1, 12) * 64, 4, 10),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES + MODELS, ids=[*NAMES, *(case.name for case in MODELS)])
def test_kernels_stay_within_the_error_budget(case: VarlenTestCase, dtype: torch.dtype) -> None:
    found = run_operators(make_inputs(case, dtype, "cuda"))
    assert all(actual.is_cuda for actual in found.values())
    check(make_inputs(case, dtype), found)


def test_the_backward_is_bitwise_deterministic() -> None:
    inputs = make_inputs(case_named("dropout with everything"), torch.bfloat16, "cuda")
    first = run_operators(inputs)
    for _ in range(REPEATS):
        for name, value in run_operators(inputs).items():
            assert torch.equal(value, first[name]), name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_pytorchs_computes_the_same_and_leaves_zeros_outside(
    dim: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(False)  # which every test has on, and which keeps ours
    qkv = randn(900, 3, 4, dim, dtype=torch.bfloat16)
    grad = randn(900, 4, dim, dtype=torch.bfloat16)
    starts = torch.tensor([3, 400, 400, 877], dtype=torch.int32, device="cuda")

    def run(rule: dispatch.Rule | None, given: Tensor) -> list[Tensor]:
        monkeypatch.setattr(dispatch, "find_rule_of_library", lambda *_, **call: rule)
        leaf = given.detach().requires_grad_()
        tensors, place = leaf.unbind(1), starts.to(given.device)
        out = attention_varlen(*tensors, place, 477, is_causal=is_causal)
        return [out, *torch.autograd.grad(out, leaf, grad.to(out))]

    exact, plain = (run(None, qkv.cpu().to(dtype)) for dtype in (torch.float64, torch.bfloat16))
    for actual, peer, truth in zip(run(dispatch.Rule(1, None, "a test"), qkv), plain, exact):
        assert_within_budget(actual, peer, truth)
        assert not actual[:3].any()
        assert not actual[877:].any()


def test_pytorchs_never_follows_wild_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(
        dispatch, "find_rule_of_library", lambda *_, **call: dispatch.Rule(1, None, "a test")
    )
    q = randn(20, 4, 16, dtype=torch.bfloat16)
    wild, clamped = (
        torch.tensor(starts, dtype=torch.int32, device="cuda")
        for starts in ((-7, 4, 2, 8, 1 << 30), (0, 4, 4, 8, 20))
    )
    expected = attention_varlen(q, q, q, clamped, 12)
    assert torch.equal(attention_varlen(q, q, q, wild, 12), expected)


def test_wild_starts_are_clamped() -> None:
    q, k, v = (randn(20, 4, 16) for _ in range(3))
    wild, clamped = (
        torch.tensor(starts, dtype=torch.int32, device="cuda")
        for starts in ((-7, 4, 8, 1 << 30), (0, 4, 8, 20))
    )
    expected = attention_varlen(q, k, v, clamped, 12)
    assert torch.equal(attention_varlen(q, k, v, wild, 12), expected)


@pytest.mark.parametrize("with_stats", [False, True])
def test_one_compiled_graph_serves_batches_of_other_sizes(with_stats: bool) -> None:
    def call(packed: Tensor, starts: Tensor, longest: int) -> Tensor:
        q, k, v = packed.unbind(1)
        if not with_stats:
            return attention_varlen(q, k, v, starts, longest)
        stats = attention_varlen_with_stats(q, k, v, starts, longest, sample=starts[:1] * 0)
        return stats.out + stats.heads.mean() + stats.entropy.mean()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for lengths in ((30, 0, 5), (70, 2), (1, 40, 2, 300)):
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        packed = randn(sum(lengths) + 2, 3, 4, 32).requires_grad_()
        expected, actual = (f(packed, starts, max(lengths)) for f in (call, compiled))
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(t.square().sum(), packed)[0] for t in (expected, actual)]
        torch.testing.assert_close(grads[1], grads[0])


def test_a_captured_graph_follows_starts_and_samples_on_the_device() -> None:
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (randn(100, 3, 16) for _ in range(3))
    starts = torch.tensor([0, 40, 100], dtype=torch.int32, device="cuda")
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, ...]:
        return attention_varlen_with_stats(q, k, v, starts, 64, sample=sample)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for second, index in ((60, 0), (37, 1)):
        starts[1] = second
        sample.fill_(index)
        graph.replay()
        for actual, expected in zip(captured, call(), strict=True):
            assert torch.equal(actual, expected)
    captured.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (captured.heads == 7).all()
