"""Tables of measured language models and of the loss of a large vocabulary; their goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = "language", "language_step", "cross_entropy"
# Crammed BERT: tokens per second of lean over original, and over the fastest of transformers.
BERT, GOAL_LEAN, GOAL_PEER = "crammed_bert", 1.4, 1.3
# GPT-2: lean over original memory as the paper prints it.
GPT = "gpt2_tinystories"

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
LOSSES = """\
A classifier's product and the mean cross-entropy of its logits, forward and backward, from Python.
*matrix* counts the three products that there must be, as a part of what a large matrix product
reaches. *peak* is what a call held beside tokens, weight and bias. *× logits* compares with logits
held whole and a softmax in float32, as autocast has it. Every row passed the correctness gate.
"""


@dataclass(frozen=True)
class LanguageRow:
    """A model in training; kept bytes and joules are of a token."""

    machine: str
    case: str
    row: str
    variant: str
    peer: str
    ours: bool
    differs: str | None
    params: int
    tokens_per_s: float
    median: float
    spread: float
    loss: float
    peak: int | None
    kept: float
    joules: float | None
    printed_gb: float | None


@dataclass(frozen=True)
class LanguageStep:
    """A single step of our model."""

    machine: str
    case: str
    row: str
    variant: str
    batch: int
    params: int
    loss: float
    peak: int | None
    printed_gb: float | None


@dataclass(frozen=True)
class LossRow:
    """A way to compute the loss; joules are of a call."""

    machine: str
    case: str
    peer: str
    ours: bool
    tokens_per_s: float
    median: float
    spread: float
    matrix: float
    peak: int | None
    joules: float | None


AnyRow = LanguageRow | LanguageStep | LossRow
Rows = Sequence[AnyRow]


def read(entry: dict[str, Any], facts: dict[str, Any], machine: str) -> AnyRow:
    """Return a row from an entry of a result file, and the facts of its case."""
    info, stats = entry["extra_info"], entry["stats"]
    common = {"machine": machine, "case": info["case"], "peak": info["peak_memory_bytes"]}
    if info["kind"] != "cross_entropy":
        common |= {key: facts[key] for key in ("row", "variant")}
        common |= {key: info[key] for key in ("params", "loss")}
        common |= {"printed_gb": info["printed_memory_gb"]}
    if info["kind"] == "language_step":
        return LanguageStep(**common, batch=facts["batch"])
    common |= {key: info[key] for key in ("peer", "ours", "tokens_per_s")}
    common |= {"median": stats["median"], "spread": stats["iqr"] / stats["median"]}
    if info["kind"] == "cross_entropy":
        return LossRow(**common, matrix=info["matrix_fraction"], joules=info["joules"])
    return LanguageRow(
        **common,
        differs=info["differs"],
        kept=info["kept_bytes"] / _tokens(facts),
        joules=info.get("joules_per_token"),
    )


def _tokens(facts: dict[str, Any]) -> int:
    return facts["batch"] * facts["sequence"] * (2 if facts["pairs"] else 1)


def newest(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """Return the last of the rows of each kind."""
    found: dict[tuple[str, str, str], AnyRow] = {}
    for row in rows:
        peer = "one_step" if isinstance(row, LanguageStep) else row.peer
        found[row.machine, row.case, peer] = row
    return list(found.values())


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a model and its batch, or of a loss."""
    if "loss_tokens" in facts:
        bias = "with" if facts["bias"] else "without"
        sizes = f"{facts['loss_tokens']:,} tokens of {facts['width']}"
        return f"{sizes}, vocabulary {facts['vocabulary']:,}, {bias} bias, {facts['dtype']}"
    kind = "pairs of sequences" if facts["pairs"] else "sequences"
    size = f"{facts['batch']} {kind} of {facts['sequence']:,}"
    model = f"depth {facts['depth']}, {facts['heads']} heads, vocabulary {facts['vocabulary']:,}"
    return f"{facts['row']}, {facts['variant']}: {size}, {model}, {facts['dtype']}"


