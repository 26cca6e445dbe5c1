"""Which of the collected tests run."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import backends

REASON = "a process of its own"  # ends the reason why a file of another backend skips itself


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the first case of each parametrized test, and all other tests."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def rehearsed(items: list[pytest.Item], listed: dict[str, Any]) -> list[pytest.Item]:
    """Leave out the tests that cannot run without a GPU, and make constants of others smaller.

    Args:
        items: tests of a GPU.
        listed: tests/gpu/not_rehearsed.toml.
    """
    for item in items:
        for name, value in listed["smaller"].get(item.path.name, {}).items():
            assert hasattr(item.module, name), f"{item.path.name} has no {name}"
            setattr(item.module, name, value)
    left_out = {name for entry in listed["left_out"] for name in entry["tests"]}
    cases = {item: f"{item.path.name}::{item.name}" for item in items}
    return [i for i in items if not left_out & {cases[i], cases[i].partition("[")[0]}]


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    """Leave only the chosen ones of the items, and report the others as deselected."""
    kept = set(chosen)
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


class Unrun:
    """Fail a run that selected tests of a folder of which none runs on its backend.

    Otherwise a contributor's run would be green although the tests that matter were left out. Who
    names a backend knows of it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.named = config.getoption("backend") or config.getoption("rehearse")
        self.left_out: dict[str, str] = {}  # the backend that a folder's tests need
        self.ran: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that skipped itself."""
        if report.skipped and REASON in str(report.longrepr):
            folder = _folder(report.nodeid)
            self.left_out.setdefault(folder, backends.FOLDERS.get(folder, backends.CPU))

    def note(self, items: Iterable[pytest.Item]) -> None:
        """Note tests of another backend, but of a GPU, which may not be there."""
        for item in items:
            wanted = backends.backends_of(item)
            if backends.GPU not in wanted:
                self.left_out.setdefault(_folder(item.nodeid), wanted[0])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist noted."""
        self.left_out |= getattr(node, "workeroutput", {}).get("left_out", {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran."""
        self.ran.add(_folder(report.nodeid))

    def unrun(self) -> dict[str, str]:
        """Return the folders of which no test ran, with the backend that they need."""
        if self.named:
            return {}
        return {folder: b for folder, b in self.left_out.items() if folder not in self.ran}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail the run."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self.left_out
        passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if passed and self.unrun() and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print, below the summary, the commands that run them."""
        for folder, backend in self.unrun().items():
            keyword = f" -k {shlex.quote(config.option.keyword)}" if config.option.keyword else ""
            config.get_terminal_writer().line(
                f"FAILED: no test of {folder} ran, which needs {REASON}: "
                f"pytest {folder} --backend {backend}{keyword}",
                red=True,
            )


def _folder(nodeid: str) -> str:
    """Return the folder of tests that a file or a test is in, such as "tests/interpreter"."""
    return "/".join(Path(nodeid.partition("::")[0]).parts[:2])
