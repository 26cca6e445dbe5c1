"""What a mask, or a length, hides from the gradients of attention on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import attention, attention_qkvpacked, attention_with_stats
from leaner_kernels.ops.attention import attention_qkvpacked_with_stats
from leaner_kernels.ops.attention.reference import visible
from leaner_kernels.ops.attention.sampled import sampled_attention
from tests.error_budget import assert_within_budget


@pytest.mark.parametrize("function", ["fused", "operator"])
def test_nothing_past_a_length_has_a_gradient(function: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64, requires_grad=True).unbind()
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    call = attention if function == "fused" else attention_with_stats
    out = call(q, k, v, key_lengths=lengths)
    out = out if function == "fused" else out.out
    dk, dv = torch.autograd.grad(out.square().sum(), (k, v))
    for grad in (dk, dv):
        assert (grad[0, :, 4:] == 0).all()
        assert (grad[0, :, :4] != 0).all()
        assert (grad[1] != 0).all()


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    qkv = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)
    return attention_qkvpacked(qkv, **options).transpose(1, 2)


def packed_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    qkv = torch.stack([t.transpose(1, 2) for t in (q, k, v)], dim=2)
    stats = attention_qkvpacked_with_stats(qkv, sample=SAMPLE, **options)
    assert stats.heads is not None
    return stats.heads


def statistics(*args: Tensor, **options: Any) -> Tensor:
    return torch.cat([t.flatten() for t in attention_with_stats(*args, sample=SAMPLE, **options)])


def sampled(*args: Tensor, **options: Any) -> Tensor:
    stats = sampled_attention(*args, sample=SAMPLE, **options)
    return torch.cat([t.flatten() for t in stats])


def second(*args: Tensor, **options: Any) -> Tensor:
    """Return (.., 3) of derivatives of derivatives with respect to queries, keys and values."""

    def loss(*args: Tensor) -> Tensor:
        return attention(*args, **options).square().sum()

    first = torch.func.grad(loss, argnums=(0, 1, 2))
    grads = torch.func.grad(lambda *args: sum(t.square().sum() for t in first(*args)), (0, 1, 2))
    return torch.stack(grads(*args))


SAMPLE = torch.tensor([0, 1], dtype=torch.int32)
LENGTHS = torch.tensor([4, 9], dtype=torch.int32)
PADDED_CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "attention": (attention, {}),
    "compiled": (torch.compile(attention, fullgraph=True, backend="aot_eager"), {}),
    "packed": (packed, {}),
    "packed, statistics": (packed_heads, {}),
    "causal": (attention, {"is_causal": True}),
    "negative scale, causal": (attention, {"is_causal": True, "scale": -1.0}),
    "boolean mask": (attention, {"attn_mask": torch.arange(9) != 2}),
    "additive mask": (attention, {"attn_mask": torch.randn(9, 9)}),
    "large negative mask": (attention, {"attn_mask": torch.full((9, 9), -1e9)}),
    "softcap": (attention, {"softcap": 2.0}),
    "dropout": (attention, {"dropout_p": 0.3}),
    "dropout, softcap": (attention, {"dropout_p": 0.3, "softcap": 2.0}),
    "statistics": (statistics, {}),
    "statistics, softcap": (statistics, {"softcap": 2.0}),
    "monitored": (sampled, {}),
    "monitored, dropout": (sampled, {"dropout_p": 0.3}),
    "second derivatives": (second, {}),
}


@pytest.mark.parametrize("spoiled", ["key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PADDED_CALLS)
def test_what_lies_past_a_length_changes_nothing(
    name: str, dtype: torch.dtype, spoiled: str
) -> None:
    """Not even NaN and infinity do, in the output, its gradients or the statistics."""
    torch._dynamo.reset()
    call, options = PADDED_CALLS[name]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, 8).to(dtype).unbind()
    past = k[0, :, 4:] if spoiled == "key" else v[0, :, 4:]

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = call(*leaves, key_lengths=LENGTHS, **options)
        if "statistics" in name or not out.requires_grad:
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    clean = run()
    assert all(t.isfinite().all() for t in clean)
    for filler in (float("nan"), float("inf")):
        past.fill_(filler)
        for actual, expected in zip(run(), clean, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("function", ["fused", "compiled", "statistics"])
@pytest.mark.parametrize("least", [-2e3, -1e4, -1e9, -1e30])
def test_a_row_of_large_negative_numbers_has_the_gradients_of_equal_scores(
    function: str, least: float
) -> None:
    """PyTorch's fused backward on the CPU makes dV as many times too large as there are keys."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    q[:, :, 3] = 0
    mask = torch.zeros(64, 64)
    mask[3] = least
    mask[4, :40] = least
    lengths = torch.tensor([50], dtype=torch.int32)
    call: Callable[..., Tensor] = {
        "fused": attention,
        "compiled": torch.compile(attention, fullgraph=True, backend="aot_eager"),
        "statistics": lambda *args, **kwargs: attention_with_stats(*args, **kwargs).out,
    }[function]
    grad = torch.randn(1, 2, 64, 16)

    def run(call: Callable[..., Tensor], dtype: torch.dtype, **more: Tensor) -> list[Tensor]:
        # A mask that learns would keep PyTorch from its fused function.
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out = call(*leaves, mask.to(dtype), **more)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        seen = visible(64, 64, lengths, q.device)
        s = (q @ k.mT * 0.25 + mask).masked_fill(~seen, float("-inf"))
        return s.softmax(-1) @ v

    peers, exact = run(plain, torch.float32), run(plain, torch.float64)
    for actual, peer, truth in zip(run(call, torch.float32, key_lengths=lengths), peers, exact):
        assert_within_budget(actual, peer, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("function", ["fused", "compiled", "statistics", "five axes", "lengths"])
def test_a_float32_mask_is_added_in_float32(
    function: str, learns: bool, dtype: torch.dtype
) -> None:
    """As by PyTorch's function, whose gradient of the mask is float32 too."""
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 3, 24, 16).to(dtype).unbind()
    # In half precision these would be up to a tenth off.
    mask = 30 + torch.randn(2, 1, 24, 24)
    mask[..., 1::3] = float("-inf")

    def run(call: Callable[..., Tensor], dtype: torch.dtype, mask: Tensor) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        leaves += [mask.clone().requires_grad_()] if learns else []
        out = call(*leaves[:3], leaves[3] if learns else mask)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    def five_axes(*args: Tensor) -> Tensor:
        return attention(*(t[:, None] for t in args))[:, 0]

    call: Callable[..., Tensor] = {
        "fused": attention,
        "compiled": torch.compile(attention, fullgraph=True, backend="aot_eager"),
        "statistics": lambda *args: attention_with_stats(*args).out,
        "five axes": five_axes,
        "lengths": lambda *args: attention(*args, key_lengths=[24, 24]),
    }[function]
    found, peers = run(call, dtype, mask), run(F.scaled_dot_product_attention, dtype, mask)
    exact = run(F.scaled_dot_product_attention, torch.float64, mask.double())
    for actual, peer, truth in zip(found, peers, exact, strict=True):
        assert actual.dtype == peer.dtype
        if dtype == torch.float64:
            torch.testing.assert_close(actual.double(), truth, rtol=1e-6, atol=1e-6)
        else:
            assert_within_budget(actual, peer, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mask_is_refused_in_every_dtype_in_which_pytorch_refuses_it(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 5, 8).to(dtype)
    others = *(torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.int32, torch.bool
    for other in others:
        mask = torch.ones(5, 5).to(other)
        taken = other in (torch.bool, torch.float32, dtype)
        for function in (attention, attention_with_stats, F.scaled_dot_product_attention):
            if taken:
                function(q, q, q, mask)
            else:
                with pytest.raises(RuntimeError, match="attn_mask"):
                    function(q, q, q, mask)
        if not taken:
            with pytest.raises(ValueError, match=f"got {other} on cpu") as caught:
                attention(q, q, q, mask)
            assert "\n" not in str(caught.value)


def test_only_masks_that_need_all_scores_take_them() -> None:
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    hiding, sinking = torch.zeros(8, 8), torch.zeros(8, 8)
    hiding[:, :7], hiding[2] = -1e9, float("-inf")
    sinking[5] = -1e9
    for mask, grad, ours in ((hiding, True, False), (sinking, True, True), (sinking, False, False)):
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counted:
            attention(q, q, q, mask)
        assert (
            torch.ops.leaner_kernels.attention in counted.get_flop_counts().get("Global", {})
        ) is ours
