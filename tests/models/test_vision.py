"""Vision models against timm's on shared weights; heads, initial values, kappa and refusals."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import timm.models.tnt
import timm.models.volo
import torch
from timm.models.davit import ChannelAttention, DaVit, WindowAttention
from timm.models.xcit import XCA, Xcit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from leaner_kernels import KappaMonitor
from models import papers
from models.davit import DaViT
from models.layers import VisionModel
from models.tnt import TNT
from models.vit import VisionTransformer
from models.volo import VOLO
from models.xcit import XCiT
from tests.models.parity import (
    assert_drawn_alike,
    assert_equal_for_one_seed,
    assert_equal_in_function,
    assert_one_seed_gives_one_model,
    randomize,
    renamed,
    timm_vit,
)


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


def timm_xcit(*, heads: int, head_dim: int | str, **sizes: Any) -> Xcit:
    """timm's model as in the paper's rows, with attention of its own width unless it is split."""
    sizes = renamed(sizes, class_depth="cls_attn_layers")
    oracle = Xcit(num_heads=heads, eta=1e-5, tokens_norm=True, **sizes)
    if head_dim != "split":
        for block in oracle.blocks:
            block.attn = WideXCA(oracle.embed_dim, heads, head_dim)
    return oracle


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


def timm_davit(*, heads: Any, head_dim: int | str, image_size: int, **sizes: Any) -> DaVit:
    """timm's model, with attention of its own width unless the heads split it."""
    heads = [heads] * len(sizes["depths"]) if isinstance(heads, int) else heads
    oracle = DaVit(num_heads=heads, **renamed(sizes, window="window_size"))
    for stage, h in zip(oracle.stages, heads) if head_dim != "split" else ():
        for layer in stage.blocks:
            for block, kind in zip(layer, (WindowAttention, ChannelAttention), strict=True):
                assert isinstance(block.attn, kind)
                dim = block.attn.proj.out_features
                block.attn = Wide(dim, h, head_dim, channels=kind is ChannelAttention)
    return oracle


def timm_tnt(**sizes: Any) -> timm.models.tnt.TNT:
    """timm's own model, which can only split."""
    sizes.pop("head_dim", None)
    names = {"inner_heads": "num_heads_inner", "inner_stride": "first_stride"}
    return timm.models.tnt.TNT(**renamed(sizes, **names, heads="num_heads_outer"))


def timm_volo(**sizes: Any) -> timm.models.volo.VOLO:
    """timm's own model, which can only split, and takes the number of its stages from tuples."""
    sizes.pop("head_dim", None)
    first = (True,) + (False,) * (len(sizes["depths"]) - 1)
    sizes = renamed(sizes, depths="layers", stem_dim="stem_hidden_dim")
    return timm.models.volo.VOLO(**sizes, downsamples=first, outlook_attention=first)


class Architecture(NamedTuple):
    """A model of ours and timm's, and sizes that are small and that both can have.

    ``stream`` names, in a block, what is called with the residual of its attention (``out`` False)
    or returns it; ``drawn`` is a weight that is random.
    """

    build: Callable[..., VisionModel]
    oracle: Callable[..., nn.Module]
    small: dict[str, Any]
    stream: str
    out: bool = False
    drawn: str = "head.weight"


