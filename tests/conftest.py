"""What every test shares: memory that shows what nobody wrote, and the choice of cases."""

from collections.abc import Iterator

import pytest
import torch

from tests import selection


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in every test, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        type=int,
        default=50,
        metavar="N",
        help="how often tests/faults kill a run; fewer than 50 also leave out what takes long",
    )
    parser.addoption("--first-case", action="store_true", help="run the first case of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(selection.Unrun())


# After -k and -m have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("first_case"):
        selection.keep(config, items, selection.first_cases(items))
