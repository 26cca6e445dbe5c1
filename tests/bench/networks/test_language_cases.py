"""The measured language models: every row of the paper, and transformers' models of their sizes."""

import sys
from unittest.mock import ANY

import pytest
import torch

from bench.harness.peers import AbsentError
from bench.networks.language_cases import (
    IGNORED,
    LANGUAGE,
    LANGUAGE_CASES,
    answers,
    mean_loss,
    small,
)
from bench.networks.language_gate import peers_of
from bench.networks.language_peers import TRANSFORMERS, transformers_model
from models import papers

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in LANGUAGE_CASES}
ON_GPU = [case for case in LANGUAGE_CASES if case.device == "cuda"]
ON_CPU = list(small())
LEAN = [case for case in ON_CPU if case.variant == "lean"]
# Retrieval reads pairs, ListOps sequences of several lengths, and Image sequences of one.
KINDS = [
    BY_NAME[f"cpu_language_{row}_lean"]
    for row in (
        "crammed_bert",
        "gpt2_tinystories",
        "nystromformer_listops",
        "nystromformer_retrieval",
        "nystromformer_image",
    )
]
PEERS = [(case, name) for case in KINDS for name in TRANSFORMERS[case.architecture]]


def test_every_language_row_is_measured_in_both_variants_at_its_full_size():
    rows = {key for key, row in papers.ROWS.items() if row.architecture in LANGUAGE}
    assert len(rows) == 14
    assert {(case.row, case.variant) for case in ON_GPU} == rows
    assert {(case.row, case.variant) for case in ON_CPU} == rows
    assert all(case.sizes == {} for case in ON_GPU)


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_our_models_of_the_rows_have_their_parameters(case):
    model = papers.build(case.row, case.variant, device="meta", **case.sizes)
    assert model.num_params() == case.entry.audited_params


def test_names_choose_one_case_and_say_the_device():
    assert len(BY_NAME) == len(LANGUAGE_CASES) == 28
    assert all(name.isidentifier() for name in BY_NAME)
    assert all((c.device == "cpu") == c.name.startswith("cpu_") for c in LANGUAGE_CASES)


def test_tokens_count_both_sequences_of_a_pair():
    assert BY_NAME["language_crammed_bert_lean"].tokens == 128 * 128
    assert BY_NAME["language_nystromformer_retrieval_lean"].tokens == 32 * 2 * 4096


def test_small_models_lose_parameters_when_lean():
    for original, lean in zip(ON_CPU[::2], ON_CPU[1::2], strict=True):
        assert (original.row, original.variant, lean.variant) == (lean.row, "original", "lean")
        params = [case.build(CPU).num_params() for case in (original, lean)]
        assert params[1] < params[0] < 3e5


def test_a_quarter_of_the_tokens_is_masked_for_bert():
    batch = BY_NAME["cpu_language_crammed_bert_lean"].draw(CPU)
    asked = batch.targets != IGNORED
    assert asked.sum(dim=1).tolist() == [8] * 4
    assert torch.equal(batch.targets[asked], batch.tokens[asked])


def test_gpt_is_asked_for_the_next_token():
    batch = BY_NAME["cpu_language_gpt2_tinystories_lean"].draw(CPU)
    assert torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])


def test_padded_sequences_differ_in_length():
    batch = BY_NAME["cpu_language_nystromformer_retrieval_lean"].draw(CPU)
    assert batch.tokens.shape == (4, 2, 128)
    assert batch.key_lengths.shape == (4, 2)
    assert (batch.key_lengths.min(), batch.key_lengths.max()) == (32, 128)
    assert BY_NAME["cpu_language_nystromformer_image_lean"].draw(CPU).key_lengths is None