ARCHITECTURES = {
    "vit": Architecture(
        VisionTransformer,
        timm_vit,
        {"image_size": 64, "embed_dim": 192, "depth": 2, "mlp_ratio": 2.0}
        | {"heads": 3, "head_dim": 64, "num_classes": 10},
        "",
        drawn="blocks.0.attn.qkv.weight",
    ),
    "xcit": Architecture(
        XCiT,
        timm_xcit,
        {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}
        | {"heads": 4, "head_dim": "split", "num_classes": 10},
        "",
        drawn="cls_token",
    ),
    "davit": Architecture(
        DaViT,
        timm_davit,
        {"image_size": 32, "embed_dims": (16, 24), "depths": (1, 2), "window": 4}
        | {"heads": 2, "head_dim": "split", "num_classes": 10},
        "cpe1",
        out=True,
        drawn="head.fc.weight",
    ),
    "tnt": Architecture(
        TNT,
        timm_tnt,
        {"image_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2}
        | {"inner_dim": 12, "inner_heads": 3, "heads": 4, "num_classes": 10},
        "norm_out",
    ),
    "volo": Architecture(
        VOLO,
        timm_volo,
        {"image_size": 32, "embed_dims": [16, 24, 24], "depths": [2, 1, 2]}
        | {"heads": [2, 4, 3], "stem_dim": 8, "num_classes": 10},
        "norm1",
    ),
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def small(name: str, **sizes: Any) -> VisionModel:
    return ARCHITECTURES[name].build(**ARCHITECTURES[name].small | sizes)


def both(name: str, training: bool, **sizes: Any) -> tuple[VisionModel, nn.Module, Tensor]:
    """Return our model, timm's with the same weights, and images for them."""
    torch.manual_seed(0)
    build, oracle, defaults, *_ = ARCHITECTURES[name]
    sizes = defaults | sizes
    theirs = randomize(oracle(**sizes)).train(training)
    ours = build(**sizes).train(training)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs, torch.randn(4, 3, sizes["image_size"], sizes["image_size"])


SIZES: list[tuple[str, dict[str, Any]]] = [
    *(("vit", {"pool": pool, **heads}) for pool in ("token", "avg") for heads in (
        {"heads": 3, "head_dim": 64}, {"heads": 4, "head_dim": 64}, {"heads": 6, "head_dim": 16},
    )),
    ("xcit", {}),
    ("xcit", {"heads": 12}),
    ("xcit", {"heads": 6, "head_dim": 16}),
    # The patches that a class block returns matter from the third on: norms undo their scale.
    ("xcit", {"class_depth": 3, "mlp_ratio": 3.0}),
    ("xcit", {"patch_size": 16, "image_size": 64}),
    # Windows that tile every map; that leave a rest in every map; a map of odd sides to halve.
    *(("davit", {"image_size": size, "window": window, **heads})
      for size, window in ((32, 4), (32, 3), (36, 7))
      for heads in ({"heads": (4, 8)}, {"heads": 3, "head_dim": 16})),
    ("tnt", papers.ROWS["tnt_base", "lean"].config | {"image_size": 32, "depth": 1}
     | {"num_classes": 10, "inner_dim": 20, "inner_heads": 4}),
    ("tnt", {"image_size": 48, "patch_size": 12, "embed_dim": 60, "heads": 12, "mlp_ratio": 2.0}),
    ("tnt", {"image_size": 16, "embed_dim": 32, "heads": 2, "inner_stride": 2}),
    # Heads as wide as those of the lean rows.
    ("volo", {"depths": [1, 1], "embed_dims": [128, 256], "heads": [8, 16]}),
    ("volo", {"depths": [1, 2, 1], "embed_dims": [48, 96, 96], "heads": [6, 16, 12]}),
    ("volo", {"depths": [2, 1], "embed_dims": [40, 32], "heads": [5, 2], "image_size": 48}),
    ("volo", {"depths": [1, 1], "embed_dims": [32, 48], "heads": [4, 3], "patch_size": 4}),
]  # fmt: skip
NORMALIZED = [(name, sizes, True) for name, sizes in SIZES if name in ("xcit", "volo")]


@pytest.mark.parametrize(
    ("name", "sizes", "training"), [*((*both_, False) for both_ in SIZES), *NORMALIZED]
)
def test_logits_gradients_and_running_statistics_equal_timms(
    name: str, sizes: dict[str, Any], training: bool
) -> None:
    assert_equal_in_function(*both(name, training, **sizes))


DEEP = {"vit": {"depth": 4}, "tnt": {"depth": 4}, "xcit": {"depth": 3}}


@every_architecture
def test_stochastic_depth_and_dropout_equal_timms_for_one_seed(name: str) -> None:
    sizes = DEEP.get(name, {}) | {"drop_path": 0.5, "drop": 0.3}
    ours, theirs, _ = both(name, True, **sizes)
    assert_equal_for_one_seed(ours, theirs, torch.randn(16, 3, ours.image_size, ours.image_size))


LARGER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vit", {"embed_dim": 768, "heads": 12, "init": "trunc_normal"}, {}),
    ("vit", {"embed_dim": 768, "heads": 12, "init": "xavier"}, {"weight_init": "jax"}),
    ("xcit", {"embed_dim": 192, "image_size": 64}, {}),
    ("davit", {"embed_dims": (96, 192), "depths": (1, 1)}, {}),
    ("tnt", {"image_size": 64, "embed_dim": 240, "depth": 1, "inner_dim": 40}, {}),
    ("volo", {"depths": [1, 1], "embed_dims": [96, 192], "heads": [3, 6], "stem_dim": 64}, {}),
]


@pytest.mark.parametrize(("name", "sizes", "more"), LARGER)
def test_initial_values_follow_the_law_of_timms(
    name: str, sizes: dict[str, Any], more: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    theirs = {key: value for key, value in sizes.items() if key != "init"}
    oracle = ARCHITECTURES[name].oracle(**ARCHITECTURES[name].small | theirs | more)
    assert_drawn_alike(small(name, **sizes), oracle)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, {}) for name in ARCHITECTURES), ("vit", {"pool": "avg", "init": "xavier"})],
)
def test_one_seed_gives_one_model_on_every_way_to_it(name: str, sizes: dict[str, Any]) -> None:
    assert_one_seed_gives_one_model(partial(small, name, **sizes), ARCHITECTURES[name].drawn)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {}) for name in ("xcit", "davit", "tnt", "volo")),
        *(("vit", {"pool": pool, "heads": 16, "depth": 7}) for pool in ("token", "avg")),
        *(("vit", {"pool": pool, "image_size": 96, "depth": 1}) for pool in ("token", "avg")),
    ],
)
def test_flops_per_image_are_those_counted_in_timms(name: str, sizes: dict[str, Any]) -> None:
    _, oracle, defaults, *_ = ARCHITECTURES[name]
    theirs = oracle(**defaults | sizes).to("meta").eval()
    for module in theirs.modules():
        if name != "davit" and hasattr(module, "fused_attn"):
            module.fused_attn = False  # plain products, which the counter has a formula for
    model = small(name, **sizes, device="meta")
    with FlopCounterMode(display=False) as counter:
        theirs(torch.empty(1, 3, model.image_size, model.image_size, device="meta"))
    assert model.flops_per_image() == counter.get_total_flops()


