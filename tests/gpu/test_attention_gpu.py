"""Softmax attention on a GPU: the same cases and the same budget, bfloat16 included."""

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention, attention_qkvpacked, attention_with_stats, explain
from leaner_kernels.ops.attention import op
from tests.attention_cases import (
    CASES,
    NAMES,
    AttentionTestCase,
    check,
    make_inputs,
    run_operators,
)
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Of tests that the same call gives the same bits: how much runs at once, and how often.
BATCH, REPEATS = 8, 20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernels_stay_within_the_error_budget(case: AttentionTestCase, dtype: torch.dtype) -> None:
    found = run_operators(make_inputs(case, dtype, "cuda"))
    assert all(actual.is_cuda for actual in found.values())
    check(make_inputs(case, dtype), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim", "causal"),
    [
        (64, 16, 4, 10, False),
        (4, 64, 16, 32, True),
        (4, 128, 24, 32, False),
        (4, 197, 16, 64, False),
        (2, 197, 30, 64, False),
        (2, 512, 16, 32, True),
        (2, 1024, 2, 128, False),
        (1, 2048, 2, 80, True),
    ],
)
def test_packed_attention_at_the_shapes_of_the_models(
    batch: int, tokens: int, heads: int, dim: int, causal: bool, dtype: torch.dtype
) -> None:
    qkv = randn(batch, tokens, 3, heads, dim, dtype=dtype)
    grad = randn(batch, tokens, heads, dim, dtype=dtype)

    def library(as_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = qkv.cpu().to(as_dtype).requires_grad_()
        q, k, v = op.split_qkv(x)
        scale = dim**-0.5
        s = scale * (q @ k.mT)
        if causal:
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            s = s.masked_fill(~seen, float("-inf"))
        out = (torch.softmax(s, dim=-1) @ v).transpose(1, 2)
        return out, torch.autograd.grad(out, x, grad.cpu().to(as_dtype))[0]

    leaf = qkv.clone().requires_grad_()
    out = attention_qkvpacked(leaf, is_causal=causal)
    (dqkv,) = torch.autograd.grad(out, leaf, grad)
    assert out.is_contiguous()
    assert dqkv.is_contiguous()
    for actual, peer, exact in zip((out, dqkv), library(dtype), library(torch.float64)):
        assert_within_budget(actual, peer, exact)


def test_more_programs_than_a_second_grid_axis_holds() -> None:
    qkv = randn(25088, 16, 3, 4, 10, dtype=torch.bfloat16)
    out = attention_qkvpacked(qkv)
    torch.testing.assert_close(out[-3:], attention_qkvpacked(qkv[-3:].clone()), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [
        (16, 4, 10),
        (49, 3, 32),
        (64, 16, 32),
        (128, 24, 32),
        (197, 16, 64),
        (300, 4, 64),
        (512, 16, 32),
    ],
)
def test_the_backward_is_bitwise_deterministic(tokens: int, heads: int, dim: int) -> None:
    qkv = randn(BATCH, tokens, 3, heads, dim, dtype=torch.bfloat16).requires_grad_()
    grad = randn(BATCH, tokens, heads, dim, dtype=torch.bfloat16)
    for causal in (False, True):

        def run(causal: bool = causal) -> Tensor:
            out = attention_qkvpacked(qkv, is_causal=causal)
            return torch.autograd.grad(out, qkv, grad)[0]

        first = run()
        assert all(torch.equal(run(), first) for _ in range(REPEATS))


def test_a_second_call_gives_what_its_own_tensors_say() -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first, second = (randn(2, 197, 3, 4, 64, dtype=torch.float16) for _ in range(2))
    padded = randn(1 + second.numel(), dtype=torch.float16)
    shifted = padded[1:].view(second.shape)  # an address that is no multiple of 16 bytes
    for qkv in (first, second, shifted, second):
        q, k, v = qkv.float().permute(2, 0, 3, 1, 4).unbind(0)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        torch.testing.assert_close(attention_qkvpacked(qkv).float(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [50, 197, 1024])
@pytest.mark.parametrize("function", ["attention", "packed", "stats"])
def test_compiles_without_a_graph_break(function: str, tokens: int, dtype: torch.dtype) -> None:
    packed = randn(2, tokens, 3, 4, 32, dtype=dtype).requires_grad_()
    sample = torch.tensor([1], dtype=torch.int32, device="cuda")

    def call(x: Tensor) -> Tensor:
        if function == "packed":
            return attention_qkvpacked(x).transpose(1, 2)
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        if function == "attention":
            return attention(q, k, v)
        stats = attention_with_stats(q, k, v, sample=sample)
        return stats.out + stats.heads.mean() + stats.entropy[..., None, None]

    compiled = torch.compile(call, fullgraph=True)
    expected, actual = call(packed), compiled(packed)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **close)
    grads = [torch.autograd.grad(t.sum(), packed)[0] for t in (expected, actual)]
    torch.testing.assert_close(grads[1], grads[0], **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_call_has_its_own_softcap(dtype: torch.dtype) -> None:
    """The second call of a kind launches what the first left, which is for one softcap."""
    q, k, v, grad = (randn(1, 2, 70, 64, dtype=dtype) for _ in range(4))
    own = [t.requires_grad_() for t in (q, k, v)]

    def eager(softcap: float, as_dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().cpu().to(as_dtype).requires_grad_() for t in (q, k, v)]
        s = leaves[0] @ leaves[1].mT
        s = softcap * torch.tanh(s / softcap) if softcap else s
        out = torch.softmax(s, dim=-1) @ leaves[2]
        return [out, *torch.autograd.grad(out, leaves, grad.cpu().to(as_dtype))]

    for softcap in (0.0, 20.0, 1.0, 20.0, 1.0, 0.0):
        out = attention(*own, scale=1.0, softcap=softcap)
        found = out, *torch.autograd.grad(out, own, grad)
        truth, peers = eager(softcap, torch.float64), eager(softcap, dtype)
        for actual, peer, exact in zip(found, peers, truth, strict=True):
            assert_within_budget(actual, peer, exact)


def test_a_captured_graph_may_skip_a_sample() -> None:
    """The index lives on the device: a negative one leaves the slot as it was."""
    # A graph would fill its memory with NaN at every replay.
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (randn(4, 3, 50, 16) for _ in range(3))
    sample = torch.tensor([2], dtype=torch.int32, device="cuda")
    attention_with_stats(q, k, v, sample=sample)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats = attention_with_stats(q, k, v, sample=sample)
    expected = attention_with_stats(q, k, v, sample=sample).heads
    graph.replay()
    assert torch.equal(stats.heads, expected)
    stats.heads.fill_(7)
    sample.fill_(-1)
    graph.replay()
    assert (stats.heads == 7).all()


def test_dropout_draws_the_same_mask_as_the_cpu() -> None:
    case = CASES[NAMES.index("dropout")]
    cpu, cuda = (make_inputs(case, torch.float32, device) for device in ("cpu", "cuda"))
    outs = [torch.ops.leaner_kernels.attention(*i.arguments)[0].cpu() for i in (cpu, cuda)]
    torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


def test_long_sequences_go_to_a_library_that_computes_the_same() -> None:
    torch.use_deterministic_algorithms(False)  # which every test has on, and which keeps ours
    q, k, v = (randn(2, 4, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    grad = randn(2, 4, 1024, 64, dtype=torch.bfloat16)
    assert explain(q, k, v, is_causal=True).forward.implementation == "sdpa"

    def run(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = attention(*leaves, is_causal=True)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out))]

    exact = run(*(t.double().cpu() for t in (q, k, v)))
    plain = run(*(t.cpu() for t in (q, k, v)))
    for actual, peer, truth in zip(run(q, k, v), plain, exact):
        assert_within_budget(actual, peer, truth)


def test_wrong_arguments_are_refused() -> None:
    q = randn(2, 3, 8, 16)
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, got torch.float64"):
        attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match=r"got torch.float32 on cpu"):
        attention(q, q.cpu(), q)
