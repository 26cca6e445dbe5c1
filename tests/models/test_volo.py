"""VOLO: timm's weights, logits and gradients; widths; kappa; initial values; what it refuses."""

import copy

import pytest
import timm.models.volo
import torch
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import KappaMonitor
from models.volo import VOLO
from tests.models.parity import (
    assert_drawn_alike,
    assert_equal_for_one_seed,
    assert_equal_in_function,
)

NAMES = {
    "image_size": "img_size",
    "depths": "layers",
    "heads": "num_heads",
    "stem_dim": "stem_hidden_dim",
    "drop_path": "drop_path_rate",
    "drop": "drop_rate",
}
SMALL = {
    "image_size": 32,
    "embed_dims": [16, 24, 24],
    "depths": [2, 1, 2],
    "heads": [2, 4, 3],
    "stem_dim": 8,
    "num_classes": 10,
}


def volo(**kwargs) -> VOLO:
    return VOLO(**SMALL | kwargs)


def timm_volo(**sizes) -> timm.models.volo.VOLO:
    """timm's own model, which can only split, and takes the number of its stages from tuples."""
    sizes.pop("head_dim", None)
    stages = len(sizes["depths"])
    first = (True,) + (False,) * (stages - 1)
    sizes = {NAMES.get(key, key): value for key, value in sizes.items()}
    return timm.models.volo.VOLO(**sizes, downsamples=first, outlook_attention=first)


def sensible(oracle: timm.models.volo.VOLO) -> timm.models.volo.VOLO:
    """Give every parameter and buffer a part in the result: none 0, no norm the identity."""
    for name, param in oracle.named_parameters():
        norm = param.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(param, mean=float(norm), std=0.05)
    for module in oracle.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return oracle


def without_fused_attention(oracle: timm.models.volo.VOLO) -> timm.models.volo.VOLO:
    """The same model with plain matrix products, which round differently and can be counted."""
    for module in oracle.modules():
        if isinstance(module, timm.models.volo.Attention):
            module.fused_attn = False
    return oracle


def loaded_from(oracle: timm.models.volo.VOLO, **sizes) -> VOLO:
    model = VOLO(**sizes)
    model.load_state_dict(oracle.state_dict(), strict=True)
    return model


def seeded(**kwargs) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return volo(**kwargs).state_dict()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_flops_per_image_are_those_counted_in_timms():
    oracle = without_fused_attention(timm_volo(**SMALL, device="meta"))
    with FlopCounterMode(display=False) as counter:
        oracle(torch.empty(1, 3, 32, 32, device="meta"))
    assert volo(device="meta").flops_per_image() == counter.get_total_flops()


@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        # Heads as wide as those of the lean rows.
        ({"depths": [1, 1], "embed_dims": [128, 256], "heads": [8, 16]}, False),
        ({"depths": [1, 2, 1], "embed_dims": [48, 96, 96], "heads": [6, 16, 12]}, True),
        ({"depths": [2, 1], "embed_dims": [40, 32], "heads": [5, 2], "image_size": 48}, False),
        ({"depths": [2, 1], "embed_dims": [40, 32], "heads": [5, 2], "image_size": 48}, True),
        ({"depths": [1, 1], "embed_dims": [32, 48], "heads": [4, 3], "patch_size": 4}, False),
    ],
)
def test_timms_weights_give_the_same_logits_and_every_gradient(sizes, training):
    torch.manual_seed(0)
    sizes = {"image_size": 32, "stem_dim": 16, "num_classes": 10} | sizes
    oracle = sensible(timm_volo(**sizes)).train(training)
    model = loaded_from(oracle, **sizes).train(training)
    images = torch.randn(2, 3, sizes["image_size"], sizes["image_size"])
    assert_equal_in_function(model, oracle, images)


@pytest.mark.parametrize(
    ("heads", "head_dim", "widths", "convention"),
    [
        (8, 32, [(8, 32)] * 3, "widen"),
        ([8, 16], 32, [(8, 32), (16, 32), (16, 32)], "widen"),
        ([16, 32], [32, 16], [(16, 32), (32, 16), (32, 16)], "mixed"),
        ([8, 16, 32], "split", [(8, 32), (16, 32), (32, 16)], "split"),
        ([6, 9], "split", [(6, 42), (9, 56), (9, 56)], "split"),
    ],
)
def test_every_layer_has_the_heads_asked_for(heads, head_dim, widths, convention):
    sizes = {"embed_dims": [256, 512], "depths": [1, 2], "class_heads": 16, "device": "meta"}
    model = VOLO(heads=heads, head_dim=head_dim, **sizes)
    attention = list(model.attention_modules().values())
    assert [(a.num_heads, a.head_dim) for a in attention] == widths
    assert model.head_convention == convention
    one = VOLO(heads=[8, 16], head_dim="split", **sizes)
    (h, e), *others = widths
    more = 512 * (h * e - 256) + 257 * 81 * (h - 8)
    more += sum(4 * 512 * (h * e - 512) for h, e in others)
    assert model.num_params() == one.num_params() + more