@pytest.mark.parametrize("case", LEAN, ids=lambda case: case.row)
def test_a_model_begins_near_the_logarithm_of_its_choices(case):
    batch = case.draw(CPU)
    with torch.no_grad():
        loss = mean_loss(answers(case.build(CPU), batch), batch).item()
    choices = case.config["vocab_size" if batch.targets.ndim == 2 else "num_classes"]
    assert loss == pytest.approx(torch.tensor(choices).log().item(), rel=0.35)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.row)
def test_each_row_meets_transformers_eager_and_compiled(case):
    rows = peers_of(case)
    assert rows["leaner"] == ("leaner", False)
    assert rows["transformers_compiled"] == ("transformers", True)
    assert ("transformers_modernbert" in rows) == (case.architecture == "bert")


@pytest.mark.parametrize(("case", "name"), PEERS, ids=lambda part: getattr(part, "row", part))
def test_transformers_models_answer_in_the_shape_of_ours(case, name):
    pytest.importorskip("transformers")
    batch = case.draw(CPU)
    theirs = transformers_model(case.architecture, name, case.config, CPU)
    ours = case.build(CPU)
    with torch.no_grad():
        logits = (
            ours(batch.tokens)
            if batch.targets.ndim == 2
            else ours(batch.tokens, key_lengths=batch.key_lengths)
        )
        assert theirs.logits(batch).shape == logits.shape
        loss = theirs(batch)
    assert loss.shape == ()
    assert 0 < loss.item() < 10
    params = [sum(weight.numel() for weight in m.parameters()) for m in (theirs, ours)]
    assert abs(params[0] / params[1] - 1) < 0.09  # at full size below 0.01, as the next test says


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_transformers_models_of_the_rows_have_parameters_within_a_percent(case):
    pytest.importorskip("transformers")
    config = case.config
    dim, heads = config["embed_dim"], config["heads"]
    # Biases of q, k and v; two positions and a token type.
    more = {"gpt": config["depth"] * 3 * (dim // heads * heads), "nystromformer": 3 * dim}
    for build, differs in TRANSFORMERS[case.architecture].values():
        with torch.device("meta"):
            theirs = sum(weight.numel() for weight in build(config).parameters())
        assert abs(theirs / case.entry.audited_params - 1) < 0.01
        assert theirs - case.entry.audited_params == more.get(case.architecture, ANY)
        assert differs


def test_gpt2_of_transformers_is_our_model_but_for_its_biases():
    """With our weights it gives our losses: heads that do not divide the width are put in right."""
    pytest.importorskip("transformers")
    case = BY_NAME["cpu_language_gpt2_tinystories_original"]
    batch, ours = case.draw(CPU), case.build(CPU)
    peer = transformers_model("gpt", "transformers", case.config, CPU)
    theirs, state = peer.model.state_dict(), ours.state_dict()
    words = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    taken = {f"transformer.h.{i}.attn.c_attn.bias" for i in range(len(ours.blocks))}
    for name in taken:
        theirs[name].zero_()
    for layer in range(len(ours.blocks)):
        for our, their in words.items():
            for kind in ("weight", "bias"):
                value = state.get(f"blocks.{layer}.{our}.{kind}")
                if value is None:
                    continue
                name = f"transformer.h.{layer}.{their}.{kind}"
                # Their linear layers keep the transpose.
                theirs[name].copy_(value.T if theirs[name].ndim == 2 else value)
                taken.add(name)
    rest = {
        "token_embed.weight": "transformer.wte.weight",
        "pos_embed": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
        "head.bias": "lm_head.bias",
    }
    for our, name in rest.items():
        theirs[name].copy_(state[our].view_as(theirs[name]))
        taken.add(name)
    assert taken == theirs.keys()
    with torch.no_grad():
        expected = mean_loss(answers(ours, batch), batch)
        torch.testing.assert_close(peer(batch), expected, rtol=1e-5, atol=0)


def test_without_transformers_its_models_are_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    case = BY_NAME["cpu_language_gpt2_tinystories_lean"]
    with pytest.raises(AbsentError, match="transformers cannot be imported"):
        transformers_model("gpt", "transformers", case.config, CPU)
