"""XCiT: timm's weights give timm's results; heads per layer, initial values, capture, refusals."""

import pytest
import torch
from timm.models.xcit import XCA, Xcit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.xcit import XCiT
from tests.models.parity import (
    assert_drawn_alike,
    assert_equal_for_one_seed,
    assert_equal_in_function,
    assert_one_seed_gives_one_model,
    randomize,
)

SMALL = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_classes": 10}


def xcit(**kwargs) -> XCiT:
    return XCiT(**SMALL | {"heads": 4, "head_dim": 8} | kwargs)


class WideXCA(XCA):
    """timm's, as its paper has it in section 3.2, between projections to another width."""

    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__(dim, heads)
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature
        return self.proj((scores.softmax(dim=-1) @ v).permute(0, 3, 1, 2).flatten(2))


def timm_xcit(*, heads: int, head_dim: int | str, **kwargs) -> Xcit:
    """timm's model as in the paper's rows, with attention of its own width unless it is split."""
    names = {"image_size": "img_size", "class_depth": "cls_attn_layers"}
    kwargs = {names.get(name, name): value for name, value in kwargs.items()}
    oracle = Xcit(num_heads=heads, eta=1e-5, tokens_norm=True, **kwargs)
    if head_dim != "split":
        for block in oracle.blocks:
            block.attn = WideXCA(oracle.embed_dim, heads, head_dim)
    return oracle


def loaded_from(oracle: nn.Module, **kwargs) -> XCiT:
    model = xcit(**kwargs)
    model.load_state_dict(oracle.state_dict(), strict=True)
    return model.train(oracle.training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        {"heads": 4, "head_dim": "split"},
        {"heads": 12, "head_dim": "split"},
        {"heads": 6, "head_dim": 16},
        # The patches that a class block returns matter from the third on: norms undo their scale.
        {"heads": 4, "head_dim": "split", "class_depth": 3, "mlp_ratio": 3.0},
        {"heads": 4, "head_dim": "split", "patch_size": 16, "image_size": 64},
    ],
)
def test_logits_gradients_and_running_statistics_equal_timms(layout, training):
    torch.manual_seed(0)
    sizes = SMALL | layout
    oracle = randomize(timm_xcit(**sizes)).train(training)
    images = torch.randn(4, 3, sizes["image_size"], sizes["image_size"])
    assert_equal_in_function(loaded_from(oracle, **layout), oracle, images)


def test_initial_values_follow_the_law_of_timms():
    torch.manual_seed(0)
    sizes = SMALL | {"embed_dim": 192, "heads": 4, "head_dim": "split", "image_size": 64}
    oracle = timm_xcit(**sizes)
    assert_drawn_alike(xcit(**sizes), oracle, 0.25)


def test_one_seed_gives_one_model_on_every_way_to_it():
    assert_one_seed_gives_one_model(xcit, "cls_token")


@pytest.mark.parametrize(
    ("heads", "head_dim", "widths", "convention", "params"),
    [
        # The paper's xcit_medium, lean, and xcit_large, original.
        (16, 64, [(16, 64)] * 12, "widen", 59_002_600),
        (16, "split", [(16, 48)] * 24, "split", 189_096_136),
        ([16] * 6 + [8] * 6, 64, [(16, 64)] * 6 + [(8, 64)] * 6, "widen", None),
        ([16, 12], "split", [(16, 32), (12, 42)], "split", None),
    ],
)
def test_every_layer_has_the_heads_asked_for(heads, head_dim, widths, convention, params):
    dim = 768 if params == 189_096_136 else 512
    sizes = {"embed_dim": dim, "depth": len(widths)}
    model = XCiT(**sizes, heads=heads, head_dim=head_dim, device="meta")
    assert [(b.attn.num_heads, b.attn.head_dim) for b in model.blocks] == widths
    assert model.head_convention == convention
    assert len(model.attention_modules()) == len(widths)
    for block in model.cls_attn_blocks:
        assert (block.attn.num_heads, block.attn.head_dim) == (widths[-1][0], dim // widths[-1][0])
    assert params is None or model.num_params() == params


def test_flops_per_image_is_the_number_of_products_that_timms_model_does():
    sizes = SMALL | {"heads": 4, "head_dim": "split"}
    images = torch.empty(1, 3, 32, 32, device="meta")
    oracle = timm_xcit(**sizes).to("meta").eval()
    with FlopCounterMode(display=False) as counter:
        oracle(images)
    assert xcit(**sizes).flops_per_image() == counter.get_total_flops()


def test_kappa_is_measured_around_the_scaled_residual_of_every_layer():
    model = randomize(xcit(heads=[4, 6]))
    streams, branches = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
        block.attn.register_forward_hook(lambda module, args, out: branches.append(out))
    for module in model.attention_modules().values():
        module.capture_samples = 2
    model(torch.randn(3, 3, 32, 32))
    for block, stream, branch in zip(model.blocks, streams, branches, strict=True):
        captured = block.attn.captured
        assert captured.heads.shape == (2, 16, block.attn.num_heads * 8)
        assert torch.equal(captured.residual, stream[:2])
        assert torch.equal(captured.output, block.gamma1 * branch[:2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 36}, "image_size must be a multiple of patch_size 8, got 36"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"patch_size": 12}, "patch_size must be a power of two from 2, got 12"),
        ({"patch_size": 1}, "patch_size must be a power of two from 2, got 1"),
        ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"embed_dim": 3}, "embed_dim must be at least 4, got 3"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"class_depth": 0}, "class_depth must be at least 1, got 0"),
        ({"class_heads": 49}, r"class_heads must split embed_dim 48 .* 1 to 128, got 49"),
        ({"class_heads": 0}, r"class_heads must split embed_dim 48 .* 1 to 128, got 0"),
        ({"embed_dim": 512, "class_heads": 3}, r"split embed_dim 512 .* 1 to 128, got 3"),
        ({"heads": [4, -2]}, "heads must be at least 1, got -2 in layer 1"),
        ({"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
        ({"head_dim": "half"}, "head_dim must be 'split' or at least 1, got 'half' in layer 0"),
        ({"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/48, got 0.01"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
        ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ],
)
def test_a_bad_size_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        xcit(device="meta", **arguments)
    assert "\n" not in str(error.value)


def test_stochastic_depth_and_dropout_equal_timms_for_one_seed():
    torch.manual_seed(0)
    sizes = SMALL | {"depth": 3, "heads": 4, "head_dim": "split"}
    oracle = randomize(timm_xcit(drop_path_rate=0.4, drop_rate=0.3, **sizes)).train()
    model = loaded_from(oracle, **sizes, drop_path=0.4, drop=0.3)
    images = torch.randn(16, 3, 32, 32)
    assert_equal_for_one_seed(model, oracle, images)
