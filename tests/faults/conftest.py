"""Faults are injected on the CPU; what each came to is kept for a table."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.faults import table

BEGAN = time.monotonic()


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that a test starts: the order of a sum depends on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it at the end of a test, with the keywords of ``table.outcome``; often, if need be."""

    def record(**row: object) -> None:
        # The process that prints the table need not be the one that ran the test.
        request.node.user_properties.append((table.PROPERTY, table.outcome(**row)))

    return record


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-results",
        type=Path,
        metavar="FILE",
        help="write what the faults came to, of which docs/reliability.md is made",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = [
        row
        for report in terminalreporter.stats.get("passed", [])
        if report.when == "call"
        for name, row in report.user_properties
        if name == table.PROPERTY
    ]
    if not rows:
        return
    rows = table.grouped(rows)
    failed = sum(len(terminalreporter.stats.get(kind, [])) for kind in ("failed", "error"))
    terminalreporter.section("faults")
    for line in table.plain(rows, failed):
        terminalreporter.line(line)
    path = config.getoption("--faults-results", default=None)
    if path is not None:
        table.write(path, rows, seconds=time.monotonic() - BEGAN, failed=failed)
