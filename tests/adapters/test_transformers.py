"""Models of transformers with our attention, against themselves with PyTorch's."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from leaner_kernels import KappaMonitor
from leaner_kernels.adapters import transformers as leaner
from tests.adapters.transformers_calls import (
    CALLS,
    eager_with_sinks,
    every_mask,
    heads,
    numbers,
    plain_attention,
    ragged,
)
from tests.adapters.transformers_families import FAMILIES, PADDING, Family
from tests.error_budget import assert_computes, assert_within_budget, by_layer

BY_NAME = {family.name: family for family in FAMILIES}
GENERATING = [family for family in FAMILIES if family.generates]


@pytest.fixture(autouse=True)
def registered() -> None:
    leaner.register()
    transformers.AttentionInterface.register("plain", plain_attention)
    transformers.AttentionMaskInterface.register("plain", every_mask)


@pytest.fixture(scope="module")
def models() -> Callable[[Family], dict[str, nn.Module]]:
    """Models with the same weights: ours, its peers, and one of these in float64."""
    built: dict[str, dict[str, nn.Module]] = {}

    def alike(family: Family) -> dict[str, nn.Module]:
        if family.name not in built:
            model = family.build()
            # Where transformers has eager attention alone, what it would write with PyTorch's.
            others = ["sdpa"] if family.exact == "sdpa" else ["eager", "plain"]
            built[family.name] = {name: copy.deepcopy(model) for name in ["leaner", *others]}
            for name, peer in built[family.name].items():
                peer.set_attn_implementation(name)
            built[family.name]["exact"] = copy.deepcopy(built[family.name][family.exact]).double()
        return built[family.name]

    return alike


def cast(inputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    dtype = next(model.parameters()).dtype
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}


def outcome(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output at tokens that are not padding, and the gradient of every weight."""
    model.zero_grad()
    out = model(**cast(inputs, model))[0]
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    out = out if mask is None else out[mask.bool()]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * direction.to(out.dtype)).sum().backward()
    grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    return by_layer({"output": out} | grads)


@pytest.mark.parametrize("family", GENERATING, ids=[family.name for family in GENERATING])
def test_generation_with_a_cache_scores_the_same_tokens(family: Family, models: Any) -> None:
    inputs = family.inputs(torch.tensor(PADDING["left"]))
    prompt = {name: t for name, t in inputs.items() if not name.startswith("decoder")}
    found, sequences = {}, {}
    for name, model in models(family).items():
        made = model.generate(
            **cast(prompt, model),
            do_sample=False,
            min_new_tokens=6,
            max_new_tokens=6,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found[name] = torch.stack(made.logits)
        sequences[name] = made.sequences
    assert torch.equal(sequences["leaner"], sequences[family.exact])
    peers = [logits for name, logits in found.items() if name not in ("leaner", "exact")]
    assert_within_budget(found["leaner"], tuple(peers), found["exact"])


def module_for(query: Tensor, key: Tensor, *_: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])


