"""What comes of a case of another project's tests: equal, refused for a known reason, different.

``pytest tests/peers`` ends with the counts; docs/compatibility.md has those of ``make peers``.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from leaner_kernels.ops._checks import ArgumentError

PROPERTY = "peers"
EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"
# Why a call is refused, by the text of the error. One that is refused no longer is judged as any.
REASONS = {
    r"alibi_slopes are not supported: .*": "ALiBi by its slopes: pass them in `attn_mask`",
    r"softcap needs a head dimension up to 128, got \d+": "a softcap at a head dimension above 128",
    r"query must be \(B, H, N, D\), got .* with a key of \d axes": "axes that differ, to broadcast",
}


def reason_of(error: Exception) -> str:
    """Return why a call was refused.

    Raises:
        AssertionError: for no reason that is known, or in more than one line.
    """
    message = str(error)
    known = (why for pattern, why in REASONS.items() if re.fullmatch(pattern, message))
    why = next(known, None)
    assert why is not None, f"refused for no reason of the table: {error!r}"
    return why


def settle(
    node: pytest.Item,
    source: str,
    group: str,
    call: Callable[[], Any],
    judge: Callable[[Any], None],
    known: str = "",
) -> None:
    """Make a call and note what comes of it.

    Args:
        node: the test.
        source: whose test it is.
        group: what it is about, as ``output``.
        call: ours.
        judge: raises an AssertionError where its result is different.
        known: why it may be.
    """
    row = {"source": source, "group": group, "outcome": DIFFERENT, "why": ""}
    node.user_properties.append((PROPERTY, row))
    try:
        found = call()
    except (ArgumentError, NotImplementedError, TypeError, ValueError) as error:
        row["why"] = reason_of(error)
        row["outcome"] = REFUSED
        return
    row["why"] = known
    try:
        judge(found)
    except AssertionError:
        if not known:
            raise
    else:
        row |= {"outcome": EQUAL, "why": ""}


class Counts:
    """A plugin of pytest that counts the outcomes of all tests and prints a table of them."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, ...]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcomes of a test, failed or not."""
        if report.when == "call":
            for name, row in report.user_properties:
                if name == PROPERTY:
                    self.of[tuple(row.values())] += 1

    def table(self) -> list[str]:
        """Return a line for each source, group, outcome and reason, then one of the totals."""
        lines = [f"| {' | '.join(row)} | {cases} |" for row, cases in sorted(self.of.items())]
        totals: Counter[str] = Counter()
        for (_, _, outcome, _), cases in self.of.items():
            totals[outcome] += cases
        return [*lines, ", ".join(f"{totals[name]} {name}" for name in (EQUAL, REFUSED, DIFFERENT))]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        for line in self.table():
            terminalreporter.line(line)
