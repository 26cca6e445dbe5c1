"""What every test shares: memory that shows what nobody wrote, and the record of compatibility."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import compatibility_record, selection


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compat-results",
        type=Path,
        metavar="FILE",
        help="write what the adapters' tests record, of which docs/compatibility.md is made",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=50,
        metavar="N",
        help="how often tests/faults kill a run; fewer than 50 also leave out what takes long",
    )
    parser.addoption("--first-case", action="store_true", help="run the first case of each test")


# After -k and -m have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("first_case"):
        selection.keep(config, items, selection.first_cases(items))


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--compat-results", default=None)
    # A worker of pytest-xdist sends its reports to the process that started it, which writes.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(compatibility_record.Recorder(path))


@pytest.fixture
def record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it at the end of a test, with the keywords of ``compatibility_record.add``."""
    compatibility_record.expect(request.node)
    judged = compatibility_record.Judged()
    for name in compatibility_record.judging():
        monkeypatch.setattr(sys.modules[name], "assert_within_budget", judged)
    return partial(compatibility_record.add, request.node, judged)
