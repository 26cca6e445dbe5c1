"""Language models: ours passes its gate, a wrong one gets no number, transformers' are alike."""

from functools import partial

import pytest
import torch

from bench.harness.gate import WrongError
from bench.networks import gate
from bench.networks.cases import IGNORED, PAPER_CASES, losses, mean_loss
from bench.networks.gate import LanguageModels
from bench.networks.peers import TRANSFORMERS, transformers_model

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in PAPER_CASES if case.kind == "language"}
ON_GPU = [case for case in BY_NAME.values() if case.device == "cuda"]


def models_of(row):
    return LanguageModels(BY_NAME[f"cpu_language_{row}_lean"])


@pytest.fixture(scope="module", params=["crammed_bert", "gpt2_tinystories"])
def models(request):
    return models_of(request.param)


def test_our_model_passes(models):
    assert 0 < models.check("leaner") <= 1


def test_our_compiled_model_passes(monkeypatch):
    """With a backend that a CPU has time for."""
    eager = partial(torch.compile, backend="eager")
    monkeypatch.setattr(gate, "compiled", lambda function, device, mode: eager(function))
    assert 0 <= models_of("crammed_bert").check("leaner_compiled") <= 1


def test_a_model_that_errs_is_refused(models):
    inner = models.model("leaner").blocks[0].attn.qkv
    scale = inner.register_forward_hook(lambda module, args, out: 1.01 * out)
    with pytest.raises(WrongError, match="losses off by"):
        models.check("leaner")
    scale.remove()


def test_models_of_another_library_must_be_finite():
    pytest.importorskip("transformers")
    models = models_of("gpt2_tinystories")
    assert models.check("transformers") == 0
    models.weights["transformers"]["model.lm_head.bias"].fill_(float("nan"))
    with pytest.raises(WrongError, match="not finite"):
        models.check("transformers")


def test_the_exact_losses_of_a_case_in_bfloat16_are_those_in_float32():
    models = models_of("gpt2_tinystories")
    exact, in_float32 = models.truth
    models.__dict__.pop("truth")
    models.device = torch.device("cuda")  # only the CPU is used
    wide, allowed = models.truth
    assert (exact.dtype, wide.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=in_float32)
    assert in_float32 < 2e-4 < allowed < 0.5


def test_a_quarter_of_the_tokens_is_masked_for_bert():
    batch = BY_NAME["cpu_language_crammed_bert_lean"].draw(CPU)
    asked = batch.targets != IGNORED
    assert asked.sum(dim=1).tolist() == [8] * 4
    assert torch.equal(batch.targets[asked], batch.tokens[asked])


@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_transformers_models_of_the_rows_have_parameters_within_a_percent(case):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = TRANSFORMERS[case.architecture](case.config)
    theirs = sum(weight.numel() for weight in model.parameters())
    assert abs(theirs / case.entry.audited_params - 1) < 0.01


def test_gpt2_of_transformers_is_our_model_but_for_its_biases():
    """With our weights it gives our losses: heads that do not divide the width are put in right."""
    pytest.importorskip("transformers")
    case = BY_NAME["cpu_language_gpt2_tinystories_original"]
    batch, ours = case.draw(CPU), case.build(CPU)
    peer = transformers_model("gpt", case.config, CPU)
    theirs, state = peer.model.state_dict(), ours.state_dict()
    words = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
    }
    words |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    names = {"token_embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"}
    for layer in range(len(ours.blocks)):
        names |= {f"blocks.{layer}.{our}": f"transformer.h.{layer}.{w}" for our, w in words.items()}
    taken = {"transformer.wpe.weight"}
    theirs["transformer.wpe.weight"].copy_(state["pos_embed"].squeeze(0))
    for our, their in names.items():
        for kind in ("weight", "bias"):
            if (value := state.get(f"{our}.{kind}")) is not None:
                name = f"{their}.{kind}"
                # Linear layers of its blocks keep the transpose.
                turned = ".h." in name and value.ndim == 2
                theirs[name].copy_(value.T if turned else value)
                taken.add(name)
    for bias in theirs.keys() - taken:  # of q, k and v, which ours have none
        assert bias.endswith("attn.c_attn.bias")
        theirs[bias].zero_()
    with torch.no_grad():
        expected = mean_loss(losses(ours, batch), batch)
        torch.testing.assert_close(peer(batch), expected, rtol=1e-5, atol=0)
