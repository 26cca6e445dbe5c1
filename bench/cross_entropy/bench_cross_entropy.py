"""The loss of a large vocabulary, forward and backward, in every library's fused form."""

from functools import partial
from typing import Any

from bench.cross_entropy.cases import CROSS_ENTROPY_CASES
from bench.cross_entropy.peers import CROSS_ENTROPY_PEERS
from bench.harness import clock, counters, machine
from bench.harness.checked import Row, attempt, each_row, one_call


@each_row(
    Row(case, name, "both", ours=peer.ours)
    for case in CROSS_ENTROPY_CASES
    for name, peer in CROSS_ENTROPY_PEERS.items()
)
def test_cross_entropy(row, benchmark, checked, unmeasured, seconds_left):
    case = row.case
    info: dict[str, Any] = {"peak_memory_bytes": None, "joules": None}
    with attempt(unmeasured, seconds_left, row):
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
        kind="cross_entropy",
        tokens_per_s=case.tokens / median,
        matrix_fraction=case.flops("both") / median / rate,
        budget_used=budget_used,
        **row.facts(),
        **info,
    )
