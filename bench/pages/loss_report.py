"""Tables of the measured loss of a large vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pages.markdown import in_unit, name, ratio, table
from bench.pages.paper_rows import case_tables
from bench.pages.rows import MeasuredRow, fastest

LEGEND = """\
A classifier's product and the mean cross-entropy of its logits, forward and backward, from Python.
*matrix* counts the three products that there must be, as a part of what a large matrix product
reaches. *peak* is what a call held beside tokens, weight and bias. *× logits* compares with logits
held whole and a softmax in float32, as autocast has it. Every row passed the correctness gate.
"""


@dataclass(frozen=True)
class LossRow(MeasuredRow):
    """A way to compute the loss; joules are of a call."""

    peer: str
    ours: bool
    tokens_per_s: float
    median: float
    iqr: float
    matrix_fraction: float
    peak_memory_bytes: int | None
    joules: float | None


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a loss."""
    bias = "with" if facts["bias"] else "without"
    sizes = f"{facts['loss_tokens']:,} tokens of {facts['width']}"
    return f"{sizes}, vocabulary {facts['vocabulary']:,}, {bias} bias, {facts['dtype']}"


def tables(rows: Sequence[LossRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    if rows:
        yield from ("### Cross-entropy of a large vocabulary", "", LEGEND)
    yield from case_tables(rows, cases, shape, _loss_table)


def _loss_table(group: Sequence[LossRow]) -> Iterator[str]:
    head = "", "median, ms", "IQR", "tokens/s", "matrix", "× logits", "× best peer", "peak, MiB"
    plain = next((row for row in group if row.peer == "logits_float32"), None)
    best = fastest(row for row in group if not row.ours)
    cells = (
        (
            name(row),
            in_unit(row.median, 1e-3, ".3f"),
            f"{row.iqr / row.median:.1%}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.matrix_fraction:.0%}",
            *(ratio(than and than.median, row.median) for than in (plain, best)),
            in_unit(row.peak_memory_bytes, 2**20, ",.0f"),
            in_unit(row.joules, 1e-3, ",.0f"),
        )
        for row in sorted(group, key=lambda row: row.median)
    )
    return table((*head, "mJ"), cells)


def short(rows: Sequence[LossRow]) -> Iterator[str]:
    """Yield one line for each row."""
    for row in rows:
        peak = in_unit(row.peak_memory_bytes, 2**20, ",.0f")
        yield f"{row.case} {row.peer}: {in_unit(row.median, 1e-3, '.3f')} ms, {peak} MiB"
