"""Models of transformers and timm, before and after the one line of an adapter.

In bfloat16 on a GPU, in float32 on a CPU, in evaluation mode: nothing is random. Calls come from
Python, as a user's do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.adapters.cases import (
    ADAPTER_CASES,
    DIRECTIONS,
    KIND,
    LIBRARY,
    AdapterCase,
    AdapterModels,
    peers,
)
from bench.harness import clock, counters, machine
from bench.harness.checked import attempt

SECONDS = {"cpu": 0.5, "cuda": 0.5}


@dataclass(frozen=True)
class AdapterBenchmark:
    """A model with one attention, in one direction."""

    case: AdapterCase
    direction: str
    name: str
    clock: clock.Clock


def rows() -> Iterator[Any]:
    """Every model in every direction; what is compared follows each other."""
    for case in ADAPTER_CASES:
        mode = "eager" if case.device == "cuda" else "wall"
        for direction in DIRECTIONS:
            group = f"{case.name} {direction} {mode}"
            for name in peers(direction):
                row = AdapterBenchmark(case, direction, name, clock.clock_for(case.device))
                marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
                yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_adapter(row, benchmark, current, unmeasured, seconds_left):
    case, on_gpu = row.case, row.case.device == "cuda"
    with attempt(unmeasured, seconds_left, case, row.name, what=row.direction, ours=True):
        models = current.use(case, AdapterModels)
        budget_used = models.check(row.name)
        call = models.call(row.direction, row.name)
        peak = counters.peak_memory(call) if on_gpu else None
        mode, seconds = clock.FROM_PYTHON[case.device], SECONDS[case.device]
        clock.record(benchmark, row.clock, mode, lambda _: call(), [None], seconds)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        case=case.name,
        peer=row.name,
        kind=KIND,
        ours=row.name != LIBRARY,
        direction=row.direction,
        shape=case.facts(),
        budget_used=budget_used,
        peak_memory_bytes=peak,
        clocks_mhz=machine.Gpu(0).clocks_mhz if on_gpu else None,
    )
