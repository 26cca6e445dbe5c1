"""What judges a vision model by timm's: weights that hide nothing, and results layer by layer."""

import copy

import torch
from torch import Tensor, nn

from tests.error_budget import assert_within_budget, by_layer
from tests.models.timm_oracle import logits_and_gradients


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    """Move every value from where it hides errors: scales of 1e-5, biases of 0, variances of 1."""
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2)
        elif value.ndim > 1:
            value.normal_(0, value[0].numel() ** -0.5)
        elif value.is_floating_point():
            value.normal_(0 if name.endswith(("bias", "mean")) else 1, 0.3)
    return model


def assert_equal_in_function(model: nn.Module, oracle: nn.Module, images: Tensor) -> None:
    """Judge logits, all gradients and the buffers that follow by timm's, in float64 and float32.

    Of two ways to run timm's model in float32 the less exact one counts: as it is, and with the
    channels last and its attention not fused.
    """
    exact, usual, other = (copy.deepcopy(oracle) for _ in range(3))
    exact, other = exact.double(), other.to(memory_format=torch.channels_last)
    for module in other.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    runs = (
        (model, images),
        (usual, images),
        (other, images.contiguous(memory_format=torch.channels_last)),
        (exact, images.double()),
    )
    actual, *peers, expected = (by_layer(logits_and_gradients(*run)) for run in runs)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_within_budget(actual[name], tuple(p[name] for p in peers), expected[name])
    actual, *peers, expected = (dict(run.named_buffers()) for run, _ in runs)
    assert actual.keys() == expected.keys()
    for name in expected:
        if expected[name].is_floating_point():
            assert_within_budget(actual[name], tuple(p[name] for p in peers), expected[name])
        else:
            assert torch.equal(actual[name], expected[name]), name
