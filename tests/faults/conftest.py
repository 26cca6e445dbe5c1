"""Faults are injected on the CPU."""

from collections.abc import Iterator

import pytest

from tests.faults.zygote import Zygote
from tests.train.on_the_cpu import no_gpu, one_thread

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
