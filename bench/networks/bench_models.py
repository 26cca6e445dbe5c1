"""Every vision row of the paper, original and lean, against timm's model of the same sizes.

On a GPU the forward and the loss run in bfloat16 autocast, over float32 weights, with AdamW fused;
on a CPU everything is float32. Calls come from Python, as in a training loop.
"""

from functools import partial
from typing import Any

from bench.harness import counters
from bench.harness.checked import Row, attempt, each_row
from bench.harness.steps import resident
from bench.networks.models import timed, trained
from bench.networks.vision_cases import MODEL_CASES
from bench.networks.vision_gate import MODEL_PEERS, OURS, STAGES, Networks


def measure(row: Row, benchmark: Any, networks: Networks) -> dict[str, Any]:
    """Time one row, and return what it cost beside time."""
    if row.what == "training":
        return trained(row, benchmark, networks.training(row.name), "image", row.case.batch)
    model, images = networks.model(row.what, row.name), networks.images_of(row.what)
    call = partial(networks.infer, model, row.what)
    there = resident(model, images)
    peak = there + counters.peak_memory(call) if row.case.device == "cuda" else None
    info = {"peak_memory_bytes": peak, "params": sum(p.numel() for p in model.parameters())}
    return info | timed(row, benchmark, call, "image", len(images))


@each_row(
    Row(case, name, stage, ours=whose in OURS)
    for case in MODEL_CASES
    for stage in STAGES
    for name, (whose, _) in MODEL_PEERS.items()
)
def test_model(row, benchmark, current, unmeasured, seconds_left):
    case = row.case
    with attempt(unmeasured, seconds_left, row):
        networks = current.use(case, Networks)
        budget_used = networks.check(row.what, row.name)
        info = measure(row, benchmark, networks)
    if benchmark.stats is None:  # --benchmark-disable: only the gate was wanted
        return
    benchmark.extra_info.update(
        **row.facts(),
        kind="model",
        stage=row.what,
        images_per_s=len(networks.images_of(row.what)) / benchmark.stats.stats.median,
        printed_memory_gb=case.entry.printed["memory_gb"],
        budget_used=budget_used,
        **info,
    )
