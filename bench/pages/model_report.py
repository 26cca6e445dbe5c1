"""Tables of measured models: images per second, memory against the paper's, energy; their goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = "model", "one_step"
# At equal architecture, against timm's model compiled: times faster.
GOAL_COMPILED, COMPILED_ROW = 1.10, "vit_base"
GOAL_IMAGES = {"H200": 4000}  # per second in training, of the original of that row
# Of attention alone, forward and backward, against the fastest of timm and PyTorch.
GOAL_BLOCK, BLOCKS = 1.5, ("cross_covariance", "channel", "window", "outlook")

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
class ModelRow:
    """A model in a stage; kept bytes and joules are of an image."""

    machine: str
    case: str
    row: str
    variant: str
    same: tuple[str, ...]
    batch: int
    stage: str
    peer: str
    ours: bool
    images_per_s: float
    spread: float
    peak: int | None
    kept: float | None
    joules: float | None
    printed_gb: float


@dataclass(frozen=True)
class OneStepRow:
    """A single step of our model."""

    machine: str
    case: str
    row: str
    variant: str
    batch: int
    params: int
    loss: float
    peak: int | None
    printed_gb: float


Rows = Sequence[ModelRow | OneStepRow]


def read(entry: dict[str, Any], facts: dict[str, Any], machine: str) -> ModelRow | OneStepRow:
    """Return a row from an entry of a result file, and the facts of its case."""
    info, stats = entry["extra_info"], entry["stats"]
    common = {
        "machine": machine,
        "case": info["case"],
        "row": facts["row"],
        "variant": facts["variant"],
        "batch": facts["batch"],
        "peak": info["peak_memory_bytes"],
        "printed_gb": info["printed_memory_gb"],
    }
    if info["kind"] == "one_step":
        return OneStepRow(**common, params=info["params"], loss=info["loss"])
    kept = info.get("kept_bytes")
    return ModelRow(
        **common,
        same=tuple(facts["same"]),
        stage=info["stage"],
        peer=info["peer"],
        ours=info["ours"],
        images_per_s=info["images_per_s"],
        spread=stats["iqr"] / stats["median"],
        kept=None if kept is None else kept / facts["batch"],
        joules=info.get("joules_per_image"),
    )


def newest(rows: Iterable[ModelRow | OneStepRow]) -> list[ModelRow | OneStepRow]:
    """Return the last of the rows of each kind."""
    found: dict[tuple[str, ...], ModelRow | OneStepRow] = {}
    for row in rows:
        what = (row.stage, row.peer) if isinstance(row, ModelRow) else ()
        found[row.machine, row.case, *what] = row
    return list(found.values())


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a model and its batch."""
    depth = "+".join(map(str, facts["depth"])) if _many(facts["depth"]) else facts["depth"]
    heads = ",".join(map(str, facts["heads"])) if _many(facts["heads"]) else facts["heads"]
    names = " and ".join([facts["row"], *facts["same"]])
    size = f"{facts['batch']} images of {facts['image_size']}², {depth} layers, {heads} heads"
    return f"{names}, {facts['variant']}: {size}, {facts['dtype']}"


def _many(value: Any) -> bool:
    return isinstance(value, list)


