"""``use`` and ``undo`` on models of transformers: swapped, left, falling back and refused."""

import copy
import inspect
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from leaner_kernels import attention
from leaner_kernels.adapters import transformers as leaner
from tests.adapters.test_transformers import BY_NAME, cast, outcome
from tests.adapters.transformers_families import (
    FAMILIES,
    LATENT,
    LEFT,
    PADDING,
    PARTLY,
    REFUSED,
    UNSUPPORTED,
    Family,
)
from tests.error_budget import assert_computes

RUNNING = FAMILIES + [family for family in PARTLY if family.name != "git"]
CASES = [(family, padding) for family in RUNNING for padding in family.padded]


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
    assert bool(report.left) == (family in PARTLY)
    compared(family, padding, model)


@pytest.mark.parametrize("family", PARTLY, ids=[family.name for family in PARTLY])
def test_attention_that_does_not_dispatch_is_left_with_the_reason(family: Family) -> None:
    model = made(family)
    report = leaner.use(model)
    assert len(report.left) == 2
    assert all(LEFT[family.name] in reason for reason in report.left.values())
    assert "\nleft 2:\n" in repr(report)


def test_a_model_a_part_of_which_would_add_our_masks_is_refused_when_it_runs() -> None:
    family = next(family for family in PARTLY if family.name == "git")
    model, inputs = made(family), family.inputs(torch.tensor(PADDING["none"]))
    expected = model(**inputs)[0]
    leaner.use(model)
    with pytest.raises(ValueError, match=r"^GitSelfAttention computes its attention itself"):
        model(**inputs)
    leaner.undo(model)
    assert torch.equal(model(**inputs)[0], expected)


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


@pytest.mark.parametrize("family", UNSUPPORTED, ids=[family.name for family in UNSUPPORTED])
def test_heads_that_the_kernels_do_not_take_are_refused_in_one_line(family: Family) -> None:
    model = made(family)
    leaner.use(model)
    inputs = family.inputs(torch.tensor(PADDING["none"]))
    with pytest.raises(ValueError, match=r"and \(2, 4, 11, 8\)$|softcap needs .* 128, got 136$"):
        model(**inputs)


def test_attention_weights_are_refused_in_one_line() -> None:
    model = BY_NAME["llama"].build()
    leaner.use(model)
    inputs = BY_NAME["llama"].inputs(torch.tensor(PADDING["none"]))
    with pytest.raises(ValueError, match=r"output_attentions=True .* KappaMonitor") as caught:
        model(**inputs, output_attentions=True)
    assert "\n" not in str(caught.value)


def test_sparse_attention_whose_mask_only_eager_gets_is_refused() -> None:
    """Under any other name DeepSeek-V3.2 passes indices in place of a mask: dense is wrong."""
    torch.manual_seed(0)
    sparse = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8, "vocab_size": 99}
    config = transformers.DeepseekV32Config(**LATENT | sparse)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    leaner.use(model)
    with pytest.raises(ValueError, match=r"DeepseekV32Attention passes indices=\(2, 9, 3\)"):
        model(torch.randint(3, 90, (2, 9)))


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
    assert report.left == {
        "head": "torch.nn.modules.activation.MultiheadAttention computes its attention itself"
    }
    with pytest.raises(ValueError, match=r"Linear has no attention module to swap \(none at all\)"):
        leaner.use(nn.Linear(2, 2))


def test_a_part_without_the_model_around_it_is_refused_with_the_reason() -> None:
    model = BY_NAME["bert"].build()
    before = named(model)
    with pytest.raises(ValueError, match="is set through the model around it") as caught:
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
