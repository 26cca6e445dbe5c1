"""A training step of every language row, original and lean, against transformers' models.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop. Nothing is dropped
out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bench.harness import clock, counters
from bench.harness.checked import attempt
from bench.networks.language_cases import LANGUAGE_CASES, LanguageCase
from bench.networks.language_gate import LanguageModels, peers_of, training_on
from bench.networks.language_peers import differences
from bench.networks.steps import one_step, single_steps, timed


@dataclass(frozen=True)
class LanguageBenchmark:
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


def rows() -> Iterator[Any]:
    """Every model of every row; ours and transformers' follow each other."""
    for case in LANGUAGE_CASES:
        for name in peers_of(case):
            row = LanguageBenchmark(case, name, clock.clock_for(case.device))
            group = f"{case.name} training"
            marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
            yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


def measure(row: LanguageBenchmark, benchmark: Any, models: LanguageModels) -> dict[str, Any]:
    """Time one row, and return what it cost beside time."""
    training = models.training(row.name)
    weights = tuple(training.model.parameters())
    kept = counters.kept_for_backward(lambda *_: training.loss(), training.batch, weights)
    info: dict[str, Any] = {
        "kept_bytes": sum(kept),
        "loss": training.step().item(),
        "params": sum(weight.numel() for weight in weights),
        "peak_memory_bytes": training.peak_bytes(),
    }
    return info | timed(row, benchmark, training.step, "token", row.case.tokens)


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(single_steps(LANGUAGE_CASES)))
def test_language_one_step(row, benchmark, unmeasured, seconds_left):
    """The loss of a step at the recipe's batch is finite; its memory is recorded."""
    case = row.case
    with attempt(unmeasured, seconds_left, case, "one_step", ours=True, others="one_step"):
        device = torch.device(case.device)
        model, batch = case.build(device), case.draw(device)
        one_step(case, benchmark, "language_step", training_on(model, batch))


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_language(row, benchmark, current, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, case, row.name, ours=row.ours):
        models = current.use(case, LanguageModels)
        budget_used = models.check(row.name)
        info = measure(row, benchmark, models)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        case=case.name,
        peer=row.name,
        kind="language",
        ours=row.ours,
        differs=None if row.ours else differences(case.architecture, row.whose),
        shape=case.facts(),
        tokens_per_s=case.tokens / benchmark.stats.stats.median,
        printed_memory_gb=case.entry.printed.get("memory_gb"),
        budget_used=budget_used,
        **info,
    )
