"""What comes of a case of another project's tests: equal, refused for a known reason, different.

``pytest tests/peers --peers-results=FILE`` counts outcomes; ``python -m bench.report``
renders the counts that are committed.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaner_kernels.ops._checks import ArgumentError
from tests import compatibility_record

PROPERTY = "peers"
EQUAL, REFUSED, DIFFERENT = "equal", "refused", "different"
# Why a call is refused, by the text of the error. One that is refused no longer is judged as any.
REASONS = {
    r"alibi_slopes are not supported: .*": "ALiBi by its slopes: pass them in `attn_mask`",
    r"query must have a head dimension up to 128, got \d+": "a varlen head dimension above 128",
    r"softcap needs a head dimension up to 128, got \d+": "a softcap at a head dimension above 128",
    r"query must be \(B, H, N, D\), got .* with a key of \d axes": "axes that differ, to broadcast",
    r"attention_varlen\(\) got an unexpected keyword argument 'window_size'": (
        "a window in `attention_varlen`: pad, and call `attention` with a mask"
    ),
    r"\w+ has no attention module to swap \(.*computes its attention itself.*\).*": (
        "a model whose attention does not dispatch"
    ),
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


class Recorder(compatibility_record.Recorder):
    """A plugin of pytest that counts the outcomes of all tests and writes them at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counts: Counter[tuple[str, ...]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcomes of a test, failed or not."""
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call":
            for name, row in report.user_properties:
                if name == PROPERTY:
                    self.counts[tuple(row.values())] += 1

    def pytest_sessionfinish(self) -> None:
        """Write the counts in an order that does not depend on which process was faster."""
        names = "source", "group", "outcome", "why", "cases"
        self.write(peers=[dict(zip(names, (*row, n))) for row, n in sorted(self.counts.items())])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many of each there were."""
        totals: Counter[str] = Counter()
        for (_, _, outcome, _), number in self.counts.items():
            totals[outcome] += number
        said = ", ".join(f"{totals[each]} {each}" for each in (EQUAL, REFUSED, DIFFERENT))
        terminalreporter.line(f"cases of others: {said}; in {self.path}")