def twice(widths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of every layer's two attentions."""
    return [width for width in widths for _ in range(2)]


VIT, TWO_OF_TNT = {"depth": 3}, {"depth": 2}
TWO_OF_VOLO = {"embed_dims": [256, 512], "depths": [1, 2], "class_heads": 16}
LAYOUTS: list[tuple[str, dict[str, Any], list[tuple[int, int]], str, int | None]] = [
    ("vit", VIT | {"heads": 12, "head_dim": 64}, [(12, 64)] * 3, "widen", 22_776_808),
    ("vit", VIT | {"heads": 16, "head_dim": 64}, [(16, 64)] * 3, "widen", 25_138_408),
    ("vit", VIT | {"heads": [16, 12, 8], "head_dim": 64},
     [(16, 64), (12, 64), (8, 64)], "widen", 22_776_808),
    ("vit", VIT | {"heads": 16, "head_dim": "split"}, [(16, 48)] * 3, "split", 22_776_808),
    ("vit", VIT | {"heads": [16, 12, 10], "head_dim": "split"},
     [(16, 48), (12, 64), (10, 76)], "split", 22_752_208),
    ("vit", VIT | {"heads": [16, 12, 8], "head_dim": [48, 64, 96]},
     [(16, 48), (12, 64), (8, 96)], "split", 22_776_808),
    ("vit", VIT | {"heads": [16, 12, 8], "head_dim": [32, 64, 64]},
     [(16, 32), (12, 64), (8, 64)], "mixed", 21_202_408),
    ("vit", VIT | {"heads": 16, "head_dim": ["split", 64, 32]},
     [(16, 48), (16, 64), (16, 32)], "mixed", 22_776_808),
    # The paper's xcit_medium, lean, and xcit_large, original.
    ("xcit", {"embed_dim": 512, "depth": 12, "heads": 16, "head_dim": 64},
     [(16, 64)] * 12, "widen", 59_002_600),
    ("xcit", {"embed_dim": 768, "depth": 24, "heads": 16, "head_dim": "split"},
     [(16, 48)] * 24, "split", 189_096_136),
    ("xcit", {"embed_dim": 512, "depth": 12, "heads": [16] * 6 + [8] * 6, "head_dim": 64},
     [(16, 64)] * 6 + [(8, 64)] * 6, "widen", None),
    ("xcit", {"embed_dim": 512, "depth": 2, "heads": [16, 12], "head_dim": "split"},
     [(16, 32), (12, 42)], "split", None),
    # The paper's davit_base, lean and original.
    ("davit", {"depths": (1, 1, 5, 1), "heads": (4, 8, 32, 32), "head_dim": "split"},
     twice([(4, 32), (8, 32), *[(32, 16)] * 5, (32, 32)]), "split", 62_653_416),
    ("davit", {"depths": (1, 1, 9, 1), "heads": (4, 8, 16, 32), "head_dim": 32},
     twice([(4, 32), (8, 32), *[(16, 32)] * 9, (32, 32)]), "widen", 87_954_408),
    ("davit", {"depths": (1, 1, 1, 1), "heads": 8, "head_dim": 24},
     twice([(8, 24)] * 4), "widen", None),
    ("davit", {"depths": (1, 1, 2, 1), "heads": [4, 8, 12, 16, 20],
               "head_dim": ["split", 40, 30, 20, 10]},
     twice([(4, 32), (8, 40), (12, 30), (16, 20), (20, 10)]), "mixed", None),
    ("tnt", TWO_OF_TNT | {"heads": 16, "head_dim": 64}, [(16, 64)] * 2, "widen", 13_861_160),
    ("tnt", TWO_OF_TNT | {"heads": [16, 10], "head_dim": 64},
     [(16, 64), (10, 64)], "widen", 12_878_120),
    ("tnt", TWO_OF_TNT | {"heads": [16, 9], "head_dim": "split"},
     [(16, 40), (9, 71)], "split", 11_892_520),
    ("tnt", TWO_OF_TNT | {"heads": [16, 10], "head_dim": [64, "split"]},
     [(16, 64), (10, 64)], "widen", 12_878_120),
    ("tnt", TWO_OF_TNT | {"heads": [16, 10], "head_dim": [32, 48]},
     [(16, 32), (10, 48)], "mixed", 11_157_800),
    ("volo", TWO_OF_VOLO | {"heads": 8, "head_dim": 32}, [(8, 32)] * 3, "widen", 12_147_352),
    ("volo", TWO_OF_VOLO | {"heads": [8, 16], "head_dim": 32},
     [(8, 32), (16, 32), (16, 32)], "widen", 13_195_928),
    ("volo", TWO_OF_VOLO | {"heads": [16, 32], "head_dim": [32, 16]},
     [(16, 32), (32, 16), (32, 16)], "mixed", 13_493_536),
    ("volo", TWO_OF_VOLO | {"heads": [8, 16, 32], "head_dim": "split"},
     [(8, 32), (16, 32), (32, 16)], "split", 13_195_928),
    ("volo", TWO_OF_VOLO | {"heads": [6, 9], "head_dim": "split"},
     [(6, 42), (9, 56), (9, 56)], "split", 13_119_478),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "widths", "convention", "params"), LAYOUTS)