def called(function: Any, arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output of an attention function, and the gradient of every tensor that takes one."""
    given = arguments | {"value": heads(*arguments["key"].shape[1:3], seed=2)}
    tensors = {
        name: t.to(dtype).requires_grad_(name != "attention_mask")
        for name, t in given.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    module = module_for(given["query"], given["key"])
    out = function(module, **({"attention_mask": None} | given | tensors))[0]
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad((out * numbers(*out.shape).to(dtype)).sum(), [*wanted.values()])
    assert out.is_contiguous()
    return {"output": out} | dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_means_what_it_means_to_transformers(call: str) -> None:
    assert_computes(
        called(leaner.attention_forward, CALLS[call], torch.float32),
        partial(called, sdpa_attention_forward, CALLS[call]),
    )


@pytest.mark.parametrize("mask", [None, ragged(7, 7)], ids=["causal", "mask"])
@pytest.mark.parametrize("rows", [7, 1])
def test_a_sink_takes_its_share_and_its_gradient(mask: Tensor | None, rows: int) -> None:
    mask = None if mask is None else mask[:, :, :rows]
    given = {"query": heads(4, rows, 0), "key": heads(2, 7, 1), "attention_mask": mask}
    given["s_aux"] = numbers(4)
    found = called(leaner.attention_forward, given, torch.float32)
    assert_computes(found, partial(called, eager_with_sinks, given))
    assert found["s_aux"].abs().min() > 0
    ours = called(leaner.attention_forward, given, torch.float64)
    for name, exact in called(eager_with_sinks, given, torch.float64).items():
        torch.testing.assert_close(ours[name], exact)


@pytest.mark.parametrize(
    ("rows", "is_causal"), [(9, True), (9, False), (1, True)], ids=["causal", "full", "one token"]
)
def test_a_window_is_kept_without_a_mask(rows: int, is_causal: bool) -> None:
    given = {"query": heads(4, rows, 0), "key": heads(2, 9, 1), "is_causal": is_causal}
    # Models add one to a window that looks both ways.
    seen = (
        sliding_window_causal_mask_function(4)
        if is_causal
        else sliding_window_bidirectional_mask_function(3)
    )
    mask = sdpa_mask(2, rows, 9, 9 - rows, mask_function=seen, allow_is_causal_skip=False)
    expected = called(leaner.attention_forward, given | {"attention_mask": mask}, torch.float64)
    found = called(leaner.attention_forward, given | {"sliding_window": 4}, torch.float64)
    for name, exact in expected.items():
        torch.testing.assert_close(found[name], exact)
    wide = called(leaner.attention_forward, given | {"sliding_window": 9}, torch.float64)
    assert not torch.allclose(wide["output"], expected["output"])


def test_a_model_that_would_add_our_masks_to_its_scores_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation="leaner")
    with pytest.raises(ValueError, match=r"^BloomAttention computes its attention itself"):
        model(torch.ones(1, 5, dtype=torch.long))


def test_packed_sequences_attend_within_themselves() -> None:
    query, key, value = heads(4, 9, 0, 1), heads(2, 9, 1, 1), heads(2, 9, 2, 1)
    starts = torch.tensor([0, 4, 9])
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    longest = {"max_length_q": torch.tensor(5), "max_length_k": 5}
    tensors = query, key, value
    packed = leaner.attention_forward(nn.Module(), *tensors, None, **lengths, **longest)[0]
    for start, stop in ((0, 4), (4, 9)):
        own = (t[:, :, start:stop] for t in tensors)
        alone = leaner.attention_forward(nn.Module(), *own, None)[0]
        torch.testing.assert_close(packed[:, start:stop], alone)


class SomeAttention(nn.Module):
    """Whose name errors show."""


PACKED = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 9]))
PACKED |= dict.fromkeys(("max_length_q", "max_length_k"), 9)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"s_aux": torch.zeros(4), "softcap": 50.0},
            r"SomeAttention passes softcap=50.0 to attention with a bias",
        ),
        ({"output_attentions": True}, "output_attentions=True .* KappaMonitor"),
        ({"cache": object()}, "cache=.* attn_implementation=.eager"),
        ({"not_known": 3}, "not_known=3"),
        ({"indices": torch.zeros(2, 3)}, r"indices=\(2, 3\)"),
        (PACKED | {"softcap": 50.0}, "softcap=50.0 to the sequences of a varlen batch"),
        (PACKED | {"s_aux": torch.zeros(4)}, r"s_aux=\(4,\) to the sequences of a varlen batch"),
        (PACKED | {"position_bias": torch.zeros(1)}, "position_bias"),
        (PACKED | {"sliding_window": 4}, "sliding_window=4"),
        (PACKED | {"max_length_k": None}, "cu_seq_lens_q needs"),
    ],
    ids=lambda given: next(reversed(given)) if isinstance(given, dict) else "",
)
def test_what_is_not_supported_is_refused_by_its_name(
    keywords: dict[str, Any], message: str
) -> None:
    query = heads(4, 9, 0)
    with pytest.raises(ValueError, match=message) as caught:
        leaner.attention_forward(SomeAttention(), query, query, query, None, **keywords)
    assert "\n" not in str(caught.value)


def test_keywords_that_change_nothing_are_taken() -> None:
    query = heads(4, 9, 0)
    given = {"position_ids": torch.arange(9), "use_cache": True, "softcap": None, "cache": None}
    given |= {"output_attentions": False, "sliding_window": 9}
    out = leaner.attention_forward(nn.Module(), query, query, query, None, **given)[0]
    assert torch.equal(out, leaner.attention_forward(nn.Module(), query, query, query, None)[0])


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_a_model_compiles_into_one_graph(models: Any) -> None:
    model = models(BY_NAME["llama"])["leaner"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = BY_NAME["llama"].inputs(torch.tensor(PADDING["right"]))
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        torch.testing.assert_close(
            compiled(**given, use_cache=False).logits, model(**given, use_cache=False).logits
        )


@pytest.mark.parametrize(
    ("name", "owner", "projection"),
    [
        ("llama", "model.layers.0.self_attn", "o_proj"),
        ("gpt_oss", "model.layers.1.self_attn", "o_proj"),
        ("t5", "decoder.block.0.layer.1.EncDecAttention", "o"),
    ],
)
def test_kappa_monitor_reads_the_statistics_of_the_same_pass(
    name: str, owner: str, projection: str, models: Any
) -> None:
    model, exact = (models(BY_NAME[name])[run] for run in ("leaner", "exact"))
    inputs, projected = BY_NAME[name].inputs(torch.tensor(PADDING["right"])), []
    hook = model.get_submodule(f"{owner}.{projection}").register_forward_pre_hook(
        lambda _, given: projected.append(given[0].detach())
    )
    monitor = KappaMonitor(model, every=1, samples=2)
    monitor.begin(0)
    found = outcome(model, inputs)
    row = {row["layer"]: row for row in monitor.end()}[owner]
    hook.remove()
    assert_computes(found, lambda dtype: outcome(copy.deepcopy(exact).to(dtype), inputs))
    assert row["source"] == "same pass"
    norms = projected[0].unflatten(-1, (row["heads"], row["head_dim"])).norm(dim=(1, 3)).mean(0)
    torch.testing.assert_close(torch.tensor(row["head_norms"]), norms)
