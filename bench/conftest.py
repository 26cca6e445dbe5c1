"""What every benchmark shares: options, the record of what was not measured, and the JSON."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest

from bench.catalogue import IN_ORDER, peers_of, problem_of
from bench.harness import machine
from bench.harness.checked import Checked, Current
from bench.harness.machine import ROOT

COLUMNS = ["median", "iqr", "min", "rounds"]
UNMEASURED = pytest.StashKey[list[dict[str, str]]]()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("bench needs pytest-benchmark: pip install --group bench")
    parser.getgroup("benchmark").addoption(
        "--bench-seconds",
        type=float,
        metavar="SECONDS",
        help="Start no further benchmark after this time; what was not run is recorded.",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config):
    config.stash[UNMEASURED] = []
    config.stash[STARTED] = time.monotonic()
    config.option.benchmark_columns = config.option.benchmark_columns or COLUMNS
    if config.option.benchmark_disable:
        return
    if config.option.benchmark_json is None:
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        config.option.benchmark_json = config.rootpath / "build" / "bench" / name
    path = Path(getattr(config.option.benchmark_json, "name", config.option.benchmark_json))
    try:
        # Now, not when an hour of measurements wants to be saved.
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"--benchmark-json={path}: {error}") from None


def pytest_collection_modifyitems(items):
    # All that is measured of a case together: its inputs are made, and its peers checked, once.
    order = {case.name: place for place, case in enumerate(IN_ORDER)}

    def place(item: pytest.Item) -> int:
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        return order[row.case.name] if row and item.path.is_relative_to(ROOT / "bench") else -1

    items.sort(key=place)


@pytest.fixture(scope="session")
def checked() -> Iterator[Checked]:
    state = Checked(peers_of, problem_of)
    yield state
    state.name_kernels()


@pytest.fixture(scope="session")
def current() -> Current:
    return Current()


@pytest.fixture
def unmeasured(request) -> Callable[..., NoReturn]:
    """A function that records why a row has no number, and ends its test.

    Statuses: ``absent`` (the peer is missing or refuses the case) and ``not run`` (no time left)
    skip the test; ``wrong`` (it failed the correctness gate) fails it.
    """

    def record(status: str, reason: str, **row: str) -> NoReturn:
        entry = {**row, "status": status, "reason": reason}
        if entry not in request.config.stash[UNMEASURED]:
            request.config.stash[UNMEASURED].append(entry)
        if status == "wrong":
            raise pytest.fail.Exception(reason, pytrace=False) from None
        raise pytest.skip.Exception(f"{status}: {reason}") from None

    return record


@pytest.fixture
def seconds_left(request) -> float:
    """How much of ``--bench-seconds`` is left; infinite without."""
    budget = request.config.getoption("--bench-seconds")
    spent = time.monotonic() - request.config.stash[STARTED]
    return float("inf") if budget is None else budget - spent


def pytest_benchmark_generate_machine_info(config):
    return machine.facts()


def pytest_benchmark_generate_commit_info(config):
    return machine.commit()


def pytest_benchmark_update_json(config, output_json):
    output_json["unmeasured"] = config.stash[UNMEASURED]
    # An interrupt leaves a row that was timed and not yet described.
    described = [row for row in output_json["benchmarks"] if "shape" in row["extra_info"]]
    output_json["benchmarks"], output_json["cases"] = described, {}
    for row in output_json["benchmarks"]:
        info = row["extra_info"]
        output_json["cases"][info["case"]] = info.pop("shape")
        # One number per round, and objects that JSON cannot hold: large, and no news.
        row["stats"].pop("data")
        row.update(params=None, options={})
    # Floats to six significant digits.
    text = json.dumps(output_json)
    output_json.update(json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}")))


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[UNMEASURED]:
        terminalreporter.section("not measured")
    for entry in config.stash[UNMEASURED]:
        terminalreporter.line("  ".join(entry.values()))
    path = getattr(config.option.benchmark_json, "name", config.option.benchmark_json)
    if path and Path(path).exists():
        terminalreporter.section("results")
        terminalreporter.line(f"{path}   (python -m bench.report {path})")
