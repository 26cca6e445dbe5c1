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


def test_transformers_bert_with_masked_logits_alone_is_the_published_model():
    """Its loss and its gradients, to rounding."""
    pytest.importorskip("transformers")
    case = BY_NAME["cpu_language_crammed_bert_lean"]
    batch = case.draw(CPU)
    published, masked = (
        transformers_model("bert", case.config, CPU, masked).double() for masked in (False, True)
    )
    losses_of = [model(batch) for model in (published, masked)]
    torch.testing.assert_close(*losses_of, rtol=1e-12, atol=0)
    for loss in losses_of:
        loss.backward()
    theirs = dict(published.named_parameters())
    for name, weight in masked.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-9, atol=1e-12)


def test_a_library_that_computes_logits_of_masked_tokens_does_our_work():
    """But for the layer before its decoder: 1% of this small model, 0.1% of Crammed BERT."""
    pytest.importorskip("transformers")
    models = models_of("crammed_bert")
    ours = models.flops("leaner", "training")
    assert 1 < models.flops("transformers_masked", "training") / ours < 1.02
    assert models.flops("transformers", "training") / ours > 1.25  # logits of every token
    assert models.flops("leaner_compiled_graphs", "training") == ours
    assert all(p.grad is None for p in models.models["leaner"].parameters())


def test_gpt2_of_transformers_does_our_work():
    pytest.importorskip("transformers")
    models = models_of("gpt2_tinystories")
    ours, theirs = (models.flops(name, "training") for name in ("leaner", "transformers"))
    assert theirs == pytest.approx(ours, rel=0.01)


def test_flops_of_a_step_are_those_of_its_products():
    """Of each weight 6 a token, of logits those of masked tokens alone, and 7 products of scores.

    PyTorch's backward computes the scores again.
    """
    case = BY_NAME["cpu_language_crammed_bert_lean"]
    models = models_of("crammed_bert")
    tokens, width = case.items("training"), case.config["embed_dim"]
    blocks = models.models.setdefault("leaner", models.build("leaner")).blocks
    weights = sum(p.numel() for p in blocks.parameters() if p.ndim == 2)
    logits = 6 * tokens // 4 * width * case.config["vocab_size"]
    scores = len(blocks) * case.batch * case.config["sequence_length"] ** 2 * width
    assert models.flops("leaner", "training") == 6 * tokens * weights + logits + 7 * 2 * scores
