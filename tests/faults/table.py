"""What the injected faults came to: collected by the tests, kept as JSON, shown as a table.

python -m tests.faults.table writes the committed results into docs/reliability.md.
"""

import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bench import frames
from bench.harness import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- faults begin: written by python -m tests.faults.table -->"
END = "<!-- faults end -->"

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
    by = ["fault", "where", "ended"]
    tries = pd.DataFrame(list(rows)).groupby(by, sort=False)["tries"].sum().reset_index()
    faults = list(tries["fault"].unique())
    tries = tries.sort_values("fault", key=lambda names: names.map(faults.index), kind="stable")
    return tries[["fault", "where", "tries", "ended"]].to_dict("records")


def plain(rows: list[dict[str, Any]], failed: int) -> Iterator[str]:
    """Return the lines of a table for a terminal, where some tests failed and have no rows."""
    yield from pd.DataFrame(rows).to_string(index=False).splitlines()
    verdict = f"{failed} tests FAILED" if failed else "no run lost, none resumed wrong"
    yield f"{sum(row['tries'] for row in rows)} faults, {verdict}"


def facts() -> dict[str, Any]:
    """Return the commit, the versions and the machine that a result is of."""
    commit, cpu = machine.commit(), machine.cpu()
    return {
        "commit": (commit["id"] or "unknown") + (" with changes" if commit["dirty"] else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu["model"],
        "cores": cpu["cores"],
    }


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
    """Return one file of outcomes as text and a table.

    A row joins the places of a fault, and the faults of a place, where they ended alike.
    """
    rows = pd.DataFrame(result["outcomes"])
    kills = rows[rows["fault"].str.startswith("kill -9")]["tries"].sum()
    said = (
        f"{rows['tries'].sum()} faults, {kills} of them `kill -9`, in "
        f"{result['seconds'] / 60:.0f} minutes on {result['cores']} cores ({result['cpu']}), torch "
        f"{result['torch']}, commit {result['commit'][:7]}; {result['failed']} tests failed."
    )
    often = " (" + rows["tries"].astype(str) + ")"
    rows["where"] += often.where(rows["tries"] > 1, "")
    for same, joined in ("fault", "where"), ("where", "fault"):
        by = rows.groupby([same, "ended"], sort=False)
        rows = by.agg({joined: "; ".join, "tries": "sum"}).reset_index()
    return f"{said}\n\n{frames.markdown(rows[['fault', 'where', 'tries', 'ended']])}"


def filled(page: str, text: str) -> str:
    """Return the page with the text between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"{PAGE.name} must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def committed(path: Path = RESULTS / "faults.json") -> str:
    """Return what stands on the page, from the committed results."""
    return of_faults(json.loads(path.read_text()))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), committed()))
