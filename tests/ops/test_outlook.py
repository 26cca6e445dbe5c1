"""Outlook attention through its public functions, operators and module, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leaner_kernels.nn import OutlookAttention
from leaner_kernels.ops.outlook import outlook_attention, outlook_attention_with_stats

WINDOWS = [(3, 2, 1), (3, 1, 1), (3, 2, 0), (5, 2, 2), (5, 1, 0)]


def out_with_stats(*args: Tensor, **params: Any) -> Tensor:
    return outlook_attention_with_stats(*args, **params).out


FUNCTIONS = {"plain": outlook_attention, "stats": out_with_stats}


def tensors(
    size: tuple[int, int] = (7, 6),
    window: tuple[int, int, int] = (3, 2, 1),
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    kernel_size, stride, padding = window
    count = [(n + 2 * padding - kernel_size) // stride + 1 for n in size]
    value = torch.randn(2, *size, 3, 4, dtype=dtype, requires_grad=requires_grad)
    shape = 2, *count, 3, kernel_size**2, kernel_size**2
    return value, torch.randn(shape, dtype=dtype, requires_grad=requires_grad)


def named(window: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("kernel_size", "stride", "padding"), window))


@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_unfold_product_and_fold(window: tuple[int, int, int]) -> None:
    """As VOLO has it, in loops over windows and places."""
    value, logits = tensors(window=window)
    kernel_size, stride, padding = window
    p = torch.softmax(4**-0.5 * logits, dim=-1)
    padded = F.pad(value, (0, 0, 0, 0, padding, padding, padding, padding))
    expected = torch.zeros_like(padded)
    for i in range(logits.shape[1]):
        for j in range(logits.shape[2]):
            y, x = i * stride, j * stride
            patch = padded[:, y : y + kernel_size, x : x + kernel_size].flatten(1, 2)
            mixed = torch.einsum("bhac,bchd->bahd", p[:, i, j], patch)
            mixed = mixed.unflatten(1, (kernel_size, kernel_size))
            expected[:, y : y + kernel_size, x : x + kernel_size] += mixed
    rows, cols = value.shape[1:3]
    expected = expected[:, padding : padding + rows, padding : padding + cols]
    torch.testing.assert_close(outlook_attention(value, logits, **named(window)), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_logits_are_a_box_filter(function: str) -> None:
    value, logits = tensors(window=(3, 1, 1))
    out = FUNCTIONS[function](value, torch.zeros_like(logits))
    # Each window spreads its mean over its pixels: two box filters, one after the other.
    box = value.permute(0, 3, 4, 1, 2).flatten(1, 2)
    for factor in (1, 9):
        box = factor * F.avg_pool2d(box, 3, stride=1, padding=1)
    expected = box.unflatten(1, (3, 4)).permute(0, 3, 4, 1, 2)
    torch.testing.assert_close(out, expected)


def test_equal_logits_have_the_entropy_of_a_fair_die() -> None:
    value, logits = tensors()
    stats = outlook_attention_with_stats(value, torch.full_like(logits, 2.0), stride=2)
    rows = logits[0, :, :, 0, :, 0].numel()
    torch.testing.assert_close(stats.entropy, torch.full((2, 3), 9.0).log())
    torch.testing.assert_close(stats.prob_norm, torch.full((2, 3), (rows / 9) ** 0.5))
    torch.testing.assert_close(stats.max_logit, torch.ones(2, 3))
    torch.testing.assert_close(stats.lse, (1 + torch.tensor(9.0).log()).expand(stats.lse.shape))


def test_a_captured_map_is_the_output_in_rows() -> None:
    value, logits = tensors()
    sample = torch.tensor([1, 0], dtype=torch.int32)
    stats = outlook_attention_with_stats(value, logits, stride=2, sample=sample)
    assert stats.heads.shape == (2, 42, 12)
    torch.testing.assert_close(stats.heads, stats.out.flip(0).reshape(2, 42, 12).float())
    torch.testing.assert_close(stats.out, outlook_attention(value, logits, stride=2))
    assert outlook_attention_with_stats(value, logits, stride=2).heads is None
    assert not any(statistic.requires_grad for statistic in stats[1:])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradcheck(function: str, window: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    size = 5, 6
    count = [(n + 2 * window[2] - window[0]) // window[1] + 1 for n in size]
    value = torch.randn(1, *size, 2, 2, dtype=torch.float64, requires_grad=True)
    places = window[0] ** 2
    logits = torch.randn(1, *count, 2, places, places, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: FUNCTIONS[function](*x, **named(window), scale=0.7),
        (value, logits),
        fast_mode=True,
    )


def test_layouts_other_than_contiguous_give_the_same() -> None:
    value, logits = tensors(requires_grad=True)
    out = outlook_attention_with_stats(value, logits, stride=2).out
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (value, logits), grad)
    # Heads before the map, as another projection would leave them; the gradient of a sum has none.
    moved = value.detach().permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    wide = torch.cat([logits.detach(), logits.detach()], dim=-1)[..., :9]
    assert not moved.is_contiguous()
    assert not wide.is_contiguous()
    leaves = moved.requires_grad_(), wide.requires_grad_()
    found = outlook_attention_with_stats(*leaves, stride=2).out
    assert found.is_contiguous()
    torch.testing.assert_close(found, out)
    strided = grad.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    for actual, wanted in zip(torch.autograd.grad(found, leaves, strided), expected):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("window", [(3, 2, 1), (3, 1, 1), (5, 2, 2)])
def test_module_equals_timms(window: tuple[int, int, int]) -> None:
    volo = pytest.importorskip("timm.models.volo", reason="needs timm")
    torch.manual_seed(0)
    theirs = volo.OutlookAttention(24, 3, **named(window), qkv_bias=True).double()
    ours = OutlookAttention(24, 3, "split", **named(window), qkv_bias=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 10, 24, dtype=torch.float64, requires_grad=True)
    expected, actual = theirs(x), ours(x)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    leaves = [(x, *module.parameters()) for module in (theirs, ours)]
    wanted, found = (
        torch.autograd.grad(out, wrt, grad) for out, wrt in zip((expected, actual), leaves)
    )
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)


VALUE, LOGITS = tensors(dtype=torch.float32)
INT = torch.int32
FAR = torch.empty_strided((1, 2, 1, 1, 1), (1, 1 << 31, 1, 1, 1), device="meta")
FAR_LOGITS = torch.empty(1, 2, 1, 1, 1, 1, device="meta")
BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "value of four axes": (
        lambda: outlook_attention(VALUE[0], LOGITS, stride=2),
        r"value must be \(B, Y, X, H, D\), got \(7, 6, 3, 4\)",
    ),
    "logits of another stride": (
        lambda: outlook_attention(VALUE, LOGITS, stride=1),
        r"logits must be .* = \(2, 7, 6, 3, 9, 9\), got \(2, 4, 3, 3, 9, 9\)",
    ),
    "dtypes differ": (
        lambda: outlook_attention(VALUE, LOGITS.half(), stride=2),
        "logits must be torch.float32 on cpu as value is, got torch.float16 on cpu",
    ),
    "no pixels": (
        lambda: outlook_attention(VALUE[:, :0], LOGITS, stride=2),
        "a map of 0 x 6 contains no window",
    ),
    "last axis of logits strided": (
        lambda: outlook_attention(VALUE, LOGITS.mT, stride=2),
        "logits must be contiguous along its last axis",
    ),
    "a batch entry that is too far apart": (
        lambda: outlook_attention(FAR, FAR_LOGITS, kernel_size=1, padding=0),
        "value must have each batch entry within 2147483648 elements, got 2147483649",
    ),
    "an expanded map": (
        lambda: outlook_attention(
            FAR[:, :1].expand(1, 1 << 16, 1 << 15, 2, 1),
            FAR_LOGITS[:, :1].expand(1, 1 << 16, 1 << 15, 2, 1, 1),
            kernel_size=1,
            padding=0,
        ),
        "value must have each batch entry within 2147483648 elements, got 4294967296",
    ),
    "a map smaller than a window": (
        lambda: outlook_attention(VALUE[:, :1], LOGITS, kernel_size=5, padding=1),
        "a map of 1 x 6 contains no window: kernel_size=5, padding=1",
    ),
    "kernel size 8": (
        lambda: outlook_attention(VALUE, LOGITS, kernel_size=8),
        r"kernel_size must be a whole number in \[1, 7\], got 8",
    ),
    "stride of a half": (
        lambda: outlook_attention(VALUE, LOGITS, stride=0.5),
        r"stride must be a whole number in \[1, 4\], got 0.5",
    ),
    "stride over the kernel size": (
        lambda: outlook_attention(VALUE, LOGITS, stride=4),
        "stride <= kernel_size and padding < kernel_size, got kernel_size=3, stride=4, padding=1",
    ),
    "negative padding": (
        lambda: OutlookAttention(8, 2, 4, padding=-1),
        r"padding must be a whole number in \[0, 6\], got -1",
    ),
    "sample past the batch": (
        lambda: outlook_attention_with_stats(
            VALUE, LOGITS, stride=2, sample=torch.tensor([2], dtype=INT)
        ),
        "sample must be below 2, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
