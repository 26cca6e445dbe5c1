"""What benchmarks of vision and language rows share: one step at full size, steps timed."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.harness import clock, counters, machine
from bench.harness.checked import Row
from bench.harness.gate import WrongError
from bench.harness.steps import Training
from bench.networks.cases import PaperCase


def single_steps(cases: Iterable[PaperCase]) -> Iterator[Row]:
    """Every row of the paper at its full size."""
    for case in cases:
        yield Row(case, "one_step", others="one_step")


def one_step(row: Row, benchmark: Any, kind: str, training: Training) -> None:
    """Take a step of our model, and record its loss and memory.

    Raises:
        WrongError: the loss is not finite.
    """
    loss = benchmark.pedantic(training.step).item()
    if not math.isfinite(loss):
        raise WrongError(f"the loss is {loss}")
    benchmark.extra_info.update(
        **row.facts(),
        kind=kind,
        params=training.model.num_params(),
        loss=loss,
        peak_memory_bytes=training.peak_bytes(),
        printed_memory_gb=row.case.entry.printed.get("memory_gb"),
    )


def trained(row: Row, benchmark: Any, training: Training, item: str, items: int) -> dict[str, Any]:
    """Time the steps of a row; return what it cost beside time, as ``timed``."""
    weights = tuple(training.model.parameters())
    kept = counters.kept_for_backward(lambda *_: training.loss(), training.batch, weights)
    info = {
        "kept_bytes": sum(kept),
        "loss": training.step().item(),
        "params": sum(weight.numel() for weight in weights),
        "peak_memory_bytes": training.peak_bytes(),
    }
    return info | timed(row, benchmark, training.step, item, items)


def timed(
    row: Row, benchmark: Any, call: Callable[[], Any], item: str, items: int
) -> dict[str, Any]:
    """Time a row from Python; return a GPU's clocks, and its joules for each of a call's items."""
    device = row.case.device
    mode, seconds = clock.FROM_PYTHON[device], clock.STEP_SECONDS[device]
    run_round = clock.record(benchmark, row.clock, mode, lambda _: call(), [None], seconds)
    if device != "cuda":
        return {}
    gpu = machine.Gpu(0)
    clocks = gpu.clocks_mhz
    joules = counters.joules_per_call(run_round, row.clock.calls, gpu)
    return {
        "clocks_mhz": clocks,
        f"joules_per_{item}": None if joules is None else joules / items,
    }
