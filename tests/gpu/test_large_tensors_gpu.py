"""Tensors of more than 2**31 elements on a GPU: the last ones give what they give alone.

Forward and backward, with gradients as large; the same kernels on the same numbers give the same
bits. The arithmetic of it, without such memory, is in tests/interpreter/test_large_offsets.py.
"""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    channel_attention,
    condition_number,
    cross_covariance_attention,
    nystrom_attention,
    outlook_attention,
    window_attention,
)
from leaner_kernels.ops.attention import reference
from leaner_kernels.ops.attention.reference import keep_mask

FAR = 2**31
HALF = torch.float16


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One of these tests at a time: together they would find no memory. Fill nothing twice."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    with (Path(tempfile.gettempdir()) / "leaner_kernels_large_tensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


def needs(gib: int) -> None:
    """Skip unless there is so much memory, and keep it from processes that test beside."""
    try:
        torch.empty(gib * (FAR // 2), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip(f"needs {gib} GiB of free memory: {torch.cuda.mem_get_info()[0] >> 30} are")


def randn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=HALF, device="cuda").normal_()


def batch_of(*shape: int) -> int:
    """Return how many entries of this shape are more than 2**31 elements."""
    return FAR // torch.Size(shape).numel() + 2


def check_last(attend: Callable[..., Tensor], *inputs: Tensor, last: int = 2) -> None:
    """Compare the last entries of the output and of every gradient with those of them alone."""
    alone = [t[-last:].clone().requires_grad_() for t in inputs]
    out = attend(*(t.requires_grad_() for t in inputs))
    grad = torch.empty_like(out).normal_()
    expected = attend(*alone)
    assert expected.isfinite().all()
    assert torch.equal(out[-last:], expected)
    gradients = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, alone, grad[-last:])
    for actual, truth in zip(gradients, wanted, strict=True):
        assert truth.isfinite().all()
        assert truth.count_nonzero() > truth.numel() // 2
        assert torch.equal(actual[-last:], truth)


@pytest.mark.parametrize("tokens", [49, 197, 300], ids=["few tokens", "short", "any length"])
def test_attention(tokens: int) -> None:
    needs(40)
    heads, dim = 8, 32
    batch = batch_of(heads, tokens, dim)
    check_last(attention, *(randn(batch, heads, tokens, dim) for _ in range(3)))


@pytest.mark.parametrize(("tokens", "dim"), [(197, 64), (128, 43)])
def test_packed_attention(tokens: int, dim: int) -> None:
    needs(20)
    shape = tokens, 3, 8, dim
    check_last(attention_qkvpacked, randn(batch_of(*shape), *shape))


def test_a_mask_of_every_score_has_a_gradient() -> None:
    """The scores are many, and so are their gradients: float32, and then those of the mask."""
    needs(32)
    heads, tokens, dim = 2, 300, 16
    batch = batch_of(heads, tokens, tokens)
    inputs = (
        *(randn(batch, heads, tokens, dim) for _ in range(3)),
        randn(batch, heads, tokens, tokens),
    )
    check_last(attention, *inputs)


