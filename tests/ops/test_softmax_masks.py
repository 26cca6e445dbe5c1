"""What masks, lengths, sliding windows and a softcap do to softmax attention.

Their cases of the error budget are in ``tests/attention_cases.py``.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.flop_counter import FlopCounterMode

import leaner_kernels as lk
from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_with_stats,
    explain,
)
from leaner_kernels.adapters import pytorch
from leaner_kernels.ops.attention import attention_qkvpacked_with_stats, reference
from leaner_kernels.ops.attention.reference import visible
from leaner_kernels.ops.attention.sampled import sampled_attention
from tests.attention_cases import AttentionTestCase, case_named, make_inputs
from tests.backends import GPU, INTERPRETER
from tests.error_budget import assert_within_budget
from tests.gpu.draws import randn

# --- Lengths and masks ----------------------------------------------------------------------------


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


def beside(*args: Tensor, **options: Any) -> Tensor:
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
    "monitored": (beside, {}),
    "monitored, dropout": (beside, {"dropout_p": 0.3}),
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


@pytest.mark.backends(INTERPRETER)
def test_nothing_past_a_length_is_read() -> None:
    from tests.interpreter import online

    inputs = make_inputs(case_named("lengths"), torch.float32)
    expected = online.run(inputs)
    for length, key, value in zip(inputs.key_lengths, inputs.key, inputs.value):
        key[:, length:], value[:, length:] = float("nan"), float("nan")
    for name, result in online.run(inputs).items():
        assert torch.equal(result, expected[name]), name


# --- Sliding windows ------------------------------------------------------------------------------

SIDES = -1, 0, 1, 3, 99


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_sees_what_the_definition_says(rows: int, cols: int, is_causal: bool) -> None:
    for left, right in product(SIDES, SIDES):
        window = {"window_left": left, "window_right": right}
        device = torch.device("cpu")
        seen = reference.visible(rows, cols, None, device, is_causal=is_causal, **window)
        for row, col in product(range(rows), range(cols)):
            distance = col - (row + cols - rows)
            expected = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            expected = expected and (not is_causal or col <= row)
            actual = seen is None or bool(seen[0, 0, row, col])
            assert actual == expected, (left, right, row, col)


def window_mask(rows: int, cols: int, left: int, right: int) -> Tensor:
    """Return (rows, cols), True where the definition lets a row see a column."""
    distance = torch.arange(cols)[None, :] - torch.arange(rows)[:, None] - (cols - rows)
    return (distance >= -left) & (distance <= right)


def test_functions_attend_as_under_a_mask() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 20, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    window = 4, 2
    mask, grad = window_mask(20, 20, *window), torch.randn(2, 4, 20, 8, dtype=torch.float64)
    expected = attention(q, k, v, mask)
    (expected_grad,) = torch.autograd.grad(expected, qkv, grad, retain_graph=True)
    lengths = torch.tensor([0, 20, 40])
    flat = qkv.flatten(0, 1).unbind(1)
    for out in (
        attention(q, k, v, window_size=window),
        attention_with_stats(q, k, v, window_size=window).out,
        attention_qkvpacked(qkv, window_size=window).transpose(1, 2),
        attention_varlen(*flat, lengths, 20, window_size=window)
        .unflatten(0, (2, 20))
        .transpose(1, 2),
    ):
        torch.testing.assert_close(out, expected)
        (gradient,) = torch.autograd.grad(out, qkv, grad, retain_graph=True)
        torch.testing.assert_close(gradient, expected_grad)


@pytest.mark.backends(INTERPRETER)
@pytest.mark.parametrize(
    ("outside", "inside"), [(slice(0, 140), slice(300, 400)), (slice(260, 400), slice(0, 100))]
)
def test_tiles_outside_the_window_are_not_read(outside: slice, inside: slice) -> None:
    """Keys and queries there are NaN, which 0 times their values would pass on."""
    from tests.interpreter import online

    case = AttentionTestCase("", 1, 1, 1, 400, 400, 16, window=(20, 10))
    inputs = make_inputs(case, torch.float32)
    clean = online.run(inputs)
    for tensor in inputs[:4]:
        tensor[:, :, outside] = float("nan")
    results = online.run(inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name][:, :, inside], clean[name][:, :, inside]), name


# --- Softcap: scores bounded as in Gemma 2, against the formula in PyTorch's own functions --------

# Scores of these inputs are a few units: far below the first, about the second, past the third.
SOFTCAPS = 50.0, 2.0, 0.1


def softcap_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
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


SOFTCAP_OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"key_lengths": torch.tensor([3, 9], dtype=torch.int32)},
    "boolean mask": {"attn_mask": torch.arange(9) != 2},
    "additive mask": {"attn_mask": torch.linspace(-2, 2, 63, dtype=torch.float64).view(7, 9)},
}


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("name", SOFTCAP_OPTIONS)
def test_scores_are_bounded_before_anything_hides_them(
    name: str, softcap: float, with_stats: bool
) -> None:
    options, (q, k, v) = dict(SOFTCAP_OPTIONS[name]), softcap_inputs()
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
    q, k, v = softcap_inputs()
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


@pytest.mark.backends(GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
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


# --- PyTorch's CausalBias: a tensor that means its variant, and whose memory means nothing --------

SDPA = F.scaled_dot_product_attention
SIZES = (5, 5), (5, 9), (9, 5)
VARIANTS = {"upper left": causal_upper_left, "lower right": causal_lower_right}


def bias(variant: str, rows: int, cols: int) -> Tensor:
    """Return the bias, with memory that spoils whatever reads it."""
    made = VARIANTS[variant](rows, cols)
    with torch._C.DisableTorchFunctionSubclass():
        made.fill_(torch.nan)
    return made


def seen(variant: str, rows: int, cols: int) -> Tensor:
    """Return what it means: (rows, cols), True is seen."""
    past = cols - rows if variant == "lower right" else 0
    return torch.arange(cols) <= torch.arange(rows)[:, None] + past


def bias_inputs(rows: int, cols: int, *before: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (rows, 8), (cols, 8), (cols, 8)
    return [torch.randn(*(before or (2, 3)), *shape) for shape in shapes]


def out_with_stats(*args: Any) -> Tensor:
    return attention_with_stats(*args).out


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


BIAS_CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "statistics": out_with_stats,
    "under vmap": lambda *args: torch.vmap(attention, (0, 0, 0, None))(*args),
    "statistics compiled": lambda *args: compiled(out_with_stats)(*args),
}


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", BIAS_CALLS)
def test_a_causal_bias_hides_what_it_says(name: str, variant: str, size: tuple[int, int]) -> None:
    torch.compiler.reset()
    q, k, v = bias_inputs(*size)
    mask = seen(variant, *size)
    actual = BIAS_CALLS[name](q, k, v, bias(variant, *size))
    expected = attention(q, k, v, mask)
    torch.testing.assert_close(actual, expected)
    assert not actual[..., ~mask.any(-1), :].any()
    assert type(actual) is Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sampled_step_measures_it(variant: str, dtype: torch.dtype) -> None:
    """Its memory was once read as an additive mask, or its shape taken for a mask's."""
    q, k, v = (t.to(dtype) for t in bias_inputs(5, 9))
    masks = bias(variant, 5, 9), seen(variant, 5, 9)
    actual, expected = (sampled_attention(q, k, v, mask, sample=SAMPLE) for mask in masks)
    for name, statistic in expected._asdict().items():
        torch.testing.assert_close(getattr(actual, name), statistic, msg=name)


