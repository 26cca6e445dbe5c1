"""Condition numbers of batches against every library, and the time of the monitor."""

import statistics
from functools import partial
from typing import Any

import torch

from bench.harness import clock, counters, machine, steps
from bench.harness.checked import Row, each_row
from bench.harness.steps import Training, classifying
from bench.kappa.spectra import MATRIX_CASES, Matrices, MatrixCase, peers_of
from bench.networks.cases import STEP_CASES, StepCase

# A library that loops over a batch may take seconds for one call: then few calls must do.
SLOW, FEW_ROUNDS = 0.3, 2
# Pairs of windows of steps, and about how many seconds they may take.
STEP_ROUNDS, STEP_LIMIT = 5, {"cpu": 8.0, "cuda": float("inf")}


def training_of(case: StepCase) -> Training:
    """Return a case's model and a batch, from a fixed seed."""
    device = torch.device(case.device)
    model = case.build(device)
    if case.compiled:
        model.compile(dynamic=False)
    return classifying(model, *case.draw(torch.Generator(device).manual_seed(0)))


def matrices_of(case: MatrixCase) -> Matrices:
    """Return a batch, as often as it takes to outgrow the cache."""
    device = torch.device(case.device)
    return Matrices(case, device, clock.copies_beyond_cache(case.bytes, device))


def measure(row: Row, benchmark: Any, matrices: Matrices) -> dict[str, float]:
    """Check a peer, time it, and return its errors."""
    peer = peers_of(row.case)[row.name]
    function = peer.build(row.case, matrices.device)
    with peer.context():
        mild, hard = matrices.check(peer, function)
        start = row.clock()
        function(matrices.sets[0])
        slow = row.clock() - start > SLOW
        if slow:
            benchmark.pedantic(function, args=(matrices.sets[0],), rounds=FEW_ROUNDS)
        else:
            seconds = clock.SECONDS[row.case.device]
            # From Python: most libraries synchronise, which no graph can capture.
            mode = clock.FROM_PYTHON[row.case.device]
            clock.record(benchmark, row.clock, mode, function, matrices.sets, seconds)
        if row.case.device == "cuda" and not slow:
            call = partial(function, matrices.sets[0])
            benchmark.extra_info["peak_memory_bytes"] = counters.peak_memory(call)
            benchmark.extra_info["clocks_mhz"] = machine.Gpu(0).clocks_mhz
    return {"error_mild": mild, "error_hard": hard}


@each_row(
    Row(case, name, ours=peer.ours)
    for case in MATRIX_CASES
    for name, peer in peers_of(case).items()
)
def test_kappa(row, benchmark, current, attempt):
    case = row.case
    with attempt(row) as info:
        errors = measure(row, benchmark, current.use(case, matrices_of))
        rate = case.bytes / clock.median(benchmark)
        info.update(
            kind="kappa",
            mode=clock.FROM_PYTHON[case.device],
            bytes=case.bytes,
            copy_fraction=rate / machine.copy_bandwidth(case.device),
            **errors,
        )


@each_row(
    Row(case, f"every={every}", on_host=True, every=every)
    for case in STEP_CASES
    for every in steps.EVERY
)
def test_monitored_step(row, benchmark, current, attempt):
    case = row.case
    with attempt(row) as info:
        training = current.use(case, training_of)
        rounds, limit = STEP_ROUNDS, STEP_LIMIT[case.device]
        without = steps.compare(training, row.every, benchmark, row.clock, rounds, limit)
        if benchmark.stats is None:  # --benchmark-disable: only the rows were to be counted
            return
        pairs = zip(benchmark.stats.stats.data, without, strict=True)
        overheads = [of - alone for of, alone in pairs]
        low, median, high = statistics.quantiles(overheads, n=4, method="inclusive")
        alone = statistics.median(without)
        info.update(
            kind="step",
            every=row.every,
            seconds_without=alone,
            overhead=median / alone,
            overhead_iqr=(high - low) / alone,
        )
