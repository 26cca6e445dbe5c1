"""``use`` and ``undo`` on models of transformers: swapped, left, falling back and refused."""

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leaner_kernels import attention
from leaner_kernels.adapters import transformers as leaner
from leaner_kernels.ops import _hooks
from tests.adapters.test_transformers import BY_NAME, cast, outcome
from tests.adapters.transformers_calls import heads
from tests.adapters.transformers_families import (
    FALLBACKS,
    FAMILIES,
    LATENT,
    LEFT,
    PADDING,
    PARTLY,
    REFUSED,
    Family,
)
from tests.error_budget import assert_computes

CASES = [(family, padding) for family in FAMILIES + PARTLY for padding in family.padded]
PADDED = [(family, padding) for family in FALLBACKS for padding in family.padded]


def made(family: Family) -> Any:
    model = family.build()
    model.set_attn_implementation(family.exact)
    return model


def named(model: nn.Module) -> list[str | None]:
    """What every configuration names."""
    configs = (m.config for m in model.modules() if hasattr(m, "config"))
    return [config._attn_implementation for config in configs]


def compared(family: Family, padding: str, model: nn.Module) -> None:
    """Hold a swapped model to the same model before, and undoing it to the same bits."""
    inputs = family.inputs(torch.tensor(PADDING[padding]))
    oracle, before = made(family), named(made(family))
    for name, expected in oracle.named_parameters():
        assert torch.equal(model.get_parameter(name), expected)
    assert_computes(
        outcome(model, inputs), lambda dtype: outcome(copy.deepcopy(oracle).to(dtype), inputs)
    )
    leaner.undo(model)
    assert named(model) == before
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in oracle.modules()]
    found, expected = outcome(model, inputs), outcome(oracle, inputs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("family", "padding"), CASES, ids=[f"{f.name}-{p}" for f, p in CASES])
def test_a_swapped_model_computes_what_it_did_and_undo_brings_back_every_bit(
    family: Family, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(family)
    report = leaner.use(model)
    assert repr(report) == str(report)
    assert leaner.use(model).swapped == report.swapped
    callers = set()

    def noted(module: nn.Module, *given: Any, **keywords: Any) -> Any:
        callers.add(module)
        return leaner.attention_forward(module, *given, **keywords)

    ours = mock.Mock(wraps=attention)
    monkeypatch.setattr(leaner, "attention", ours)
    transformers.AttentionInterface.register("leaner", noted)
    inputs = family.inputs(torch.tensor(PADDING[padding]))
    model(**cast(inputs, model))
    # The report names the callers, no more and no fewer, but where a part of the model did not run.
    called = {name for name, module in model.named_modules() if module in callers}
    assert called == set(report.swapped) or (called < set(report.swapped) and family in PARTLY)
    assert ours.call_count >= len(called) > 0
    assert report.fallbacks == {}
    assert bool(report.left) == (family in PARTLY)
    compared(family, padding, model)


@pytest.mark.parametrize("family", PARTLY, ids=[family.name for family in PARTLY])
def test_attention_that_does_not_dispatch_is_left_with_the_reason(family: Family) -> None:
    model = made(family)
    report = leaner.use(model)
    assert len(report.left) == 2
    assert all(LEFT[family.name] in reason for reason in report.left.values())
    assert "\nleft 2:\n" in repr(report)
    # Git would add the masks that the name stands for to its scores.
    assert model.config._attn_implementation == ("eager" if family.name == "git" else "leaner")


@pytest.mark.parametrize("family", REFUSED, ids=[family.name for family in REFUSED])
def test_a_model_in_which_nothing_dispatches_is_refused_in_one_line(family: Family) -> None:
    model = family.fresh()
    if "ALL_ATTENTION_FUNCTIONS" in vars(inspect.getmodule(type(model))):
        pytest.skip(f"dispatches since transformers {transformers.__version__}: is for FAMILIES")
    before, inputs = named(model), family.inputs(torch.tensor(PADDING["none"]))
    expected = model(**inputs)[0]
    with pytest.raises(ValueError, match=r"has no attention module to swap \(") as caught:
        leaner.use(model)
    assert "computes its attention itself" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert named(model) == before
    assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize(("family", "padding"), PADDED, ids=[f"{f.name}-{p}" for f, p in PADDED])
def test_what_the_kernels_do_not_take_falls_back_and_is_reported(
    family: Family, padding: str
) -> None:
    model = made(family)
    report = leaner.use(model)
    assert ("fallbacks 2:" in repr(report)) == (family.name != "deepseek_v3")
    inputs = family.inputs(torch.tensor(PADDING[padding]))
    with pytest.warns(UserWarning, match="Attention falls back: ") as caught:
        model(**inputs)
    assert len({str(warning.message) for warning in caught}) == 1
    (reason,) = set(report.fallbacks.values())
    assert (
        reason
        == {
            "gemma": "head dimension 136, and 136 of its values: sdpa computes it",
            "deepseek_v3": "head dimension 12, and 8 of its values: sdpa computes it",
            "gemma2": "head dimension 136, and 136 of its values: its eager function computes it",
        }[family.name]
    )
    assert report.fallbacks.keys() == report.swapped.keys()
    assert f"  model.layers.*.self_attn (2): {reason}" in repr(report).splitlines()
    compared(family, padding, model)
    assert report.fallbacks.keys() == (
        report.swapped.keys() if family.name != "deepseek_v3" else set()
    )


@pytest.mark.parametrize("padding", ["none", "right"])
def test_attention_weights_are_those_of_the_eager_function(padding: str) -> None:
    family = BY_NAME["llama"]
    model, inputs = family.build(), family.inputs(torch.tensor(PADDING[padding]))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    report = leaner.use(model)
    with pytest.warns(UserWarning, match="output_attentions=True: its eager function"):
        found = model(**inputs, output_attentions=True)
    expected = eager(**inputs, output_attentions=True)
    assert len(found.attentions) == 2
    torch.testing.assert_close(found.attentions, expected.attentions)
    torch.testing.assert_close(found.logits, expected.logits)
    assert len(report.fallbacks) == 2


def test_sparse_attention_whose_mask_only_eager_gets_is_refused() -> None:
    """Under any other name DeepSeek-V3.2 passes indices in place of a mask: dense is wrong."""
    torch.manual_seed(0)
    sparse = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8, "vocab_size": 99}
    config = transformers.DeepseekV32Config(**LATENT | sparse)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    leaner.use(model)
    with pytest.raises(ValueError, match=r"DeepseekV32Attention passes indices=\(2, 9, 3\)"):
        model(torch.randint(3, 90, (2, 9)))


