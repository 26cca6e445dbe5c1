"""Condition numbers of batches against every library, and what the monitor adds to a step."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from bench.harness import clock, counters, machine, steps
from bench.harness.checked import Current, attempt
from bench.kappa.spectra import (
    MATRIX_CASES,
    MATRIX_PEERS,
    Matrices,
    MatrixCase,
    MatrixPeer,
    peers_of,
)

SECONDS = {"cpu": 0.25, "cuda": 0.15}
# A library that loops over a batch may take seconds for one call: then few calls must do.
SLOW, FEW_ROUNDS = 0.3, 2
# Pairs of windows of steps.
STEP_ROUNDS = 5


@dataclass(frozen=True)
class KappaBenchmark:
    """A peer on a batch of matrices."""

    case: MatrixCase
    name: str
    clock: clock.Clock

    @property
    def peer(self) -> MatrixPeer:
        """How the peer is built and called."""
        return MATRIX_PEERS[self.name]

    @property
    def mode(self) -> str:
        """Calls from Python: most libraries synchronise, which no graph can capture."""
        return "eager" if self.case.device == "cuda" else "wall"


@dataclass(frozen=True)
class MonitorBenchmark:
    """The monitor at one interval, on a model."""

    case: steps.StepCase
    every: int
    clock: clock.WallClock


def rows() -> Iterator[Any]:
    """Every peer of every case."""
    for case in MATRIX_CASES:
        for name in peers_of(case):
            row = KappaBenchmark(case, name, clock.clock_for(case.device))
            marks = pytest.mark.benchmark(timer=row.clock, group=case.name, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{case.name}-{name}")


def step_rows() -> Iterator[Any]:
    """Every interval on every model."""
    for case in steps.STEP_CASES:
        for every in steps.EVERY:
            row = MonitorBenchmark(case, every, clock.WallClock())
            marks = pytest.mark.benchmark(timer=row.clock, group=case.name, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{case.name}-every-{every}")


def matrices_of(case: MatrixCase) -> Matrices:
    """Return a batch, as often as it takes to outgrow the cache."""
    device = torch.device(case.device)
    return Matrices(case, device, clock.copies_beyond_cache(case.bytes, device))


@pytest.fixture(scope="session")
def to_profile() -> Iterator[list[tuple[KappaBenchmark, dict[str, Any]]]]:
    """Rows whose kernels are named when everything is timed, as ``Checked.name_kernels`` does."""
    measured: list[tuple[KappaBenchmark, dict[str, Any]]] = []
    yield measured
    current = Current()
    for row, info in measured:
        matrices = current.use(row.case, matrices_of)
        function = row.peer.build(matrices.device)
        with row.peer.context():
            call = partial(function, matrices.sets[0])
            info["kernels"] = counters.kernel_names(call, row.case.device)


def measure(row: KappaBenchmark, benchmark: Any, matrices: Matrices) -> dict[str, float]:
    """Check a peer, time it, and return its errors."""
    function = row.peer.build(matrices.device)
    with row.peer.context():
        mild, hard = matrices.check(row.peer, function)
        start = row.clock()
        function(matrices.sets[0])
        slow = row.clock() - start > SLOW
        if slow:
            benchmark.pedantic(function, args=(matrices.sets[0],), rounds=FEW_ROUNDS)
        else:
            seconds = SECONDS[row.case.device]
            clock.record(benchmark, row.clock, row.mode, function, matrices.sets, seconds)
        if row.case.device == "cuda" and not slow:
            call = partial(function, matrices.sets[0])
            benchmark.extra_info["peak_memory_bytes"] = counters.peak_memory(call)
            benchmark.extra_info["clocks_mhz"] = machine.Gpu(0).clocks_mhz
    return {"error_mild": mild, "error_hard": hard}


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_kappa(row, benchmark, current, to_profile, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, case, row.name, ours=row.peer.ours):
        errors = measure(row, benchmark, current.use(case, matrices_of))
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    median = benchmark.stats.stats.median
    benchmark.extra_info.update(
        case=case.name,
        kind="kappa",
        peer=row.name,
        ours=row.peer.ours,
        mode=row.mode,
        shape=case.facts(),
        bytes=case.bytes,
        copy_fraction=case.bytes / median / machine.copy_bandwidth(case.device),
        **errors,
    )
    if case.device == "cuda" and median < SLOW:
        to_profile.append((row, benchmark.extra_info))


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(step_rows()))
def test_monitored_step(row, benchmark, current, unmeasured, seconds_left):
    case, peer = row.case, f"every={row.every}"
    with attempt(unmeasured, seconds_left, case, peer, ours=True, others=peer):
        training = current.use(case, steps.training_of)
        without = steps.compare(training, row.every, benchmark, row.clock, STEP_ROUNDS)
    if benchmark.stats is None:
        return
    pairs = zip(benchmark.stats.stats.data, without, strict=True)
    overheads = [of - alone for of, alone in pairs]
    low, median, high = statistics.quantiles(overheads, n=4, method="inclusive")
    alone = statistics.median(without)
    benchmark.extra_info.update(
        case=case.name,
        peer=peer,
        kind="step",
        ours=True,
        every=row.every,
        shape=case.facts(),
        seconds_without=alone,
        overhead=median / alone,
        overhead_iqr=(high - low) / alone,
    )
