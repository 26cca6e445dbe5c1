"""Which of the collected tests run."""

import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

# What begins a run of the tests of a folder that need a process of their own.
ENVIRONMENT = {"tests/interpreter": "TRITON_INTERPRET=1 ", "tests/compiled": "LEANER_EXECUTE=1 "}
REASON = "a process of its own"  # ends the reason why their files skip themselves elsewhere


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the first case of each parametrized test, and all other tests."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    """Leave only the chosen ones of the items, and report the others as deselected."""
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


class Unrun:
    """Fail a run that selected tests of a folder of which none could run in its process.

    Otherwise a contributor's run would be green although the tests that matter skipped themselves.
    """

    def __init__(self) -> None:
        self.skipped: dict[str, None] = {}  # folders, in order
        self.ran: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that skipped itself."""
        if report.skipped and REASON in str(report.longrepr):
            self.skipped[_folder(report.nodeid)] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that ran."""
        self.ran.add(_folder(report.nodeid))

    def folders(self) -> list[str]:
        """Return the folders of which files skipped themselves and no test ran."""
        return [folder for folder in self.skipped if folder not in self.ran]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail the run."""
        passed = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if passed and self.folders():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Print, below the summary, the commands that run them."""
        for folder in self.folders():
            keyword = f" -k {shlex.quote(config.option.keyword)}" if config.option.keyword else ""
            command = f"{ENVIRONMENT.get(folder, '')}pytest {folder}{keyword}"
            config.get_terminal_writer().line(
                f"FAILED: no test of {folder} ran, which needs {REASON}: {command}", red=True
            )


def _folder(nodeid: str) -> str:
    """Return the folder of tests that a file or a test is in, such as "tests/interpreter"."""
    return "/".join(Path(nodeid.partition("::")[0]).parts[:2])
