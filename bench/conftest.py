"""Configure all benchmarks: options, the rows of a run, its printed output and its JSON."""

import difflib
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch

from bench.attention.catalogue import peers_of, problem_of
from bench.catalogue import IN_ORDER, OVERVIEW, legend, size
from bench.harness import command, machine
from bench.harness.checked import Current, Row, first_line, unmeasured_lines
from bench.harness.gate import WrongError
from bench.harness.machine import ROOT
from bench.harness.peers import REFUSALS, AbsentError

BENCH = ROOT / "bench"
# The first one orders the rows of a table.
COLUMNS = ["median", "iqr", "min", "rounds"]
TIMES = {"min", "max", "mean", "median", "stddev", "iqr"}
CASES = {case.name: case for case in IN_ORDER}
# Including set-up and output, an overview ends within three minutes.
OVERVIEW_SECONDS = 120.0
UNMEASURED = pytest.StashKey[list[dict[str, str]]]()
STARTED = pytest.StashKey[float]()
NOTES = pytest.StashKey[list[str]]()
SHOWN = pytest.StashKey[set[tuple[str, str]]]()
NAMES = pytest.StashKey[dict[str, None]]()


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("bench needs pytest-benchmark: pip install --group bench")
    parser.getgroup("benchmark").addoption(
        "--bench-seconds",
        type=float,
        metavar="SECONDS",
        help="Start no new row after this many seconds, and list the rest as not run. There is no "
        "limit by default, except that `pytest bench/` on a machine without CUDA measures an "
        f"overview for {OVERVIEW_SECONDS:.0f} seconds.",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark and others read their options
def pytest_configure(config):
    config.stash[UNMEASURED], config.stash[NOTES] = [], []
    config.stash[SHOWN], config.stash[NAMES] = set(), {}
    config.stash[STARTED] = time.monotonic()
    arguments = config.invocation_params.args
    if not any(arg.startswith("--benchmark-columns") for arg in arguments):
        config.option.benchmark_columns = COLUMNS
    first = config.option.benchmark_columns[0]
    if first in TIMES and not any(arg.startswith("--benchmark-sort") for arg in arguments):
        config.option.benchmark_sort = first
    # Skipped rows are listed under "not measured", a line for each reason.
    config.option.reportchars = config.option.reportchars.replace("a", "fE")
    if is_overview(config) and not torch.cuda.is_available():
        config.option.keyword, config.option.bench_seconds = OVERVIEW, OVERVIEW_SECONDS
        # Threads that wait for each other become tens of times slower if another process is busy.
        torch.set_num_threads(1)
        config.stash[NOTES].append(
            "this is an overview, on one thread: -k EXPRESSION, a file or --bench-seconds=SECONDS "
            "chooses among all rows"
        )


def is_overview(config: pytest.Config) -> bool:
    """Whether all of bench/ is asked for, and neither an expression nor a time limit is given."""
    option = config.option
    folder = config.invocation_params.dir
    paths = [(folder / argument.split("::")[0]).resolve() for argument in config.args]
    selected = option.keyword or option.markexpr or option.bench_seconds is not None
    return not selected and paths == [BENCH]


def pytest_collection_modifyitems(config, items):
    kept, order = items[:], {name: place for place, name in enumerate(CASES)}
    rows = filter(None, map(row_of, items))
    names = (name for row in rows for name in (row.case.name, row.name, row.what, row.mode))
    config.stash[NAMES] = dict.fromkeys(filter(None, names))
    # All rows of a case together: its inputs are created, and its peers checked, only once.
    kept.sort(key=lambda item: order[row_of(item).case.name] if row_of(item) else -1)
    if not torch.cuda.is_available():
        kept = [item for item in kept if not (row_of(item) and row_of(item).case.device == "cuda")]
        if len(kept) < len(items):
            config.stash[NOTES].append(
                f"{len(items) - len(kept):,} GPU rows deselected: torch sees no CUDA device; "
                "on a GPU machine run bench/gpu.sh OUTDIR STAGE"
            )
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def row_of(item: pytest.Item) -> Any:
    """Return the row that a test of bench/ measures, or None for other tests."""
    if not item.path.is_relative_to(BENCH):
        return None
    return getattr(item, "callspec", None) and item.callspec.params.get("row")


@pytest.hookimpl(tryfirst=True)  # before the notes are printed
def pytest_collection_finish(session):
    if any(map(row_of, session.items)) and (line := command.other_attention("bench")):
        raise pytest.UsageError(line)
    keyword = session.config.option.keyword
    if keyword and not session.items:
        session.config.stash[NOTES].append(
            nothing_selected(keyword, [*session.config.stash[NAMES]])
        )


def nothing_selected(keyword: str, names: list[str]) -> str:
    """Return a line with the parts of ``-k KEYWORD`` that are in no name, and similar names."""
    words = dict.fromkeys(re.findall(r"[^\s()]+", keyword)).keys() - {"and", "or", "not"}
    parts = [
        part for word in sorted(words) for part in ([word] if "-" not in word else word.split("-"))
    ]
    unknown = [part for part in parts if not any(part.lower() in name.lower() for name in names)]
    near = [name for part in unknown for name in difflib.get_close_matches(part, names, n=4)]
    line = f"-k {keyword!r} selects nothing that is measured here"
    if unknown:
        line += f": no case and no peer is named {', '.join(unknown)}"
    if near:
        line += f"; the nearest are {', '.join(dict.fromkeys(near))}"
    return f"{line}; bench/README.md lists all names"


def pytest_report_collectionfinish(config):
    return config.stash[NOTES]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    """Treat SIGTERM as an interrupt, which prints and saves the measurements; a second kills."""
    before = signal.getsignal(signal.SIGTERM)

    def stop(_number: int, _frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, before)
        raise KeyboardInterrupt("SIGTERM")

    signal.signal(signal.SIGTERM, stop)
    try:
        return (yield)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def current() -> Current:
    return Current(peers_of, problem_of)


@pytest.fixture
def attempt(request, benchmark) -> Callable[[Row], Any]:
    """Check and time a row in a context; the dictionary's final contents join its result.

    A row without a number ends its test, and the reason is recorded: ``absent`` (the peer is
    missing or refuses the case) and ``not run`` (no time left) skip it; ``wrong`` (it failed the
    correctness gate) fails it.
    """
    config = request.config

    def end(status: str, reason: str, row: Row) -> NoReturn:
        entry = {"case": row.case.name, "peer": row.name, "status": status, "reason": reason}
        if entry not in config.stash[UNMEASURED]:
            config.stash[UNMEASURED].append(entry)
        if status == "wrong":
            raise pytest.fail.Exception(reason, pytrace=False) from None
        raise pytest.skip.Exception(f"{status}: {reason}") from None

    @contextmanager
    def attempt(row: Row) -> Iterator[dict[str, Any]]:
        what = " ".join(word for word in (row.what, row.mode) if word)
        limit = config.getoption("--bench-seconds")
        if limit is not None and time.monotonic() - config.stash[STARTED] >= limit:
            end("not run", f"{what}: the time of --bench-seconds was spent", row)
        info: dict[str, Any] = {}
        try:
            yield info
        except AbsentError as absent:
            end("absent", str(absent), row)
        except WrongError as wrong:
            end("wrong", str(wrong), row)
        except REFUSALS as error:
            if row.ours:
                raise
            end("absent", f"refuses {what or 'the case'}: {first_line(error)}", row)
        benchmark.extra_info.update(row.facts() | info)

    return attempt


def pytest_benchmark_generate_machine_info(config):
    return machine.facts()


def pytest_benchmark_generate_commit_info(config):
    return machine.commit()


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_json(benchmarks):
    # An interrupt leaves a row that was not, or not fully, timed and has no description.
    benchmarks[:] = [row for row in benchmarks if "shape" in row.extra_info]


def pytest_benchmark_update_json(config, output_json):
    output_json["unmeasured"] = config.stash[UNMEASURED]
    output_json["cases"] = {}
    for row in output_json["benchmarks"]:
        row["extra_info"] = info = dict(row["extra_info"])
        output_json["cases"][info["case"]] = info.pop("shape")
        # One number per round, and objects that JSON cannot hold: large, and no news.
        row["stats"].pop("data", None)
        # `pytest-benchmark compare --group-by=param:row` reads the row's name.
        row.update(params=dict.fromkeys(row["params"] or (), row["param"]), options={})
    output_json.update(command.rounded(output_json))


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(config, benchmarks):
    """Name rows for their peer, and groups for their case and its size."""
    benchmarks[:] = [row for row in benchmarks if "shape" in row["extra_info"]]
    titles = {}
    for row in benchmarks:
        info = row["extra_info"]
        case, peer, shape = info["case"], info["peer"], info["shape"]
        row["name"] = " ".join([peer, *filter(None, [shape.get("variant")])])
        if "overhead" in info:
            row["name"] += f" {info['overhead']:+.0%} a step, IQR {info['overhead_iqr']:.0%}"
        titles[row["group"]] = f"{case} {size(shape)}{row['group'].removeprefix(case)}"
        config.stash[SHOWN].add((case, peer))
    groups = yield
    return [(titles.get(group, group), rows) for group, rows in groups]


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's table
def pytest_terminal_summary(terminalreporter, config):
    if shown := config.stash[SHOWN]:
        terminalreporter.section("what the rows are")
        terminalreporter.line("(2.00) beside a time: twice the least of its column and table")
        lines = legend(case for case in IN_ORDER if case.name in {name for name, _ in shown})
        for peer, sentence in lines.items():
            if peer in {name for _, name in shown}:
                terminalreporter.line(f"{peer}: {sentence}")
    if config.stash[UNMEASURED]:
        terminalreporter.section("not measured")
    for line in (*unmeasured_lines(config.stash[UNMEASURED]), *config.stash[NOTES]):
        terminalreporter.line(line)
