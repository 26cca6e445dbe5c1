"""The table of other projects' tests on the page of compatibility: what ``make peers`` counted."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
OTHERS = "refused", "different"
HEAD = "source", "cases of", "cases", "equal", "refused by design", "different"
TEXT = """\
Their samples, grids and comparisons, written as cases of our functions on a CPU
([tests/peers](../tests/peers); `make peers` runs all, CI some). *Equal* is within the error budget
of the project's own result, gradients included where the case has any. A refusal is one line of an
error, for a reason of a list that the tests hold; any other fails. FlashAttention counts causality
from the last row and key: such cases are given to `attention` as `causal_lower_right`, and those of
sequences of any length by padding them. Its grid is thinned so that every two values still meet.
"""


@dataclass(frozen=True)
class Run:
    """One file of ``pytest tests/peers --peers-results``."""

    path: Path
    date: str
    rows: list[dict[str, Any]]
    machine_info: dict[str, Any]
    commit: dict[str, Any]


def load(path: Path) -> Run:
    """Read one file.

    Raises:
        SystemExit: it cannot be read, is no such result, or is of a run in which a test failed; in
            one line.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["failed"]:
            raise SystemExit(f"{path}: not to be published, failed: {', '.join(data['failed'])}")
        info, commit = data["machine_info"], data["commit_info"]
        return Run(path, data["datetime"], data["peers"], info, commit)
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: no counts of other projects' tests ({error!r})") from None


def committed(folder: Path = RESULTS) -> list[Run]:
    """Return the committed files."""
    return [load(path) for path in sorted(folder.glob("peers-*.json"))]


def rows(run: Run) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each group of cases."""
    for source, group in dict.fromkeys((row["source"], row["group"]) for row in run.rows):
        here = [row for row in run.rows if (row["source"], row["group"]) == (source, group)]
        cases = sum(row["cases"] for row in here)
        equal = sum(row["cases"] for row in here if row["outcome"] == "equal")
        reasons = (_reasons(row for row in here if row["outcome"] == o) for o in OTHERS)
        yield source, group, str(cases), str(equal), *reasons


def _reasons(rows: Iterable[dict[str, Any]]) -> str:
    return "; ".join(f"{row['cases']}: {row['why']}" for row in rows) or "–"
