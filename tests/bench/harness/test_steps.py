"""The monitored training step: windows in pairs, rows counted."""

from types import SimpleNamespace

import pytest

from bench.harness import steps
from bench.harness.clock import Clock
from bench.harness.gate import WrongError
from bench.kappa.bench_kappa import training_of
from bench.networks.cases import StepCase

SIZES = {"image_size": 8, "patch_size": 4, "embed_dim": 64, "depth": 2, "heads": 1}
TINY = StepCase("cpu_tiny_step", "cpu", "vit_base", "original", 2, SIZES)


@pytest.fixture(scope="module")
def training():
    return training_of(TINY)


def recorder(ran):
    def pedantic(function, args, setup, rounds):
        for _ in range(rounds):
            setup()
            ran.append(len(function(*args)))

    return SimpleNamespace(pedantic=pedantic)


@pytest.mark.parametrize("every", [1, 20])
def test_each_window_with_the_monitor_follows_one_without(training, every):
    ran, clock = [], Clock()
    without = steps.compare(training, every, recorder(ran), clock, rounds=2, limit=60)
    assert clock.calls == max(every, 10)
    assert ran == [clock.calls // every * 2] * 2
    assert len(without) == 2
    assert all(0 < seconds < 1 for seconds in without)


@pytest.mark.parametrize(("limit", "pairs"), [(1e-9, 2), (float("inf"), 4)])
def test_a_slow_machine_measures_fewer_pairs_and_never_one(training, limit, pairs):
    ran = []
    without = steps.compare(training, 10, recorder(ran), Clock(), rounds=4, limit=limit)
    assert len(ran) == len(without) == pairs


def test_rows_that_are_missing_stop_the_measurement(training, monkeypatch):
    monkeypatch.setattr(steps.KappaMonitor, "flush", lambda monitor: [])
    monkeypatch.setattr(steps.KappaMonitor, "end", lambda monitor: [])
    with pytest.raises(WrongError, match="0 rows in 10 steps, expected 2"):
        steps.compare(training, 10, recorder([]), Clock(), rounds=2, limit=60)
