"""What the models of language have in common: heads, dropout, first weights, refused sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.bert import BERT
from models.gpt import GPT
from models.layers import LanguageModel
from tests.models import test_bert, test_gpt, test_nystromformer

BUILD: dict[str, Callable[..., LanguageModel]] = {
    "gpt": lambda **sizes: GPT(**test_gpt.SMALL | sizes),
    "bert": lambda **sizes: BERT(**test_bert.SMALL | sizes),
    "nystromformer": test_nystromformer.small,
}


@pytest.mark.parametrize(
    ("name", "heads", "head_dim", "widths", "convention"),
    [
        ("gpt", [3, 5], ["split", 7], [(3, 6), (5, 7)], "mixed"),
        ("bert", [3, 5], ["split", 7], [(3, 6), (5, 7)], "mixed"),
        ("nystromformer", 4, 32, [(4, 32)] * 2, "widen"),
        ("nystromformer", [4, 2], "split", [(4, 6), (2, 12)], "split"),
        ("nystromformer", [4, 2], [32, 8], [(4, 32), (2, 8)], "mixed"),
    ],
)
def test_every_layer_has_the_heads_asked_for(
    name: str, heads: Any, head_dim: Any, widths: list[tuple[int, int]], convention: str
) -> None:
    convolved = {"conv_kernel_size": 35} if name == "nystromformer" else {}
    model = BUILD[name](heads=heads, head_dim=head_dim, device="meta", **convolved)
    attention = model.attention_modules()
    assert list(attention) == ["blocks.0.attn", "blocks.1.attn"]
    assert [(module.num_heads, module.head_dim) for module in attention.values()] == widths
    assert model.head_convention == convention
    if convolved:
        kernels = [tuple(module.conv.weight.shape) for module in attention.values()]
        assert kernels == [(count, 1, 35, 1) for count, _ in widths]


@pytest.mark.parametrize(
    ("build", "drops"), [(test_gpt.gpt, 4), (lambda **p: test_bert.bert(num_classes=4, **p), 6)]
)
def test_dropout_is_where_it_is_published_and_only_while_training(
    build: Callable[..., nn.Module], drops: int
) -> None:
    model, tokens = build(dropout=0.25), test_gpt.some_tokens()
    assert [block.attn.attn_drop for block in model.blocks] == [0.25] * 2
    modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [module.p for module in modules] == [0.25] * drops
    assert torch.equal(model.eval()(tokens), build()(tokens))
    # Each of them alone, and none.
    model.train()
    places = [(module, "p") for module in modules] + [(b.attn, "attn_drop") for b in model.blocks]
    for chosen in (None, *places):
        for module, rate in places:
            setattr(module, rate, 0.25 if (module, rate) == chosen else 0.0)
        assert torch.equal(model(tokens), model(tokens)) == (chosen is None)


@pytest.mark.parametrize("build", [GPT, lambda **sizes: BERT(**sizes, num_classes=3)])
def test_weights_begin_as_published(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    for name, value in build(embed_dim=96, vocab_size=300, depth=2).state_dict().items():
        if name == "pos_scale":
            assert value.item() == pytest.approx(96**-0.5)
        elif "norm" in name:
            assert value.eq(float("weight" in name)).all()
        elif name.endswith("bias"):
            assert value.eq(0).all()
        else:
            assert value.std() == pytest.approx(0.02, rel=0.05), name
            assert abs(value.mean()) < 1e-3, name


OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
    ({"embed_dim": -1}, "embed_dim must be at least 1, got -1"),
    ({"depth": 0, "heads": 2}, "depth must be at least 1, got 0"),
    ({"heads": [3]}, r"heads must be one value or 2 \(one per layer\), got 1"),
    ({"head_dim": [6, 0]}, "head_dim must be 'split' or at least 1, got 0 in layer 1"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
]
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((name, arguments, message) for name in BUILD for arguments, message in OF_ALL),
    ("gpt", {"heads": 21}, "heads must be at most 20 to split embed_dim, got 21 in layer 0"),
    ("gpt", {"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/20, got 0.01"),
    ("bert", {"num_classes": 0}, "num_classes must be at least 1, got 0"),
    ("bert", {"heads": 21}, "heads must be at most 20 to split embed_dim, got 21 in layer 0"),
    ("bert", {"mlp_ratio": 0.05}, "mlp_ratio must be an even number over 20, got 0.05"),
    ("bert", {"mlp_ratio": 1.05}, "mlp_ratio must be an even number over 20, got 1.05"),
    ("bert", {"most_masked": 0.0}, r"most_masked must be in \(0, 1\], got 0.0"),
    ("nystromformer", {"mlp_ratio": 0.01}, "mlp_ratio must be at least 1/24, got 0.01"),
    ("nystromformer", {"attention": "linear"},
     "attention must be 'nystrom' or 'softmax', got 'linear'"),
    ("nystromformer", {"init": "row"}, "init must be one of matrix, batch, got 'row'"),
    ("nystromformer", {"num_landmarks": 0},
     "num_landmarks must be a whole number of at least 1, got 0"),
    ("nystromformer", {"num_landmarks": 12},
     "sequence_length must be a multiple of num_landmarks 12, got 32"),
    ("nystromformer", {"conv_kernel_size": 4},
     "conv_kernel_size must be odd and positive, got 4"),
    ("nystromformer", {"conv_kernel_size": -3},
     "conv_kernel_size must be odd and positive, got -3"),
    ("nystromformer", {"conv_kernel_size": 5, "attention": "softmax"},
     "conv_kernel_size must be None with softmax attention, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_a_bad_size_is_named_in_one_line(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        BUILD[name](device="meta", **arguments)
    assert "\n" not in str(error.value)
