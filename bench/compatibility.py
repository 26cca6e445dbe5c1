"""The page "which models, what speed, what is refused", of what tests recorded and benches timed.

``python -m bench.compatibility`` renders docs/compatibility.md from the committed files of
bench/results; ``--check`` only checks that it is up to date. With files named, their page goes to
standard output, or with ``--short`` one line for each model.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.adapters.cases import KIND, LEANER, LIBRARY, MONITORED
from bench.pages import suites
from bench.pages.compatibility_text import (
    INSTEAD,
    INTRODUCTION,
    LIBRARIES,
    NO_GPU,
    SPEED,
    STATED,
    TRANSFORMS,
    Stated,
)
from bench.pages.markdown import number, provenance, ratio, table, titled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "bench" / "results"
REFUSED = "family", "class", "what", "message", "instead"
LEFT = "family", "class", "what", "why"


@dataclass(frozen=True)
class Fact:
    """What one test found, as ``tests/compatibility_record.py`` describes it."""

    machine: str
    library: str
    family: str
    architecture: str
    case: str
    dtype: str
    status: str
    error: float | None
    budget: float | None
    note: str
    test: str


@dataclass(frozen=True)
class Timed:
    """A model with one attention in one direction; seconds, bytes."""

    machine: str
    case: str
    library: str
    model: str
    size: str
    direction: str
    peer: str
    median: float
    iqr: float
    peak: int | None


@dataclass(frozen=True)
class Run:
    """One file: rows of the tests, or of the benchmark, or of both."""

    path: Path
    date: str
    facts: list[Fact]
    timed: list[Timed]
    unmeasured: list[dict[str, str]]
    machine_info: dict[str, Any]
    commit: dict[str, Any]


def load(path: Path) -> Run:
    """Read one file of bench/results; the rows of other benchmarks are left out.

    Raises:
        SystemExit: the file cannot be read, is no such result, or is of a run in which a test of
            the adapters failed; in one line.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        info = data["machine_info"]
        names = {"cuda": info["gpu"] and info["gpu"]["name"], "cpu": f"CPU: {info['cpu']['model']}"}
        if data.get("failed"):
            raise SystemExit(f"{path}: not to be published, failed: {', '.join(data['failed'])}")
        facts = [
            Fact(names[row["device"]], **{k: v for k, v in row.items() if k != "device"})
            for row in data.get("compatibility", ())
        ]
        timed = []
        for entry in data.get("benchmarks", ()):
            extra, stats = entry["extra_info"], entry["stats"]
            if extra.get("kind") == KIND:
                case = data["cases"][extra["case"]]
                timed.append(
                    Timed(
                        machine=names[case["device"]],
                        case=extra["case"],
                        library=case["library"],
                        model=case["op"].removeprefix(f"{case['library']} "),
                        size=f"{case['size']}, {case['dtype']}",
                        direction=extra["direction"],
                        peer=extra["peer"],
                        median=stats["median"],
                        iqr=stats["iqr"],
                        peak=extra["peak_memory_bytes"],
                    )
                )
        unmeasured = [e for e in data.get("unmeasured", ()) if "adapter_" in e["case"]]
        return Run(path, data["datetime"], facts, timed, unmeasured, info, data["commit_info"])
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a result of tests or bench ({error!r})") from None


def committed(folder: Path = RESULTS) -> list[Run]:
    """Return the committed files that hold rows of the adapters, oldest first."""
    # Those of the tests, and every run of the benchmarks: on a GPU one file holds them all.
    paths = *folder.glob("compatibility-*.json"), *folder.glob("20*.json")
    runs = [load(path) for path in sorted(paths)]
    return sorted((run for run in runs if run.facts or run.timed), key=lambda run: run.date)


def facts_of(runs: Iterable[Run]) -> list[Fact]:
    """Return the newest facts of each machine: those of its last run of the tests, whole."""
    newest = {run.facts[0].machine: run.facts for run in runs if run.facts}
    return [fact for facts in newest.values() for fact in facts]


