"""Predictions of a pass from its launches: floors by bytes and units, and what is not known."""

import pytest

from bench.attention.cases import CASES
from bench.gpu_model import units
from bench.gpu_model.command import Prediction, row
from bench.gpu_model.replay import Timing

CASE = next(case for case in CASES if case.name == "vit_base")
BYTES = CASE.bytes("forward") / (0.9 * 2.04e12)  # seconds on an A100


def launch(seconds=3e-4, **floors):
    timing = seconds and Timing(seconds, {"issue": 0.9}, {}, [])
    return Prediction(floors, timing, "" if seconds else "unknown")


def test_each_unit_takes_its_work_over_its_rate():
    work = {"MUFU": 2e5, "FFMA": 1e5, "IMAD": 3e5, "HMMA.16816.F32.BF16": 7e4}
    found = units.cycles(work, 1e5, units.GPUS["A100"])
    assert found == pytest.approx(
        {
            "issue": 6.7e5 / 4,
            "tensor cores": 7e4 * 2 * 16 * 8 * 16 / 312e12 * 108 * 1.41e9,
            "multiply-add": 4e5 / 2,
            "other arithmetic": 0,
            "special functions": 2e5 * 2,
            "shared memory": 1e5,
        }
    )


def test_the_floor_is_the_busiest_unit_of_each_launch_or_the_bytes():
    both = launch(issue=BYTES, special=BYTES / 2), launch(issue=1e-9, special=BYTES / 4)
    found = row("A100", CASE, "forward", both, 1)
    assert (found["limit"], found["binds"], found["programs"]) == ("issue", "issue", 1)
    assert found["floor"] == pytest.approx(1.25 * BYTES, rel=1e-3)
    assert found["predicted"] == pytest.approx(6e-4)
    found = row("A100", CASE, "forward", [launch(issue=BYTES / 2)], 2)
    assert (found["limit"], found["floor"]) == ("bytes", pytest.approx(BYTES, rel=1e-3))
    found = row("A100", CASE, "forward", [launch(None), launch(issue=1e-9)], 2)
    assert (found["limit"], found["binds"]) == ("bytes, units unknown", "unknown")
    assert found["predicted"] is None
