"""Soft-capped scores, as Gemma 2 has them, against the formula in PyTorch's own functions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention, attention_with_stats, explain

# Scores of these inputs are a few units: far below the first, about the second, past the third.
SOFTCAPS = 50.0, 2.0, 0.1


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8)
    return [(2 * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]


def scores(q: Tensor, k: Tensor, softcap: float, **options: Any) -> Tensor:
    s = softcap * torch.tanh(0.5 * q @ k.repeat_interleave(2, dim=1).mT / softcap)
    seen = torch.ones(s.shape, dtype=torch.bool)
    if options.get("is_causal"):
        seen = seen.tril()
    if (lengths := options.get("key_lengths")) is not None:
        seen = seen & (torch.arange(s.shape[-1]) < lengths[:, None, None, None])
    if (mask := options.get("attn_mask")) is not None:
        s, seen = (s, seen & mask) if mask.dtype == torch.bool else (s + mask, seen)
    return s.masked_fill(~seen, float("-inf"))


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": torch.tensor([3, 9], dtype=torch.int32)},
    "boolean mask": {"attn_mask": torch.arange(9) != 2},
    "additive mask": {"attn_mask": torch.linspace(-2, 2, 63, dtype=torch.float64).view(7, 9)},
}


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_scores_are_bounded_before_anything_hides_them(
    name: str, softcap: float, with_stats: bool
) -> None:
    options, (q, k, v) = dict(OPTIONS[name]), inputs()
    leaves = [q, k, v]
    if name == "additive mask":
        options["attn_mask"] = options["attn_mask"].clone().requires_grad_()
        leaves.append(options["attn_mask"])
    expected = scores(q, k, softcap, **options).softmax(dim=-1) @ v.repeat_interleave(2, dim=1)
    given: dict[str, Any] = {"scale": 0.5, "enable_gqa": True, "softcap": softcap, **options}
    if with_stats:
        stats = attention_with_stats(q, k, v, **given)
        actual, s = stats.out, scores(q, k, softcap, **options)
        torch.testing.assert_close(stats.max_logit, s.amax((-2, -1)).float())
        torch.testing.assert_close(stats.lse, s.logsumexp(-1).float())
    else:
        actual = attention(q, k, v, **given)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves, grad), wanted)


def test_none_is_zero_and_the_default() -> None:
    q, k, v = inputs()
    expected = attention(q, k, v, enable_gqa=True)
    for none in (0.0, 0):
        assert torch.equal(attention(q, k, v, enable_gqa=True, softcap=none), expected)
    # So large a bound is never felt.
    torch.testing.assert_close(attention(q, k, v, enable_gqa=True, softcap=1e30), expected)


def test_a_gradient_far_past_the_softcap_keeps_its_digits() -> None:
    """1 - tanh^2 would be 0 in float32 where every score is twelve times the softcap."""
    torch.manual_seed(0)
    q, k, v = (
        6 * torch.ones(1, 1, 5, 8),
        1 + 0.01 * torch.randn(1, 1, 9, 8),
        torch.randn(1, 1, 9, 8),
    )
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = q.to(dtype).requires_grad_()
        out = attention(leaf, k.to(dtype), v.to(dtype), scale=0.5, softcap=2.0)
        found.append(torch.autograd.grad(out.square().sum(), leaf)[0].double())
    assert 0 < found[1].abs().max() < 1e-10
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "softcap", [-1.0, 1e-31, 1e31, float("nan"), float("inf"), True, None, "5"]
)
@pytest.mark.parametrize("function", [attention, attention_with_stats])
def test_another_softcap_is_refused_in_one_line(function: Any, softcap: Any) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"softcap must be 0 \(disabled\) or from 1e-30") as caught:
        function(q, q, q, softcap=softcap)
    assert "\n" not in str(caught.value)


def test_no_library_gets_one() -> None:
    q = torch.empty(1, 1, 1024, 64, dtype=torch.bfloat16, device="meta")
    torch.use_deterministic_algorithms(False)
    routes = [explain(q, q, q, softcap=cap, capability=90).forward for cap in (0.0, 50.0)]
    assert [route.implementation for route in routes] == ["sdpa", "online_forward"]
