"""Attention of every kind, forward, backward and both, against every peer."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from bench.attention.cases import DIRECTIONS
from bench.attention.catalogue import ATTENTION_CASES, facts_of, peers_of
from bench.catalogue import ONE_OF_EACH
from bench.harness import clock, counters, machine
from bench.harness.checked import Row, each_row, one_call


def rows() -> Iterator[Any]:
    """Return the rows, one case after another, so that a drifting clock favours no peer."""
    for case in ATTENTION_CASES:
        for direction in DIRECTIONS:
            for mode in clock.MODES[case.device]:
                for name, peer in peers_of(case).items():
                    both = peer.ours and (direction, mode) == ("both", "eager")
                    marks = [pytest.mark.one_of_each] * (both and case.name in ONE_OF_EACH)
                    yield Row(case, name, direction, mode, peer.ours).param(*marks)


def measure(row: Row, benchmark: Any, function: Callable[..., Tensor], sets: list[Any]) -> None:
    """Time one row, and add its costs to the benchmark's ``extra_info``."""
    call = one_call(row.what, function)
    with peers_of(row.case)[row.name].context(), clock.capturing(row.mode):
        if row.what == "backward":
            sets = [(function(*inputs.leaves), inputs) for inputs in sets]
        run_round = clock.record(
            benchmark, row.clock, row.mode, call, sets, clock.SECONDS[row.case.device]
        )
        info = benchmark.extra_info
        if row.case.device == "cuda":
            info["clocks_mhz"] = machine.Gpu(0).clocks_mhz
        if row.mode == "eager":
            info["peak_memory_bytes"] = counters.peak_memory(partial(call, sets[0]))
        if row.mode == "graph" and row.what == "both":
            info |= counters.energy(run_round, row.clock.calls, machine.Gpu(0))


@each_row(rows())
def test_attention(row, benchmark, current, attempt):
    case = row.case
    with attempt(row) as info:
        function, budget_used, sets = current.peer(case, row.name)
        measure(row, benchmark, function, sets)
        layout, median = peers_of(case)[row.name].layout, clock.median(benchmark)
        info.update(facts_of(case, layout, row.what, row.mode, budget_used, median))
