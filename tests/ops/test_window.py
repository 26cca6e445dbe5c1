"""Window attention through its public functions, operators and module, on the CPU."""

import pytest
import torch
from torch import Tensor

from leaner_kernels.nn import WindowAttention
from leaner_kernels.ops.attention import attention_qkvpacked, attention_qkvpacked_with_stats
from leaner_kernels.ops.window import window_attention, window_attention_with_stats


def random_map(
    *shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)


def test_one_window_is_attention_over_the_map() -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    sample = torch.tensor([1], dtype=torch.int32)
    stats = window_attention_with_stats(qkv, (4, 6), sample=sample)
    whole = attention_qkvpacked_with_stats(qkv.flatten(1, 2), sample=sample)
    torch.testing.assert_close(stats.out, whole.out.unflatten(1, (4, 6)))
    torch.testing.assert_close(stats.lse, whole.lse.unflatten(2, (4, 6)))
    for actual, expected in zip(stats[2:], whole[2:], strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window", [(2, 3), (4, 2), (1, 6)])
def test_every_window_is_a_sequence_of_its_own(window: tuple[int, int]) -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    out = window_attention(qkv, window)
    for y in range(0, 4, window[0]):
        for x in range(0, 6, window[1]):
            inside = slice(None), slice(y, y + window[0]), slice(x, x + window[1])
            expected = attention_qkvpacked(qkv[inside].flatten(1, 2)).unflatten(1, window)
            torch.testing.assert_close(out[inside], expected)


def test_equal_keys_have_the_entropy_of_a_fair_die() -> None:
    qkv = random_map(1, 4, 6, 3, 2, 8)
    qkv[:, :, :, 1] = 0.25
    stats = window_attention_with_stats(qkv, (2, 3))
    torch.testing.assert_close(stats.entropy, torch.full((1, 2), 6.0).log())
    # Four windows of six rows, each of which has a sixth of the probability in every column.
    torch.testing.assert_close(stats.prob_norm, torch.full((1, 2), 2.0))


def test_a_map_of_any_strides_is_read_in_place() -> None:
    qkv = random_map(2, 4, 6, 3, 3, 8)
    expected = window_attention_with_stats(qkv, 2)
    channels_first = qkv.permute(0, 3, 4, 5, 1, 2).contiguous().permute(0, 4, 5, 1, 2, 3)
    for strided in (qkv.transpose(1, 2).contiguous().transpose(1, 2), qkv.repeat(1, 1, 2, 1, 1, 1)):
        found = window_attention_with_stats(strided[:, :, :6], 2)
        for actual, wanted in zip(found[:-1], expected[:-1], strict=True):
            torch.testing.assert_close(actual, wanted)
    with pytest.raises(ValueError, match="must be contiguous along its last axis"):
        window_attention(channels_first, 2)


@pytest.mark.parametrize(
    ("shape", "window", "message"),
    [
        ((2, 4, 6, 2, 2, 8), 2, r"qkv must be \(B, Y, X, 3, H, D\), got \(2, 4, 6, 2, 2, 8\)"),
        ((2, 24, 3, 2, 8), 2, r"qkv must be \(B, Y, X, 3, H, D\), got \(2, 24, 3, 2, 8\)"),
        ((2, 4, 6, 3, 2, 129), 2, "head dimension up to 128, got 129"),
        ((2, 0, 6, 3, 2, 8), 2, "windows of 2 x 2 must fill the map, got 0 x 6"),
        ((2, 4, 6, 3, 2, 8), 4, "windows of 4 x 4 must fill the map, got 4 x 6"),
        ((2, 4, 6, 3, 2, 8), (3, 2), "windows of 3 x 2 must fill the map, got 4 x 6"),
        ((2, 4, 6, 3, 2, 8), 0, "whole numbers of at least 1, got 0"),
        ((2, 4, 6, 3, 2, 8), 2.0, r"whole numbers of at least 1, got 2.0"),
        ((2, 4, 6, 3, 2, 8), (2,), r"whole numbers of at least 1, got \(2,\)"),
        ((2, 4, 6, 3, 2, 8), (2, 1.5), r"whole numbers of at least 1, got \(2, 1.5\)"),
    ],
)
def test_wrong_arguments_are_refused(shape: tuple[int, ...], window: object, message: str) -> None:
    for function in (window_attention, window_attention_with_stats):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(shape), window)


def test_other_wrong_arguments_are_refused() -> None:
    qkv = torch.zeros(2, 4, 6, 3, 2, 8)
    with pytest.raises(ValueError, match="qkv must be a tensor, got int"):
        window_attention(3, 2)
    with pytest.raises(ValueError, match="must be one of float32, float16, bfloat16, float64, got"):
        window_attention(qkv.int(), 2)
    with pytest.raises(ValueError, match="scale must be a finite number, got nan"):
        window_attention(qkv, 2, scale=float("nan"))
    with pytest.raises(ValueError, match="sample must be below 2, got 2"):
        window_attention_with_stats(qkv, 2, sample=torch.tensor([2], dtype=torch.int32))


@pytest.mark.parametrize("size", [(14, 14), (9, 16)], ids=["whole windows", "padded"])
def test_the_module_is_timms(size: tuple[int, int]) -> None:
    """Output and gradients of DaViT's spatial block, whose other layers pass through."""
    from timm.models.davit import SpatialBlock

    torch.manual_seed(0)
    block = SpatialBlock(32, 4, window_size=7).double()
    block.cpe1 = block.cpe2 = torch.nn.Identity()
    torch.nn.init.zeros_(block.mlp.fc2.weight)
    torch.nn.init.zeros_(block.mlp.fc2.bias)
    module = WindowAttention(32, 4, "split", window_size=7, dtype=torch.float64)
    module.load_state_dict(block.attn.state_dict())
    images = torch.randn(2, 32, *size, dtype=torch.float64)
    expected, skip = block(images), images.permute(0, 2, 3, 1)
    actual = (skip + module(block.norm1(skip), skip=skip)).permute(0, 3, 1, 2)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, list(block.attn.parameters()), grad)
    found = torch.autograd.grad(actual, list(module.parameters()), grad)
    torch.testing.assert_close(found, wanted)


def test_the_module_names_its_window() -> None:
    with pytest.raises(ValueError, match="whole numbers of at least 1, got 0"):
        WindowAttention(24, 3, 16, window_size=0)
