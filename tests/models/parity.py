"""What judges a vision model by timm's: weights that hide nothing, and results layer by layer."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.error_budget import assert_computes, by_layer

NAMES = {
    "image_size": "img_size",
    "heads": "num_heads",
    "drop_path": "drop_path_rate",
    "drop": "drop_rate",
}


def renamed(sizes: dict[str, Any], **names: str) -> dict[str, Any]:
    """Return the arguments of a model of ours as timm calls them."""
    names = NAMES | names
    return {names.get(name, name): value for name, value in sizes.items()}


def timm_vit(*, head_dim: int = 64, pool: str = "token", **sizes: Any) -> VisionTransformer:
    """Return timm's own model with heads of a chosen width.

    It only takes a class as ``attn_layer``, and splits without a width.
    """

    class FixedWidthAttention(Attention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, attn_head_dim=head_dim, **kwargs)

    pooled = {"global_pool": pool, "class_token": pool == "token"}
    return VisionTransformer(attn_layer=FixedWidthAttention, **pooled, **renamed(sizes))


def logits_and_gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the logits, the gradient of every parameter and of the images, for a random loss."""
    images = images.clone().requires_grad_()
    logits = model(images)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(logits.shape, generator=generator).to(logits)
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "images": images.grad, **gradients}


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


def assert_drawn_alike(model: nn.Module, oracle: nn.Module, largest: float = 0.3) -> None:
    """Judge initial values by the laws of timm's: constant, uniform or normal.

    Args:
        model: ours.
        oracle: timm's, with the same names.
        largest: how far the largest values may differ, which tells a uniform law from a normal one.
    """
    theirs = oracle.state_dict()
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            assert torch.equal(value, theirs[name]), name
            continue
        ours, their = value.double(), theirs[name].double()
        std = their.std(correction=0).item()
        # Five standard errors of the difference of two sample means, which for these laws also
        # covers the difference of two sample deviations.
        slack = 5 * std * (2 / ours.numel()) ** 0.5
        assert ours.mean().item() == pytest.approx(their.mean().item(), abs=slack), name
        assert ours.std(correction=0).item() == pytest.approx(std, abs=slack), name
        assert ours.abs().max().item() == pytest.approx(their.abs().max().item(), rel=largest), name


def assert_one_seed_gives_one_model(build: Callable[..., Any], drawn: str) -> None:
    """Judge a model that is built at once, later from the meta device, and in bfloat16.

    ``drawn`` is the name of a weight that is random.
    """
    torch.manual_seed(0)
    whole = build().state_dict()
    later = build(device="meta")
    assert all(t.is_meta for t in later.state_dict().values())
    later.to_empty(device="cpu")
    for t in later.state_dict().values():
        t.fill_(77)
    half = build(device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    for model in (later, half):
        torch.manual_seed(0)
        model.init_weights()
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole[name].to(value.dtype)), name
    before = torch.get_rng_state()
    half.init_weights(torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(half.state_dict()[drawn], whole[drawn].bfloat16())
