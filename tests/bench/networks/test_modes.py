"""Names of rows: every row says whose model it is, and how that is compiled."""

import pytest
import torch

from bench.harness.steps import Training
from bench.networks import gate
from bench.networks.cases import PAPER_CASES
from bench.networks.gate import LanguageModels, peers_of
from bench.networks.modes import MODELS, mode_of, modes_of, replays_graphs, whose

BY_NAME = {case.name: case for case in PAPER_CASES}
BERT = BY_NAME["cpu_language_crammed_bert_lean"]


@pytest.mark.parametrize(
    ("name", "model", "mode"),
    [
        ("timm", "timm", "eager"),
        ("timm_leaner_compiled", "timm_leaner", "compiled"),
        ("leaner_compiled_autotune", "leaner", "compiled, max-autotune"),
        ("transformers_masked_compiled_graphs", "transformers_masked", "compiled, CUDA graphs"),
    ],
)
def test_a_name_is_a_model_and_a_mode(name, model, mode):
    assert whose(name) == model
    assert mode_of(name) == mode


def test_a_mode_that_is_not_known_is_refused():
    with pytest.raises(KeyError, match="_compiled_twice"):
        mode_of("leaner_compiled_twice")


def test_every_model_trains_eager_and_in_three_modes_and_infers_in_one():
    for case in PAPER_CASES:
        for stage in case.stages:
            rows = peers_of(case, stage)
            assert set(map(whose, rows)) <= MODELS.keys()
            for model in set(map(whose, rows)):
                modes = [mode_of(row) for row in rows if whose(row) == model]
                assert modes == ["eager", *(mode.words for mode in modes_of(stage).values())]
    assert len(modes_of("training")) == 3
    assert replays_graphs("timm_compiled", "inference")
    assert not replays_graphs("timm_compiled", "training")
    assert replays_graphs("timm_compiled_graphs", "training")
    assert not replays_graphs("timm", "training")


def test_torch_compile_gets_the_mode_of_a_row_once(monkeypatch):
    compiled = []

    def pretend(function, device, mode):
        compiled.append(mode)
        return function

    monkeypatch.setattr(gate, "compiled", pretend)
    models = LanguageModels(BERT)
    for name in peers_of(BERT):
        if whose(name) == "leaner":
            models.model(name)
            models.model(name)
    assert compiled == [None, "max-autotune-no-cudagraphs", "reduce-overhead"]


def test_steps_of_cuda_graphs_begin_with_a_mark(monkeypatch):
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    monkeypatch.setattr(gate, "compiled", lambda function, device, mode: function)
    models = LanguageModels(BERT)
    models.training("leaner_compiled").step()
    assert not marks
    training = models.training("leaner_compiled_graphs")
    before = len(marks)
    training.step()
    training.step()
    assert len(marks) == before + 2


def test_what_cuda_graphs_hold_is_not_given_as_peak_memory():
    device = torch.device("cuda")
    training = object.__new__(Training)
    training.device, training.graphs = device, True
    assert training.peak_bytes() is None