def tables(rows: Rows, cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    models = [row for row in rows if isinstance(row, ModelRow)]
    steps = [row for row in rows if isinstance(row, OneStepRow)]
    found = list(goals(rows))
    if found:
        yield from ("### Goals of the models", "", "| goal | measured |  |", "|---|---:|---|")
        yield from (f"| {' | '.join(goal)} |" for goal in found)
        yield ""
    if models:
        yield from ("### Models", "", LEGEND)
    for case in dict.fromkeys(row.case for row in models):
        yield from (f"#### {case} ({shape(cases[case])})", "")
        yield from _model_table([row for row in models if row.case == case])
    ratios = list(_ratio_rows(rows))
    if ratios:
        yield from ("### Memory of lean over original", "", RATIOS)
        yield "| row | ours | timm | kept | one step | paper |"
        yield f"|---|{'---:|' * 5}"
        yield from (f"| {' | '.join(cells)} |" for cells in ratios)
        yield ""
    if steps:
        yield from ("### One step of every row", "", STEPS)
        yield "| row | images | parameters | loss | peak, GB |"
        yield f"|---|{'---:|' * 4}"
        for row in steps:
            cells = f"{row.batch} | {row.params:,} | {row.loss:.3f} | {_gigabytes(row.peak)}"
            yield f"| {row.row} {row.variant} | {cells} |"
        yield ""


def _model_table(group: Sequence[ModelRow]) -> Iterator[str]:
    head = "", "images/s", "IQR", "× timm", "peak, GB", "kept, MB", "mJ an image"
    yield f"| stage | {' | '.join(head)} |"
    yield f"|---|---|{'---:|' * (len(head) - 1)}"
    for row in group:
        cells = [
            row.stage,
            f"**{row.peer}**" if row.ours else row.peer,
            f"{row.images_per_s:,.0f}",
            f"{row.spread:.1%}",
            _times(row, _counterpart(row, group)),
            _gigabytes(row.peak),
            "–" if row.kept is None else f"{row.kept / 1e6:.1f}",
            "–" if row.joules is None else f"{row.joules * 1e3:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _counterpart(row: ModelRow, group: Iterable[ModelRow]) -> ModelRow | None:
    """Return timm's model, called as ``row`` is."""
    name = row.peer.replace("leaner", "timm")
    return next((r for r in group if (r.stage, r.peer) == (row.stage, name)), None)


def _times(row: ModelRow, than: ModelRow | None) -> str:
    return "–" if than is None else f"{row.images_per_s / than.images_per_s:.2f}"


def _gigabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e9:.2f}"


def _ratio(lean: float | None, original: float | None) -> float | None:
    return lean / original if lean and original else None


def ratios(rows: Rows) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield each row of the paper with lean over original: of each peak, of kept, of the paper."""
    steps: dict[str, dict[str, OneStepRow]] = {}
    models: dict[str, dict[tuple[str, str], ModelRow]] = {}
    printed: dict[str, dict[str, float]] = {}
    for row in rows:
        printed.setdefault(row.row, {})[row.variant] = row.printed_gb
        if isinstance(row, OneStepRow):
            steps.setdefault(row.row, {})[row.variant] = row
        elif row.stage == "training":
            models.setdefault(row.row, {})[row.peer, row.variant] = row
    for name, gigabytes in printed.items():
        if len(gigabytes) < 2:
            continue
        of_model, of_step = models.get(name, {}), steps.get(name, {})

        def pair(peer: str, what: str, found: Any = of_model) -> float | None:
            sides = (found.get((peer, variant)) for variant in ("lean", "original"))
            return _ratio(*(None if side is None else getattr(side, what) for side in sides))

        lean, original = (of_step.get(variant) for variant in ("lean", "original"))
        yield (
            name,
            {
                "ours": pair("leaner", "peak"),
                "timm": pair("timm", "peak"),
                "kept": pair("leaner", "kept"),
                "one step": lean and original and _ratio(lean.peak, original.peak),
                "paper": gigabytes["lean"] / gigabytes["original"],
            },
        )


def _ratio_rows(rows: Rows) -> Iterator[list[str]]:
    # The small models of a CPU are no rows of the paper.
    for name, found in ratios([row for row in rows if not row.case.startswith("cpu_")]):
        yield [name, *("–" if value is None else f"{value:.2f}" for value in found.values())]


def goals(rows: Rows) -> Iterator[tuple[str, str, str]]:
    """Yield each goal that applies to the machine of these rows, what was measured, and whether."""
    models = [row for row in rows if isinstance(row, ModelRow) and not row.case.startswith("cpu_")]
    training = [row for row in models if row.stage == "training"]
    for row in training:
        if row.row != COMPILED_ROW or row.peer != "leaner_compiled":
            continue
        same = (r for r in training if r.case == row.case)
        theirs = next((r for r in same if r.peer == "timm_compiled"), None)
        if theirs is not None:
            times = row.images_per_s / theirs.images_per_s
            goal = f"{row.row} {row.variant}: {GOAL_COMPILED:.2f} × compiled timm in training"
            yield goal, f"{times:.2f} ×", _verdict(times >= GOAL_COMPILED)
    originals = [r for r in training if (r.row, r.variant) == (COMPILED_ROW, "original") and r.ours]
    for gpu, least in GOAL_IMAGES.items():
        if originals and gpu in originals[0].machine:
            best = max(row.images_per_s for row in originals)
            goal = f"{COMPILED_ROW} original: {least:,} images/s in training"
            yield goal, f"{best:,.0f}", _verdict(best >= least)
    for name, found in ratios([row for row in rows if not row.case.startswith("cpu_")]):
        measured = found["ours"] or found["one step"]
        paper = found["paper"]
        if measured and paper:
            goal = f"{name}: lean over original memory at most the paper's {paper:.2f}"
            yield goal, f"{measured:.2f}", _verdict(measured <= paper)


def block_goal(case: str, times: float, peer: str) -> tuple[str, str, str]:
    """Return the goal of one attention, forward and backward, against its fastest peer."""
    goal = f"{case}: {GOAL_BLOCK} × the fastest peer, {peer}"
    return goal, f"{times:.2f} ×", _verdict(times >= GOAL_BLOCK)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def short(rows: Rows) -> Iterator[str]:
    """Yield one line for each goal, and one for each model, with what it did in training."""
    for goal, measured, met in goals(rows):
        yield f"goal: {goal}: {measured}, {met.strip('*')}"
    models = [row for row in rows if isinstance(row, ModelRow)]
    for row in models:
        if row.ours:
            times = _times(row, _counterpart(row, [r for r in models if r.case == row.case]))
            what = f"{row.images_per_s:,.0f} images/s, {_gigabytes(row.peak)} GB, × timm {times}"
            yield f"{row.case} {row.stage} {row.peer}: {what}"
    for row in rows:
        if isinstance(row, OneStepRow):
            yield f"{row.case} one step: loss {row.loss:.3f}, {_gigabytes(row.peak)} GB"
