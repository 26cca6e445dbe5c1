"""Every vision row of the paper, original and lean, against timm's model of the same sizes.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.harness import clock, counters, machine
from bench.harness.checked import first_line, need_gpu
from bench.harness.gate import WrongError
from bench.harness.peers import REFUSALS, AbsentError
from bench.harness.steps import Training
from bench.networks.vision_cases import MODEL_CASES, ModelCase
from bench.networks.vision_gate import MODEL_PEERS, STAGES, Networks

SECONDS = {"cpu": 0.25, "cuda": 1.0}


@dataclass(frozen=True)
class Row:
    """A model in one stage."""

    case: ModelCase
    stage: str
    name: str
    clock: clock.Clock

    @property
    def ours(self) -> bool:
        """Whether it is a model of this project."""
        return MODEL_PEERS[self.name][0] == "leaner"


@dataclass(frozen=True)
class OneStep:
    """A single step of our model."""

    case: ModelCase


def rows() -> Iterator[Any]:
    """Every model in every stage; ours and timm's follow each other."""
    for case in MODEL_CASES:
        for stage in STAGES:
            for name in MODEL_PEERS:
                row = Row(case, stage, name, clock.clock_for(case.device))
                group = f"{case.name} {stage}"
                marks = pytest.mark.benchmark(timer=row.clock, group=group, disable_gc=True)
                yield pytest.param(row, marks=marks, id=f"{group} {name}".replace(" ", "-"))


def single_steps() -> Iterator[Any]:
    """Every row of the paper at its full size."""
    for case in MODEL_CASES:
        marks = pytest.mark.benchmark(group=f"{case.name} one_step")
        yield pytest.param(OneStep(case), marks=marks, id=f"{case.name}-one_step")


def resident(model: nn.Module, images: Tensor, *others: Tensor) -> int:
    """Return the bytes of a model, its gradients, its images and other tensors."""
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    owned = (*model.parameters(), *model.buffers(), *gradients, images, *others)
    return sum(tensor.nbytes for tensor in owned)


def peak_of_step(training: Training) -> int:
    """Take a step after the first, which made AdamW's moments; return the most that it held."""
    states = training.optimizer.state.values()
    moments = (moment for state in states for moment in state.values())
    there = resident(training.model, training.images, training.labels, *moments)
    return there + counters.peak_memory(training.step)


def measure(row: Row, benchmark: Any, networks: Networks) -> dict[str, Any]:
    """Time one row, and return what it cost beside time."""
    info: dict[str, Any] = {}
    on_gpu = row.case.device == "cuda"
    if row.stage == "training":
        training = networks.training(row.name)
        call = training.step
        weights = tuple(training.model.parameters())
        kept = counters.kept_for_backward(lambda _: training.loss(), (networks.images,), weights)
        info["kept_bytes"] = sum(kept)
        call()
        info["peak_memory_bytes"] = peak_of_step(training) if on_gpu else None
    else:
        model = networks.model(row.stage, row.name)
        call = partial(networks.infer, model)
        there = resident(model, networks.images)
        info["peak_memory_bytes"] = there + counters.peak_memory(call) if on_gpu else None
    mode = "eager" if on_gpu else "wall"
    run_round = clock.record(
        benchmark, row.clock, mode, lambda _: call(), [None], SECONDS[row.case.device]
    )
    if on_gpu:
        gpu = machine.Gpu(0)
        info["clocks_mhz"] = gpu.clocks_mhz
        joules = counters.joules_per_call(run_round, row.clock.calls, gpu)
        info["joules_per_image"] = None if joules is None else joules / row.case.batch
    return info


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(single_steps()))
def test_one_step(row, benchmark, unmeasured, seconds_left):
    """The loss of a step at the paper's batch is finite; its memory is recorded."""
    case = row.case
    need_gpu(case.device)
    entry = {"case": case.name, "peer": "one_step"}
    if seconds_left <= 0:
        unmeasured("not run", "the time of --bench-seconds was spent", **entry)
    device = torch.device(case.device)
    model = case.build(device).train()
    training = Training(model, *case.draw(torch.Generator(device).manual_seed(0)))
    loss = benchmark.pedantic(training.step).item()
    if not math.isfinite(loss):
        unmeasured("wrong", f"the loss is {loss}", **entry)
    benchmark.extra_info.update(
        entry,
        kind="one_step",
        shape=case.facts(),
        params=model.num_params(),
        loss=loss,
        peak_memory_bytes=peak_of_step(training) if case.device == "cuda" else None,
        printed_memory_gb=case.entry.printed["memory_gb"],
    )


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # after a failed gate
@pytest.mark.parametrize("row", list(rows()))
def test_model(row, benchmark, current, unmeasured, seconds_left):
    need_gpu(row.case.device)
    entry = {"case": row.case.name, "peer": row.name}
    if seconds_left <= 0:
        reason = f"{row.stage}: the time of --bench-seconds was spent"
        unmeasured("not run", reason, **entry | {"peer": "every peer left"})
    try:
        networks = current.use(row.case, Networks)
        budget_used = networks.check(row.stage, row.name)
        info = measure(row, benchmark, networks)
    except AbsentError as absent:
        unmeasured("absent", str(absent), **entry)
    except WrongError as wrong:
        unmeasured("wrong", f"{row.stage}: {wrong}", **entry)
    except REFUSALS as error:
        if row.ours:
            raise
        unmeasured("absent", f"refuses {row.stage}: {first_line(error)}", **entry)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        entry,
        kind="model",
        ours=row.ours,
        stage=row.stage,
        shape=row.case.facts(),
        params=sum(weight.numel() for weight in networks.models["leaner"].parameters()),
        images_per_s=row.case.batch / benchmark.stats.stats.median,
        printed_memory_gb=row.case.entry.printed["memory_gb"],
        budget_used=budget_used,
        **info,
    )
