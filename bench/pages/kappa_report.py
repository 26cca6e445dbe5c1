"""Tables of measured condition numbers and of what KappaMonitor adds to a step, and their goals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
class KappaRow:
    """A peer on a batch of matrices; times in seconds, errors relative."""

    machine: str
    case: str
    peer: str
    ours: bool
    mode: str
    median: float
    iqr: float
    copy: float
    error_mild: float
    error_hard: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class StepRow:
    """The monitor at one interval on a model; seconds for a step, overheads as a part of it."""

    machine: str
    case: str
    every: int
    median: float
    without: float
    overhead: float
    iqr: float


def read(entry: dict[str, Any], machine: str) -> KappaRow | StepRow:
    """Return a row from an entry of a result file whose ``extra_info`` has a ``kind``."""
    info, stats = entry["extra_info"], entry["stats"]
    if info["kind"] == "step":
        of_step = info["seconds_without"], info["overhead"], info["overhead_iqr"]
        return StepRow(machine, info["case"], info["every"], stats["median"], *of_step)
    return KappaRow(
        machine,
        *(info[name] for name in ("case", "peer", "ours", "mode")),
        median=stats["median"],
        iqr=stats["iqr"],
        copy=info["copy_fraction"],
        error_mild=info["error_mild"],
        error_hard=info["error_hard"],
        kernels=tuple(info.get("kernels", ())),
    )


def newest(rows: Iterable[KappaRow | StepRow]) -> list[KappaRow | StepRow]:
    """Return the last of the rows of each kind."""
    found: dict[tuple[object, ...], KappaRow | StepRow] = {}
    for row in rows:
        what = row.peer if isinstance(row, KappaRow) else row.every
        found[row.machine, row.case, what] = row
    return list(found.values())


def shape(facts: dict[str, Any]) -> str:
    """Return the size of a batch of matrices, or of a model and its batch."""
    if "cols" in facts:
        return f"{facts['batch']}·({facts['rows']}×{facts['cols']}) {facts['dtype']}"
    return (
        f"{facts['batch']} images, {facts['tokens']} tokens, {facts['depth']} layers of width "
        f"{facts['width']}, {facts['heads']} heads, {facts['samples']} samples, {facts['dtype']}"
    )


def tables(rows: Sequence[KappaRow | StepRow], cases: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Render the rows of one machine."""
    batches, steps = _by_case(rows, KappaRow), _by_case(rows, StepRow)
    yield from ("### Goals of κ", "")
    yield from ("| goal | measured |  |", "|---|---:|---|")
    yield from (f"| {' | '.join(goal)} |" for goal in goals(rows))
    yield ""
    if batches:
        yield from ("### Condition numbers", "", LEGEND)
    for case, group in batches.items():
        yield from (f"#### {case} ({shape(cases[case])}), {group[0].mode}", "")
        yield from _batch_table(group)
    if steps:
        yield from ("### Steps with KappaMonitor", "", STEPS)
    for case, group in steps.items():
        yield from (f"#### {case} ({shape(cases[case])})", "")
        yield from ("| every | step without | with | overhead | IQR |", f"|---|{'---:|' * 4}")
        for row in sorted(group, key=lambda row: row.every):
            times = f"{row.without * 1e3:.2f} | {row.median * 1e3:.2f}"
            yield f"| {row.every} | {times} | {row.overhead:+.1%} | {row.iqr:.1%} |"
        yield ""


def _by_case(rows: Iterable[Any], kind: type) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for row in rows:
        if isinstance(row, kind):
            groups.setdefault(row.case, []).append(row)
    return groups


def _batch_table(group: Sequence[KappaRow]) -> Iterator[str]:
    head = "median", "IQR", "copy", "× svdvals", "× best library", "error at 10³", "at 10⁶"
    yield f"|  | {' | '.join(head)} |"
    yield f"|---|{'---:|' * len(head)}"
    for row in sorted(group, key=lambda row: row.median):
        cells = [
            f"**{row.peer}**" if row.ours else row.peer,
            f"{row.median * 1e3:.3g}",
            f"{row.iqr * 1e3:.2g}",
            f"{row.copy:.0%}",
            _times(row, _svdvals(group)),
            _times(row, best_library(group)),
            f"{row.error_mild:.0e}",
            f"{row.error_hard:.0e}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def best_library(group: Iterable[KappaRow]) -> KappaRow | None:
    """Return the fastest row that is not ours and right where attention needs it."""
    right = (row for row in group if not row.ours and row.error_hard <= 1e-3)
    return min(right, key=lambda row: row.median, default=None)


def _svdvals(group: Iterable[KappaRow]) -> KappaRow | None:
    return next((row for row in group if row.peer == "svdvals"), None)


def _times(row: KappaRow, than: KappaRow | None) -> str:
    return "–" if than is None else f"{than.median / row.median:.3g}"


def goals(rows: Iterable[KappaRow | StepRow]) -> Iterator[tuple[str, str, str]]:
    """Yield each goal that applies to the machine of these rows, what was measured, and whether."""
    for case, group in _by_case(rows, KappaRow).items():
        ours = next((row for row in group if row.ours), None)
        if ours is None:
            continue
        library, svdvals = best_library(group), _svdvals(group)
        if case.startswith("cpu_"):
            if library is not None:
                times = ours.median / library.median
                goal = f"{case} in at most {GOAL_CPU} × the time of {library.peer}"
                yield goal, f"{times:.2f} ×", _verdict(times <= GOAL_CPU)
            continue
        gpu = next((gpu for gpu in GOAL_SECONDS if gpu in ours.machine), None)
        if case == GOAL_CASE and gpu:
            goal = GOAL_SECONDS[gpu]
            met = _verdict(ours.median <= goal)
            yield f"{case} in {goal * 1e3:g} ms", f"{ours.median * 1e3:.3g} ms", met
        for than, factor in ((library, GOAL_LIBRARY), (svdvals, GOAL_SVDVALS)):
            if than is not None:
                times = than.median / ours.median
                goal = f"{case}: {factor} × as fast as {than.peer}"
                yield goal, f"{times:.3g} ×", _verdict(times >= factor)
    for case, group in _by_case(rows, StepRow).items():
        for row in group:
            if row.every == 1 and not case.startswith("cpu_"):
                goal = f"{case}: every=1 costs at most {GOAL_OVERHEAD:.0%}"
                yield goal, f"{row.overhead:.1%}", _verdict(row.overhead <= GOAL_OVERHEAD)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def short(rows: Iterable[KappaRow | StepRow]) -> Iterator[str]:
    """Yield one line for each goal, and one for each interval of the monitor."""
    rows = list(rows)
    for goal, measured, met in goals(rows):
        yield f"goal: {goal}: {measured}, {met.strip('*')}"
    for row in rows:
        if isinstance(row, StepRow):
            yield f"{row.case} every={row.every}: {row.overhead:+.1%} (IQR {row.iqr:.1%})"
