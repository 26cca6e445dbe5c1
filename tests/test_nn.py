"""ManyHeadAttention: projections, widths and the capture."""

import pytest
import torch
import torch.nn.functional as F

from leaner_kernels.nn import ManyHeadAttention


@pytest.mark.parametrize("capture_samples", [0, 2])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.eye(7).bool()}])
def test_forward_is_projection_attention_projection(
    options: dict[str, object], capture_samples: int
) -> None:
    torch.manual_seed(0)
    module = ManyHeadAttention(12, num_heads=5, head_dim=6)
    module.capture_samples = capture_samples
    x = torch.randn(3, 7, 12)
    q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).view(3, 7, 3, 5, 6).unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    a = F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)
    expected = F.linear(a, module.proj.weight, module.proj.bias)
    torch.testing.assert_close(module(x, **options), expected)
    assert (module.captured is not None) == (capture_samples > 0)
    if module.captured is not None:
        torch.testing.assert_close(module.captured[-1], a[[0, 1]])


def test_widths() -> None:
    wide = ManyHeadAttention(12, num_heads=16, head_dim=64)
    assert wide.qkv.weight.shape == (3 * 1024, 12)
    assert wide.proj.weight.shape == (12, 1024)
    split = ManyHeadAttention(512, num_heads=12, head_dim="split", qkv_bias=False, proj_bias=False)
    assert split.head_dim == 42
    assert split.qkv.bias is None
    assert split.proj.bias is None


def test_dropout_only_while_training() -> None:
    torch.manual_seed(0)
    module = ManyHeadAttention(12, num_heads=2, head_dim=6, attn_drop=0.5)
    x = torch.randn(3, 7, 12)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_key_lengths_hide_padding() -> None:
    torch.manual_seed(0)
    module = ManyHeadAttention(12, num_heads=2, head_dim=6)
    x = torch.randn(2, 7, 12)
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    padded = module(x, key_lengths=lengths)
    torch.testing.assert_close(padded[0, :4], module(x[:1, :4])[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"head_dim": "half"}, "must be a width or \"split\", got 'half'"),
        ({"num_heads": 13, "head_dim": "split"}, r"in \[1, 128\], got 0 \(dim 12, num_heads 13\)"),
        ({"head_dim": 129}, r"in \[1, 128\], got 129"),
        ({"num_heads": 2.5}, r"num_heads must be a whole number .* got 2\.5"),
        ({"attn_drop": 1.5}, r"attn_drop must be in \[0, 1\), got 1\.5"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ManyHeadAttention(12, **arguments)


@pytest.mark.parametrize("shape", [(7, 12), (2, 7, 13)])
def test_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x must be \(B, N, 12\), got"):
        ManyHeadAttention(12, num_heads=2, head_dim=6)(torch.randn(shape))
