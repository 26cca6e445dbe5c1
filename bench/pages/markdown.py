"""How every page of results writes numbers, tables and goals, and what a run was made with."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

# What is to be reached, what was measured, and whether it is met.
Goal = tuple[str, str, str]


class Run(Protocol):
    """A file of results, whatever it holds."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def date(self) -> str:
        """When it was written, as ISO 8601 has it."""
        ...

    @property
    def machine_info(self) -> dict[str, Any]:
        """As ``machine.facts`` returns it."""
        ...

    @property
    def commit(self) -> dict[str, Any]:
        """As ``machine.commit`` returns it."""
        ...


def number(value: float) -> str:
    """Format a positive number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def in_unit(value: float | None, unit: float, form: str) -> str:
    """Format a number in a unit, or a dash without one."""
    return "–" if value is None else f"{value / unit:{form}}"


def gigabytes(size: float | None) -> str:
    """Format bytes in GB, or a dash without."""
    return in_unit(size, 1e9, ".2f")


def ratio(value: float | None, base: float | None, form: str = ".2f") -> str:
    """Format ``value / base``, or a dash without one of them."""
    return "–" if value is None or base is None else f"{value / base:{form}}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Render a table whose columns after the first ``left`` hold numbers; nothing without a row."""
    rows = list(rows)
    if rows:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * left}{'---:|' * (len(head) - left)}"
        for row in rows:
            cells = " | ".join(cell.replace("|", r"\|") for cell in row)
            yield f"| {cells} |"
        yield ""


def titled(title: str, lines: Iterable[str], level: int = 3) -> Iterator[str]:
    """Yield lines under a title, or nothing where there are none."""
    lines = list(lines)
    if lines:
        yield from (f"{'#' * level} {title}", "", *lines)


def goal(text: str, measured: str, met: bool) -> Goal:
    """Return a goal and whether it is met."""
    return text, measured, "met" if met else "**missed**"


def goal_table(title: str, goals: Iterable[Goal]) -> Iterator[str]:
    """Render goals under a title, or nothing where there are none."""
    rows = [f"| {' | '.join(each)} |" for each in goals]
    if rows:
        yield from titled(title, ["| goal | measured |  |", "|---|---:|---|", *rows, ""])


def goal_lines(goals: Iterable[Goal]) -> Iterator[str]:
    """Yield one line for each goal."""
    for text, measured, met in goals:
        yield f"goal: {text}: {measured}, {met.strip('*')}"


def name(row: Any) -> str:
    """Return a row's peer, bold where it is ours."""
    return f"**{row.peer}**" if row.ours else row.peer


def provenance(run: Run) -> str:
    """Describe one run in one line."""
    commit, info = run.commit, run.machine_info
    code = (commit["id"] or "no commit")[:12] + (" with changes" if commit["dirty"] else "")
    versions = (f"{name} {version}" for name, version in info["versions"].items() if version)
    hardware = [f"{info['cpu']['cores']} CPU cores, {info['cpu']['torch_threads']} torch threads"]
    if info["gpu"]:
        gpu = info["gpu"]
        hardware += [f"{gpu['count']} GPU", f"{gpu['memory_bytes'] / 2**30:.0f} GiB"]
        hardware += [f"power limit {gpu['power_limit_watts']} W"]
        hardware += [f"{name} clock {mhz} MHz" for name, mhz in gpu["clocks_mhz"].items()]
    facts = ", ".join([*hardware, *versions])
    return f"- {run.path.name}: {run.date[:10]}, {code}, source {commit['source']}; {facts}."
