"""What judges a vision model by timm's: weights that hide nothing, and results layer by layer."""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from tests.error_budget import assert_computes, by_layer
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


def results(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Logits, all gradients layer by layer, and the buffers that follow."""
    found = by_layer(logits_and_gradients(model, images))
    buffers = {
        n: b.clone() if b.is_floating_point() else b.float() for n, b in model.named_buffers()
    }
    assert not found.keys() & buffers.keys()
    return found | buffers


def assert_equal_for_one_seed(model: nn.Module, oracle: nn.Module, images: Tensor) -> None:
    """Judge the logits of models that draw numbers, the same ones after the same seed."""

    def logits(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        torch.manual_seed(7)
        return {"logits": copy.deepcopy(model).to(dtype)(images.to(dtype))}

    found = logits(model, images.dtype)
    assert_computes(found, partial(logits, oracle))
    assert not torch.allclose(found["logits"], copy.deepcopy(model).eval()(images))


def assert_equal_in_function(model: nn.Module, oracle: nn.Module, images: Tensor) -> None:
    """Judge what ``model`` computes in float32 by what correct arithmetic makes of timm's model."""

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        return results(copy.deepcopy(oracle).to(dtype), images.to(dtype))

    assert_computes(results(model, images), reference)
