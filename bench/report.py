"""Render measured rows, and nothing else, as Markdown tables and plots.

``python -m bench.report bench/results/20*.json -o docs/results.md`` writes the page and one PNG for
each machine beside it; without ``-o`` the page goes to standard output. ``--short`` writes one line
for each case and direction instead.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = "sdpa"
NO_GPU = (
    "**No GPU run is committed yet.** The rows below are from a CPU, where `attention` and "
    "`attention_packed` call PyTorch: they show that the benchmark works, and say nothing about "
    "the kernels."
)
LEGEND = """\
Medians in µs with the interquartile range. *graph* replays a CUDA graph: the kernels alone. *eager*
calls from Python: what a user feels. *wall* is host time on a CPU. On a GPU the inputs rotate
through twice the memory that the L2 cache holds. *copy* and *matrix* are the useful bytes and FLOPs
per second, as a part of what a large copy and a large matrix product reach on the same machine in
the same session (CPU cases stay in cache, so *copy* can pass 100%). *× sdpa* and *× best peer* say
how many times faster a row is than PyTorch's default `scaled_dot_product_attention`, and than the
fastest row of the table that is not ours: below 1 is a loss. Rows of this project are bold. Every
row passed the correctness gate, gradients included, before it was timed.
"""


@dataclass(frozen=True)
class Row:
    """One measured number; times in seconds, fractions of the machine's measured ceilings."""

    machine: str
    case: str
    direction: str
    mode: str
    peer: str
    ours: bool
    median: float
    iqr: float
    copy: float
    matrix: float
    joules: float | None
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One JSON file: what was measured, what was not and why, and where."""

    path: Path
    date: str
    rows: list[Row]
    unmeasured: list[dict[str, str]]
    cases: dict[str, dict[str, Any]]
    machine_info: dict[str, Any]
    commit: dict[str, Any]

    @property
    def machines(self) -> list[str]:
        """The machines its rows are from: the GPU, the CPU, or both."""
        return list(dict.fromkeys(row.machine for row in self.rows))


def load(path: Path) -> Run:
    """Read one result file.

    Raises:
        SystemExit: the file cannot be read or is no result of bench/, in one line.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        info, cases = data["machine_info"], data["cases"]
        names = {"cuda": info["gpu"] and info["gpu"]["name"], "cpu": f"CPU: {info['cpu']['model']}"}
        rows = []
        for entry in data["benchmarks"]:
            extra, stats = entry["extra_info"], entry["stats"]
            rows.append(
                Row(
                    machine=names[cases[extra["case"]]["device"]],
                    case=extra["case"],
                    direction=extra["direction"],
                    mode=extra["mode"],
                    peer=extra["peer"],
                    ours=extra["ours"],
                    median=stats["median"],
                    iqr=stats["iqr"],
                    copy=extra["copy_fraction"],
                    matrix=extra["matrix_fraction"],
                    joules=extra.get("joules"),
                    kernels=tuple(extra.get("kernels", ())),
                )
            )
        commit, date = data["commit_info"], data["datetime"]
        return Run(path, date, rows, data["unmeasured"], cases, info, commit)
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a result of bench/ ({error!r})") from None


def merge(runs: Iterable[Run]) -> list[Row]:
    """Return the rows of all runs, the newest of each kind, in the order they were measured."""
    newest: dict[tuple[str, ...], Row] = {}
    for run in sorted(runs, key=lambda run: run.date):
        for row in run.rows:
            newest[row.machine, row.case, row.direction, row.mode, row.peer] = row
    return list(newest.values())


def tables(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Group rows by case, direction and mode, fastest first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction, row.mode), []).append(row)
    return {key: sorted(group, key=lambda row: row.median) for key, group in groups.items()}


def best_peer(group: Iterable[Row]) -> Row | None:
    """Return the fastest row that is not ours."""
    return min((row for row in group if not row.ours), key=lambda row: row.median, default=None)


def number(value: float) -> str:
    """Format a positive number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def faster(row: Row, than: Row | None) -> str:
    """Return how many times faster a row is, or a dash without the other."""
    return "–" if than is None else f"{than.median / row.median:.2f}"


def shape(case: dict[str, Any]) -> str:
    """Return B·H·N·D, the dtype, and what else the case is."""
    size = "·".join(str(case[name]) for name in ("batch", "heads", "tokens", "head_dim"))
    kinds = [kind for kind in ("causal", "padded") if case[kind]]
    return " ".join([size, case["dtype"], *kinds])


def table(group: Sequence[Row]) -> Iterable[str]:
    """Render the rows of one case, direction and mode."""
    energy = any(row.joules is not None for row in group)
    head = ["", "median", "IQR", "copy", "matrix", "× sdpa", "× best peer"] + ["mJ"] * energy
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    baseline = next((row for row in group if row.peer == BASELINE), None)
    peer = best_peer(group)
    for row in group:
        cells = [
            f"**{row.peer}**" if row.ours else row.peer,
            number(row.median * 1e6),
            number(row.iqr * 1e6),
            f"{row.copy:.0%}",
            f"{row.matrix:.0%}",
            faster(row, baseline),
            faster(row, peer),
        ]
        if energy:
            cells.append("–" if row.joules is None else number(row.joules * 1e3))
        yield f"| {' | '.join(cells)} |"
    yield ""


def missing(runs: Iterable[Run], cases: set[str]) -> Iterable[str]:
    """List what was not measured on these cases, and why."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for entry in run.unmeasured:
            if entry["case"] in cases:
                key = entry["peer"], entry["status"], entry["reason"]
                found.setdefault(key, []).append(entry["case"])
    for (peer, status, reason), where in found.items():
        yield f"- {peer}, {status} ({', '.join(dict.fromkeys(where))}): {reason}"