def test_kappa_is_of_outlookers_and_transformer_layers_around_their_skips():
    torch.manual_seed(0)
    model = volo()
    streams = []
    for block in model.blocks[:5]:
        block.norm1.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    monitor = KappaMonitor(model, every=1, samples=2)
    assert monitor.layers == list(model.attention_modules())
    assert len(monitor.layers) == 5
    monitor.begin(0)
    model(torch.randn(3, 3, 32, 32))
    for stream, attention in zip(streams, model.attention_modules().values(), strict=True):
        assert torch.equal(attention.captured.residual, stream[:2].flatten(1, -2))
    rows = monitor.end()
    assert [row["tokens"] for row in rows] == [16, 16, 4, 4, 4]
    assert all(row["kappa"] > 1 for row in rows)


def test_the_stem_takes_weights_of_another_dtype_than_its_statistics():
    model = volo(dtype=torch.bfloat16)
    expected = copy.deepcopy(model).float()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean = module.running_mean.float()
            module.running_var = module.running_var.float()
    images = torch.randn(4, 3, 32, 32)
    actual = model.patch_embed(images.bfloat16())
    torch.testing.assert_close(actual.float(), expected.patch_embed(images), atol=0.02, rtol=0.02)
    for (name, ours), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.01, msg=name)
        assert not ours.is_floating_point() or ours.dtype == torch.float32


def test_initial_values_follow_the_law_of_timms():
    torch.manual_seed(0)
    sizes = {"image_size": 64, "depths": [1, 1], "embed_dims": [96, 192], "heads": [3, 6]}
    oracle = timm_volo(**sizes)
    assert_drawn_alike(VOLO(**sizes), oracle)


def test_one_seed_gives_one_model_in_every_dtype_and_from_every_generator():
    state = seeded()
    low = seeded(dtype=torch.bfloat16)
    assert_equal(low, {name: value.to(low[name].dtype) for name, value in state.items()})
    model = volo()
    model.init_weights(torch.Generator().manual_seed(0))
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 40}, r"image_size must be a multiple of 2 \* patch_size, 16, got 40"),
        ({"patch_size": 7}, "patch_size must be even, got 7"),
        ({"stem_dim": 0}, "stem_dim must be at least 1, got 0"),
        ({"depths": [2]}, r"depths must be of at least 2 stages, got \[2\]"),
        ({"depths": [2, 0, 1]}, r"depths must be at least 1 in every stage, got \[2, 0, 1\]"),
        (
            {"embed_dims": [16, 24, 32]},
            r"embed_dims must be 3 widths, equal from the second on, got \[16, 24, 32\]",
        ),
        ({"embed_dims": [0, 24, 24]}, r"embed_dims must be at least 1, got \[0, 24, 24\]"),
        ({"heads": [2, 4]}, r"one value, 3 \(one per stage\) or 5 \(one per layer\), got 2"),
        ({"heads": [2, 4, 25]}, "at most 24 to split embed_dim, got 25 in layer 3"),
        ({"head_dim": 129}, r"head_dim must be in \[1, 128\], got 129"),
        ({"class_heads": 25}, "class_heads must be from 1 to 24, to split width 24, got 25"),
        (
            {"embed_dims": [16, 300, 300], "class_heads": 2},
            "class_heads must be from 3 to 300, to split width 300, got 2",
        ),
        ({"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/16, got 0.01"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        volo(device="meta", **arguments)
    assert "\n" not in str(error.value)


def test_stochastic_depth_and_dropout_equal_timms_for_one_seed():
    torch.manual_seed(0)
    sizes = SMALL | {"drop_path": 0.5, "drop": 0.3, "embed_dims": [24, 24, 24], "heads": [2, 4, 4]}
    oracle = sensible(timm_volo(**sizes)).train()
    model = loaded_from(oracle, **sizes).train()
    images = torch.randn(8, 3, 32, 32)
    assert_equal_for_one_seed(model, oracle, images)
