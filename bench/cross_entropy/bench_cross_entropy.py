"""The loss of a large vocabulary, forward and backward, in every library's fused form."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bench.cross_entropy.cases import CROSS_ENTROPY_CASES, CrossEntropyCase
from bench.cross_entropy.peers import CROSS_ENTROPY_PEERS
from bench.harness import clock, counters, machine
from bench.harness.checked import first_line, need_gpu, one_call
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError, Peer
from bench.networks.bench_models import SECONDS


@dataclass(frozen=True)
class Row:
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
            row = Row(case, name, clock.clock_for(case.device))
            marks = pytest.mark.benchmark(timer=row.clock, group=case.name, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{case.name}-both-{name}")


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_cross_entropy(row, benchmark, checked, unmeasured, seconds_left):
    need_gpu(row.case.device)
    entry = {"case": row.case.name, "peer": row.name}
    if seconds_left <= 0:
        reason = "the time of --bench-seconds was spent"
        unmeasured("not run", reason, **entry | {"peer": "every peer left"})
    info: dict[str, Any] = {"peak_memory_bytes": None, "joules": None}
    try:
        function, budget_used, sets = checked.peer(row.case, row.name)
        call, on_gpu = one_call("both", function), row.case.device == "cuda"
        if on_gpu:
            info["peak_memory_bytes"] = counters.peak_memory(partial(call, sets[0]))
        mode = "eager" if on_gpu else "wall"
        seconds = SECONDS[row.case.device]
        run_round = clock.record(benchmark, row.clock, mode, call, sets, seconds)
        if on_gpu:
            info["joules"] = counters.joules_per_call(run_round, row.clock.calls, machine.Gpu(0))
    except AbsentError as absent:
        unmeasured("absent", str(absent), **entry)
    except WrongError as wrong:
        unmeasured("wrong", str(wrong), **entry)
    except REFUSALS as error:
        if row.peer.ours:
            raise
        unmeasured("absent", f"refuses: {first_line(error)}", **entry)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    median = benchmark.stats.stats.median
    rate = machine.matrix_rate(row.case.device, row.case.dtype)
    benchmark.extra_info.update(
        entry,
        kind="cross_entropy",
        ours=row.peer.ours,
        shape=row.case.facts(),
        tokens_per_s=row.case.tokens / median,
        matrix_fraction=row.case.flops("both") / median / rate,
        budget_used=budget_used,
        **info,
    )
