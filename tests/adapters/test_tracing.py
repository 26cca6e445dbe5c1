"""Swapped models under TorchScript, and our classes in place of PyTorch's own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from leaner_kernels.adapters import pytorch, timm
from leaner_kernels.adapters import transformers as leaner
from tests.adapters.test_timm import images, of
from tests.adapters.test_transformers import BY_NAME
from tests.adapters.transformers_families import PADDING

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.mark.parametrize("weights", [False, True])
def test_pytorchs_class_may_be_replaced_by_ours(
    weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dropout": 0.0, "batch_first": True}
    torch.manual_seed(0)
    oracle, layer = nn.MultiheadAttention(12, 3, **options), nn.TransformerEncoderLayer(12, 3, 16)
    monkeypatch.setattr(nn, "MultiheadAttention", pytorch.MultiheadAttention)
    monkeypatch.setattr(nn, "TransformerEncoderLayer", pytorch.TransformerEncoderLayer)
    torch.manual_seed(0)
    ours, ours_in_layer = nn.MultiheadAttention(12, 3, **options), nn.TransformerEncoderLayer(12, 3)
    assert torch.equal(ours.in_proj_weight, oracle.in_proj_weight)
    assert type(ours_in_layer.self_attn) is pytorch.MultiheadAttention
    x = torch.randn(2, 7, 12)
    expected = oracle(x, x, x, need_weights=weights)[0]
    torch.testing.assert_close(ours(x, x, x, need_weights=weights)[0], expected)
    # What was constructed before is swapped as ever.
    model = nn.ModuleList([oracle, layer])
    assert list(pytorch.use(model).swapped) == ["0", "1", "1.self_attn"]
    pytorch.undo(model)
    assert torch.equal(oracle(x, x, x, need_weights=weights)[0], expected)


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, images())])
def test_torchscript_is_refused_in_one_line_until_the_swap_is_undone(make: Any) -> None:
    model = of("vit")
    expected = make(copy.deepcopy(model))(x := images())
    report = timm.use(model)
    with pytest.raises(
        ValueError, match=r"^Attention does not support TorchScript.* undo\(model\)"
    ) as no:
        make(model)
    assert "\n" not in str(no.value)
    report.undo()
    assert torch.equal(make(model)(x), expected)


def test_torchscript_is_refused_of_pytorchs_swapped_modules() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 16))
    pytorch.use(model)
    with pytest.raises(ValueError, match=r"^MultiheadAttention does not support TorchScript"):
        torch.jit.script(model)
    with pytest.raises(ValueError, match=r"^MultiheadAttention does not support TorchScript"):
        torch.jit.trace(model, torch.randn(7, 2, 12))


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "whisper", "vit"])
def test_torchscript_is_refused_of_transformers_under_our_name(name: str, padding: str) -> None:
    family = BY_NAME[name]
    model = family.build().eval()
    model.config.return_dict = model.config.use_cache = False
    inputs = dict(family.inputs(torch.tensor(PADDING[padding])))
    leaner.use(model)
    with pytest.raises(ValueError, match=r"^\w*Attention does not support .* undo\(m") as no:
        torch.jit.trace(model, example_kwarg_inputs=inputs)
    assert "\n" not in str(no.value)
