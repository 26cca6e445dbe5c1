"""Cases of other projects' tests, put to our functions; their outcomes are counted."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.peers import outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peers-results",
        type=Path,
        metavar="FILE",
        help="write how many cases of others are equal, refused and different",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--peers-results", default=None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(outcomes.Recorder(path))


@pytest.fixture
def settle(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``outcomes.settle`` for the test at hand."""
    return partial(outcomes.settle, request.node)
