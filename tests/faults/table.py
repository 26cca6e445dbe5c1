"""What the injected faults came to: collected by the tests, kept as JSON, shown as a table.

python -m tests.faults.table writes the committed results into docs/reliability.md.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- {} begin: written by python -m tests.faults.table -->"
END = "<!-- {} end -->"

# Under which a test's report carries its outcomes.
PROPERTY = "fault_outcome"
ENDINGS = (
    "resumed, same bits",
    "refused, one line",
    "training went on, earlier checkpoints intact",
    "stopped cleanly",
)


def outcome(*, fault: str, where: str, ended: str, tries: int = 1) -> dict[str, Any]:
    """Return what became of a fault.

    Args:
        fault: what was done to the run.
        where: when, or to which part of it.
        ended: one of ``ENDINGS``.
        tries: how often.

    Raises:
        ValueError: another ending, or no try.
    """
    if ended not in ENDINGS:
        raise ValueError(f"ended must be one of {', '.join(ENDINGS)}, got {ended!r}")
    if tries < 1:
        raise ValueError(f"tries must be at least 1, got {tries}")
    return {"fault": fault, "where": where, "tries": tries, "ended": ended}


def grouped(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each fault, place and ending, with all its tries; the same faults side by
    side, in the order in which they first came."""
    tries: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = row["fault"], row["where"], row["ended"]
        tries[key] = tries.get(key, 0) + row["tries"]
    faults = list(dict.fromkeys(fault for fault, _, _ in tries))
    return [
        {"fault": fault, "where": where, "tries": count, "ended": ended}
        for (fault, where, ended), count in sorted(
            tries.items(), key=lambda item: faults.index(item[0][0])
        )
    ]


def plain(rows: list[dict[str, Any]], failed: int) -> Iterator[str]:
    """Return the lines of a table for a terminal, where some tests failed and have no rows."""
    names = ("fault", "where", "tries", "ended")
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()
    verdict = f"{failed} tests FAILED" if failed else "no run lost, none resumed wrong"
    yield f"{sum(row['tries'] for row in rows)} faults, {verdict}"


def facts() -> dict[str, Any]:
    """Return the commit, the versions and the machine that a result is of."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, check=True, text=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + (" with changes" if changed else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write(path: Path, rows: list[dict[str, Any]], *, seconds: float, failed: int) -> None:
    """Write what a run of the tests came to.

    Args:
        path: of the JSON file.
        rows: from ``grouped``.
        seconds: that the tests took.
        failed: how many tests failed, whose outcomes are not in the rows.
    """
    result = facts() | {"seconds": round(seconds), "failed": failed, "outcomes": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def of_faults(result: dict[str, Any]) -> str:
    """Return one file of outcomes as text and a table."""
    rows = result["outcomes"]
    kills = sum(row["tries"] for row in rows if row["fault"].startswith("kill -9"))
    lines = [
        f"{sum(row['tries'] for row in rows)} faults, {kills} of them `kill -9`, in "
        f"{result['seconds'] / 60:.0f} minutes on {result['cores']} cores ({result['cpu']}), torch "
        f"{result['torch']}, commit {result['commit'][:7]}; {result['failed']} tests failed.",
        "",
        "| fault | where | tries | ended |",
        "|---|---|--:|---|",
    ]
    lines += [f"| {r['fault']} | {r['where']} | {r['tries']} | {r['ended']} |" for r in rows]
    return "\n".join(lines)


def of_soak(result: dict[str, Any]) -> str:
    """Return one soak as text and a table."""
    same = "identical to" if not result["differences"] else "**different from**"
    lines = [
        f"{result['minutes']:.0f} minutes of training on {result['ranks']} ranks "
        f"({result['cpu']}, {result['cores']} cores, torch {result['torch']}, commit "
        f"{result['commit'][:7]}): {result['steps']:,} steps, {len(result['events'])} faults, "
        f"{result['launches']} launches, {result['restarts']} restarts by torchrun itself. "
        f"{result['steps_lost']:,} steps were lost and done again, at most "
        f"{result['most_steps_lost']} after one fault, with a checkpoint every "
        f"{result['checkpoint_every']} steps. {len(result['problems'])} problems noted. "
        f"Weights, averages, optimizer state, metrics and κ "
        f"rows are {same} those of a run of as many steps that nothing interrupted.",
        "",
        "| fault | times | steps lost | most at once |",
        "|---|--:|--:|--:|",
    ]
    for fault, times in result["faults"].items():
        lost = [e.get("steps_lost", 0) for e in result["events"] if e["fault"] == fault]
        lines.append(f"| {fault} | {times} | {sum(lost)} | {max(lost)} |")
    return "\n".join(lines)


def filled(page: str, parts: dict[str, str]) -> str:
    """Return the page with each part between its markers.

    Raises:
        ValueError: the page lacks the markers of a part.
    """
    for name, text in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"{PAGE.name} must have the lines {begin!r} and {end!r}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def committed(folder: Path = RESULTS) -> dict[str, str]:
    """Return the parts of the page by name, from the committed results."""
    render = {"faults": of_faults, "soak": of_soak}
    return {
        name: "\n\n".join(
            part(json.loads(path.read_text())) for path in sorted(folder.glob(f"{name}*.json"))
        )
        or "No result is committed yet."
        for name, part in render.items()
    }


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), committed()))