def timed_of(runs: Iterable[Run]) -> list[Timed]:
    """Return the newest row of each kind."""
    newest = {(t.machine, t.case, t.direction, t.peer): t for run in runs for t in run.timed}
    return list(newest.values())


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Render a table without columns of numbers, or nothing where there is no row."""
    return table(head, rows, left=len(head))


def equal_rows(facts: Iterable[Fact]) -> Iterator[Sequence[str]]:
    """Yield each model with the cases in which it was equal, and its largest error."""
    groups: dict[tuple[str, ...], list[Fact]] = {}
    for fact in facts:
        if fact.status == "equal":
            key = fact.family, fact.architecture, fact.machine, fact.dtype
            groups.setdefault(key, []).append(fact)
    # Dtypes in which the same cases were equal share a row.
    rows: dict[tuple[str, ...], list[Fact]] = {}
    for (family, architecture, machine, _), group in groups.items():
        cases = "; ".join(dict.fromkeys(fact.case for fact in group))
        rows.setdefault((family, architecture, machine, cases), []).extend(group)
    for (family, architecture, machine, cases), group in rows.items():
        dtypes = ", ".join(dict.fromkeys(fact.dtype for fact in group))
        where = "CPU" if machine.startswith("CPU: ") else machine
        notes = dict.fromkeys(note for fact in group for note in fact.note.split("; ") if note)
        cells = cases, _largest_error(group), f"{where}, {dtypes}", "; ".join(notes) or "–"
        yield family, f"`{architecture}`", *cells


def _largest_error(group: Iterable[Fact]) -> str:
    """Return the largest part of a budget that was used, in per cent, and the case it is from."""
    judged = [fact for fact in group if fact.error is not None and fact.budget]
    shares = {fact.case: fact.error / fact.budget for fact in judged}
    if not shares:
        return "–"
    worst = max(shares, key=lambda case: shares[case])
    return f"{shares[worst]:.0%} ({worst})"


def refused_rows(facts: Iterable[Fact]) -> Iterator[Sequence[str]]:
    """Yield what is refused, once, with the message and what to do instead."""
    refused = [fact for fact in facts if fact.status == "refused"]
    for family, architecture, case, note in dict.fromkeys(
        (f.family, f.architecture, f.case, f.note) for f in refused
    ):
        yield family, f"`{architecture}`", case, code(note), instead(note)


def left_rows(facts: Iterable[Fact]) -> Iterator[Sequence[str]]:
    """Yield what an adapter leaves as it was, once, with the reason."""
    left = [fact for fact in facts if fact.status == "left"]
    for row in dict.fromkeys((f.family, f.architecture, f.case, f.note) for f in left):
        family, architecture, case, note = row
        yield family, f"`{architecture}`", case, note


def code(text: str) -> str:
    """Return a message as code."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def instead(message: str) -> str:
    """Return what to do where a message was raised: its own advice, or else ours."""
    for words, verb in (("does not support: ", ""), ("; use ", "use ")):
        _, found, advice = message.rpartition(words)
        if found:
            return verb + advice
    return next((advice for words, advice in INSTEAD.items() if words in message), "–")


def speed_tables(timed: Iterable[Timed]) -> Iterator[str]:
    """Render the timed models of one library, a table for each machine, then their sizes."""
    timed = list(timed)
    head = "model", "", "its own, ms", "leaner, ms", "× own", "IQR", "with κ, ms", "κ adds"
    for machine in dict.fromkeys(row.machine for row in timed):
        here = [row for row in timed if row.machine == machine]
        peaks = ["peak, MiB"] if any(row.peak is not None for row in here) else []
        columns = *head, *peaks
        yield from (f"### Speed on {machine}", "")
        yield from text_table(columns, (row[: len(columns)] for row in speed_rows(here)))
        yield from dict.fromkeys(f"- {row.model}: {row.size}." for row in here)
        yield ""


def speed_rows(timed: Sequence[Timed]) -> Iterator[list[str]]:
    """Yield the cells of each model and direction; of two the library's own first, then ours."""
    for case, direction in dict.fromkeys((row.case, row.direction) for row in timed):
        found = {t.peer: t for t in timed if (t.case, t.direction) == (case, direction)}
        own, ours, monitored = (found.get(name) for name in (LIBRARY, LEANER, MONITORED))
        yield [
            next(iter(found.values())).model,
            "forward" if direction == "forward" else "forward and backward",
            _ms(own),
            _ms(ours),
            ratio(own and own.median, ours and ours.median),
            ", ".join("–" if t is None else f"{t.iqr / t.median:.0%}" for t in (own, ours)),
            _ms(monitored),
            "–"
            if monitored is None or ours is None
            else f"{monitored.median / ours.median - 1:+.0%}",
            ", ".join(_mib(t) for t in (own, ours)),
        ]


def _ms(row: Timed | None) -> str:
    return "–" if row is None else number(row.median * 1e3)


def _mib(row: Timed | None) -> str:
    return "–" if row is None or row.peak is None else f"{row.peak / 2**20:,.0f}"


