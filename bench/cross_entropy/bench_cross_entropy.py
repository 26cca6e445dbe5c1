"""The loss of a large vocabulary, forward and backward, in every library's fused form."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.cross_entropy.cases import CROSS_ENTROPY_CASES, CrossEntropyCase
from bench.cross_entropy.peers import CROSS_ENTROPY_PEERS
from bench.harness import clock, counters, machine
from bench.harness.checked import attempt, one_call
from bench.harness.peers import Peer


@dataclass(frozen=True)
class CrossEntropyBenchmark:
    """A peer on a case."""

    case: CrossEntropyCase
    name: str
    clock: clock.Clock

    @property
    def peer(self) -> Peer:
        """How the peer is built and called."""
        return CROSS_ENTROPY_PEERS[self.name]


def rows() -> Iterator[Any]:
    """Every peer on every case."""
    for case in CROSS_ENTROPY_CASES:
        for name in CROSS_ENTROPY_PEERS:
            row = CrossEntropyBenchmark(case, name, clock.clock_for(case.device))
            marks = pytest.mark.benchmark(timer=row.clock, group=case.name, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{case.name}-both-{name}")


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_cross_entropy(row, benchmark, checked, unmeasured, seconds_left):
    case = row.case
    info: dict[str, Any] = {"peak_memory_bytes": None, "joules": None}
    with attempt(unmeasured, seconds_left, case, row.name, ours=row.peer.ours):
        function, budget_used, sets = checked.peer(case, row.name)
        call, on_gpu = one_call("both", function), case.device == "cuda"
        if on_gpu:
            info["peak_memory_bytes"] = counters.peak_memory(partial(call, sets[0]))
        seconds, mode = clock.STEP_SECONDS[case.device], clock.FROM_PYTHON[case.device]
        run_round = clock.record(benchmark, row.clock, mode, call, sets, seconds)
        if on_gpu:
            info["joules"] = counters.joules_per_call(run_round, row.clock.calls, machine.Gpu(0))
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    median = benchmark.stats.stats.median
    rate = machine.matrix_rate(case.device, case.dtype)
    benchmark.extra_info.update(
        case=case.name,
        peer=row.name,
        kind="cross_entropy",
        ours=row.peer.ours,
        shape=case.facts(),
        tokens_per_s=case.tokens / median,
        matrix_fraction=case.flops("both") / median / rate,
        budget_used=budget_used,
        **info,
    )
