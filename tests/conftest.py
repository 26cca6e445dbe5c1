"""Uninitialised memory is NaN in every test, so that an element nobody wrote shows."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
