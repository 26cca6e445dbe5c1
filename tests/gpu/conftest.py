"""Tests of this folder need a GPU, or rehearse without one (``--rehearse``)."""

import os
import sys
import tomllib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests import selection

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter.conftest import prepare_the_language_once_a_launch, rounding  # noqa: F401

# Where time is limited: what no GPU has run yet, then few and quick tests of models of others.
ORDER = {"test_compile_gpu.py": -2, "test_transformers_gpu.py": -1}
NOT_REHEARSED = tomllib.loads((Path(__file__).parent / "not_rehearsed.toml").read_text("utf-8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse",
        choices=["bodies", "all"],
        help="run tests/gpu without a GPU (rehearsal.py): one case of each test, or all",
    )


class ReplaceLostWorkers:
    """End a worker of pytest-xdist whose CUDA context is lost, so that another takes its place."""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # torch.AcceleratorError is one
                sys.stderr.write(f"the CUDA context is lost after {nodeid}: {error}\n")
                sys.stderr.flush()
                os._exit(70)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ReplaceLostWorkers())
    if config.getoption("rehearse"):
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise pytest.UsageError("--rehearse needs TRITON_INTERPRET=1, in a process of its own")
        from tests.gpu import rehearsal

        rehearsal.begin()


@pytest.fixture(autouse=True)
def draw_the_same_numbers() -> None:
    """Whichever tests ran before, and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compile_anew() -> None:
    """PyTorch compiles one function a few times only, and the cases of a test share theirs."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("rehearse")
    if wanted:
        leave_out(config, items, one_each=wanted == "bodies")
    elif torch.cuda.is_available():
        items.sort(key=lambda item: ORDER.get(item.path.name, 0))
    else:
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: none is visible"))


def leave_out(config: pytest.Config, items: list[pytest.Item], one_each: bool) -> None:
    """Deselect what is listed and, if ``one_each``, all but the first other case of each test."""
    for item in items:
        for name, value in NOT_REHEARSED["smaller"].get(item.path.name, {}).items():
            assert hasattr(item.module, name), f"{item.path.name} has no {name}"
            setattr(item.module, name, value)
    listed = {name for entry in NOT_REHEARSED["left_out"] for name in entry["tests"]}
    chosen = []
    for item in items:
        case = f"{item.path.name}::{item.name}"
        if not listed & {case, case.partition("[")[0]}:
            chosen.append(item)
    selection.keep(config, items, selection.first_cases(chosen) if one_each else chosen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("rehearse") and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped, and not listed: {report.longrepr}"
    return report
