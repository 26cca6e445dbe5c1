"""Tables of measured models: images per second, memory against the paper's, energy; their goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pages import paper_rows
from bench.pages.markdown import (
    Goal,
    gigabytes,
    goal,
    goal_lines,
    goal_table,
    in_unit,
    name,
    ratio,
    table,
)
from bench.pages.paper_rows import OneStepRow
from bench.pages.rows import MeasuredRow, of_kind

# At equal architecture, against timm's model compiled: times faster.
GOAL_COMPILED, COMPILED_ROW = 1.10, "vit_base"
GOAL_IMAGES = {"H200": 4000}  # per second in training, of the original of that row
# Lean over original, as in ``paper_rows.ratios``.
COLUMNS = {
    "ours": ("peak_memory_bytes", "leaner"),
    "timm": ("peak_memory_bytes", "timm"),
    "kept": ("kept", "leaner"),
    "one step": ("peak_memory_bytes", None),
}

LEGEND = """\
Each row of the paper, original and lean, with the same weights in our model and in timm's of the
same sizes; both gave the same logits before anything was timed. *training* is a whole step from
Python: forward, cross-entropy, backward and fused AdamW, in bfloat16 autocast over float32 weights
on a GPU, in float32 on a CPU. *peak* is what PyTorch's allocator held at most, weights, gradients
and moments included; *kept* is what autograd keeps of a forward, for each image, each storage once,
parameters not counted but their bfloat16 copies. *× timm* says how many times as many images per
second as timm's model, called in the same way (eager or compiled): below 1 is a loss.
"""
RATIOS = """\
Peak memory of a training step of the lean model over that of the original, at the paper's batch on
each of 8 GPUs, beside the ratio of the memory that the paper prints. *one step* is our model alone,
*kept* the ratio of what autograd keeps.
"""
STEPS = """\
One step of every row at the paper's batch on each of 8 GPUs, from random weights and images.
"""


@dataclass(frozen=True)
class ModelRow(MeasuredRow):
    """A model in a stage; kept bytes and joules are of an image."""

    row: str
    variant: str
    stage: str
    peer: str
    ours: bool
    images_per_s: float
    median: float
    iqr: float
    peak_memory_bytes: int | None
    printed_memory_gb: float
    kept: float | None
    joules_per_image: float | None = None

    @staticmethod
    def derived(values: dict[str, Any]) -> dict[str, Any]:
        """Return the bytes that are kept, for each image."""
        kept = values.get("kept_bytes")
        return {"kept": None if kept is None else kept / values["batch"]}


AnyRow = ModelRow | OneStepRow


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a model and its batch."""
    depth = "+".join(map(str, facts["depth"])) if _many(facts["depth"]) else facts["depth"]
    heads = ",".join(map(str, facts["heads"])) if _many(facts["heads"]) else facts["heads"]
    names = " and ".join([facts["row"], *facts["same"]])
    size = f"{facts['batch']} images of {facts['image_size']}², {depth} layers, {heads} heads"
    return f"{names}, {facts['variant']}: {size}, {facts['dtype']}"


def _many(value: Any) -> bool:
    return isinstance(value, list)


def tables(rows: Sequence[AnyRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    yield from goal_table("Goals of the models", goals(rows))
    models = of_kind(rows, ModelRow)
    if models:
        yield from ("### Models", "", LEGEND)
    yield from paper_rows.case_tables(models, cases, shape, _model_table)
    yield from paper_rows.ratio_table("Memory of lean over original", RATIOS, rows, COLUMNS)
    yield from paper_rows.step_table("One step of every row", STEPS, "images", rows)


def _model_table(group: Sequence[ModelRow]) -> Iterator[str]:
    head = "", "images/s", "IQR", "× timm", "peak, GB", "kept, MB", "mJ an image"
    cells = (
        (
            row.stage,
            name(row),
            f"{row.images_per_s:,.0f}",
            f"{row.iqr / row.median:.1%}",
            _times_timm(row, group),
            gigabytes(row.peak_memory_bytes),
            in_unit(row.kept, 1e6, ".1f"),
            in_unit(row.joules_per_image, 1e-3, ",.0f"),
        )
        for row in group
    )
    return table(("stage", *head), cells, left=2)


def _timm(row: ModelRow, group: Iterable[ModelRow]) -> ModelRow | None:
    """Return timm's model of the same case, called as ``row`` is."""
    theirs = row.case, row.stage, row.peer.replace("leaner", "timm")
    return next((r for r in group if (r.case, r.stage, r.peer) == theirs), None)


def _times_timm(row: ModelRow, group: Iterable[ModelRow]) -> str:
    theirs = _timm(row, group)
    return ratio(row.images_per_s, theirs and theirs.images_per_s)


def goals(rows: Sequence[AnyRow]) -> Iterator[Goal]:
    """Yield each goal that applies to the machine of these rows, what was measured, and whether."""
    models = of_kind(paper_rows.of_the_paper(rows), ModelRow)
    training = [row for row in models if row.stage == "training"]
    of_row = [row for row in training if row.row == COMPILED_ROW]
    for row in of_row:
        theirs = _timm(row, of_row)
        if row.peer == "leaner_compiled" and theirs is not None:
            times = row.images_per_s / theirs.images_per_s
            text = f"{row.row} {row.variant}: {GOAL_COMPILED:.2f} × compiled timm in training"
            yield goal(text, f"{times:.2f} ×", times >= GOAL_COMPILED)
    originals = [row for row in of_row if row.variant == "original" and row.ours]
    for gpu, least in GOAL_IMAGES.items():
        if originals and gpu in originals[0].machine:
            best = max(row.images_per_s for row in originals)
            text = f"{COMPILED_ROW} original: {least:,} images/s in training"
            yield goal(text, f"{best:,.0f}", best >= least)
    for row, found in paper_rows.ratios(rows, COLUMNS).items():
        yield from paper_rows.memory_goal(row, found["ours"] or found["one step"], found["paper"])


def short(rows: Sequence[AnyRow]) -> Iterator[str]:
    """Yield one line for each goal, and one for each model, with what it did in training."""
    yield from goal_lines(goals(rows))
    models = of_kind(rows, ModelRow)
    for row in models:
        if row.ours:
            rate, peak = (
                f"{row.images_per_s:,.0f} images/s",
                gigabytes(row.peak_memory_bytes),
            )
            times = _times_timm(row, models)
            yield f"{row.case} {row.stage} {row.peer}: {rate}, {peak} GB, × timm {times}"
    yield from paper_rows.step_lines(rows)
