"""Attention between channels through its public functions, operators and modules, on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leaner_kernels.nn import ChannelAttention, CrossCovarianceAttention
from leaner_kernels.ops.covariance import (
    channel_attention,
    channel_attention_with_stats,
    cross_covariance_attention,
    cross_covariance_attention_with_stats,
)
from leaner_kernels.ops.statistics import AttentionStats
from tests.error_budget import assert_within_budget
from tests.operator_cases import CHANNEL, CROSS

OPERATORS = CROSS, CHANNEL
FUNCTIONS = {
    CROSS: (cross_covariance_attention, cross_covariance_attention_with_stats),
    CHANNEL: (channel_attention, channel_attention_with_stats),
}


def tensors(
    operator: str, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False
) -> list[Tensor]:
    """Return qkv (B, N, 3, H, D) and what else the operator takes."""
    torch.manual_seed(0)
    found = [torch.randn(shape, dtype=dtype)]
    if operator == CROSS:
        found.append(torch.linspace(0.5, 3, shape[3], dtype=dtype)[:, None, None])
    return [t.requires_grad_(requires_grad) for t in found]


def plain(operator: str) -> Callable[..., Tensor]:
    return FUNCTIONS[operator][0]


def with_stats(operator: str) -> Callable[..., AttentionStats]:
    return FUNCTIONS[operator][1]


@pytest.mark.parametrize("operator", OPERATORS)
def test_values_that_are_one_constant_pass_through(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6)
    qkv[:, :, 2 if operator == CROSS else 0] = 3.5
    for out in (plain(operator)(qkv, *rest), with_stats(operator)(qkv, *rest).out):
        torch.testing.assert_close(out, torch.full_like(out, 3.5))


@pytest.mark.parametrize("operator", OPERATORS)
def test_permuted_tokens_permute_the_output_and_no_statistic(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6, dtype=torch.float64)
    order = torch.randperm(17)
    one, other = (with_stats(operator)(x, *rest) for x in (qkv, qkv[:, order]))
    torch.testing.assert_close(other.out, one.out[:, order])
    for first, second in zip(one[1:-1], other[1:-1]):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("operator", OPERATORS)
def test_equal_scores_have_the_entropy_of_a_fair_die(operator: str) -> None:
    qkv, *rest = tensors(operator, 2, 17, 3, 4, 6)
    cols = 1 if operator == CROSS else 2
    qkv[:, :, cols] = qkv[:, :, cols, :, :1].clone()
    stats = with_stats(operator)(qkv, *rest)
    torch.testing.assert_close(stats.entropy, torch.full((2, 4), 6.0).log())
    torch.testing.assert_close(stats.prob_norm, torch.ones(2, 4))


def test_the_smallest_eps_divides_channels_of_zeros() -> None:
    qkv, temperature = tensors(CROSS, 1, 5, 3, 1, 4, requires_grad=True)
    with torch.no_grad():
        qkv[:, :, :2, :, 0] = 0
    out = cross_covariance_attention(qkv, temperature, eps=1e-15)
    grads = torch.autograd.grad(out.sum(), (qkv, temperature))
    assert all(t.isfinite().all() for t in (out, *grads))


@pytest.mark.parametrize("kind", OPERATORS)
def test_modules_are_timms(kind: str) -> None:
    """Its parameters load unchanged; output and gradients are within the budget."""
    davit, xcit = pytest.importorskip("timm.models.davit"), pytest.importorskip("timm.models.xcit")
    torch.manual_seed(0)
    if kind == CROSS:
        theirs, ours = xcit.XCA(24, 4, qkv_bias=True), CrossCovarianceAttention(24, 4, "split")
        torch.nn.init.uniform_(theirs.temperature, 0.5, 2)
    else:
        theirs, ours = davit.ChannelAttention(24, 4), ChannelAttention(24, 4, 6, qkv_bias=False)
    ours.load_state_dict(theirs.state_dict())
    x, grad = torch.randn(2, 30, 24), torch.randn(2, 30, 24)

    def run(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        module.to(dtype)
        out = module(x.to(dtype))
        weights = dict(module.named_parameters())
        grads = torch.autograd.grad(out, list(weights.values()), grad.to(dtype))
        return {"out": out.detach(), **dict(zip(weights, grads, strict=True))}

    peers, exact = run(theirs, torch.float32), run(theirs, torch.float64)
    for samples in (0, 1):
        ours.capture_samples = samples
        for name, actual in run(ours, torch.float32).items():
            assert_within_budget(actual, peers[name], exact[name])


X, T = torch.randn(2, 6, 3, 4, 8), torch.ones(4)
INT = torch.int32
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "four axes": (
        lambda: channel_attention(X[0]),
        r"qkv must be \(B, N, 3, H, D\), got \(6, 3, 4, 8\)",
    ),
    "head_dim 129": (
        lambda: channel_attention(torch.randn(1, 2, 3, 1, 129)),
        "up to 128, got 129",
    ),
    "scale of nan": (
        lambda: channel_attention(X, scale=float("nan")),
        "scale must be a finite number, got nan",
    ),
    "no temperature": (
        lambda: cross_covariance_attention(X, 1.0),
        "temperature must be a tensor, got float",
    ),
    "temperatures of other heads": (
        lambda: cross_covariance_attention(X, T[:3]),
        r"temperature must be \(4,\) or \(4, 1, 1\), got \(3,\)",
    ),
    "temperatures of integers": (
        lambda: cross_covariance_attention(X, T.int()),
        "temperature must be floating point on cpu, got torch.int32 on cpu",
    ),
    "temperature elsewhere": (
        lambda: cross_covariance_attention(X, T.to("meta")),
        "temperature must be floating point on cpu, got torch.float32 on meta",
    ),
    "eps of zero": (
        lambda: cross_covariance_attention(X, T, eps=0),
        "eps must be a number of at least 1e-15, got 0",
    ),
    "sample past the batch": (
        lambda: channel_attention_with_stats(X, sample=torch.tensor([2], dtype=INT)),
        "sample must be below 2, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
