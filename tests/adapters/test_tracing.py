"""Swapped models under torch.fx and TorchScript, and our classes in place of PyTorch's own."""

import copy
import re
from typing import Any

import pytest
import torch
from timm.models import create_feature_extractor, get_graph_node_names
from torch import nn

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import pytorch, timm
from leaner_kernels.adapters import transformers as leaner
from tests.adapters.test_timm import images, made, of
from tests.adapters.test_transformers import BY_NAME
from tests.adapters.timm_families import CASES, TimmCase
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


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_swapped_model_is_traced_by_torch_fx(case: TimmCase, training: bool) -> None:
    model = made(case, training)
    own = torch.fx.symbolic_trace(model)
    timm.use(model)
    traced, x = torch.fx.symbolic_trace(model), images()
    modules = [{n.target for n in t.graph.nodes if n.op == "call_module"} for t in (own, traced)]
    assert modules[1] <= modules[0]
    nodes = [getattr(node.target, "__module__", "") for node in traced.graph.nodes]
    names = [getattr(node.target, "__name__", "") for node in traced.graph.nodes]
    ours = [name for at, name in zip(nodes, names) if at.startswith("leaner_kernels")]
    assert len([name for name in ours if "attention" in name]) == case.swapped
    # The traced one holds the same parameters, in an order of its own.
    results = []
    for network in (model, traced):
        torch.manual_seed(7)
        out = network(x)
        out = out[0] if isinstance(out, tuple) else out
        results.append([out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_of_a_swapped_model_are_extracted_by_their_names(case: TimmCase) -> None:
    model, x = made(case), images()
    own = get_graph_node_names(model)[1]
    timm.use(model)
    names = get_graph_node_names(model)[1]
    projected = re.compile(r"\battn\w*\.proj$")
    wanted = [*filter(projected.search, names)]
    assert wanted == [*filter(projected.search, own)] != []
    seen = {}
    for name in wanted:
        model.get_submodule(name).register_forward_hook(
            lambda _module, _given, out, name=name: seen.update({name: out})
        )
    expected = model(x)
    features = create_feature_extractor(model, [*wanted, names[-1]])(x)
    torch.testing.assert_close(features.pop(names[-1]), expected)
    for name, out in features.items():
        torch.testing.assert_close(out, seen[name])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_pytorchs_swapped_attention_is_a_leaf_to_torch_fx_as_before(training: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
            self.attn = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            inner = self.layer(x, src_key_padding_mask=padding)
            out, weights = self.attn(x, x, inner, average_attn_weights=False)
            return out + weights.sum()

    model, x = Model().train(training), torch.randn(2, 7, 12)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    before = [node.target for node in torch.fx.symbolic_trace(model).graph.nodes]
    expected = model(x, padding)
    pytorch.use(model)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes] == before
    torch.testing.assert_close(traced(x, padding), expected)
    assert KappaMonitor(traced).modules.keys() == {"attn", "layer.self_attn"}


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
