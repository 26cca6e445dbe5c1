"""timm's models on a GPU in bfloat16: on our kernels they stay within the budget of timm's own."""

import copy

import pytest
import torch

pytest.importorskip("timm", minversion="1.0.29", exc_type=ImportError)
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import timm
from tests.error_budget import assert_within_budget, by_layer
from tests.models.parity import randomize
from tests.models.timm_oracle import logits_and_gradients

MODELS = {
    "vit": lambda: VisionTransformer(embed_dim=192, depth=2, num_heads=3, num_classes=10),
    "swin": lambda: SwinTransformer(
        img_size=112,
        embed_dim=48,
        depths=(2, 2),
        num_heads=(3, 6),
        drop_path_rate=0,
        num_classes=10,
    ),
    "xcit": lambda: Xcit(embed_dim=128, depth=2, num_heads=4, tokens_norm=True, num_classes=10),
}
SIZES = {"vit": 224, "swin": 112, "xcit": 224}


def made(family: str, device: str) -> tuple[nn.Module, Tensor]:
    """Weights and images that bfloat16 holds."""
    torch.manual_seed(0)
    oracle = randomize(MODELS[family]()).eval().to(device, torch.bfloat16)
    return oracle, torch.randn(4, 3, SIZES[family], SIZES[family]).to(device, torch.bfloat16)


def assert_swapped_is_as_exact(family: str, device: str) -> nn.Module:
    """Judge logits and gradients by float64, allowing what timm's errs, fused or not."""
    oracle, images = made(family, device)
    model, plain = copy.deepcopy(oracle), copy.deepcopy(oracle)
    timm.use(model)
    for module in plain.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    exact = by_layer(
        logits_and_gradients(copy.deepcopy(oracle).cpu().double(), images.cpu().double())
    )
    actual, *peers = (by_layer(logits_and_gradients(m, images)) for m in (model, oracle, plain))
    for name, expected in exact.items():
        assert_within_budget(actual[name], tuple(peer[name] for peer in peers), expected)
    return oracle


def assert_kappa_is_that_of_float64(family: str, device: str) -> None:
    model, images = made(family, device)
    timm.use(model)
    rows = []
    for each, x in ((model, images), (copy.deepcopy(model).cpu().double(), images.cpu().double())):
        monitor = KappaMonitor(each, every=1, samples=2)
        monitor.begin(0)
        each(x)
        rows.append([*monitor.end(), *monitor.flush()])
    # Of the first layer: bfloat16 changes what later ones are given.
    actual, exact = rows[0][0], rows[1][0]
    assert actual["layer"] == exact["layer"]
    assert actual["kappa"] == pytest.approx(exact["kappa"], rel=0.1)


@pytest.mark.parametrize("family", MODELS)
def test_a_swapped_model_stays_within_the_budget_of_timms(family):
    assert_swapped_is_as_exact(family, "cuda")


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_kappa_in_bfloat16_is_near_that_of_float64(family):
    assert_kappa_is_that_of_float64(family, "cuda")