@pytest.mark.parametrize("tokens", [49, 197, 300], ids=["few tokens", "short", "any length"])
def test_dropout_does_not_repeat(tokens: int) -> None:
    """The last entry, past 2**31 scores, drops what the reference drops there."""
    heads, dim, p = 8, 16, 0.3
    batch = batch_of(heads, tokens, tokens)
    needs(3 * batch * heads * tokens * dim * 2 * 2 // 2**30 + 2)
    query, key, value = (randn(batch, heads, tokens, dim) for _ in range(3))
    seed = torch.tensor([0x123456789ABCDEF], device="cuda")
    out, _ = torch.ops.leaner_kernels.attention(
        query, key, value, None, None, seed, p, False, dim**-0.5, 0.0, -1, -1
    )
    q, k, v = (t[-1:].double() for t in (query, key, value))
    scores, _, _ = reference.probabilities(q, k, None, None, scale=dim**-0.5)
    first, last = (
        reference.forward(scores, v, keep_mask(seed, 1, heads, tokens, tokens, p, first=entry), p)
        for entry in (0, batch - 1)
    )
    torch.testing.assert_close(out[-1:].double(), last, atol=0.02, rtol=0)
    assert (out[-1:] - first).abs().max() > 0.1


@pytest.mark.parametrize("dim", [32, 43])
def test_packed_sequences_have_gradients(dim: int) -> None:
    needs(24)
    heads, length = 4, 150
    tokens = FAR // (heads * dim) + 1000
    packed = [randn(tokens, heads, dim) for _ in range(3)]
    starts = [0, 100, tokens - length - 7, tokens - 7]
    starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    own = slice(tokens - length - 7, tokens - 7)
    one = torch.tensor([0, 100, 100 + length], dtype=torch.int32, device="cuda")
    # A sequence before it, so that it is the same launch but for where it lies.
    both = [torch.cat([t[:100], t[own]]).requires_grad_() for t in packed]
    out = attention_varlen(*(t.requires_grad_() for t in packed), starts, length)
    grad = torch.empty_like(out).normal_()
    expected = attention_varlen(*both, one, length)
    assert torch.equal(out[own], expected[100:])
    assert (out[-7:] == 0).all()
    gradients = torch.autograd.grad(out, packed, grad)
    wanted = torch.autograd.grad(expected, both, torch.cat([grad[:100], grad[own]]))
    for actual, truth in zip(gradients, wanted, strict=True):
        assert torch.equal(actual[own], truth[100:])
        assert (actual[-7:] == 0).all()


@pytest.mark.parametrize("dim", [48, 43])
@pytest.mark.parametrize("operator", [cross_covariance_attention, channel_attention])
def test_attention_between_channels(operator: Callable[..., Tensor], dim: int) -> None:
    needs(20)
    shape = 196, 3, 8, dim
    temperature = torch.linspace(0.5, 2, 8, device="cuda")
    extra = (temperature,) if operator is cross_covariance_attention else ()
    check_last(lambda qkv: operator(qkv, *extra), randn(batch_of(*shape), *shape))


@pytest.mark.parametrize("window", [7, 14], ids=["one tile", "tiles"])
def test_windows(window: int) -> None:
    needs(20)
    shape = 14, 14, 3, 6, 32
    check_last(lambda qkv: window_attention(qkv, window), randn(batch_of(*shape), *shape))


@pytest.mark.parametrize("window", [7, 14], ids=["one tile", "tiles"])
def test_windows_of_three_tensors(window: int) -> None:
    """From q to v is more than 2**31 elements, from q to k is less."""
    needs(32)
    shape = 14, 14, 6, 32
    batch = FAR // 2 // torch.Size(shape).numel() + 1
    parts = randn(3, batch, *shape)
    qkv = parts.permute(1, 2, 3, 0, 4, 5)
    assert FAR // 2 < qkv.stride(3) < FAR
    check_last(lambda qkv: window_attention(qkv, window), qkv.detach())


def test_outlook() -> None:
    needs(32)
    shape, places = (8, 8, 2, 32), (4, 4, 2, 9, 9)
    batch = batch_of(*shape)
    check_last(outlook_attention_of_stride_2, randn(batch, *shape), randn(batch, *places))


def outlook_attention_of_stride_2(value: Tensor, logits: Tensor) -> Tensor:
    return outlook_attention(value, logits, stride=2)


def test_a_gradient_of_outlook_may_be_a_view_of_something_huge() -> None:
    needs(12)
    value, logits = randn(2, 4, 4, 1, 32), randn(2, 2, 2, 1, 9, 9)
    huge = torch.empty(2 * FAR, dtype=HALF, device="cuda")
    grad = huge.as_strided(value.shape, (32, FAR // 2, FAR // 8, 32, 1))
    grad.copy_(randn(*value.shape))
    inputs = value.requires_grad_(), logits.requires_grad_()
    out = outlook_attention_of_stride_2(*inputs)
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    wanted = torch.autograd.grad(out, inputs, grad.contiguous())
    for actual, truth in zip(found, wanted, strict=True):
        assert torch.equal(actual, truth)


@pytest.mark.parametrize("dim", [32, 44])
def test_nystrom(dim: int) -> None:
    needs(40)
    tokens, heads = 256, 4
    batch = batch_of(tokens, 3, heads, dim)
    packed = randn(batch, tokens, 3, heads, dim)
    check_last(
        lambda x: nystrom_attention(*x.permute(2, 0, 3, 1, 4).unbind(0), 16, iterations=2), packed
    )


def test_one_landmark_of_many_tokens() -> None:
    """Fifteen landmarks of its tile are missing: where they would start is past 2**31."""
    needs(12)
    tokens = FAR // 8
    query, key, value = (randn(1, 1, tokens, 1) for _ in range(3))
    lengths = torch.tensor([1000], dtype=torch.int32, device="cuda")
    out = nystrom_attention(query, key, value, 1, key_lengths=lengths, iterations=1)
    torch.cuda.synchronize()
    assert out.isfinite().all()


def test_condition_numbers() -> None:
    needs(14)
    shape = 1024, 64
    matrices = torch.empty(batch_of(*shape), *shape, device="cuda").normal_()
    found, wanted = condition_number(matrices), condition_number(matrices[-2:].clone())
    assert torch.equal(found.kappa[-2:], wanted.kappa)
    assert wanted.kappa.isfinite().all()
