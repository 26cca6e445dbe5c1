"""timm's weights load unchanged and give the same logits and gradients; timm runs on our kernel."""

import pytest
import torch

from models.vit import VisionTransformer
from tests.models.parity import assert_equal_for_one_seed, assert_equal_in_function
from tests.models.timm_oracle import timm_vit


def loaded_from(oracle: torch.nn.Module, **kwargs) -> VisionTransformer:
    model = VisionTransformer(**kwargs)
    model.load_state_dict(oracle.state_dict(), strict=True)
    return model


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize(
    ("embed_dim", "heads", "head_dim"), [(192, 3, 64), (192, 4, 64), (192, 6, 16)]
)
def test_logits_and_every_gradient_equal_timms(embed_dim, heads, head_dim, pool):
    torch.manual_seed(0)
    sizes = {"embed_dim": embed_dim, "depth": 2, "mlp_ratio": 2.0, "num_classes": 10}
    oracle = timm_vit(
        img_size=64,
        num_heads=heads,
        head_dim=head_dim,
        global_pool=pool,
        class_token=pool == "token",
        **sizes,
    )
    model = loaded_from(oracle, image_size=64, heads=heads, head_dim=head_dim, pool=pool, **sizes)
    assert_equal_in_function(model, oracle, torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize(("init", "weight_init"), [("trunc_normal", ""), ("xavier", "jax")])
def test_initial_values_follow_the_law_of_timms(init, weight_init):
    torch.manual_seed(0)
    oracle = timm_vit(img_size=64, depth=2, num_heads=12, weight_init=weight_init)
    model = VisionTransformer(image_size=64, depth=2, init=init)
    theirs = dict(oracle.named_parameters())
    for name, ours in model.named_parameters():
        std = theirs[name].std().item()
        # Five standard errors of the difference of two sample means, which for these laws
        # (constant, uniform, normal) also covers the difference of two sample deviations.
        slack = 5 * std * (2 / ours.numel()) ** 0.5
        assert ours.mean().item() == pytest.approx(theirs[name].mean().item(), abs=slack), name
        assert ours.std().item() == pytest.approx(std, abs=slack), name
        # The largest value tells a uniform law from a normal one and a cut normal from a whole one.
        largest = theirs[name].abs().max().item()
        assert ours.abs().max().item() == pytest.approx(largest, rel=0.25), name


def test_stochastic_depth_and_dropout_equal_timms_for_one_seed():
    torch.manual_seed(0)
    sizes = {"embed_dim": 64, "depth": 4, "num_classes": 10}
    oracle = timm_vit(
        img_size=32, num_heads=2, head_dim=8, drop_path_rate=0.5, drop_rate=0.3, **sizes
    ).train()
    model = loaded_from(
        oracle, image_size=32, heads=2, head_dim=8, drop_path=0.5, drop=0.3, **sizes
    ).train()
    images = torch.randn(16, 3, 32, 32)
    assert_equal_for_one_seed(model, oracle, images)