def kernels(rows: Iterable[Row]) -> Iterable[str]:
    """List the kernels that ran in one forward and backward of each peer."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        if row.direction == "both" and row.kernels:
            found.setdefault((row.peer, row.kernels), []).append(row.case)
    for (peer, names), cases in found.items():
        yield f"- {peer} ({', '.join(cases)}): {', '.join(f'`{name}`' for name in names)}"


def provenance(run: Run) -> str:
    """Describe one run in one line."""
    commit, info = run.commit, run.machine_info
    code = (commit["id"] or "no commit")[:12] + (" with changes" if commit["dirty"] else "")
    versions = (f"{name} {version}" for name, version in info["versions"].items() if version)
    hardware = [f"{info['cpu']['cores']} CPU cores, {info['cpu']['torch_threads']} torch threads"]
    if info["gpu"]:
        gpu = info["gpu"]
        hardware += [f"{gpu['count']} GPU", f"{gpu['memory_bytes'] / 2**30:.0f} GiB"]
        hardware += [f"power limit {gpu['power_limit_watts']} W"]
        hardware += [f"{name} clock {mhz} MHz" for name, mhz in gpu["clocks_mhz"].items()]
    facts = ", ".join([*hardware, *versions])
    return f"- {run.path.name}: {run.date[:10]}, {code}, source {commit['source']}; {facts}."


def page(runs: Sequence[Run], plots: dict[str, str]) -> str:
    """Render everything as Markdown; ``plots`` names a picture for each machine."""
    files = " ".join(run.path.name for run in runs)
    lines = ["# Results", "", f"Written by `python -m bench.report` from {files}.", ""]
    rows = merge(runs)
    if all(row.machine.startswith("CPU: ") for row in rows):
        lines += [NO_GPU, ""]
    lines += [LEGEND]
    cases = {name: facts for run in runs for name, facts in run.cases.items()}
    for machine in dict.fromkeys(row.machine for row in rows):
        here = [row for row in rows if row.machine == machine]
        sources = [run for run in runs if machine in run.machines]
        lines += [f"## {machine}", "", *map(provenance, sources), ""]
        if machine in plots:
            lines += [f"![Medians on {machine}]({plots[machine]})", ""]
        for (case, direction, mode), group in tables(here).items():
            lines += [f"### {case} ({shape(cases[case])}), {direction}, {mode}", "", *table(group)]
        lines += ["### Not measured", "", *missing(sources, {row.case for row in here}), ""]
        lines += ["### Kernels that ran", "", *kernels(here), ""]
    return "\n".join(lines)


def short(runs: Sequence[Run]) -> str:
    """Render one line for each case, direction and mode: our fastest row against the others."""
    line = "{:<38} {:<22} {:>9} {:>6} {:>7}  {}"
    lines = [line.format("case", "ours", "µs", "copy", "× sdpa", "× best peer")]
    for (case, direction, mode), group in tables(merge(runs)).items():
        ours = next((row for row in group if row.ours), None)
        if ours is None:
            continue
        baseline = next((row for row in group if row.peer == BASELINE), None)
        peer = best_peer(group)
        versus = faster(ours, peer) + (f" {peer.peer}" if peer else "")
        cells = number(ours.median * 1e6), f"{ours.copy:.0%}", faster(ours, baseline), versus
        lines.append(line.format(f"{case} {direction} {mode}", ours.peer, *cells))
    wrong = [entry for run in runs for entry in run.unmeasured if entry["status"] == "wrong"]
    wrong_lines = (f"WRONG: {entry['case']} {entry['peer']}: {entry['reason']}" for entry in wrong)
    lines += dict.fromkeys(wrong_lines)  # once, also when several files say it
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the medians of one machine, a panel for each case and direction, ours in colour."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'leaner-kernels[bench]'") from None
    groups = {key: group for key, group in tables(rows).items() if key[2] != "eager"}
    cases = list(dict.fromkeys(case for case, _, _ in groups))
    directions = list(dict.fromkeys(direction for _, direction, _ in groups))
    size = 4.2 * len(directions), 0.6 + 2.4 * len(cases)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    panels = figure.subplots(len(cases), len(directions), squeeze=False)
    for (case, direction, mode), group in groups.items():
        panel = panels[cases.index(case)][directions.index(direction)]
        panel.barh(
            [row.peer for row in group],
            [row.median * 1e6 for row in group],
            xerr=[row.iqr / 2 * 1e6 for row in group],
            color=["tab:orange" if row.ours else "lightgray" for row in group],
        )
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
        panel.set_title(f"{case}, {direction}, {mode} (µs)", fontsize=8)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files written by bench/")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file to write, plots beside it")
    parser.add_argument("--short", action="store_true", help="one line for each table")
    options = parser.parse_args(arguments)
    runs = [load(path) for path in options.results]
    if not any(run.rows for run in runs):
        raise SystemExit("no measured row in " + ", ".join(map(str, options.results)))
    if options.output is None or options.short:
        sys.stdout.write(short(runs) if options.short else page(runs, {}))
        return
    rows, plots = merge(runs), {}
    for machine in dict.fromkeys(row.machine for row in rows):
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        plots[machine] = f"{options.output.stem}-{slug}.png"
        here = [row for row in rows if row.machine == machine]
        plot(here, options.output.with_name(plots[machine]))
    options.output.write_text(page(runs, plots), "utf-8")


if __name__ == "__main__":
    main()
