"""Clocks, rounds and rotation, with time and events that the test controls."""

import gc
import time
import weakref

import pytest

from bench.harness import clock


class Time:
    """Host time that passes only when something is called."""

    now = 0.0

    def call(self, given=None):
        self.now += 1e-3


@pytest.fixture
def host(monkeypatch):
    host = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: host.now)
    return host


def test_a_round_takes_the_sets_in_turn_and_keeps_one_result_of_each():
    class Result:
        pass

    seen, alive = [], weakref.WeakSet()

    def call(given):
        seen.append(given)
        alive.add(result := Result())
        return result

    run = clock.eager_round(call, ["a", "b", "c"], calls=7)
    run()
    gc.collect()
    assert "".join(seen) == "abcabca"
    assert len(alive) == 3


class Benchmark:
    """pytest-benchmark's fixture, as far as `record` uses it."""

    def pedantic(self, target, rounds, warmup_rounds):
        self.target, self.rounds, self.warmup_rounds = target, rounds, warmup_rounds


@pytest.mark.parametrize(
    ("sets", "budget", "calls", "rounds"),
    [(1, 0.101, 5, 20), (3, 0.1, 6, 16), (40, 0.1, 40, 10), (1, 10, 5, 50)],
)
def test_a_round_is_long_and_a_whole_number_of_rotations(host, sets, budget, calls, rounds):
    wall, benchmark = clock.Clock(), Benchmark()
    run = clock.record(benchmark, wall, "wall", host.call, list(range(sets)), budget)
    assert (wall.calls, benchmark.rounds) == (calls, rounds)
    assert run is benchmark.target
    before = host.now
    run()
    assert host.now - before == pytest.approx(calls * 1e-3)
