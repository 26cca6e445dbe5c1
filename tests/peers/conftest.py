"""Cases of other projects' tests, put to our functions; their outcomes are counted."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.peers import outcomes


def pytest_configure(config: pytest.Config) -> None:
    # A worker of pytest-xdist sends its reports to the process that started it, which prints.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(outcomes.Counts())


@pytest.fixture
def settle(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``outcomes.settle`` for the test at hand."""
    return partial(outcomes.settle, request.node)
