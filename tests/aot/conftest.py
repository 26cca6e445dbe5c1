"""``--gpus 80,90`` compiles for some of the supported GPUs alone, ``all`` for every one."""

import pytest

from bench import resources


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpus", help="compute capabilities with commas between")


def pytest_configure(config: pytest.Config) -> None:
    gpus = config.getoption("--gpus")
    if gpus in (None, "all"):
        return
    chosen = tuple(map(int, gpus.split(",")))
    if not set(chosen) <= set(resources.SUPPORTED):
        raise pytest.UsageError(f"--gpus must be of {resources.SUPPORTED}, got {gpus}")
    # Before the tests, which take it from here, are imported.
    resources.SUPPORTED = chosen
