"""Tests of compiled kernels, executed: on a GPU that is not there, in a process of its own."""

import os

import pytest

if os.environ.get("LEANER_EXECUTE") == "1":
    from tests.gpu import rehearsal

    rehearsal.begin()


@pytest.fixture(scope="session", autouse=True)
def executor() -> None:
    """Skip, with the reason, where the executor cannot be built."""
    from bench.gpu_model import library

    try:
        library.load()
    except library.NoCompilerError as error:
        pytest.skip(str(error))
