"""Every row of the paper, original and lean, against timm's and transformers' models.

Vision models are timm's of the same sizes; of language models a training step is timed, in which
nothing is dropped out. On a GPU the forward and the loss run in bfloat16 autocast, over float32
weights, with AdamW fused; on a CPU everything is float32. Calls come from Python, as in a training
loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.harness import clock, counters, machine
from bench.harness.checked import Row, each_row
from bench.harness.steps import resident
from bench.networks.cases import PAPER_CASES
from bench.networks.gate import OURS, models_of, peers_of
from bench.networks.modes import replays_graphs, whose


def timed(row: Row, benchmark: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """Time a row from Python; return a GPU's clocks, and the energy of a call."""
    device = row.case.device
    mode, seconds = clock.FROM_PYTHON[device], clock.STEP_SECONDS[device]
    run_round = clock.record(benchmark, row.clock, mode, lambda _: call(), [None], seconds)
    if device != "cuda":
        return {}
    gpu = machine.Gpu(0)
    clocks = gpu.clocks_mhz
    return {"clocks_mhz": clocks} | counters.energy(run_round, row.clock.calls, gpu)


def measure(row: Row, benchmark: Any, models: Any) -> dict[str, Any]:
    """Time one row, and return its costs besides time."""
    flops = models.flops(row.name, row.what)  # first, because a model is reset for it
    if row.what == "training":
        training = models.training(row.name)
        weights, call = tuple(training.model.parameters()), training.step
        info = {
            "kept_bytes": counters.kept_for_backward(training.loss, weights),
            "loss": training.step().item(),
            "peak_memory_bytes": training.peak_bytes(),
        }
    else:
        model = models.model(row.name, row.what)
        weights, call = tuple(model.parameters()), partial(models.infer, model, row.what)
        there, peak = resident(model, models.images_of(row.what)), None
        if row.case.device == "cuda" and not replays_graphs(row.name, row.what):
            peak = there + counters.peak_memory(call)
        info = {"peak_memory_bytes": peak}
    info |= {"params": sum(weight.numel() for weight in weights), "flops": flops}
    return info | timed(row, benchmark, call)


@each_row(
    Row(case, name, stage, ours=whose(name) in OURS)
    for case in PAPER_CASES
    for stage in case.stages
    for name in peers_of(case, stage)
)
def test_model(row, benchmark, current, attempt):
    case = row.case
    with attempt(row) as info:
        models = current.use(case, models_of)
        info.update(
            kind=case.kind,
            stage=row.what,
            printed_memory_gb=case.entry.printed.get("memory_gb"),
            budget_used=models.check(row.name, row.what),
            **measure(row, benchmark, models),
        )
        info[f"{case.item}s_per_s"] = case.items(row.what) / clock.median(benchmark)
