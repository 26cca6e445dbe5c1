"""Every vision row of the paper, original and lean, against timm's model of the same sizes.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from bench.harness import clock, counters
from bench.harness.checked import attempt
from bench.harness.steps import classifying, resident
from bench.networks.steps import one_step, single_steps, timed
from bench.networks.vision_cases import MODEL_CASES, ModelCase
from bench.networks.vision_gate import MODEL_PEERS, STAGES, Networks


@dataclass(frozen=True)
class ModelBenchmark:
    """A model in one stage."""

    case: ModelCase
    stage: str
    name: str
    clock: clock.Clock

    @property
    def ours(self) -> bool:
        """Whether it is a model of this project."""
        return MODEL_PEERS[self.name][0] == "leaner"


def rows() -> Iterator[Any]:
    """Every model in every stage; ours and timm's follow each other."""
    for case in MODEL_CASES:
        for stage in STAGES:
            for name in MODEL_PEERS:
                row = ModelBenchmark(case, stage, name, clock.clock_for(case.device))
                group = f"{case.name} {stage}"
                marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
                yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


def measure(row: ModelBenchmark, benchmark: Any, networks: Networks) -> dict[str, Any]:
    """Time one row, and return what it cost beside time."""
    info: dict[str, Any] = {}
    if row.stage == "training":
        training = networks.training(row.name)
        call = training.step
        weights = tuple(training.model.parameters())
        kept = counters.kept_for_backward(lambda _: training.loss(), (networks.images,), weights)
        info["kept_bytes"] = sum(kept)
        call()
        info["peak_memory_bytes"] = training.peak_bytes()
    else:
        model = networks.model(row.stage, row.name)
        call = partial(networks.infer, model)
        on_gpu = row.case.device == "cuda"
        there = resident(model, networks.images)
        info["peak_memory_bytes"] = there + counters.peak_memory(call) if on_gpu else None
    return info | timed(row, benchmark, call, "image", row.case.batch)


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(single_steps(MODEL_CASES)))
def test_one_step(row, benchmark, unmeasured, seconds_left):
    """The loss of a step at the paper's batch is finite; its memory is recorded."""
    case = row.case
    with attempt(unmeasured, seconds_left, case, "one_step", ours=True, others="one_step"):
        device = torch.device(case.device)
        model = case.build(device).train()
        images, labels = case.draw(torch.Generator(device).manual_seed(0))
        one_step(case, benchmark, "one_step", classifying(model, images, labels))


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_model(row, benchmark, current, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, case, row.name, what=row.stage, ours=row.ours):
        networks = current.use(case, Networks)
        budget_used = networks.check(row.stage, row.name)
        info = measure(row, benchmark, networks)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        case=case.name,
        peer=row.name,
        kind="model",
        ours=row.ours,
        stage=row.stage,
        shape=case.facts(),
        params=sum(weight.numel() for weight in networks.models["leaner"].parameters()),
        images_per_s=case.batch / benchmark.stats.stats.median,
        printed_memory_gb=case.entry.printed["memory_gb"],
        budget_used=budget_used,
        **info,
    )
