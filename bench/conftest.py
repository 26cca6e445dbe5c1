"""What every benchmark shares: options, the rows of a run, what it prints, and the JSON."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from bench.catalogue import IN_ORDER, OVERVIEW, peers_of, problem_of
from bench.harness import machine, summary
from bench.harness.checked import Checked, Current
from bench.harness.machine import ROOT

BENCH = ROOT / "bench"
COLUMNS = ["median", "iqr", "min", "rounds"]
# With what comes before and after the measurements, an overview ends within three minutes.
OVERVIEW_SECONDS = 120.0
UNMEASURED = pytest.StashKey[list[dict[str, str]]]()
STARTED = pytest.StashKey[float]()
RESULTS = pytest.StashKey[Path]()
ROWS = pytest.StashKey[list[dict[str, Any]]]()
NOTES = pytest.StashKey[list[str]]()


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("bench needs pytest-benchmark: pip install --group bench")
    parser.getgroup("benchmark").addoption(
        "--bench-seconds",
        type=float,
        metavar="SECONDS",
        help="Start no further row after this time, and list the rows left over as not run. "
        "There is no limit by default, except where `pytest bench/` measures an overview on a "
        f"machine without CUDA ({OVERVIEW_SECONDS:.0f} seconds).",
    )


class ResultsFile:
    """A results file as every pytest-benchmark takes it.

    Since version 5.3 it opens a path; before, it enters an open file.
    """

    def __init__(self, path: Path):
        """Name the file; it is created when results are written."""
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __enter__(self) -> Any:
        self.file = self.path.open("wb")
        return self.file

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def __str__(self) -> str:
        return str(self.path)


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark and the terminal read their options
def pytest_configure(config):
    option = config.option
    config.stash[UNMEASURED], config.stash[ROWS], config.stash[NOTES] = [], [], []
    config.stash[STARTED] = time.monotonic()
    if not any(arg.startswith("--benchmark-columns") for arg in config.invocation_params.args):
        option.benchmark_columns = COLUMNS
    if all(path.is_relative_to(BENCH) for path in asked(config)):
        # Skipped rows are listed under "not measured", a line for each reason.
        option.reportchars = option.reportchars.replace("a", "fE")
    if option.benchmark_disable:
        return
    if option.benchmark_json is None:
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        option.benchmark_json = ResultsFile(config.rootpath / "build" / "bench" / name)
    config.stash[RESULTS] = path = path_of(option.benchmark_json)
    try:
        # Now, not when an hour of measurements wants to be saved.
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"--benchmark-json={path}: {error}") from None


def path_of(results: Any) -> Path:
    """Return the path of what ``--benchmark-json`` became: a path, or a file that has a name."""
    return Path(results if isinstance(results, str | os.PathLike) else results.name)


def asked(config: pytest.Config) -> list[Path]:
    """Return the files and folders on the command line."""
    paths = (argument.split("::")[0] for argument in config.args)
    return [(config.invocation_params.dir / path).resolve() for path in paths]


def is_overview(config: pytest.Config) -> bool:
    """Whether all of bench/ is asked for, and neither an expression nor a time limit is given."""
    option = config.option
    selected = option.keyword or option.markexpr or option.bench_seconds is not None
    return not selected and all(path == BENCH for path in asked(config))


def pytest_collection_modifyitems(config, items):
    kept, order = items[:], {case.name: place for place, case in enumerate(IN_ORDER)}

    def place(item: pytest.Item) -> int:
        row = row_of(item)
        return order[row.case.name] if row else -1

    # All that is measured of a case together: its inputs are made, and its peers checked, once.
    kept.sort(key=place)
    if not torch.cuda.is_available():
        kept = [item for item in kept if not (row_of(item) and row_of(item).case.device == "cuda")]
        if len(kept) < len(items):
            config.stash[NOTES].append(
                f"{len(items) - len(kept):,} GPU rows deselected: torch sees no CUDA device; "
                "on a GPU machine run bench/gpu.sh OUTDIR STAGE"
            )
        if is_overview(config):
            kept = overview(config, kept)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def row_of(item: pytest.Item) -> Any:
    """Return the row that a test of bench/ measures; None of another test."""
    if not item.path.is_relative_to(BENCH):
        return None
    return getattr(item, "callspec", None) and item.callspec.params.get("row")


def overview(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the rows that tell most on a CPU, in their order; limit the run's time and threads."""
    config.option.bench_seconds = OVERVIEW_SECONDS
    # Threads that wait for each other take tens of times longer where another process is busy.
    torch.set_num_threads(1)
    places = {}
    for item in items:
        for place, pattern in enumerate(OVERVIEW):
            if row_of(item) and re.fullmatch(pattern, item.callspec.id):
                places[item] = place
    config.stash[NOTES].append(
        f"{len(items) - len(places):,} CPU rows deselected: this is an overview, on one thread; "
        "-k EXPRESSION, a file or --bench-seconds=SECONDS chooses among all rows"
    )
    return sorted(places, key=places.__getitem__)


