"""Faults are injected on the CPU; what each came to is kept for a table."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import table
from tests.faults.zygote import Zygote
from tests.train.on_the_cpu import no_gpu, one_thread

BEGAN = time.monotonic()


__all__ = ["no_gpu", "one_thread"]


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> None:
    """For what takes long: left out where few kills are asked for."""
    if pytestconfig.getoption("--kills") < 50:
        pytest.skip("takes long: part of the full suite, pytest tests/faults")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes that train: for all that need not be started by torchrun."""
    with Zygote() as zygote:
        yield zygote


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
