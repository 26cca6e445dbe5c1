"""Rows of the paper, of images and of language: one step of each, and lean over original."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pages.markdown import Goal, gigabytes, goal, in_unit, table, titled
from bench.pages.rows import MeasuredRow, by, of_kind


@dataclass(frozen=True)
class OneStepRow(MeasuredRow):
    """A single step of our model."""

    row: str
    variant: str
    batch: int
    params: int
    loss: float
    peak_memory_bytes: int | None
    printed_memory_gb: float | None


def of_the_paper(rows: Iterable[Any]) -> list[Any]:
    """Return the rows that are models of the paper, which the small ones of a CPU are not."""
    return [row for row in rows if not row.case.startswith("cpu_")]


def step_table(title: str, legend: str, batch: str, rows: Iterable[Any]) -> Iterator[str]:
    """Render the single steps among rows of models; ``batch`` names what a batch has."""
    lines = table(
        ("row", batch, "parameters", "loss", "peak, GB"),
        (
            (
                f"{row.row} {row.variant}",
                str(row.batch),
                f"{row.params:,}",
                f"{row.loss:.3f}",
                gigabytes(row.peak_memory_bytes),
            )
            for row in of_kind(rows, OneStepRow)
        ),
    )
    return titled(title, with_legend(legend, lines))


def with_legend(legend: str, lines: Iterable[str]) -> list[str]:
    """Return lines under their legend, or nothing where there are none."""
    lines = list(lines)
    return [legend, *lines] if lines else []


def step_lines(rows: Iterable[Any]) -> Iterator[str]:
    """Yield one line for each single step among rows of models."""
    for row in of_kind(rows, OneStepRow):
        yield f"{row.case} one step: loss {row.loss:.3f}, {gigabytes(row.peak_memory_bytes)} GB"


# By the title of a column: the attribute, and whose, or None of a single step.
Columns = Mapping[str, tuple[str, str | None]]
Ratios = dict[str, float | None]


def ratios(rows: Iterable[Any], columns: Columns) -> dict[str, Ratios]:
    """Return lean over original, of each attribute and of the memory that the paper prints.

    Only rows of the paper count, of those in stages the training.
    """
    rows = [r for r in of_the_paper(rows) if getattr(r, "stage", "training") == "training"]
    found = {}
    for name, here in by(rows, "row").items():
        wanted = {
            title: [r for r in here if getattr(r, "peer", None) == peer]
            for title, (_, peer) in columns.items()
        }
        found[name] = {
            title: lean_over_original(wanted[title], what) for title, (what, _) in columns.items()
        } | {"paper": lean_over_original(here, "printed_memory_gb")}
    return found


def lean_over_original(rows: Iterable[Any], what: str) -> float | None:
    """Return the ratio of an attribute, None without one of the two."""
    sides = {row.variant: getattr(row, what) for row in rows}
    lean, original = sides.get("lean"), sides.get("original")
    return lean / original if lean and original else None


def ratio_table(title: str, legend: str, rows: Iterable[Any], columns: Columns) -> Iterator[str]:
    """Render ``ratios``, of each row of the paper of which something was measured twice."""
    lines = table(
        ("row", *columns, "paper"),
        (
            (name, *(in_unit(value, 1, ".2f") for value in of_row.values()))
            for name, of_row in ratios(rows, columns).items()
            if any(of_row[title] is not None for title in columns)
        ),
    )
    return titled(title, with_legend(legend, lines))


def memory_goal(name: str, measured: float | None, paper: float | None) -> Iterator[Goal]:
    """Yield the goal of a row's memory, lean over original, where both numbers are there."""
    if measured and paper:
        text = f"{name}: lean over original memory at most the paper's {paper:.2f}"
        yield goal(text, f"{measured:.2f}", measured <= paper)


def case_tables(
    rows: Sequence[Any], cases: dict[str, dict[str, Any]], shape: Any, render: Any
) -> Iterator[str]:
    """Render a table under a title for each case, by ``shape`` of its facts and its rows."""
    for case, group in by(rows, "case").items():
        yield from (f"#### {case} ({shape(cases[case])})", "", *render(group))
