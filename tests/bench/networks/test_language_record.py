"""Language benchmarks record what the report reads, and say when their time is spent."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import frames
from bench.catalogue import peers_of, problem_of
from bench.cross_entropy import bench_cross_entropy
from bench.cross_entropy.cases import CROSS_ENTROPY_CASES
from bench.harness import clock, machine
from bench.harness.checked import Checked, Current, Row
from bench.networks import bench_language
from bench.networks.language_cases import LANGUAGE_CASES
from bench.networks.steps import single_steps


def read(*benchmarks):
    """Return the rows of these, as a file of results holds them."""
    extras = [dict(each.extra_info) for each in benchmarks]
    return frames.timed(
        [
            {
                "datetime": "2026-01-01",
                "file": "a.json",
                "machine_info": {"gpu": None, "versions": {}},
                "names": {"cpu": "CPU: m"},
                "cases": {extra["case"]: extra["shape"] for extra in extras},
                "benchmarks": [each.entry() for each in benchmarks],
            }
        ]
    )


class Benchmark:
    """What the benchmark fixture does of a row: calls, an interval that is one, and no timer."""

    def __init__(self):
        self.extra_info = {}
        self.stats = SimpleNamespace(stats=SimpleNamespace(median=2.0, iqr=0.5))

    def pedantic(self, function, **_):
        return function()

    def entry(self):
        """Return what a result file holds."""
        stats = self.stats.stats
        return {"extra_info": self.extra_info, "stats": {"median": stats.median, "iqr": stats.iqr}}


def refuse(*args, **row):
    raise AssertionError(args)


def test_what_is_measured_is_what_the_report_reads(monkeypatch):
    monkeypatch.setitem(clock.STEP_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(machine, "matrix_rate", lambda *_: 1e12)
    case = next(c for c in LANGUAGE_CASES if c.name == "cpu_language_nystromformer_image_lean")
    here = Benchmark()
    bench_language.test_language(Row(case, "leaner"), here, Current(), refuse, 9.0)
    row = read(here).iloc[0]
    assert (row["tokens_per_s"], row["median"], row["iqr"]) == (4 * 128 / 2, 2.0, 0.5)
    assert (row["kind"], row["stage"], row["mode"]) == ("language", "training", "eager")
    assert row["ours"]
    assert row[["peak_memory_bytes", "printed_memory_gb"]].isna().all()
    assert row["params"] == case.build(torch.device("cpu")).num_params()
    assert 0 <= here.extra_info["budget_used"] <= 1
    # Every block keeps its input, its normalised input, q, k and v at the least.
    assert row["own"] > 4 * 5 * 64
    step = Benchmark()
    bench_language.test_language_one_step(next(single_steps([case])), step, refuse, 9.0)
    one_step = read(step).iloc[0]
    assert (one_step["batch"], one_step["params"], one_step["loss"]) == (
        4,
        row["params"],
        pytest.approx(row["loss"]),
    )
    loss_case = replace(CROSS_ENTROPY_CASES[-1], tokens=32, vocabulary=100)
    of_loss = Benchmark()
    bench_cross_entropy.test_cross_entropy(
        Row(loss_case, "leaner"),
        of_loss,
        Checked(peers_of, problem_of),
        refuse,
        9.0,
    )
    loss = read(of_loss).iloc[0]
    assert (loss["tokens_per_s"], loss["median"]) == (16, 2.0)
    assert loss["matrix_fraction"] == pytest.approx(3 * 2 * 32 * 64 * 100 / 2 / 1e12)


def test_time_that_is_spent_is_stated():
    recorded = []

    def unmeasured(status, reason, **row):
        recorded.append((status, reason, row))
        pytest.skip(reason)

    case = LANGUAGE_CASES[-1]
    calls = [
        (
            bench_language.test_language,
            Row(case, "leaner"),
            Current(),
        ),
        (bench_language.test_language_one_step, next(single_steps([case]))),
        (
            bench_cross_entropy.test_cross_entropy,
            Row(CROSS_ENTROPY_CASES[-1], "leaner"),
            Checked(peers_of, problem_of),
        ),
    ]
    for function, row, *state in calls:
        with pytest.raises(pytest.skip.Exception):
            function(row, Benchmark(), *state, unmeasured, 0.0)
    assert {status for status, _, _ in recorded} == {"not run"}
    assert [row["peer"] for _, _, row in recorded] == [
        "every peer left",
        "one_step",
        "every peer left",
    ]
