"""The gate of the language models: ours passes, a wrong one gets no number, others are finite."""

from functools import partial

import pytest
import torch

from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError
from bench.networks import gate
from bench.networks.language_cases import LANGUAGE_CASES, Batch
from bench.networks.language_gate import LanguageModels, gradient_budget, peers_of

ROWS = "crammed_bert", "gpt2_tinystories", "nystromformer_listops", "nystromformer_retrieval"
BY_NAME = {case.name: case for case in LANGUAGE_CASES}


def models_of(row):
    return LanguageModels(BY_NAME[f"cpu_language_{row}_lean"])


@pytest.fixture(scope="module", params=ROWS)
def models(request):
    return models_of(request.param)


def test_our_model_passes(models):
    assert 0 < models.check("leaner") <= 1


def test_our_compiled_model_passes(monkeypatch):
    """With a backend that a CPU has time for."""
    eager = partial(torch.compile, backend="eager")
    monkeypatch.setattr(gate, "compiled", lambda function, device, mode: eager(function))
    models = models_of("crammed_bert")
    assert 0 <= models.check("leaner_compiled") <= 1


def test_a_model_that_errs_is_refused(models):
    inner = models.model("leaner").blocks[0].attn.qkv
    scale = inner.register_forward_hook(lambda module, args, out: 1.01 * out)
    with pytest.raises(WrongError, match=r"(losses|logits) off by"):
        models.check("leaner")
    scale.remove()


def test_a_wrong_gradient_is_refused_though_the_losses_are_right(models):
    weight = models.model("leaner").blocks[0].attn.qkv.weight
    scale = weight.register_hook(lambda grad: 1.01 * grad)
    with pytest.raises(WrongError, match="gradient off by"):
        models.check("leaner")
    scale.remove()


def test_a_measurement_begins_with_the_first_weights():
    models = models_of("nystromformer_image")
    models.check("leaner")
    first = models.case.build(torch.device("cpu")).state_dict()
    training = models.training("leaner")
    assert all(torch.equal(v, first[k]) for k, v in training.model.state_dict().items())
    losses = [training.step().item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]  # one batch, learned by heart
    again = models.training("leaner")
    assert again.step().item() == losses[0]


def test_models_of_another_library_must_be_finite():
    pytest.importorskip("transformers")
    models = models_of("gpt2_tinystories")
    assert models.check("transformers") == 0
    models.weights["transformers"]["model.lm_head.bias"].fill_(float("nan"))
    with pytest.raises(WrongError, match="not finite"):
        models.check("transformers")


def test_the_exact_result_of_a_case_in_bfloat16_is_one_in_float32():
    models = models_of("gpt2_tinystories")
    exact, plain = models.truth
    assert exact.output.dtype == torch.float64
    models.__dict__.pop("truth")
    models.device = torch.device("cuda")  # only the CPU is used
    exact, plain = models.truth
    assert exact.output.dtype == torch.float32
    error = (plain.gradient - exact.gradient).norm() / exact.gradient.norm()
    assert 1e-4 < error < 0.1


def test_a_budget_of_a_gradient_is_twice_what_plain_code_errs():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    allowed = gradient_budget(exact, exact + torch.tensor([0.0, 0.5]))
    assert allowed == pytest.approx(2 * (0.5 + 5 * torch.finfo(torch.float32).eps))


def test_compiling_is_measured_on_a_gpu_only():
    models = models_of("nystromformer_image")
    assert [name for name in peers_of(models.case) if name.endswith("compiled")] == [
        "leaner_compiled",
        "transformers_compiled",
    ]
    with pytest.raises(AbsentError, match="CUDA only"):
        models.check("leaner_compiled")


def test_the_first_samples_are_those_of_the_batch():
    batch = Batch(torch.arange(6).view(3, 2), torch.tensor([1, 2, 2]), torch.tensor([0, 1, 0]))
    first = batch.first(2)
    assert first.tokens.tolist() == [[0, 1], [2, 3]]
    assert (first.key_lengths.tolist(), first.targets.tolist()) == ([1, 2], [0, 1])
