"""Models of transformers and timm, before and after the one line of an adapter.

In bfloat16 on a GPU, in float32 on a CPU, in evaluation mode: nothing is random. Calls come from
Python, as a user's do.
"""

from collections.abc import Iterator
from typing import Any

from bench.adapters.cases import ADAPTER_CASES, DIRECTIONS, KIND, LIBRARY, AdapterModels, peers
from bench.harness import clock, counters, machine
from bench.harness.checked import Row, attempt, each_row

SECONDS = {"cpu": 0.5, "cuda": 0.5}


def rows() -> Iterator[Any]:
    """Every model in every direction; what is compared follows each other."""
    for case in ADAPTER_CASES:
        for direction in DIRECTIONS:
            for name in peers(direction):
                yield Row(case, name, direction, clock.FROM_PYTHON[case.device]).param()


@each_row(rows())
def test_adapter(row, benchmark, current, unmeasured, seconds_left):
    case, on_gpu = row.case, row.case.device == "cuda"
    with attempt(unmeasured, seconds_left, row):
        models = current.use(case, AdapterModels)
        budget_used = models.check(row.name)
        call = models.call(row.what, row.name)
        peak = counters.peak_memory(call) if on_gpu else None
        seconds = SECONDS[case.device]
        clock.record(benchmark, row.clock, row.mode, lambda _: call(), [None], seconds)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        **row.facts() | {"ours": row.name != LIBRARY},
        kind=KIND,
        direction=row.what,
        budget_used=budget_used,
        peak_memory_bytes=peak,
        clocks_mhz=machine.Gpu(0).clocks_mhz if on_gpu else None,
    )