def missing(runs: Iterable[Run]) -> Iterator[str]:
    """List the models that were not timed, and why."""
    for run in runs:
        for entry in run.unmeasured:
            yield f"- {entry['case']}, {entry['peer']}, {entry['status']}: {entry['reason']}"


def stated(rows: Iterable[Stated]) -> Iterator[str]:
    """Render what was written by hand, each row with the test that holds it."""
    linked = (
        (row.what, row.answer, f"[{row.test.split('::')[1]}](../{row.test.split('::')[0]})")
        for row in rows
    )
    yield from text_table(("what", "how it is", "held by"), linked)


def section(library: str, facts: Sequence[Fact], timed: Sequence[Timed]) -> Iterator[str]:
    """Render what there is about one library."""
    facts = [fact for fact in facts if fact.library == library]
    timed = [row for row in timed if row.library == library]
    yield LIBRARIES[library]
    equal = "family", "class", "equal", "error, of what is allowed", "on", "note"
    yield from text_table(equal, equal_rows(facts))
    yield from speed_tables(timed)
    yield from titled("Refused", text_table(REFUSED, refused_rows(facts)))
    yield from titled("Left as it is", text_table(LEFT, left_rows(facts)))
    yield from titled("Beside that", stated(STATED[library]))
    tests = sorted({fact.test.split("::")[0] for fact in facts})
    if tests:
        yield f"Rows by {', '.join(f'[{Path(test).name}](../{test})' for test in tests)}."
        yield ""


def page(runs: Sequence[Run], of_others: Sequence[suites.Run] = ()) -> str:
    """Render everything as Markdown; ``of_others`` counts what other projects' tests came to."""
    facts, timed = facts_of(runs), timed_of(runs)
    files = ", ".join(run.path.name for run in (*runs, *of_others))
    lines = ["# Which models, what speed, what is refused", ""]
    lines += [f"Written by `python -m bench.compatibility` from {files}.", "", INTRODUCTION]
    if all(row.machine.startswith("CPU: ") for row in (*facts, *timed)):
        lines += [NO_GPU, ""]
    for library in LIBRARIES:
        lines += section(library, facts, timed)
    lines += titled("Compilers, transforms and parallelism", stated(TRANSFORMS), level=2)
    counted = [line for run in of_others for line in text_table(suites.HEAD, suites.rows(run))]
    lines += titled("Tests of other projects", [suites.TEXT, *counted] if counted else [], level=2)
    lines += titled("How times are taken", [SPEED, *missing(runs)], level=2)
    lines += titled("Runs", [*map(provenance, (*runs, *of_others)), ""], level=2)
    return "\n".join(lines)


def short(runs: Sequence[Run]) -> str:
    """Render one line for each model and direction, and how many facts there are of each status."""
    facts, timed = facts_of(runs), timed_of(runs)
    lines = []
    for status in dict.fromkeys(fact.status for fact in facts):
        of_status = [fact for fact in facts if fact.status == status]
        families = {(fact.library, fact.family) for fact in of_status}
        lines.append(f"{status}: {len(of_status)} cases of {len(families)} families")
    for row in speed_rows(timed):
        model, direction, own, ours, times, _, monitored, adds, peaks = row
        lines.append(
            f"{model}, {direction}: own {own} ms, leaner {ours} ms, {times} ×, "
            f"with κ {monitored} ms ({adds}), peaks {peaks} MiB"
        )
    wrong = (entry for run in runs for entry in run.unmeasured if entry["status"] == "wrong")
    lines += [f"WRONG: {entry['case']} {entry['peer']}: {entry['reason']}" for entry in wrong]
    return "".join(f"{line}\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write what it requests."""
    parser = argparse.ArgumentParser(prog="python -m bench.compatibility", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="files of tests or bench, as JSON")
    parser.add_argument("--check", action="store_true", help="compare with the page, write nothing")
    parser.add_argument("--short", action="store_true", help="one line for each model")
    options = parser.parse_args(arguments)
    runs = [load(path) for path in options.results] if options.results else committed()
    if options.short:
        sys.stdout.write(short(runs))
        return
    rendered = page(runs, [] if options.results else suites.committed())
    if options.check:
        if not PAGE.exists() or PAGE.read_text("utf-8") != rendered:
            raise SystemExit(f"{PAGE.name} is out of date: run python -m bench.compatibility")
    elif options.results:
        sys.stdout.write(rendered)
    else:
        PAGE.write_text(rendered, "utf-8")


if __name__ == "__main__":
    main()