def test_a_sampled_step_checks_its_sample() -> None:
    q, k, v = bias_inputs(5, 9)
    with pytest.raises(ValueError, match="sample must be below 2, got 2"):
        sampled_attention(q, k, v, sample=SAMPLE + 1)
    heads = sampled_attention(q, k, v, sample=SAMPLE - 1).heads
    expected = attention(q, k, v)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(heads[1], expected)  # pyright: ignore[reportOptionalSubscript]


def test_what_it_cannot_mean_is_refused() -> None:
    q, k, v = bias_inputs(5, 9)
    for call in (attention, attention_with_stats):
        for size in ((9, 9), (5, 8)):
            with pytest.raises(
                ValueError, match=r"\(N, M\) = \(5, 9\), got one of \(" + str(size[0])
            ):
                call(q, k, v, bias("lower right", *size))
        for variant in VARIANTS:
            with pytest.raises(ValueError, match="attn_mask and is_causal=True cannot be combined"):
                call(q, k, v, bias(variant, 5, 9), is_causal=True)
    with pytest.raises(ValueError, match="query must be a tensor"):
        attention(None, k, v, bias("lower right", 5, 9))  # pyright: ignore
    with pytest.raises(ValueError, match="query must be"):
        attention(q.flatten(), k, v, bias("lower right", 5, 9))


@pytest.mark.parametrize("weights", [False, True])
def test_pytorchs_module_refuses_it(weights: bool) -> None:
    layer, x = pytorch.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="CausalBias"):
        layer(x, x, x, attn_mask=bias("upper left", 9, 9), need_weights=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_of_timm_takes_it(dtype: torch.dtype) -> None:
    timm_layers = pytest.importorskip("timm.layers")
    adapter = pytest.importorskip("leaner_kernels.adapters.timm")
    torch.manual_seed(0)
    layer = timm_layers.Attention(12, 3).eval().to(dtype)
    x = torch.randn(2, 7, 12).to(dtype)
    expected = layer(x, attn_mask=seen("upper left", 7, 7))
    adapter.use(layer)
    torch.testing.assert_close(layer(x, attn_mask=bias("upper left", 7, 7)), expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("call", [attention, SDPA], ids=["ours", "PyTorch's"])
def test_the_monitor_measures_it(variant: str, call: Callable[..., Tensor]) -> None:
    q, k, v = (t.double() for t in bias_inputs(5, 9))

    class Calls(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return call(q, k, v, attn_mask=mask)

    rows = []
    for mask in (bias(variant, 5, 9), seen(variant, 5, 9)):
        monitor = lk.KappaMonitor(Calls(), every=1)
        monitor.begin(0)
        monitor.model(mask)
        rows += monitor.end()
    for name in ("kappa", "entropy", "prob_norm", "max_logit"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-6), name


def test_the_monitor_says_what_it_cannot_measure() -> None:
    """PyTorch takes a square bias of the lower right for one of the upper left, of any size."""
    q, k, v = bias_inputs(5, 9)

    class Calls(nn.Module):
        def forward(self) -> Tensor:
            return SDPA(q, k, v, attn_mask=bias("lower right", 9, 9))

    monitor = lk.KappaMonitor(Calls(), every=1)
    monitor.begin(0)
    torch.testing.assert_close(monitor.model(), SDPA(q, k, v, is_causal=True))
    with pytest.raises(RuntimeError, match="attn_mask must be a lower right bias"):
        monitor.end()