def pytest_report_collectionfinish(config):
    return config.stash[NOTES]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    """Treat SIGTERM as an interrupt, after which results are printed and saved; a second kills."""
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, before)
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    try:
        return (yield)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Append the row to a file of lines: a machine that goes keeps what was measured."""
    benchmark, path = (
        getattr(item, "funcargs", {}).get("benchmark"),
        item.config.stash.get(RESULTS, None),
    )
    if path and benchmark and benchmark.stats and "shape" in benchmark.extra_info:
        stats = {name: getattr(benchmark.stats.stats, name) for name in COLUMNS}
        row = {"name": item.name, "extra_info": benchmark.extra_info, "stats": stats}
        with lines_of(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return (yield)


def lines_of(results: Path) -> Path:
    """Return the file that holds the rows so far, until ``results`` are written."""
    return results.with_suffix(".jsonl")


@pytest.fixture(scope="session")
def checked(request) -> Iterator[Checked]:
    state = Checked(peers_of, problem_of)
    yield state
    # Profiling every peer takes longer than whoever interrupts a run wants to wait.
    if request.session.exitstatus != pytest.ExitCode.INTERRUPTED:
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
    """How much of ``--bench-seconds`` is left; infinite without a limit."""
    budget = request.config.getoption("--bench-seconds")
    spent = time.monotonic() - request.config.stash[STARTED]
    return float("inf") if budget is None else budget - spent


def pytest_benchmark_generate_machine_info(config):
    return machine.facts()


def pytest_benchmark_generate_commit_info(config):
    return machine.commit()


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_json(benchmarks):
    # An interrupt leaves a row that was not, or not wholly, timed and is not described.
    benchmarks[:] = [row for row in benchmarks if "shape" in row.extra_info]


def pytest_benchmark_update_json(config, output_json):
    output_json["unmeasured"] = config.stash[UNMEASURED]
    output_json["cases"] = {}
    for row in output_json["benchmarks"]:
        row["extra_info"] = info = dict(row["extra_info"])
        output_json["cases"][info["case"]] = info.pop("shape")
        # One number per round, and objects that JSON cannot hold: large, and no news.
        row["stats"].pop("data", None)
        row.update(params=None, options={})
    # Floats to six significant digits.
    text = json.dumps(output_json)
    output_json.update(json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}")))


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(config, benchmarks, group_by):
    config.stash[ROWS] = [row for row in benchmarks if "shape" in row["extra_info"]]
    benchmarks[:] = [row for row in config.stash[ROWS] if summary.is_timed(row)]
    groups = yield
    return summary.groups(benchmarks) if group_by == "group" else groups


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's table
def pytest_terminal_summary(terminalreporter, config):
    write, rows = terminalreporter.line, config.stash[ROWS]
    if summary.has_sdpa_on_a_cpu(rows):
        write(f"\n{summary.SDPA_LINE}")
    if lines := summary.memory_lines(rows):
        terminalreporter.section("memory")
        terminalreporter.write_line("\n".join(lines))
    if config.stash[UNMEASURED]:
        terminalreporter.section("not measured")
    for line in summary.unmeasured_lines(config.stash[UNMEASURED]):
        write(line)
    for line in config.stash[NOTES]:
        write(line)
    path = config.stash.get(RESULTS, None)
    if path and path.exists() and path.stat().st_size:
        lines_of(path).unlink(missing_ok=True)
        terminalreporter.section("results")
        write(f"{path}   (python -m bench.report {path})")
