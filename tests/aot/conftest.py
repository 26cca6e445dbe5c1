"""``--cards 80,90`` compiles for some of the supported cards alone."""

import pytest

from bench import resources


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cards", help="compute capabilities with commas between")


def pytest_configure(config: pytest.Config) -> None:
    cards = config.getoption("--cards")
    if cards is None:
        return
    chosen = tuple(map(int, cards.split(",")))
    if not set(chosen) <= set(resources.SUPPORTED):
        raise pytest.UsageError(f"--cards must be of {resources.SUPPORTED}, got {cards}")
    # Before the tests, which take it from here, are imported.
    resources.SUPPORTED = chosen
