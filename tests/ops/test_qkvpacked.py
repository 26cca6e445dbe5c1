"""Softmax attention of a fused projection (B, N, 3, H, D): one tensor, one gradient."""

import pytest
import torch
from torch import Tensor

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_qkvpacked_with_stats,
    attention_with_stats,
)
from tests.backends import GPU, INTERPRETER
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn

OPS = torch.ops.leaner_kernels
# On a GPU, of tests that the same call gives the same bits: how much runs at once, how often.
BATCH, REPEATS = 8, 20


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, [5, 33]])
def test_packed_equals_unpacked(causal: bool, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    packed = torch.randn(2, 33, 3, 4, 10, dtype=torch.float64, requires_grad=True)
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    expected = attention(q, k, v, is_causal=causal, key_lengths=key_lengths).transpose(1, 2)
    out = attention_qkvpacked(packed, is_causal=causal, key_lengths=key_lengths)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected)
    operator, _ = OPS.attention_qkvpacked(packed, key_lengths, None, 0.0, causal, 10**-0.5, -1, -1)
    torch.testing.assert_close(operator, expected)
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, packed, grad)
    (actual,) = torch.autograd.grad(operator, packed, grad)
    torch.testing.assert_close(actual, wanted)


def test_packed_statistics_are_those_of_its_parts() -> None:
    torch.manual_seed(0)
    packed = torch.randn(2, 33, 3, 4, 10, requires_grad=True)
    params = {
        "key_lengths": torch.tensor([5, 33], dtype=torch.int32),
        "sample": torch.tensor([1], dtype=torch.int32),
        "is_causal": True,
    }
    out, *stats = attention_qkvpacked_with_stats(packed, **params)
    expected, *expected_stats = attention_with_stats(*packed.permute(2, 0, 3, 1, 4), **params)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    for actual, wanted in zip(stats, expected_stats, strict=True):
        assert not actual.requires_grad
        torch.testing.assert_close(actual, wanted)
    grad = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(expected.transpose(1, 2), packed, grad)
    (actual,) = torch.autograd.grad(out, packed, grad)
    torch.testing.assert_close(actual, wanted)
    # The gradient of the whole projection comes from one operator, not joined by copies.
    assert out.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


@pytest.mark.backends(INTERPRETER)
def test_packed_views_need_no_copy() -> None:
    """The kernels read (B, N, 3, H, D) in place and write one packed gradient."""
    from leaner_kernels.ops.attention import op
    from leaner_kernels.ops.attention.call import Call
    from tests.interpreter import online

    torch.manual_seed(0)
    qkv = torch.randn(2, 33, 3, 4, 16)
    query, key, value = op.split_qkv(qkv)
    call = Call(query, key, value, None, None, None, 0.0, False, 0.25)
    out, max_log_sum = op.new_out(query), online.new_max_log_sum(query)
    online.forward(call, out, max_log_sum)
    dqkv, grad = torch.empty_like(qkv), torch.randn(out.shape)
    online.backward(grad, call, out, max_log_sum, *op.split_qkv(dqkv), None)

    def exact(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = qkv.to(dtype).requires_grad_()
        a = torch.nn.functional.scaled_dot_product_attention(*op.split_qkv(x))
        (gradient,) = torch.autograd.grad(a, x, grad.to(dtype))
        return a, gradient

    for actual, peer, truth in zip((out, dqkv), exact(torch.float32), exact(torch.float64)):
        assert_within_budget(actual, peer, truth)


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
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
def test_shapes_of_the_models_stay_within_the_error_budget(
    batch: int, tokens: int, heads: int, dim: int, causal: bool, dtype: torch.dtype
) -> None:
    qkv = randn(batch, tokens, 3, heads, dim, dtype=dtype)
    grad = randn(batch, tokens, heads, dim, dtype=dtype)

    def library(as_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = qkv.cpu().to(as_dtype).requires_grad_()
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
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


@pytest.mark.backends(GPU)
def test_more_programs_than_a_second_grid_axis_holds() -> None:
    qkv = randn(25088, 16, 3, 4, 10, dtype=torch.bfloat16)
    out = attention_qkvpacked(qkv)
    torch.testing.assert_close(out[-3:], attention_qkvpacked(qkv[-3:].clone()), atol=0, rtol=0)


@pytest.mark.backends(GPU)
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


@pytest.mark.backends(GPU)
def test_a_second_call_gives_what_its_own_tensors_say() -> None:
    """The plan that the first call leaves is for a kind of call, not for its tensors."""
    first, second = (randn(2, 197, 3, 4, 64, dtype=torch.float16) for _ in range(2))
    padded = randn(1 + second.numel(), dtype=torch.float16)
    shifted = padded[1:].view(second.shape)  # an address that is no multiple of 16 bytes
    for qkv in (first, second, shifted, second):
        q, k, v = qkv.float().permute(2, 0, 3, 1, 4).unbind(0)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        torch.testing.assert_close(attention_qkvpacked(qkv).float(), expected, atol=4e-3, rtol=4e-3)
