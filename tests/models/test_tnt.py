"""TNT: timm's weights, logits and gradients; widths; kappa; initial values; what it refuses."""

import pytest
import timm.models.tnt
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import KappaMonitor
from models import papers
from models.tnt import TNT
from tests.models.parity import (
    assert_drawn_alike,
    assert_equal_for_one_seed,
    assert_equal_in_function,
)

NAMES = {
    "image_size": "img_size",
    "heads": "num_heads_outer",
    "inner_heads": "num_heads_inner",
    "inner_stride": "first_stride",
    "drop_path": "drop_path_rate",
    "drop": "drop_rate",
}
SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "heads": 4,
    "inner_dim": 12,
    "inner_heads": 3,
    "num_classes": 10,
}


def tnt(**kwargs) -> TNT:
    return TNT(**SMALL | kwargs)


def timm_tnt(**sizes) -> timm.models.tnt.TNT:
    """timm's own model, which can only split."""
    sizes.pop("head_dim", None)
    return timm.models.tnt.TNT(**{NAMES.get(key, key): value for key, value in sizes.items()})


def sensible(oracle: timm.models.tnt.TNT) -> timm.models.tnt.TNT:
    """Give every parameter a part in the result: no bias is 0 and no norm the identity."""
    for name, param in oracle.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name and "weight" in name), std=0.05)
    return oracle


def loaded_from(oracle: timm.models.tnt.TNT, **sizes) -> TNT:
    model = TNT(**sizes)
    model.load_state_dict(oracle.state_dict(), strict=True)
    return model


def seeded(**kwargs) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return tnt(**kwargs).state_dict()


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_flops_per_image_are_those_counted_in_timms():
    oracle = timm_tnt(**SMALL, device="meta")
    with FlopCounterMode(display=False) as counter:
        oracle(torch.empty(1, 3, 32, 32, device="meta"))
    assert tnt(device="meta").flops_per_image() == counter.get_total_flops()


@pytest.mark.parametrize(
    "sizes",
    [
        papers.ROWS["tnt_base", "lean"].config | {"image_size": 32, "depth": 1, "num_classes": 10},
        {"image_size": 48, "patch_size": 12, "embed_dim": 60, "heads": 12, "mlp_ratio": 2.0},
        {"image_size": 16, "patch_size": 8, "embed_dim": 32, "heads": 2, "inner_stride": 2},
    ],
)
def test_timms_weights_give_the_same_logits_and_every_gradient(sizes):
    torch.manual_seed(0)
    sizes = {"inner_dim": 20, "inner_heads": 4, "depth": 2, "num_classes": 10} | sizes
    oracle = sensible(timm_tnt(**sizes))
    model = loaded_from(oracle, **sizes)
    images = torch.randn(2, 3, sizes["image_size"], sizes["image_size"])
    assert_equal_in_function(model, oracle, images)


@pytest.mark.parametrize(
    ("heads", "head_dim", "widths", "convention"),
    [
        (16, 64, [(16, 64)] * 2, "widen"),
        ([16, 10], 64, [(16, 64), (10, 64)], "widen"),
        ([16, 9], "split", [(16, 40), (9, 71)], "split"),
        ([16, 10], [64, "split"], [(16, 64), (10, 64)], "widen"),
        ([16, 10], [32, 48], [(16, 32), (10, 48)], "mixed"),
    ],
)
def test_every_layer_has_the_heads_asked_for(heads, head_dim, widths, convention):
    model = TNT(depth=2, heads=heads, head_dim=head_dim, device="meta")
    assert [(b.attn_out.num_heads, b.attn_out.head_dim) for b in model.blocks] == widths
    assert model.head_convention == convention
    ten = TNT(depth=2, heads=10, device="meta")
    more = sum(4 * 640 * (h * e - 640) for h, e in widths)
    assert model.num_params() == ten.num_params() + more


def test_widened_attention_is_that_of_its_projections():
    torch.manual_seed(0)
    attention = tnt(heads=5, head_dim=7).blocks[0].attn_out
    x, skip = torch.randn(2, 3, 6, 24).unbind()
    q, k = attention.qk(x).view(3, 6, 2, 5, 7).permute(2, 0, 3, 1, 4)
    v = attention.v(x).view(3, 6, 5, 7).transpose(1, 2)
    heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.proj(heads))
    assert attention.captured is None
    attention.capture_samples = 2
    output = attention(x, skip=skip)
    torch.testing.assert_close(output, attention.proj(heads))
    torch.testing.assert_close(attention.captured.heads, heads[:2].detach())
    assert torch.equal(attention.captured.output, output[:2])
    assert torch.equal(attention.captured.residual, skip[:2])


def test_kappa_is_of_the_outer_attention_of_every_layer_around_its_skip():
    torch.manual_seed(0)
    model = tnt()
    streams = []
    for block in model.blocks:
        block.norm_out.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    monitor = KappaMonitor(model, every=1, samples=2)
    assert monitor.layers == list(model.attention_modules())
    assert monitor.layers == ["blocks.0.attn_out", "blocks.1.attn_out"]
    monitor.begin(0)
    model(torch.randn(3, 3, 32, 32))
    for stream, attention in zip(streams, model.attention_modules().values(), strict=True):
        assert torch.equal(attention.captured.residual, stream[:2])
    rows = monitor.end()
    assert [(row["heads"], row["head_dim"], row["tokens"]) for row in rows] == [(4, 6, 17)] * 2
    assert all(row["kappa"] > 1 for row in rows)


def test_initial_values_follow_the_law_of_timms():
    torch.manual_seed(0)
    sizes = {"image_size": 64, "depth": 1, "embed_dim": 240}
    oracle = timm_tnt(**sizes)
    assert_drawn_alike(TNT(**sizes, heads=10), oracle)


def test_one_seed_gives_one_model_in_every_dtype_and_from_every_generator():
    state = seeded()
    assert_equal(seeded(dtype=torch.bfloat16), {name: v.bfloat16() for name, v in state.items()})
    model = tnt()
    model.init_weights(torch.Generator().manual_seed(0))
    assert_equal(model.state_dict(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 30}, "image_size must be a multiple of patch_size 8, got 30"),
        ({"inner_stride": 0}, "inner_stride must be at least 1, got 0"),
        ({"inner_dim": 0}, "inner_dim must be at least 1, got 0"),
        ({"inner_heads": 13}, "inner_heads must be from 1 to 12, to split inner_dim, got 13"),
        (
            {"inner_dim": 300, "inner_heads": 2},
            "inner_heads must be from 3 to 300, to split inner_dim, got 2",
        ),
        ({"heads": 25}, "heads must be at most 24 to split embed_dim, got 25 in layer 0"),
        ({"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
        ({"head_dim": 129}, r"head_dim must be in \[1, 128\], got 129"),
        ({"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/24, got 0.01"),
        ({"position_std": -1.0}, "position_std must be at least 0, got -1.0"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        tnt(device="meta", **arguments)
    assert "\n" not in str(error.value)


def test_stochastic_depth_and_dropout_equal_timms_for_one_seed():
    torch.manual_seed(0)
    sizes = SMALL | {"depth": 4, "drop_path": 0.5, "drop": 0.3}
    oracle = sensible(timm_tnt(**sizes)).train()
    model = loaded_from(oracle, **sizes).train()
    images = torch.randn(8, 3, 32, 32)
    assert_equal_for_one_seed(model, oracle, images)
