"""VisionTransformer: widths, heads per layer, initialisation, FLOPs, and what it refuses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.vit import VisionTransformer
from tests.models.timm_oracle import timm_vit

SMALL = {"image_size": 32, "embed_dim": 48, "depth": 2, "num_classes": 10, "heads": 4}


def vit(**kwargs) -> VisionTransformer:
    return VisionTransformer(**SMALL | {"head_dim": 8} | kwargs)


def seeded(**kwargs) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return vit(**kwargs).state_dict()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize(
    ("heads", "head_dim", "widths", "convention"),
    [
        (12, 64, [(12, 64)] * 3, "widen"),
        (16, 64, [(16, 64)] * 3, "widen"),
        ([16, 12, 8], 64, [(16, 64), (12, 64), (8, 64)], "widen"),
        (16, "split", [(16, 48)] * 3, "split"),
        ([16, 12, 10], "split", [(16, 48), (12, 64), (10, 76)], "split"),
        ([16, 12, 8], [48, 64, 96], [(16, 48), (12, 64), (8, 96)], "split"),
        ([16, 12, 8], [32, 64, 64], [(16, 32), (12, 64), (8, 64)], "mixed"),
        (16, ["split", 64, 32], [(16, 48), (16, 64), (16, 32)], "mixed"),
    ],
)
def test_every_layer_has_the_heads_asked_for(heads, head_dim, widths, convention):
    model = VisionTransformer(depth=3, heads=heads, head_dim=head_dim, device="meta")
    assert [(b.attn.num_heads, b.attn.head_dim) for b in model.blocks] == widths
    assert model.head_convention == convention
    D, N, M = 768, 197, 3072
    attention = [3 * h * e * (D + 1) + D * (h * e + 1) for h, e in widths]
    feed_forward = M * (D + 1) + D * (M + 1)
    ends = D * (3 * 16**2 + 1) + D + N * D + 2 * D + 1000 * (D + 1)
    assert model.num_params() == ends + sum(a + feed_forward + 4 * D for a in attention)


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize(
    "layout", [{"heads": 16, "depth": 7, "mlp_ratio": 2.0}, {"image_size": 96, "depth": 1}]
)
def test_flops_per_image_is_the_number_of_matrix_products_counted(layout, pool):
    model = VisionTransformer(**layout, pool=pool, device="meta")
    names = {"image_size": "img_size", "heads": "num_heads"}
    oracle = timm_vit(
        **{names.get(key, key): value for key, value in layout.items()},
        global_pool=pool,
        class_token=pool == "token",
        device="meta",
    )
    for block in oracle.blocks:
        block.attn.fused_attn = False  # plain matrix products, which the counter has a formula for
    images = torch.empty(1, 3, model.image_size, model.image_size, device="meta")
    with FlopCounterMode(display=False) as counter:
        oracle(images)
    assert model.flops_per_image() == counter.get_total_flops()


@pytest.mark.parametrize("init", ["trunc_normal", "xavier"])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_model_built_on_the_meta_device_gets_the_same_weights_later(pool, init):
    model = vit(device="meta", pool=pool, init=init)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.constant_(p, float("nan"))
    torch.manual_seed(0)
    model.init_weights()
    assert_equal(model.state_dict(), seeded(pool=pool, init=init))


@pytest.mark.parametrize(("pool", "init"), [("token", "trunc_normal"), ("avg", "xavier")])
def test_every_weight_is_written_when_memory_starts_as_nan(pool, init):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan()
        state = vit(pool=pool, init=init).state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(value.isfinite().all() for value in state.values())


def test_one_seed_gives_one_model_in_every_dtype():
    state = seeded(dtype=torch.bfloat16)
    assert_equal(state, {name: v.bfloat16() for name, v in seeded().items()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 30}, "image_size must be a multiple of patch_size 16, got 30"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0"),
        ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"embed_dim": -1}, "embed_dim must be at least 1, got -1"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"heads": 0}, "heads must be at least 1, got 0 in layer 0"),
        ({"heads": [4, -2]}, "heads must be at least 1, got -2 in layer 1"),
        ({"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
        ({"head_dim": [8, 8, 8]}, r"head_dim must be one value or 2 \(one per layer\), got 3"),
        ({"head_dim": 0}, "head_dim must be 'split' or at least 1, got 0 in layer 0"),
        ({"head_dim": "half"}, "head_dim must be 'split' or at least 1, got 'half' in layer 0"),
        (
            {"heads": [4, 49], "head_dim": "split"},
            "at most 48 to split embed_dim, got 49 in layer 1",
        ),
        ({"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/48, got 0.01"),
        ({"pool": "max"}, "pool must be 'token' or 'avg', got 'max'"),
        ({"init": "kaiming"}, "init must be 'trunc_normal' or 'xavier', got 'kaiming'"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        vit(device="meta", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(2, 3, 32), (2, 1, 32, 32), (2, 3, 32, 48)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 32, 32\), got \(2, "):
        vit()(torch.zeros(shape))
