"""The recorded memory is what the predictor returns, beside what the paper prints."""

import json

import pytest

from studies import printed_memory
from studies.runner import RESULTS


def test_what_is_recorded_is_what_is_predicted():
    recorded = json.loads((RESULTS / f"{printed_memory.NAME}.json").read_text())["models"]
    found = printed_memory.predictions(["crammed_bert"])["models"]
    kept = [each for each in recorded if each["row"] == "crammed_bert"]
    for one, other in zip(found, kept, strict=True):
        assert one["printed"] == other["printed"]
        # Another release of PyTorch may save other tensors.
        assert one["steps"] == pytest.approx(other["steps"], rel=0.01)


def test_every_row_is_recorded():
    recorded = json.loads((RESULTS / f"{printed_memory.NAME}.json").read_text())["models"]
    models = [(row, variant) for row in printed_memory.ROWS for variant in ("original", "lean")]
    assert [(each["row"], each["variant"]) for each in recorded] == models
