"""Tables of measured language models, and their goals."""

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

# Crammed BERT: tokens per second of lean over original, and over the fastest of transformers.
BERT, GOAL_LEAN, GOAL_PEER = "crammed_bert", 1.4, 1.3
# GPT-2: lean over original memory as the paper prints it.
GPT = "gpt2_tinystories"
# Lean over original, as in ``paper_rows.ratios``.
COLUMNS = {
    "time": ("median", "leaner"),
    "compiled": ("median", "leaner_compiled"),
    "transformers": ("median", "transformers"),
    "memory": ("peak_memory_bytes", "leaner"),
    "one step": ("peak_memory_bytes", None),
}

LEGEND = """\
Each language row of the paper, original and lean, in whole training steps from Python: forward,
loss, backward and fused AdamW, in bfloat16 autocast over float32 weights on a GPU, in float32 on a
CPU, without dropout. Padding counts among the tokens: ListOps, Text and Retrieval have sequences
from a quarter of the longest up. *peak* is what PyTorch's allocator held at most, weights,
gradients and moments included; *kept* is what autograd keeps of a forward for each token, each
storage once, parameters not counted. *loss* is that of the first step, from random weights. Our
losses and gradients were held to a copy of the model on the CPU before anything was timed;
transformers' models have weights of their own, and were only seen to be finite. *× transformers*
says how many times as many tokens per second as the fastest of transformers' models called in the
same way (eager or compiled): below 1 is a loss.
"""
RATIOS = """\
Lean over original: the time of a training step, and its peak memory beside the ratio of the memory
that the paper prints. *one step* is our model alone.
"""
STEPS = """\
One step of every row at the batch of its recipe, from random weights and tokens.
"""


@dataclass(frozen=True)
class LanguageRow(MeasuredRow):
    """A model in training; kept bytes and joules are of a token."""

    row: str
    variant: str
    peer: str
    ours: bool
    differs: str | None
    params: int
    tokens_per_s: float
    median: float
    iqr: float
    loss: float
    peak_memory_bytes: int | None
    kept: float
    printed_memory_gb: float | None
    joules_per_token: float | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the model went through ``torch.compile``."""
        return self.peer.endswith("_compiled")

    @staticmethod
    def derived(values: dict[str, Any]) -> dict[str, Any]:
        """Return the bytes that are kept, for each token."""
        tokens = values["batch"] * values["sequence"] * (2 if values["pairs"] else 1)
        return {"kept": values["kept_bytes"] / tokens}


AnyRow = LanguageRow | OneStepRow


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a model and its batch."""
    kind = "pairs of sequences" if facts["pairs"] else "sequences"
    size = f"{facts['batch']} {kind} of {facts['sequence']:,}"
    model = f"depth {facts['depth']}, {facts['heads']} heads, vocabulary {facts['vocabulary']:,}"
    return f"{facts['row']}, {facts['variant']}: {size}, {model}, {facts['dtype']}"


def tables(rows: Sequence[AnyRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    yield from goal_table("Goals of the language models", goals(rows))
    models = of_kind(rows, LanguageRow)
    if models:
        yield from ("### Language models", "", LEGEND)
    yield from paper_rows.case_tables(models, cases, shape, _model_table)
    differences = {
        (row.peer.removesuffix("_compiled"), row.row): row.differs for row in models if row.differs
    }
    if differences:
        yield "How transformers' models differ from ours:"
        yield from ("", *_differences(differences), "")
    title = "Language models, lean over original"
    yield from paper_rows.ratio_table(title, RATIOS, rows, COLUMNS)
    yield from paper_rows.step_table("One step of every language row", STEPS, "batch", rows)


def _model_table(group: Sequence[LanguageRow]) -> Iterator[str]:
    head = ["", "tokens/s", "IQR", "× transformers", "peak, GB", "kept, kB", "J per million tokens"]
    cells = (
        (
            name(row),
            f"{row.tokens_per_s:,.0f}",
            f"{row.iqr / row.median:.1%}",
            ratio(row.tokens_per_s, (theirs := _transformers(row, group)) and theirs.tokens_per_s),
            gigabytes(row.peak_memory_bytes),
            in_unit(row.kept, 1e3, ",.1f"),
            in_unit(row.joules_per_token, 1e-6, ",.0f"),
            f"{row.params:,}",
            f"{row.loss:.3f}",
        )
        for row in sorted(group, key=lambda row: -row.tokens_per_s)
    )
    return table([*head, "parameters", "loss"], cells)


def _differences(differences: dict[tuple[str, str], str]) -> Iterator[str]:
    rows_of: dict[tuple[str, str], list[str]] = {}
    for (peer, row), differs in differences.items():
        rows_of.setdefault((peer, differs), []).append(row)
    for (peer, differs), rows in rows_of.items():
        yield f"- {peer} ({', '.join(rows)}): {differs}."


def _transformers(row: LanguageRow, group: Iterable[LanguageRow]) -> LanguageRow | None:
    """Return the fastest model that is not ours, called as ``row`` is."""
    theirs = [r for r in group if not r.ours and r.is_compiled == row.is_compiled]
    return max(theirs, key=lambda r: r.tokens_per_s, default=None)


def goals(rows: Sequence[AnyRow]) -> Iterator[Goal]:
    """Yield each goal that applies to these rows, what was measured, and whether it is met."""
    found = paper_rows.ratios(rows, COLUMNS)
    bert, gpt = found.get(BERT, {}), found.get(GPT, {})
    for how, column in (("eager", "time"), ("compiled", "compiled")):
        if times := bert.get(column):
            text = f"{BERT}: lean {GOAL_LEAN} × the tokens/s of the original, {how}"
            yield goal(text, f"{1 / times:.2f} ×", 1 / times >= GOAL_LEAN)
    models = of_kind(paper_rows.of_the_paper(rows), LanguageRow)
    lean = [row for row in models if (row.row, row.variant) == (BERT, "lean")]
    for how, compiled in (("eager", False), ("compiled", True)):
        ours = next((row for row in lean if row.ours and row.is_compiled == compiled), None)
        theirs = ours and _transformers(ours, lean)
        if ours and theirs:
            faster = ours.tokens_per_s / theirs.tokens_per_s
            text = f"{BERT} lean: {GOAL_PEER} × {theirs.peer}, {how}"
            yield goal(text, f"{faster:.2f} ×", faster >= GOAL_PEER)
    yield from paper_rows.memory_goal(
        GPT, gpt.get("memory") or gpt.get("one step"), gpt.get("paper")
    )


def short(rows: Sequence[AnyRow]) -> Iterator[str]:
    """Yield one line for each goal, and one for each row."""
    yield from goal_lines(goals(rows))
    yield from paper_rows.step_lines(rows)
    for row in of_kind(rows, LanguageRow):
        rate = f"{row.tokens_per_s:,.0f} tokens/s"
        yield f"{row.case} {row.peer}: {rate}, {gigabytes(row.peak_memory_bytes)} GB"