def test_every_layer_has_the_heads_asked_for(
    name: str,
    sizes: dict[str, Any],
    widths: list[tuple[int, int]],
    convention: str,
    params: int | None,
) -> None:
    model = ARCHITECTURES[name].build(**sizes, device="meta")
    attention = model.attention_modules().values()
    assert [(module.num_heads, module.head_dim) for module in attention] == widths
    assert model.head_convention == convention
    assert params is None or model.num_params() == params
    for block in getattr(model, "cls_attn_blocks", ()):
        dim, heads = sizes["embed_dim"], widths[-1][0]
        assert (block.attn.num_heads, block.attn.head_dim) == (heads, dim // heads)


KAPPA_HEADS = {"davit": [2, 3, 5], "xcit": [4, 6]}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "vit"])
def test_kappa_is_measured_around_the_residual_of_every_attention(name: str) -> None:
    torch.manual_seed(0)
    heads = {"heads": KAPPA_HEADS[name], "head_dim": 8} if name in KAPPA_HEADS else {}
    model = randomize(small(name, **heads))
    of, streams, branches = ARCHITECTURES[name], [], []
    monitor = KappaMonitor(model, every=1, samples=2)
    assert monitor.layers == list(model.attention_modules())
    for layer, attention in model.attention_modules().items():
        block = model.get_submodule(layer.rpartition(".")[0])
        place = block.get_submodule(of.stream)
        if of.out:
            place.register_forward_hook(lambda _, args, out: streams.append(out))
        else:
            place.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        scale = block.gamma1 if name == "xcit" else 1
        attention.register_forward_hook(
            lambda _, args, out, scale=scale: branches.append(scale * out)
        )
    monitor.begin(0)
    model(torch.randn(3, 3, 32, 32))
    for module, stream, branch in zip(
        model.attention_modules().values(), streams, branches, strict=True
    ):
        captured = module.captured
        tokens = stream[:2].flatten(1, -2)
        assert captured.heads.shape == (*tokens.shape[:2], module.num_heads * module.head_dim)
        assert torch.equal(captured.residual, tokens)
        if name in ("xcit", "tnt"):
            assert torch.equal(captured.output, branch[:2])
    rows = monitor.end()
    assert [row["tokens"] for row in rows] == [s.flatten(1, -2).shape[1] for s in streams]
    assert all(row["kappa"] > 1 for row in rows if row["resolved"])


