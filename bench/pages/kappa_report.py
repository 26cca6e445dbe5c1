"""Tables of measured condition numbers and of what KappaMonitor adds to a step, and their goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pages.markdown import (
    Goal,
    goal,
    goal_lines,
    goal_table,
    in_unit,
    name,
    ratio,
    table,
)
from bench.pages.paper_rows import case_tables
from bench.pages.rows import MeasuredRow, by, fastest, of_kind

# Of condition_number on 96 matrices of 197 x 1024, in seconds.
GOAL_CASE = "kappa_197x1024"
GOAL_SECONDS = {"H200": 0.5e-3, "A100": 0.8e-3, "RTX A6000": 2.5e-3}
GOAL_LIBRARY, GOAL_SVDVALS = 10, 100  # times faster than the best library, than svdvals
GOAL_CPU = 1.2  # times as long as the fastest library
GOAL_OVERHEAD = 0.02  # of a step of ViT-B, with every=1

LEGEND = """\
A batch of float32 matrices goes in, the condition number of each comes out. Milliseconds from
Python, synchronisations included. *copy* is the input read once, as a part of what a large copy
reaches. *× svdvals* and *× best library* say how many times faster a row is than
`torch.linalg.svdvals` on the float32 matrices, and than the fastest row that is not ours and right
at κ = 10⁶: below 1 is a loss. Errors of κ are relative, the largest of eight matrices against
LAPACK in float64. Every row is right to 10⁻³ at κ = 10³, before it was timed; ours also at 10⁶.
*gram_eigvalsh* is the float64 Gram matrix on the smaller side and its eigenvalues, *_cusolver*,
*_magma*, *_cupy* and *_gesvd…* force what does it.
"""
STEPS = """\
Whole optimizer steps of a ViT on the host's clock, in milliseconds: windows of steps with
`KappaMonitor` next to windows of as many without, rows fetched at the end of each; medians of the
differences, with their interquartile range.
"""


@dataclass(frozen=True)
class KappaRow(MeasuredRow):
    """A peer on a batch of matrices; times in seconds, errors relative."""

    peer: str
    ours: bool
    mode: str
    median: float
    iqr: float
    copy_fraction: float
    error_mild: float
    error_hard: float
    kernels: Sequence[str] = ()


@dataclass(frozen=True)
class MonitorRow(MeasuredRow):
    """The monitor at one interval on a model; seconds for a step, overheads as a part of it."""

    every: int
    median: float
    seconds_without: float
    overhead: float
    overhead_iqr: float


AnyRow = KappaRow | MonitorRow


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a batch of matrices, or of a model and its batch."""
    if "cols" in facts:
        return f"{facts['batch']}·({facts['rows']}×{facts['cols']}) {facts['dtype']}"
    return (
        f"{facts['batch']} images, {facts['tokens']} tokens, {facts['depth']} layers of width "
        f"{facts['width']}, {facts['heads']} heads, {facts['samples']} samples, {facts['dtype']}"
    )


def tables(rows: Sequence[AnyRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    yield from goal_table("Goals of κ", goals(rows))
    batches, steps = of_kind(rows, KappaRow), of_kind(rows, MonitorRow)
    if batches:
        yield from ("### Condition numbers", "", LEGEND)
    for case, group in by(batches, "case").items():
        yield from (f"#### {case} ({shape(cases[case])}), {group[0].mode}", "")
        yield from _batch_table(group)
    if steps:
        yield from ("### Steps with KappaMonitor", "", STEPS)
    yield from case_tables(steps, cases, shape, _step_table)


def _batch_table(group: Sequence[KappaRow]) -> Iterator[str]:
    head = "median", "IQR", "copy", "× svdvals", "× best library", "error at 10³", "at 10⁶"
    cells = (
        (
            name(row),
            in_unit(row.median, 1e-3, ".3g"),
            in_unit(row.iqr, 1e-3, ".2g"),
            f"{row.copy_fraction:.0%}",
            *(
                ratio(than and than.median, row.median, ".3g")
                for than in (_svdvals(group), best_library(group))
            ),
            f"{row.error_mild:.0e}",
            f"{row.error_hard:.0e}",
        )
        for row in sorted(group, key=lambda row: row.median)
    )
    return table(("", *head), cells)


def _step_table(group: Sequence[MonitorRow]) -> Iterator[str]:
    cells = (
        (
            str(row.every),
            in_unit(row.seconds_without, 1e-3, ".2f"),
            in_unit(row.median, 1e-3, ".2f"),
            f"{row.overhead:+.1%}",
            f"{row.overhead_iqr:.1%}",
        )
        for row in sorted(group, key=lambda row: row.every)
    )
    return table(("every", "step without", "with", "overhead", "IQR"), cells)


def best_library(group: Iterable[KappaRow]) -> KappaRow | None:
    """Return the fastest row that is not ours and right where attention needs it."""
    return fastest(row for row in group if not row.ours and row.error_hard <= 1e-3)


def _svdvals(group: Iterable[KappaRow]) -> KappaRow | None:
    return next((row for row in group if row.peer == "svdvals"), None)


def goals(rows: Sequence[AnyRow]) -> Iterator[Goal]:
    """Yield each goal that applies to the machine of these rows, what was measured, and whether."""
    for case, group in by(of_kind(rows, KappaRow), "case").items():
        ours = next((row for row in group if row.ours), None)
        if ours is None:
            continue
        library, svdvals = best_library(group), _svdvals(group)
        if case.startswith("cpu_"):
            if library is not None:
                times = ours.median / library.median
                text = f"{case} in at most {GOAL_CPU} × the time of {library.peer}"
                yield goal(text, f"{times:.2f} ×", times <= GOAL_CPU)
            continue
        gpu = next((gpu for gpu in GOAL_SECONDS if gpu in ours.machine), None)
        if case == GOAL_CASE and gpu:
            most = GOAL_SECONDS[gpu]
            text = f"{case} in {most * 1e3:g} ms"
            yield goal(text, f"{ours.median * 1e3:.3g} ms", ours.median <= most)
        for than, factor in ((library, GOAL_LIBRARY), (svdvals, GOAL_SVDVALS)):
            if than is not None:
                times = than.median / ours.median
                text = f"{case}: {factor} × as fast as {than.peer}"
                yield goal(text, f"{times:.3g} ×", times >= factor)
    for row in of_kind(rows, MonitorRow):
        if row.every == 1 and not row.case.startswith("cpu_"):
            text = f"{row.case}: every=1 costs at most {GOAL_OVERHEAD:.0%}"
            yield goal(text, f"{row.overhead:.1%}", row.overhead <= GOAL_OVERHEAD)


def short(rows: Sequence[AnyRow]) -> Iterator[str]:
    """Yield one line for each goal, and one for each interval of the monitor."""
    yield from goal_lines(goals(rows))
    for row in of_kind(rows, MonitorRow):
        yield f"{row.case} every={row.every}: {row.overhead:+.1%} (IQR {row.overhead_iqr:.1%})"
