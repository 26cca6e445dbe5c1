"""What the adapters' tests found out about other people's models, as rows of a JSON file.

``pytest tests/adapters --compat-results=FILE`` writes it; ``python -m bench.report`` renders
docs/compatibility.md from the files that are committed.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import error_budget

# Equal within the error budget; refused with an error; left as it was by an adapter that swaps.
STATUSES = "equal", "refused", "left"
PROPERTY = "compatibility"
_assert_within_budget = error_budget.assert_within_budget


class Judged:
    """``error_budget.assert_within_budget``, which remembers what came nearest to failing.

    Attributes:
        worst: its error and the error that was allowed, Nones before anything was judged.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start again."""
        self.worst: tuple[float | None, float | None] = None, None
        self.share = -1.0

    def __call__(
        self, actual: Tensor, same_dtype: Tensor | tuple[Tensor, ...], exact: Tensor
    ) -> None:
        """Judge as the original does, then remember."""
        _assert_within_budget(actual, same_dtype, exact)
        peers = same_dtype if isinstance(same_dtype, tuple) else (same_dtype,)
        finite = exact.isfinite().cpu()
        eps = torch.finfo(actual.dtype).eps
        exact, actual, *peers = (
            t.detach().to("cpu", torch.float64)[finite] for t in (exact, actual, *peers)
        )
        if exact.numel() == 0:
            return
        error = (actual - exact).abs().max().item()
        allowed = max((peer - exact).abs().max() for peer in peers) + eps * exact.abs().max()
        budget = 2 * allowed.item()
        if budget > 0 and error / budget > self.share:
            self.share, self.worst = error / budget, (error, budget)


def add(
    node: pytest.Item,
    judged: Judged,
    *,
    library: str,
    family: str,
    architecture: str,
    case: str,
    dtype: str = "float32",
    status: str = "equal",
    error: float | None = None,
    budget: float | None = None,
    note: str = "",
) -> None:
    """Note one fact at the end of a test: what follows an assert that failed is never noted.

    Args:
        node: the test.
        judged: what stands in for ``assert_within_budget`` during the test.
        library: ``transformers``, ``timm`` or ``torch``.
        family: of models, as ``llama``.
        architecture: the class.
        case: what was compared, as ``padded left``, or refused, as ``softcap``.
        dtype: of the model, as PyTorch prints it without ``torch.``.
        status: one of ``STATUSES``.
        error: the largest, against float64; of what was judged since the last row when omitted.
        budget: the error that is allowed; of the same when omitted.
        note: where something is refused, the whole message; where it is left, why.

    Raises:
        ValueError: a row that would say nothing, or the contrary of its numbers.
    """
    what = f"{library} {family}, {case}"
    if error is None and status == "equal":
        error, budget = judged.worst
    judged.forget()
    if status not in STATUSES:
        raise ValueError(f"status must be one of {STATUSES}, got {status!r} ({what})")
    if status != "equal" and not note.strip():
        raise ValueError(f"note must say why {what} is {status}")
    if "\n" in note:
        raise ValueError(f"note must be one line, got {note!r} ({what})")
    if error is not None and (budget is None or not error <= budget):
        raise ValueError(f"error must be within a budget, got {error} and {budget} ({what})")
    facts: dict[str, Any] = {
        "library": library,
        "family": family,
        "architecture": architecture,
        "case": case,
        "device": "cuda" if "/gpu/" in node.path.as_posix() else "cpu",
        "dtype": dtype,
        "status": status,
        "error": None if error is None else float(f"{error:.3g}"),
        "budget": None if budget is None else float(f"{budget:.3g}"),
        "note": note,
        "test": node.nodeid,
    }
    # A list of pairs that pytest carries to its reports, and pytest-xdist between processes.
    node.user_properties.append((PROPERTY, facts))


def judging() -> list[str]:
    """Return the names of the loaded modules that call ``assert_within_budget``, its own too."""
    return [
        name
        for name, module in sys.modules.items()
        if name.startswith("tests.")
        and getattr(module, "assert_within_budget", None) is _assert_within_budget
    ]


def expect(node: pytest.Item) -> None:
    """Note that a test means to record something, so that its failure is known."""
    node.user_properties.append((PROPERTY, {}))


class Recorder:
    """A plugin of pytest that collects the rows of all tests and writes them at the end."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows of a test that passed, and the name of one that should have had some."""
        given = [facts for name, facts in report.user_properties if name == PROPERTY]
        if report.failed and given:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.rows += filter(None, given)

    def pytest_sessionfinish(self) -> None:
        """Write the rows in an order that does not depend on which process was faster."""
        key = "library", "family", "architecture", "case", "dtype", "status", "test"
        self.write(compatibility=sorted(self.rows, key=lambda row: [row[name] for name in key]))

    def write(self, **rows: list[dict[str, Any]]) -> None:
        """Write rows, what they were made with, and what failed."""
        from bench.harness import machine

        result = {
            "datetime": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine_info": machine.facts(),
            "commit_info": machine.commit(),
            "failed": sorted(set(self.failed)),
            **rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where they are."""
        terminalreporter.line(f"{len(self.rows)} rows of compatibility in {self.path}")