def eager_doubled(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, double: bool, **_: Any
) -> tuple[Tensor, None]:
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return out * (1 + double), None


def eager_multiplied(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any
) -> tuple[Tensor, None]:
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return out * others.get("factor", 1), None


class Doubled(nn.Module):
    is_causal = False

    def forward(self, x: Tensor, **handed_on: Any) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("leaner", eager_doubled)
        return attend(self, x, x, x, None, top_k=None, **handed_on)[0]


class Multiplied(nn.Module):
    is_causal = False

    def forward(self, x: Tensor, **handed_on: Any) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("leaner", eager_multiplied)
        return attend(self, x, x, x, None, **handed_on)[0]


@pytest.mark.filterwarnings("ignore:.*falls back")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_eager_function_of_a_module_decides_which_keywords_count(compiled: bool) -> None:
    leaner.register()
    torch._dynamo.reset()
    x = heads(4, 7, 0).float()
    plain = F.scaled_dot_product_attention(x, x, x).transpose(1, 2)
    cases: list[tuple[type[nn.Module], dict[str, Any], int, bool]] = [
        (Doubled, {"double": True}, 2, True),  # named in the signature
        (Doubled, {"return_dict": True, "factor": 3, "image_sizes": torch.ones(2)}, 1, False),
        (Multiplied, {"factor": 3}, 3, True),  # looked up among the others
        (Multiplied, {"return_dict": True}, 1, False),
    ]
    for cls, keywords, times, falls_back in cases:
        module = cls()
        call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
        torch.testing.assert_close(call(x, **keywords), times * plain)
        assert hasattr(module, _hooks.FALLBACK) == falls_back
    with pytest.raises(ValueError, match="Multiplied passes factor=3 to the sequences"):
        leaner.attention_forward(Multiplied(), x, x, x, None, factor=3, **packed(x))
    assert leaner.attention_forward(Doubled(), x, x, x, None, factor=3, **packed(x))


def packed(x: Tensor) -> dict[str, Any]:
    starts = torch.arange(0, x.shape[0] * x.shape[2] + 1, x.shape[2])
    sizes = {"max_length_q": x.shape[2], "max_length_k": x.shape[2]}
    return sizes | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_swapped_model_is_swapped_and_can_be_undone(duplicate: Any) -> None:
    model = BY_NAME["t5"].build()
    before = named(model)
    report = leaner.use(model)
    twin = duplicate(model)
    assert set(named(twin)) == {"leaner"}
    leaner.undo(twin)
    assert named(twin) == before
    assert set(named(model)) == {"leaner"}
    report.undo()
    assert named(model) == before


def test_models_inside_of_other_modules_are_swapped() -> None:
    model = nn.ModuleDict({"text": BY_NAME["bert"].build(), "head": nn.MultiheadAttention(8, 2)})
    report = leaner.use(model)
    assert list(report.swapped) == [f"text.bert.encoder.layer.{i}.attention.self" for i in (0, 1)]
    assert report.left == {"head": "leaner_kernels.adapters.pytorch swaps it"}
    with pytest.raises(ValueError, match=r"Linear has no attention module to swap \(none at all\)"):
        leaner.use(nn.Linear(2, 2))


def test_a_part_without_the_model_around_it_is_refused_with_the_reason() -> None:
    model = BY_NAME["bert"].build()
    before = named(model)
    with pytest.raises(ValueError, match="whose configuration is set through the model") as caught:
        leaner.use(model.bert.encoder)
    assert "\n" not in str(caught.value)
    assert named(model) == before


def test_what_was_set_before_use_or_after_it_stays_when_it_is_undone() -> None:
    model = BY_NAME["llama"].build()
    leaner.register()
    model.set_attn_implementation("leaner")
    leaner.use(model).undo()
    assert set(named(model)) == {"leaner"}
    model.set_attn_implementation("sdpa")
    report = leaner.use(model)
    model.set_attn_implementation("eager")
    report.undo()
    assert set(named(model)) == {"eager"}
