"""Fixtures of tests that train, GPU or not: on the CPU, with one thread for each process."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that ``launch`` starts: the order of a sum depends on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
