"""Attention modules: projections, widths, captures, empty batches, and what they refuse."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leaner_kernels.monitor.trace import RECOMPUTED, TracedCall
from leaner_kernels.nn import (
    ChannelAttention,
    CrossCovarianceAttention,
    ManyHeadAttention,
    NystromAttention,
    OutlookAttention,
    WindowAttention,
)
from leaner_kernels.ops.statistics import STATISTICS


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
        torch.testing.assert_close(module.captured.heads, a[[0, 1]])


def test_a_capture_keeps_output_stream_and_lengths_of_the_sampled_entries() -> None:
    torch.manual_seed(0)
    module = ManyHeadAttention(12, num_heads=5, head_dim=6).bfloat16()
    module.capture_samples = 2
    x, skip = torch.randn(2, 4, 7, 12).bfloat16().unbind(0)
    lengths = torch.tensor([4, 7, 3, 7], dtype=torch.int32)
    output = module(x, key_lengths=lengths, skip=skip.requires_grad_())
    captured = module.captured
    assert captured.heads.shape == (2, 7, 30)
    assert torch.equal(captured.output, output[[0, 2]].float())
    assert torch.equal(captured.residual, skip[[0, 2]].float())
    assert captured.lengths.tolist() == [4, 3]
    assert captured.dtype == torch.bfloat16
    shapes = {name: values.shape for name, values in captured.statistics.items()}
    assert shapes.pop("max_logit") == (5,)
    assert set(shapes.values()) == {(4, 5)}
    kept = [t for t in captured if isinstance(t, Tensor)] + list(captured.statistics.values())
    assert not any(t.requires_grad for t in kept)
    assert torch.equal(output, module(x, key_lengths=lengths))
    assert module.captured.residual is None


def test_statistics_of_a_capture_are_attributes_of_it() -> None:
    module = ManyHeadAttention(12, num_heads=5, head_dim=6)
    module.capture_samples = 1
    module(torch.randn(2, 7, 12))
    captured = copy.deepcopy(module.captured)
    for statistic in STATISTICS:
        assert getattr(captured, statistic.name) is captured.statistics[statistic.name]
    traced = TracedCall(
        captured.heads, None, captured.statistics, torch.float32, 6, 7, RECOMPUTED, 4
    )
    assert traced.entropy is captured.entropy
    for held in (captured, traced):
        with pytest.raises(AttributeError, match="has no attribute 'kappa'"):
            _ = held.kappa


def largest_logit(module: ManyHeadAttention, x: Tensor) -> Tensor:
    """The largest score of every head, (H,), from the projection itself."""
    q, k, _ = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT * module.head_dim**-0.5).amax(dim=(0, 2, 3)).detach()


@pytest.mark.parametrize("way", ["eager", "compiled", "recomputed"])
def test_the_peak_logit_is_the_maximum_over_micro_batches(way: str) -> None:
    torch.manual_seed(0)
    module = ManyHeadAttention(12, num_heads=3, head_dim=5)
    module.track_logits = True
    run = {
        "eager": module,
        "compiled": torch.compile(module, fullgraph=True, backend="aot_eager"),
        "recomputed": lambda x: checkpoint(module, x, use_reentrant=False),
    }[way]
    micro_batches = [scale * torch.randn(4, 7, 12) for scale in (1, 3, 2)]
    for capture_samples in (0, 2):
        module.capture_samples, module.peak_logit, module.captured = capture_samples, None, None
        for x in micro_batches:
            run(x).sum().backward()
        expected = torch.stack([largest_logit(module, x) for x in micro_batches]).amax(0)
        torch.testing.assert_close(module.peak_logit, expected)
        assert not module.peak_logit.requires_grad
        if capture_samples:
            torch.testing.assert_close(module.captured.statistics["max_logit"], expected)
    module.track_logits, module.peak_logit = False, None
    run(micro_batches[0])
    assert module.peak_logit is None
    # A function may be compiled only so often in one process, and other tests compile this one.
    torch.compiler.reset()


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


# Each module, and the shape of its input.
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "many heads": (lambda: ManyHeadAttention(24, 3, 16), (4, 7, 24)),
    "channels": (lambda: ChannelAttention(24, 3, 16), (4, 7, 24)),
    "covariance": (lambda: CrossCovarianceAttention(24, 3, 16), (4, 7, 24)),
    "landmarks": (lambda: NystromAttention(24, 3, 16, num_landmarks=4), (4, 8, 24)),
    "outlook": (lambda: OutlookAttention(24, 3, 16), (4, 4, 6, 24)),
    "a padded window": (lambda: WindowAttention(24, 3, 16, window_size=(3, 4)), (4, 5, 7, 24)),
}
every_module = pytest.mark.parametrize("name", MODULES)


@every_module
def test_a_capture_is_of_the_sampled_entries(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module, x, skip = make(), torch.randn(shape), torch.randn(shape)
    expected = module(x)
    assert module.captured is module.peak_logit is None
    module.capture_samples, module.track_logits = 2, True
    output, captured = module(x, skip=skip), module.captured
    torch.testing.assert_close(output, expected)
    rows, residual = (t[[0, 2]].flatten(1, -2) for t in (output, skip))
    assert captured.heads.shape == (2, rows.shape[1], 48)
    torch.testing.assert_close(module.proj(captured.heads), rows)
    torch.testing.assert_close(captured.output, rows)
    assert torch.equal(captured.residual, residual)
    assert captured.statistics["entropy"].shape == (4, 3)
    assert captured.statistics["max_logit"].shape == (3,)
    assert torch.equal(module.peak_logit, captured.statistics["max_logit"])


@every_module
def test_input_and_streams_of_other_shapes_are_refused(name: str) -> None:
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape)
    for other in (x[0], x[..., :-1]):
        with pytest.raises(ValueError, match=r"x must be \(B, (N|Y, X), 24\), got"):
            module(other)
    with pytest.raises(ValueError, match="skip must be shaped as x") as caught:
        module(x, skip=x[:, :1])
    assert f"{shape}, got" in str(caught.value)


@pytest.mark.parametrize("captures", [False, True])
@every_module
def test_an_empty_batch_passes_and_nothing_of_it_is_captured(name: str, captures: bool) -> None:
    make, shape = MODULES[name]
    module = make()
    if captures:
        module.capture_samples, module.track_logits = 2, True
    x = torch.randn(0, *shape[1:], requires_grad=True)
    out = module(x)
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()], allow_unused=True)
    assert out.shape == gradients[0].shape == x.shape
    assert all(g is None or not g.any() for g in gradients[1:])
    assert module.captured is module.peak_logit is None
