"""A training step of every language row, original and lean, against transformers' models.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop. Nothing is dropped
out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bench.harness import clock, counters, machine
from bench.harness.checked import first_line, need_gpu
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError
from bench.harness.steps import mixed
from bench.networks.bench_models import SECONDS, resident
from bench.networks.language_cases import LANGUAGE_CASES, LanguageCase, answers, mean_loss
from bench.networks.language_gate import LanguageModels, LanguageTraining, peers_of
from bench.networks.language_peers import differences


@dataclass(frozen=True)
class Row:
    """A model on a batch."""

    case: LanguageCase
    name: str
    clock: clock.Clock

    @property
    def whose(self) -> str:
        """Whose model it is, compiled or not."""
        return peers_of(self.case)[self.name][0]

    @property
    def ours(self) -> bool:
        """Whether it is a model of this project."""
        return self.whose == "leaner"


@dataclass(frozen=True)
class OneStep:
    """A single step of our model."""

    case: LanguageCase


def rows() -> Iterator[Any]:
    """Every model of every row; ours and transformers' follow each other."""
    for case in LANGUAGE_CASES:
        for name in peers_of(case):
            row = Row(case, name, clock.clock_for(case.device))
            group = f"{case.name} training"
            marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


def single_steps() -> Iterator[Any]:
    """Every row of the paper at its full size."""
    for case in LANGUAGE_CASES:
        marks = pytest.mark.benchmark(group=f"{case.name} one_step")
        yield pytest.param(OneStep(case), marks=marks, id=f"{case.name}-one_step")


def peak_of_step(training: LanguageTraining) -> int:
    """Take a step after the first, which made AdamW's moments; return the most that it held."""
    states = training.optimizer.state.values()
    moments = (moment for state in states for moment in state.values())
    there = resident(training.model, *training.batch.tensors(), *moments)
    return there + counters.peak_memory(training.step)


def measure(row: Row, benchmark: Any, models: LanguageModels) -> dict[str, Any]:
    """Time one row, and return what it cost beside time."""
    on_gpu = row.case.device == "cuda"
    training = models.training(row.name)
    weights = tuple(training.model.parameters())
    given = tuple(training.batch.tensors())
    kept = counters.kept_for_backward(lambda *_: training.loss(), given, weights)
    info: dict[str, Any] = {
        "kept_bytes": sum(kept),
        "loss": training.step().item(),
        "params": sum(weight.numel() for weight in weights),
        "peak_memory_bytes": peak_of_step(training) if on_gpu else None,
    }
    mode = "eager" if on_gpu else "wall"
    run_round = clock.record(
        benchmark, row.clock, mode, lambda _: training.step(), [None], SECONDS[row.case.device]
    )
    if on_gpu:
        gpu = machine.Gpu(0)
        info["clocks_mhz"] = gpu.clocks_mhz
        joules = counters.joules_per_call(run_round, row.clock.calls, gpu)
        info["joules_per_token"] = None if joules is None else joules / row.case.tokens
    return info


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(single_steps()))
def test_language_one_step(row, benchmark, unmeasured, seconds_left):
    """The loss of a step at the recipe's batch is finite; its memory is recorded."""
    case = row.case
    need_gpu(case.device)
    entry = {"case": case.name, "peer": "one_step"}
    if seconds_left <= 0:
        unmeasured("not run", "the time of --bench-seconds was spent", **entry)
    device = torch.device(case.device)
    model, batch = case.build(device), case.draw(device)

    def loss_of_batch() -> torch.Tensor:
        with mixed(device):
            return mean_loss(answers(model, batch), batch)

    training = LanguageTraining(model, loss_of_batch, batch)
    loss = benchmark.pedantic(training.step).item()
    if not math.isfinite(loss):
        unmeasured("wrong", f"the loss is {loss}", **entry)
    benchmark.extra_info.update(
        entry,
        kind="language_step",
        shape=case.facts(),
        params=model.num_params(),
        loss=loss,
        peak_memory_bytes=peak_of_step(training) if case.device == "cuda" else None,
        printed_memory_gb=case.entry.printed.get("memory_gb"),
    )


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_language(row, benchmark, current, unmeasured, seconds_left):
    need_gpu(row.case.device)
    entry = {"case": row.case.name, "peer": row.name}
    if seconds_left <= 0:
        reason = "the time of --bench-seconds was spent"
        unmeasured("not run", reason, **entry | {"peer": "every peer left"})
    try:
        models = current.use(row.case, LanguageModels)
        budget_used = models.check(row.name)
        info = measure(row, benchmark, models)
    except AbsentError as absent:
        unmeasured("absent", str(absent), **entry)
    except WrongError as wrong:
        unmeasured("wrong", str(wrong), **entry)
    except REFUSALS as error:
        if row.ours:
            raise
        unmeasured("absent", f"refuses a step: {first_line(error)}", **entry)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        entry,
        kind="language",
        ours=row.ours,
        differs=None if row.ours else differences(row.case.architecture, row.whose),
        shape=row.case.facts(),
        tokens_per_s=row.case.tokens / benchmark.stats.stats.median,
        printed_memory_gb=row.case.entry.printed.get("memory_gb"),
        budget_used=budget_used,
        **info,
    )
