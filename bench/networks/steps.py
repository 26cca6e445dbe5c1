"""What benchmarks of vision and language rows share: one step at full size, steps timed."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.harness import clock, counters, machine
from bench.harness.gate import WrongError
from bench.harness.steps import Training
from bench.networks.language_cases import LanguageCase
from bench.networks.vision_cases import ModelCase


@dataclass(frozen=True)
class OneStep:
    """A single step of our model."""

    case: ModelCase | LanguageCase


def single_steps(cases: Iterable[ModelCase | LanguageCase]) -> Iterator[Any]:
    """Every row of the paper at its full size."""
    for case in cases:
        marks = pytest.mark.benchmark(group=f"{case.name} one_step")
        yield pytest.param(OneStep(case), marks=marks, id=f"{case.name}-one_step")


def one_step(case: Any, benchmark: Any, kind: str, training: Training) -> None:
    """Take a step of our model, and record its loss and memory.

    Raises:
        WrongError: the loss is not finite.
    """
    loss = benchmark.pedantic(training.step).item()
    if not math.isfinite(loss):
        raise WrongError(f"the loss is {loss}")
    benchmark.extra_info.update(
        case=case.name,
        peer="one_step",
        kind=kind,
        shape=case.facts(),
        params=training.model.num_params(),
        loss=loss,
        peak_memory_bytes=training.peak_bytes(),
        printed_memory_gb=case.entry.printed.get("memory_gb"),
    )


def timed(
    row: Any, benchmark: Any, call: Callable[[], Any], item: str, items: int
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
