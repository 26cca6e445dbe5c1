"""The measured models: every row of the paper, equal to timm's before they are timed."""

import math

import pytest
import torch

from bench.harness.gate import WrongError
from bench.harness.peers import AbsentError
from bench.harness.steps import classifying, resident
from bench.networks.cases import PAPER_CASES, ModelCase
from bench.networks.gate import VisionModels
from bench.networks.peers import timm_model
from models import papers

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in PAPER_CASES if case.kind == "model"}
ON_GPU = [case for case in BY_NAME.values() if case.device == "cuda"]


def test_every_vision_row_is_measured_in_both_variants():
    measured = [(case.entry.architecture, case.config) for case in ON_GPU]
    for (name, _), row in papers.ROWS.items():
        if name.startswith(("vit", "deit", "xc", "tn", "vo", "da")):
            assert measured.count((row.architecture, row.config)) == 1
    assert len(ON_GPU) == 18  # DeiT is ViT
    assert all(case.sizes == {} for case in ON_GPU)


@pytest.mark.parametrize("name", ["model_vit_base_lean", "model_xcit_medium_lean"])
def test_timms_model_of_a_widened_row_has_its_parameters(name):
    case = BY_NAME[name]
    with torch.device("meta"):
        theirs = timm_model(case.entry.architecture, case.config).state_dict()
    ours = papers.build(case.row, case.variant, device="meta").state_dict()
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}


@pytest.mark.parametrize("architecture", ["tnt", "volo", "davit"])
def test_what_timm_cannot_widen_is_absent(architecture):
    with pytest.raises(AbsentError, match="splits its width, and head_dim is 16"):
        timm_model(architecture, {"head_dim": 16})


@pytest.fixture(scope="module")
def networks() -> VisionModels:
    return VisionModels(BY_NAME["cpu_model_xcit_original"])


@pytest.mark.parametrize("stage", ModelCase.stages)
@pytest.mark.parametrize("name", ["leaner", "timm", "timm_leaner"])
def test_both_models_classify_alike(networks, stage, name):
    assert 0 <= networks.check(name, stage) <= 1


def test_a_widened_xcit_has_no_attention_to_swap():
    with pytest.raises(AbsentError, match="Xcit has no attention module to swap"):
        VisionModels(BY_NAME["cpu_model_xcit_lean"]).check("timm_leaner", "inference")


def test_a_wrong_model_is_refused(networks):
    scale = (
        networks.models["leaner"]
        .blocks[0]
        .attn.qkv.register_forward_hook(lambda module, args, out: 1.01 * out)
    )
    with pytest.raises(WrongError, match="inference: logits are off by"):
        networks.check("leaner", "inference")
    scale.remove()


def test_a_measurement_begins_with_the_first_weights(networks):
    training = networks.training("leaner")
    training.step()
    changed = training.model.state_dict()
    assert any(not torch.equal(changed[k], v) for k, v in networks.weights["timm"].items())
    assert training.model.training
    again = networks.model("leaner", "inference")
    assert all(torch.equal(again.state_dict()[k], v) for k, v in networks.weights["timm"].items())
    assert not again.training
    assert all(p.grad is None for p in again.parameters())


def test_a_model_alone_is_weights_gradients_images_and_moments():
    case = BY_NAME["cpu_model_vit_lean"]
    training = classifying(case.build(CPU), *case.draw(torch.Generator().manual_seed(0)))
    images = training.batch[0]
    weights = 4 * training.model.num_params()
    assert resident(training.model, images) == weights + 4 * 2 * 3 * 32**2
    loss = training.step()
    assert math.isfinite(loss.item())
    moments = [m for state in training.optimizer.state.values() for m in state.values()]
    found = resident(training.model, images, *moments)
    steps = sum(m.nbytes for m in moments if m.ndim == 0)
    assert found - steps == 4 * weights + 4 * 2 * 3 * 32**2
