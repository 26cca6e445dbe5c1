"""The profile of whole steps, of PyTorch's operators on a CPU."""

import json

import pytest

from bench.networks import profile_steps
from bench.networks.gate import models_of
from bench.networks.profile_steps import CASES

BERT = "cpu_language_crammed_bert_lean"


def test_every_operator_of_a_step_has_a_row(tmp_path, capsys):
    path = tmp_path / "profile.json"
    profile_steps.main([BERT, "leaner", "--json", str(path)])
    result = json.loads(path.read_text("utf-8"))
    rows = result["rows"]
    assert (result["case"], result["peer"], result["steps"]) == (BERT, "leaner", 3)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    times = [row["microseconds"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert result["microseconds_per_step"] > 0
    calls = {row["kernel"]: row["calls"] for row in rows}
    assert calls["aten::_fused_adamw_"] == 1
    # No annotation, which would count what it spans twice.
    assert not any("ProfilerStep" in name or "Optimizer" in name for name in calls)
    out = capsys.readouterr().out.splitlines()
    assert len(out) == min(len(rows), profile_steps.PRINTED) + 1
    assert f"in {len(rows)} kernels" in out[-1]


def test_calls_are_of_one_step():
    training = models_of(CASES[BERT]).training("leaner")
    three, five = (
        {row["kernel"]: row["calls"] for row in profile_steps.by_kernel(training, steps)}
        for steps in (3, 5)
    )
    assert three["aten::mm"] == five["aten::mm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BERT, "leaner_compiled"), "is compiled on CUDA only"),
        ((BERT, "timm"), "PEER must be one of leaner, transformers, transformers_masked, leaner_"),
        (("vit_base", "leaner"), "CASE must be one of model_vit_base_original, "),
        (("model_vit_base_lean", "leaner"), "needs a CUDA GPU"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        profile_steps.main(arguments)
    text = capsys.readouterr().err.splitlines()
    assert message in (text[-1] if text else str(stopped.value))
