"""``use`` and ``undo`` on models of transformers: swapped, left and refused."""

import copy
import inspect
import pickle
import re
import warnings
from contextlib import nullcontext
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
    BOTH_SIDES,
    FAMILIES,
    LEFT,
    PADDING,
    PARTLY,
    REFUSED,
    UNSUPPORTED,
    Family,
    encoded_and_decoded,
    tokens,
)
from tests.error_budget import assert_computes

CASES = [(family, padding) for family in FAMILIES + PARTLY for padding in family.padded]


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


def test_a_part_that_would_add_our_masks_to_its_scores_keeps_its_own() -> None:
    family = next(family for family in PARTLY if family.name == "git")
    model, inputs = made(family), family.inputs(torch.tensor(PADDING["none"]))
    report = leaner.use(model)
    assert all("image_encoder" in name for name in report.swapped)
    assert model.config._attn_implementation == family.exact
    model(**inputs)
    # By name, which nobody checks before it runs, it is refused.
    model.set_attn_implementation("leaner")
    with pytest.raises(ValueError, match=r"^GitSelfAttention computes its attention itself"):
        model(**inputs)
    # Then there is nothing to go back to but transformers' own.
    leaner.use(model)
    model(**inputs)


def test_a_decoder_beside_an_encoder_that_does_not_dispatch_is_left_where_they_share_masks() -> (
    None
):
    """BigBird-Pegasus' decoder dispatches, and its encoder would misread masks of ours."""
    sizes = BOTH_SIDES | {"max_position_embeddings": 64}
    model = transformers.BigBirdPegasusForCausalLM(transformers.BigBirdPegasusConfig(**sizes))
    ids = torch.randint(3, 40, (2, 9))
    expected = model.eval()(ids)[0]
    with pytest.raises(ValueError, match="shares its masks with BigBirdPegasusSelfAttention"):
        leaner.use(model)
    assert torch.equal(model(ids)[0], expected)


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


REASONS = {
    "deepseek_v3": r"keys have a head dimension of 12, values of 8: they must be equal",
    "gemma2": r"a softcap needs a head dimension up to 128, got 136",
    "deepseek_v32": r"it may pass indices, which leaner_kernels\.attention does not support",
}


@pytest.mark.parametrize("family", UNSUPPORTED, ids=[family.name for family in UNSUPPORTED])
def test_use_decides_on_heads_that_the_kernels_do_not_take(family: Family) -> None:
    model, before = made(family), named(made(family))
    inputs = family.inputs(torch.tensor(PADDING["none"]))
    expected = model(**inputs)[0]
    with pytest.raises(ValueError, match=REASONS[family.name]) as caught:
        leaner.use(model)
    assert "\n" not in str(caught.value)
    assert named(model) == before
    assert torch.equal(model(**inputs)[0], expected)
    # Beside a model that is swapped it is left.
    both = nn.ModuleDict({"whole": BY_NAME["bert"].build(), "left": model})
    report = leaner.use(both)
    assert {name.split(".")[0] for name in report.swapped} == {"whole"}
    assert len(report.left) == 2
    assert all(re.search(REASONS[family.name], reason) for reason in report.left.values())
    assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize("family", UNSUPPORTED, ids=[family.name for family in UNSUPPORTED])
def test_by_name_such_heads_are_refused_when_they_run(family: Family) -> None:
    model, inputs = made(family), family.inputs(torch.tensor(PADDING["none"]))
    leaner.register()
    model.set_attn_implementation("leaner")
    reason = r"and \(2, 4, 11, 8\)$|softcap needs .* 128, got 136$|passes indices="
    with pytest.raises(ValueError, match=reason):
        model(**inputs)


# On meta, which runs no kernel: with the sizes that their configurations have without arguments.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
LAYERS += ("decoder_layers", "num_decoder_layers")
# Their forwards read values, or multiply in dtypes that a CPU has not.
NOT_ON_META = {"bart", "mbart", "gpt_oss"}


def published(family: Family) -> Any:
    cls = getattr(transformers, family.architecture)
    config = cls.config_class()
    for part in (config, *vars(config).values()):
        if not isinstance(part, transformers.PreTrainedConfig):
            continue
        for name in LAYERS:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 2)
        for name in ("n_routed_experts", "num_experts"):
            if hasattr(part, name):
                setattr(part, name, 8)
        if isinstance(getattr(part, "layer_types", None), list):
            part.layer_types = part.layer_types[:2]
    with torch.device("meta"):
        return cls(config).eval()


TEXTS = [
    family
    for family in FAMILIES + PARTLY + UNSUPPORTED
    if family.inputs in (tokens, encoded_and_decoded) and family.name not in NOT_ON_META
]


@pytest.mark.parametrize("family", TEXTS, ids=[f"{family.name}" for family in TEXTS])
def test_no_forward_raises_after_use_at_published_sizes(family: Family) -> None:
    model = published(family)
    ids = {"input_ids": torch.zeros(2, 16, dtype=torch.long, device="meta")}
    if family.inputs is encoded_and_decoded:
        ids["decoder_input_ids"] = ids["input_ids"]
    reason = REASONS.get(family.name)
    with nullcontext() if reason is None else pytest.raises(ValueError, match="attention module"):
        leaner.use(model)
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="head dimension")
        assert model(**ids)[0].shape[:2] == (2, 16)


def test_attention_weights_are_refused_in_one_line() -> None:
    model = BY_NAME["llama"].build()
    leaner.use(model)
    inputs = BY_NAME["llama"].inputs(torch.tensor(PADDING["none"]))
    with pytest.raises(ValueError, match=r"output_attentions=True .* KappaMonitor") as caught:
        model(**inputs, output_attentions=True)
    assert "\n" not in str(caught.value)


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


def test_a_model_without_attention_says_so_and_promises_nothing() -> None:
    resnet = transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, depths=[1] * 4))
    for model, name in ((resnet, "ResNetModel"), (nn.Linear(2, 2), "Linear")):
        with pytest.raises(ValueError, match=f"^{name} has no attention module") as caught:
            leaner.use(model)
        assert "KappaMonitor" not in str(caught.value)


def test_a_part_without_the_model_around_it_is_refused_with_the_reason() -> None:
    model = BY_NAME["bert"].build()
    before = named(model)
    with pytest.raises(ValueError, match="the enclosing model sets the attention of") as caught:
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
