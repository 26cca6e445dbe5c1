"""DaViT: timm's weights give timm's results; heads per layer, initial values, capture, refusals."""

import pytest
import torch
from timm.models.davit import ChannelAttention, DaVit, WindowAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.davit import DaViT
from tests.models.parity import (
    assert_drawn_alike,
    assert_equal_for_one_seed,
    assert_equal_in_function,
    assert_one_seed_gives_one_model,
    randomize,
)

SMALL = {"embed_dims": (16, 24), "depths": (1, 2), "num_classes": 10}


def davit(**kwargs) -> DaViT:
    sizes = {"image_size": 32, "heads": 2, "head_dim": 8, "window": 3}
    return DaViT(**SMALL | sizes | kwargs)


class Wide(nn.Module):
    """Either attention of DaViT as its paper has it, between projections to another width."""

    fused_attn = True

    def __init__(self, dim: int, heads: int, head_dim: int, channels: bool):
        super().__init__()
        self.sizes, self.channels = (3, heads, head_dim), channels
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.sizes).permute(2, 0, 3, 1, 4)
        q, k, v = (k.mT, v.mT, q.mT) if self.channels else (q, k, v)
        scale = self.sizes[-1] ** -0.5
        if self.fused_attn:
            a = F.scaled_dot_product_attention(q, k, v, scale=scale)
        else:
            a = (q @ k.mT * scale).softmax(dim=-1) @ v
        a = a.mT if self.channels else a
        return self.proj(a.transpose(1, 2).flatten(2))


def timm_davit(*, heads, head_dim: int | str, window: int, **kwargs) -> DaVit:
    """timm's model, with attention of its own width unless the heads split it."""
    heads = [heads] * len(kwargs["depths"]) if isinstance(heads, int) else heads
    oracle = DaVit(num_heads=heads, window_size=window, **kwargs)
    for stage, h in zip(oracle.stages, heads) if head_dim != "split" else ():
        for layer in stage.blocks:
            for block, kind in zip(layer, (WindowAttention, ChannelAttention), strict=True):
                assert isinstance(block.attn, kind)
                dim = block.attn.proj.out_features
                block.attn = Wide(dim, h, head_dim, channels=kind is ChannelAttention)
    return oracle


def loaded_from(oracle: nn.Module, **kwargs) -> DaViT:
    model = davit(**kwargs)
    model.load_state_dict(oracle.state_dict(), strict=True)
    return model.train(oracle.training)


@pytest.mark.parametrize(
    ("image_size", "window"),
    # Windows that tile every map; that leave a rest in every map; a map of odd sides to halve.
    [(32, 4), (32, 3), (36, 7)],
)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 8), "split"), (3, 16)])
def test_logits_and_every_gradient_equal_timms(heads, head_dim, image_size, window):
    torch.manual_seed(0)
    layout = {"heads": heads, "head_dim": head_dim, "window": window}
    oracle = randomize(timm_davit(**SMALL, **layout))
    model = loaded_from(oracle, **layout, image_size=image_size)
    assert_equal_in_function(model, oracle, torch.randn(4, 3, image_size, image_size))


def test_initial_values_follow_the_law_of_timms():
    torch.manual_seed(0)
    sizes = {"embed_dims": (96, 192), "depths": (1, 1), "num_classes": 10}
    sizes |= {"heads": 2, "head_dim": "split", "window": 4}
    oracle = timm_davit(**sizes)
    assert_drawn_alike(davit(**sizes), oracle, 0.25)


def test_one_seed_gives_one_model_on_every_way_to_it():
    assert_one_seed_gives_one_model(davit, "head.fc.weight")


