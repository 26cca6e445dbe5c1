"""Soft-capped scores, as Gemma 2 has them, against the formula in PyTorch's own functions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from leaner_kernels import attention, attention_with_stats, explain
from leaner_kernels.ops import _tiles
from leaner_kernels.ops.attention import launch
from leaner_kernels.ops.attention.call import Call
from leaner_kernels.ops.attention.dispatch import online_tile
from leaner_kernels.ops.attention.op import new_out, new_results

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


def test_any_number_of_axes_takes_a_softcap() -> None:
    q, k, v = inputs()
    out = attention(q[0], k[0], v[0], enable_gqa=True, softcap=2.0)
    expected = attention(q, k, v, enable_gqa=True, softcap=2.0)[0]
    torch.testing.assert_close(out, expected)


def test_shapes_are_known_without_numbers() -> None:
    q = torch.empty(2, 3, 5, 8, device="meta")
    assert attention(q, q, q, softcap=2.0).shape == q.shape
    assert attention_with_stats(q, q, q, softcap=2.0).lse.shape == (2, 3, 5)


@pytest.mark.parametrize("function", [attention, attention_with_stats])
def test_it_compiles_without_a_graph_break(function: Any) -> None:
    q, k, v = inputs(torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
        out = function(q, k, v, is_causal=True, enable_gqa=True, softcap=softcap)
        return out if isinstance(out, Tensor) else out.out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for softcap in (2.0, 3.0, 4.0):  # after the first, a number that the graph does not hold
        expected, actual = call(q, k, v, softcap), compiled(q, k, v, softcap)
        torch.testing.assert_close(actual, expected)
        grads = [torch.autograd.grad(t.sum(), (q, k, v)) for t in (expected, actual)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "softcap", [-1.0, 1e-31, 1e31, float("nan"), float("inf"), True, None, "5"]
)
@pytest.mark.parametrize("function", [attention, attention_with_stats])
def test_another_softcap_is_refused_in_one_line(function: Any, softcap: Any) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="softcap must be 0, for none, or from 1e-30") as caught:
        function(q, q, q, softcap=softcap)
    assert "\n" not in str(caught.value)


def test_no_library_gets_one() -> None:
    q = torch.empty(1, 1, 1024, 64, dtype=torch.bfloat16, device="meta")
    torch.use_deterministic_algorithms(False)
    routes = [explain(q, q, q, softcap=cap, capability=90).forward for cap in (0.0, 50.0)]
    assert [route.implementation for route in routes] == ["sdpa", "online_forward"]


@pytest.mark.parametrize("gpu", [80, 86, 90])
def test_only_the_kernels_for_any_length_compute_one(
    gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="launches are recorded in Triton")
    from bench.gpu_model.compile_ahead import recorded

    monkeypatch.setattr(_tiles, "capability", lambda _: gpu)

    def names(tokens: int, dim: int, softcap: float) -> set[str]:
        projection = torch.empty(300, tokens, 4, dim, dtype=torch.bfloat16, device="meta")
        q = projection.transpose(1, 2)
        call = Call(q, q, q, None, None, None, 0.0, True, 0.1, softcap)
        results = new_results(call, new_out(q))
        gradients = new_out(q), new_out(q), new_out(q)
        with recorded() as launches:
            launch.forward(call, results)
            launch.backward(new_out(q), call, results, *gradients, None)
        assert all(
            ("softcap" in one.kwargs) == one.name.startswith("_attention") for one in launches
        )
        return {one.name for one in launches}

    general = {"_attention_fwd_kernel", "_attention_bwd_kernel"}
    for tokens, dim in ((16, 10), (49, 32), (128, 32), (197, 64), (577, 64), (2048, 128)):
        assert names(tokens, dim, 50.0) == general
    assert names(16, 10, 0.0).isdisjoint(general)
    assert names(197, 64, 0.0).isdisjoint(general)


def test_a_softcap_alone_keeps_the_tiles_of_the_forward() -> None:
    pytest.importorskip("triton", reason="tiles are chosen beside kernels in Triton")
    from leaner_kernels.ops.attention.kernels import online_forward

    q = torch.empty(1, 2, 2048, 128, dtype=torch.bfloat16, device="meta")
    call = Call(q, q, q, None, None, None, 0.0, True, 0.1)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="meta")
    calls = call, call._replace(softcap=50.0), call._replace(softcap=50.0, attn_mask=mask)
    results = new_results(call, new_out(q))
    plain, capped, masked = (
        online_forward.prepare(online_tile("online_forward", one), one, *results[:4]).arguments
        for one in calls
    )
    assert plain["BLOCK_M"] == capped["BLOCK_M"] > masked["BLOCK_M"]