def test_widened_attention_of_tnt_is_that_of_its_projections() -> None:
    torch.manual_seed(0)
    attention = small("tnt", heads=5, head_dim=7).blocks[0].attn_out
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


def test_the_stem_of_volo_takes_weights_of_another_dtype_than_its_statistics() -> None:
    model = small("volo", dtype=torch.bfloat16)
    expected = copy.deepcopy(model).float()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_mean.float()
            module.running_var = module.running_var.float()
    images = torch.randn(4, 3, 32, 32)
    actual = model.patch_embed(images.bfloat16())
    torch.testing.assert_close(actual.float(), expected.patch_embed(images), atol=0.02, rtol=0.02)
    for (name, ours), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0.01, msg=name)
        assert not ours.is_floating_point() or ours.dtype == torch.float32


OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({"image_size": 0}, "image_size must be at least 1, got 0"),
    ({"in_chans": 0}, "in_chans must be at least 1, got 0"),
    ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
    ({"mlp_ratio": 0.001}, r"mlp_ratio must be at least 1/\d+, got 0.001"),
    ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), got 1.0"),
    ({"drop": -0.1}, r"drop must be in \[0, 1\), got -0.1"),
    ({"head_dim": 129}, r"head_dim must be in \[1, 128\], got 129"),
]
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((name, arguments, message) for name in ARCHITECTURES for arguments, message in OF_ALL),
    ("vit", {"image_size": 30}, "image_size must be a multiple of patch_size 16, got 30"),
    ("vit", {"patch_size": 0}, "patch_size must be at least 1, got 0"),
    ("vit", {"embed_dim": -1}, "embed_dim must be at least 1, got -1"),
    ("vit", {"depth": 0}, "depth must be at least 1, got 0"),
    ("vit", {"heads": 0}, "heads must be at least 1, got 0 in layer 0"),
    ("vit", {"heads": [4, -2]}, "heads must be at least 1, got -2 in layer 1"),
    ("vit", {"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
    ("vit", {"head_dim": [8, 8, 8]}, r"head_dim must be one value or 2 \(one per layer\), got 3"),
    ("vit", {"head_dim": 0}, "head_dim must be 'split' or at least 1, got 0 in layer 0"),
    ("vit", {"head_dim": "half"}, "head_dim must be 'split' or at least 1, got 'half' in layer 0"),
    ("vit", {"heads": [4, 193], "head_dim": "split"},
     "at most 192 to split embed_dim, got 193 in layer 1"),
    ("vit", {"pool": "max"}, "pool must be 'token' or 'avg', got 'max'"),
    ("vit", {"init": "kaiming"}, "init must be 'trunc_normal' or 'xavier', got 'kaiming'"),
    ("xcit", {"image_size": 36}, "image_size must be a multiple of patch_size 8, got 36"),
    ("xcit", {"patch_size": 12}, "patch_size must be a power of two from 2, got 12"),
    ("xcit", {"patch_size": 1}, "patch_size must be a power of two from 2, got 1"),
    ("xcit", {"embed_dim": 3}, "embed_dim must be at least 4, got 3"),
    ("xcit", {"depth": 0}, "depth must be at least 1, got 0"),
    ("xcit", {"class_depth": 0}, "class_depth must be at least 1, got 0"),
    ("xcit", {"class_heads": 49}, r"class_heads must split embed_dim 48 .* 1 to 128, got 49"),
    ("xcit", {"class_heads": 0}, r"class_heads must split embed_dim 48 .* 1 to 128, got 0"),
    ("xcit", {"embed_dim": 512, "class_heads": 3}, r"split embed_dim 512 .* 1 to 128, got 3"),
    ("xcit", {"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
    ("davit", {"image_size": 34}, "image_size must be a multiple of 4, got 34"),
    ("davit", {"window": 0}, "window must be at least 1, got 0"),
    ("davit", {"embed_dims": (16, 0)},
     r"embed_dims must be at least 1 in each stage, got \[16, 0\]"),
    ("davit", {"depths": (1, 0)}, r"depths must be at least 1 in each stage, got \[1, 0\]"),
    ("davit", {"embed_dims": (), "depths": ()},
     r"embed_dims must be at least 1 in each stage, got \[\]"),
    ("davit", {"depths": (1, 1, 1)}, "embed_dims and depths must have one .* each, got 2 and 3"),
    ("davit", {"heads": (4, -2)}, "heads must be at least 1, got -2 in layer 1"),
    ("davit", {"heads": (4,)},
     r"heads must be one value, 2 \(one per stage\) or 3 \(one per layer\), got 1"),
    ("davit", {"heads": 17}, "at most 16 to split embed_dim, got 17 in layer 0"),
    ("tnt", {"image_size": 30}, "image_size must be a multiple of patch_size 8, got 30"),
    ("tnt", {"inner_stride": 0}, "inner_stride must be at least 1, got 0"),
    ("tnt", {"inner_dim": 0}, "inner_dim must be at least 1, got 0"),
    ("tnt", {"inner_heads": 13}, "inner_heads must be from 1 to 12, to split inner_dim, got 13"),
    ("tnt", {"inner_dim": 300, "inner_heads": 2},
     "inner_heads must be from 3 to 300, to split inner_dim, got 2"),
    ("tnt", {"heads": 25}, "heads must be at most 24 to split embed_dim, got 25 in layer 0"),
    ("tnt", {"heads": [4]}, r"heads must be one value or 2 \(one per layer\), got 1"),
    ("tnt", {"position_std": -1.0}, "position_std must be at least 0, got -1.0"),
    ("volo", {"image_size": 40}, r"image_size must be a multiple of 2 \* patch_size, 16, got 40"),
    ("volo", {"patch_size": 7}, "patch_size must be even, got 7"),
    ("volo", {"stem_dim": 0}, "stem_dim must be at least 1, got 0"),
    ("volo", {"depths": [2]}, r"depths must be of at least 2 stages, got \[2\]"),
    ("volo", {"depths": [2, 0, 1]}, r"depths must be at least 1 in every stage, got \[2, 0, 1\]"),
    ("volo", {"embed_dims": [16, 24, 32]},
     r"embed_dims must be 3 widths, equal from the second on, got \[16, 24, 32\]"),
    ("volo", {"embed_dims": [0, 24, 24]}, r"embed_dims must be at least 1, got \[0, 24, 24\]"),
    ("volo", {"heads": [2, 4]}, r"one value, 3 \(one per stage\) or 5 \(one per layer\), got 2"),
    ("volo", {"heads": [2, 4, 25]}, "at most 24 to split embed_dim, got 25 in layer 3"),
    ("volo", {"class_heads": 25},
     "class_heads must be from 1 to 24, to split width 24, got 25"),
    ("volo", {"embed_dims": [16, 300, 300], "class_heads": 2},
     "class_heads must be from 3 to 300, to split width 300, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_a_bad_size_is_named_in_one_line(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        small(name, device="meta", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 1, 64, 64), (2, 3, 64, 48)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 64, 64\), got \(2, "):
        small("vit")(torch.zeros(shape))