@pytest.mark.parametrize(
    ("heads", "head_dim", "widths", "convention", "params"),
    [
        # The paper's davit_base, lean and original.
        (
            (4, 8, 32, 32),
            "split",
            [(4, 32), (8, 32), *[(32, 16)] * 5, (32, 32)],
            "split",
            62_653_416,
        ),
        (
            (4, 8, 16, 32),
            32,
            [(4, 32), (8, 32), *[(16, 32)] * 9, (32, 32)],
            "widen",
            87_954_408,
        ),
        (8, 24, [(8, 24)] * 4, "widen", None),
        (
            [4, 8, 12, 16, 20],
            ["split", 40, 30, 20, 10],
            [(4, 32), (8, 40), (12, 30), (16, 20), (20, 10)],
            "mixed",
            None,
        ),
    ],
)
def test_every_layer_has_the_heads_asked_for(heads, head_dim, widths, convention, params):
    depths = (1, 1, len(widths) - 3, 1)
    model = DaViT(depths=depths, heads=heads, head_dim=head_dim, device="meta")
    attns = [[block.attn for block in layer] for layer in model.blocks]
    assert [[(a.num_heads, a.head_dim) for a in pair] for pair in attns] == [[w, w] for w in widths]
    assert model.head_convention == convention
    assert list(model.attention_modules().values()) == [a for pair in attns for a in pair]
    assert params is None or model.num_params() == params


def test_flops_per_image_is_the_number_of_products_that_timms_model_does():
    layout = {"heads": 2, "head_dim": "split", "window": 4}
    images = torch.empty(1, 3, 32, 32, device="meta")
    oracle = timm_davit(**SMALL, **layout).to("meta").eval()
    with FlopCounterMode(display=False) as counter:
        oracle(images)
    assert davit(**layout).flops_per_image() == counter.get_total_flops()


def test_kappa_is_measured_around_the_residual_of_every_attention():
    model = davit(heads=[2, 3, 5])
    streams = []
    for layer in model.blocks:
        for block in layer:
            block.cpe1.register_forward_hook(lambda module, args, out: streams.append(out))
    for module in model.attention_modules().values():
        module.capture_samples = 2
    model(torch.randn(3, 3, 32, 32))
    for module, stream in zip(model.attention_modules().values(), streams, strict=True):
        tokens = stream.shape[1] * stream.shape[2]
        assert module.captured.heads.shape == (2, tokens, module.num_heads * 8)
        assert torch.equal(module.captured.residual, stream[:2].flatten(1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 34}, "image_size must be a multiple of 4, got 34"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"embed_dims": (16, 0)}, r"embed_dims must be at least 1 in each stage, got \[16, 0\]"),
        ({"depths": (1, 0)}, r"depths must be at least 1 in each stage, got \[1, 0\]"),
        (
            {"embed_dims": (), "depths": ()},
            r"embed_dims must be at least 1 in each stage, got \[\]",
        ),
        ({"depths": (1, 1, 1)}, "embed_dims and depths must have one .* each, got 2 and 3"),
        ({"heads": (4, -2)}, "heads must be at least 1, got -2 in layer 1"),
        (
            {"heads": (4,)},
            r"heads must be one value, 2 \(one per stage\) or 3 \(one per layer\), got 1",
        ),
        ({"heads": 17, "head_dim": "split"}, "at most 16 to split embed_dim, got 17 in layer 0"),
        ({"head_dim": "half"}, "head_dim must be 'split' or at least 1, got 'half' in layer 0"),
        ({"mlp_ratio": 0.05}, "mlp_ratio must be at least 1/16, got 0.05"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        davit(device="meta", **arguments)
    assert "\n" not in str(error.value)


def test_stochastic_depth_and_dropout_equal_timms_for_one_seed():
    torch.manual_seed(0)
    layout = {"heads": 2, "head_dim": "split", "window": 4}
    oracle = timm_davit(**SMALL, **layout, drop_path_rate=0.5, drop_rate=0.3)
    oracle = randomize(oracle).train()
    model = loaded_from(oracle, **layout, drop_path=0.5, drop=0.3)
    images = torch.randn(16, 3, 32, 32)
    assert_equal_for_one_seed(model, oracle, images)