def tables(rows: Rows, cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    models = [row for row in rows if isinstance(row, LanguageRow)]
    steps = [row for row in rows if isinstance(row, LanguageStep)]
    losses = [row for row in rows if isinstance(row, LossRow)]
    found = list(goals(rows))
    if found:
        yield from (
            "### Goals of the language models",
            "",
            "| goal | measured |  |",
            "|---|---:|---|",
        )
        yield from (f"| {' | '.join(goal)} |" for goal in found)
        yield ""
    if models:
        yield from ("### Language models", "", LEGEND)
    for case in dict.fromkeys(row.case for row in models):
        yield from (f"#### {case} ({shape(cases[case])})", "")
        yield from _model_table([row for row in models if row.case == case])
    told = {(r.peer.removesuffix("_compiled"), r.row): r.differs for r in models if r.differs}
    if told:
        yield from ("How transformers' models differ from ours:", "", *_differences(told), "")
    ratios = list(_ratio_rows(rows))
    if ratios:
        yield from ("### Language models, lean over original", "", RATIOS)
        yield "| row | time | compiled | transformers | memory | one step | paper |"
        yield f"|---|{'---:|' * 6}"
        yield from (f"| {' | '.join(cells)} |" for cells in ratios)
        yield ""
    if steps:
        yield from ("### One step of every language row", "", STEPS)
        yield "| row | batch | parameters | loss | peak, GB |"
        yield f"|---|{'---:|' * 4}"
        for row in steps:
            cells = f"{row.batch} | {row.params:,} | {row.loss:.3f} | {_gigabytes(row.peak)}"
            yield f"| {row.row} {row.variant} | {cells} |"
        yield ""
    if losses:
        yield from ("### Cross-entropy of a large vocabulary", "", LOSSES)
    for case in dict.fromkeys(row.case for row in losses):
        yield from (f"#### {case} ({shape(cases[case])})", "")
        yield from _loss_table([row for row in losses if row.case == case])


def _model_table(group: Sequence[LanguageRow]) -> Iterator[str]:
    head = ["", "tokens/s", "IQR", "× transformers", "peak, GB", "kept, kB", "J per million tokens"]
    yield f"| {' | '.join([*head, 'parameters', 'loss'])} |"
    yield f"|---|{'---:|' * (len(head) + 1)}"
    for row in sorted(group, key=lambda row: -row.tokens_per_s):
        theirs = _fastest_of_transformers(row, group)
        cells = [
            f"**{row.peer}**" if row.ours else row.peer,
            f"{row.tokens_per_s:,.0f}",
            f"{row.spread:.1%}",
            "–" if theirs is None else f"{row.tokens_per_s / theirs.tokens_per_s:.2f}",
            _gigabytes(row.peak),
            f"{row.kept / 1e3:,.1f}",
            "–" if row.joules is None else f"{row.joules * 1e6:,.0f}",
            f"{row.params:,}",
            f"{row.loss:.3f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _differences(told: dict[tuple[str, str], str]) -> Iterator[str]:
    rows_of: dict[tuple[str, str], list[str]] = {}
    for (peer, row), differs in told.items():
        rows_of.setdefault((peer, differs), []).append(row)
    for (peer, differs), rows in rows_of.items():
        yield f"- {peer} ({', '.join(rows)}): {differs}."


def _fastest_of_transformers(row: LanguageRow, group: Iterable[LanguageRow]) -> LanguageRow | None:
    """Return the fastest model that is not ours, called as ``row`` is."""
    theirs = [r for r in group if not r.ours and _is_compiled(r) == _is_compiled(row)]
    return max(theirs, key=lambda r: r.tokens_per_s, default=None)


def _is_compiled(row: LanguageRow) -> bool:
    return row.peer.endswith("_compiled")


def _loss_table(group: Sequence[LossRow]) -> Iterator[str]:
    head = ["", "median, ms", "IQR", "tokens/s", "matrix", "× logits", "× best peer"]
    yield f"| {' | '.join([*head, 'peak, MiB', 'mJ'])} |"
    yield f"|---|{'---:|' * (len(head) + 1)}"
    plain = next((row for row in group if row.peer == "logits_float32"), None)
    best = min((r for r in group if not r.ours), key=lambda r: r.median, default=None)
    for row in sorted(group, key=lambda row: row.median):
        cells = [
            f"**{row.peer}**" if row.ours else row.peer,
            f"{row.median * 1e3:.3f}",
            f"{row.spread:.1%}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.matrix:.0%}",
            *("–" if r is None else f"{r.median / row.median:.2f}" for r in (plain, best)),
            "–" if row.peak is None else f"{row.peak / 2**20:,.0f}",
            "–" if row.joules is None else f"{row.joules * 1e3:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _gigabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e9:.2f}"


def _of_the_paper(rows: Rows) -> list[AnyRow]:
    """Return the rows that are models of the paper, which the small ones of a CPU are not."""
    return [row for row in rows if not row.case.startswith("cpu_")]


def ratios(rows: Rows) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield each row of the paper with lean over original: time, peak memory, and the paper's."""
    for name in dict.fromkeys(row.row for row in rows if not isinstance(row, LossRow)):
        here = [row for row in rows if not isinstance(row, LossRow) and row.row == name]

        def over(what: str, peer: str | None, here: list[Any] = here) -> float | None:
            sides = {r.variant: getattr(r, what) for r in here if getattr(r, "peer", None) == peer}
            lean, original = sides.get("lean"), sides.get("original")
            return lean / original if lean and original else None

        printed = {row.variant: row.printed_gb for row in here}
        lean, original = printed.get("lean"), printed.get("original")
        yield (
            name,
            {
                "time": over("median", "leaner"),
                "compiled": over("median", "leaner_compiled"),
                "transformers": over("median", "transformers"),
                "memory": over("peak", "leaner"),
                "one step": over("peak", None),
                "paper": lean / original if lean and original else None,
            },
        )


def _ratio_rows(rows: Rows) -> Iterator[list[str]]:
    for name, found in ratios(_of_the_paper(rows)):
        if any(value is not None for what, value in found.items() if what != "paper"):
            yield [name, *("–" if value is None else f"{value:.2f}" for value in found.values())]


def goals(rows: Rows) -> Iterator[tuple[str, str, str]]:
    """Yield each goal that applies to these rows, what was measured, and whether it is met."""
    rows = _of_the_paper(rows)
    found = dict(ratios(rows))
    bert = found.get(BERT, {})
    for how, key in (("eager", "time"), ("compiled", "compiled")):
        if times := bert.get(key):
            goal = f"{BERT}: lean {GOAL_LEAN} × the tokens/s of the original, {how}"
            yield goal, f"{1 / times:.2f} ×", _verdict(1 / times >= GOAL_LEAN)
    lean = [r for r in rows if isinstance(r, LanguageRow) and (r.row, r.variant) == (BERT, "lean")]
    for compiled in (False, True):
        group = [row for row in lean if _is_compiled(row) == compiled]
        ours = next((row for row in group if row.ours), None)
        theirs = ours and _fastest_of_transformers(ours, group)
        if ours and theirs:
            faster = ours.tokens_per_s / theirs.tokens_per_s
            how = "compiled" if compiled else "eager"
            goal = f"{BERT} lean: {GOAL_PEER} × {theirs.peer}, {how}"
            yield goal, f"{faster:.2f} ×", _verdict(faster >= GOAL_PEER)
    gpt = found.get(GPT, {})
    measured, paper = gpt.get("memory") or gpt.get("one step"), gpt.get("paper")
    if measured and paper:
        goal = f"{GPT}: lean over original memory at most the paper's {paper:.2f}"
        yield goal, f"{measured:.2f}", _verdict(measured <= paper)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def short(rows: Rows) -> Iterator[str]:
    """Yield one line for each goal, and one for each row that is ours."""
    for goal, measured, met in goals(rows):
        yield f"goal: {goal}: {measured}, {met.strip('*')}"
    for row in rows:
        if isinstance(row, LanguageStep):
            yield f"{row.case} one step: loss {row.loss:.3f}, {_gigabytes(row.peak)} GB"
        elif isinstance(row, LossRow):
            peak = "–" if row.peak is None else f"{row.peak / 2**20:,.0f}"
            yield f"{row.case} {row.peer}: {row.median * 1e3:.3f} ms, {peak} MiB"
        else:
            rate = f"{row.tokens_per_s:,.0f} tokens/s"
            yield f"{row.case} {row.peer}: {rate}, {_gigabytes(row.peak)} GB"
