"""Render measured rows as Markdown tables and plots, and apart from them what is predicted.

``python -m bench.report`` reads every dated file of bench/results and writes docs/results.md with
two PNGs for each machine beside it. With files named, the page goes to standard output, or to
``-o``.
``--short`` writes one line for each case and direction instead.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import predict
from bench.adapters.cases import KIND as ADAPTER
from bench.pages import kappa_report, language_report, language_training, model_report, plots
from bench.pages.phrases import number, provenance

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
# What everybody has without us, the first of them that a table holds.
BASELINES = "timm", "sdpa", "sdpa_padded"
NO_GPU = (
    "**No GPU run is committed yet.** The rows below are from a CPU, where `attention` and "
    "`attention_qkvpacked` call PyTorch: they show that the benchmark works, and say nothing about "
    "the kernels."
)
LEGEND = """\
Medians in µs with the interquartile range. *graph* replays a CUDA graph: the kernels alone. *eager*
calls from Python: what a user feels. *wall* is host time on a CPU. On a GPU the inputs rotate
through twice the memory that the L2 cache holds. *copy* and *matrix* are the useful bytes and FLOPs
per second, as a part of what a large copy and a large matrix product reach on the same machine in
the same session (CPU cases stay in cache, so *copy* can pass 100%). *× default* and *× best peer*
say how many times faster a row is than what everybody has (PyTorch's default
`scaled_dot_product_attention`; for the operators of XCiT, DaViT and VOLO timm's own code between
its projections, for a *block* timm's module), and than the fastest row of the table that is not
ours: below 1 is a loss. Rows of this project are bold. Every row passed the correctness gate,
gradients included, before it was timed. Where sequences differ in length, *padded* peers get inputs
that are padded already, and only rows within a sequence count as work. On windows, *sdpa* gets them
cut already and leaves them so, while *timm* cuts q, k and v, which its model does before its
projection. *leaner_kernel* is the operator below `attention`, which never calls a library;
*leaner_stats_unsampled* a step on which no entry is captured. Of *nystrom*, *sdpa* is exact softmax
attention of the same tensors, which an approximation has to beat.
"""
MEMORY = """\
Bytes for each token that autograd saves in a forward until its backward, each storage once: memory
of the *inputs* and of the *output*, which their neighbours in a model may keep anyway, and what is
*kept* for this backward alone. *peak* is the most that a forward and backward held on the GPU
beside its inputs, in MiB.
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
    intensity: float
    tflop_per_s: float
    copy_gb_per_s: float
    matrix_tflop_per_s: float
    joules: float | None
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """What a peer keeps for its backward: bytes for each token; peak in bytes of the whole call."""

    machine: str
    case: str
    peer: str
    ours: bool
    inputs: float
    out: float
    own: float
    peak: int | None


@dataclass(frozen=True)
class Run:
    """One JSON file: what was measured, what was not and why, and where."""

    path: Path
    date: str
    rows: list[Row]
    memory: list[Memory]
    kappa: list[kappa_report.KappaRow | kappa_report.StepRow]
    models: list[model_report.ModelRow | model_report.OneStepRow]
    language: list[language_report.AnyRow]
    unmeasured: list[dict[str, str]]
    cases: dict[str, dict[str, Any]]
    machine_info: dict[str, Any]
    commit: dict[str, Any]

    @property
    def machines(self) -> list[str]:
        """The machines its rows are from: the GPU, the CPU, or both."""
        rows = *self.rows, *self.kappa, *self.models, *self.language
        return list(dict.fromkeys(row.machine for row in rows))


def load(path: Path) -> Run:
    """Read one result file.

    Raises:
        SystemExit: the file cannot be read or is no result of bench/, in one line.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
        info, cases = data["machine_info"], data["cases"]
        names = {"cuda": info["gpu"] and info["gpu"]["name"], "cpu": f"CPU: {info['cpu']['model']}"}
        rows, memory, kappa, models, language = [], [], [], [], []
        for entry in data["benchmarks"]:
            extra, stats = entry["extra_info"], entry["stats"]
            if extra.get("kind") == ADAPTER:
                continue  # of other people's models: docs/compatibility.md
            machine = names[cases[extra["case"]]["device"]]
            if extra.get("kind") in model_report.KINDS:
                models.append(model_report.read(entry, cases[extra["case"]], machine))
                continue
            if extra.get("kind") in language_report.KINDS:
                language.append(language_report.read(entry, cases[extra["case"]], machine))
                continue
            if "kind" in extra:
                kappa.append(kappa_report.read(entry, machine))
                continue
            common = {"machine": machine} | {name: extra[name] for name in ("case", "peer", "ours")}
            if "kept_bytes" in extra:
                kept = {part: size / extra["tokens"] for part, size in extra["kept_bytes"].items()}
                memory.append(Memory(**common, **kept, peak=extra["peak_memory_bytes"]))
                continue
            rows.append(
                Row(
                    **common,
                    direction=extra["direction"],
                    mode=extra["mode"],
                    median=stats["median"],
                    iqr=stats["iqr"],
                    copy=extra["copy_fraction"],
                    matrix=extra["matrix_fraction"],
                    intensity=extra["flops"] / extra["bytes"],
                    tflop_per_s=extra["tflop_per_s"],
                    copy_gb_per_s=extra["copy_gb_per_s"],
                    matrix_tflop_per_s=extra["matrix_tflop_per_s"],
                    joules=extra.get("joules"),
                    kernels=tuple(extra.get("kernels", ())),
                )
            )
        for facts in cases.values():
            shape(facts)  # a file of another kind shows here, not halfway through a page
        commit, date = data["commit_info"], data["datetime"]
        measured = rows, memory, kappa, models, language
        return Run(path, date, *measured, data["unmeasured"], cases, info, commit)
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


def merge_memory(runs: Iterable[Run]) -> list[Memory]:
    """Return the memory rows of all runs, the newest of each kind."""
    newest: dict[tuple[str, ...], Memory] = {}
    for run in sorted(runs, key=lambda run: run.date):
        newest.update({(row.machine, row.case, row.peer): row for row in run.memory})
    return list(newest.values())


def merge_others(runs: Iterable[Run], kind: str) -> list[Any]:
    """Return the rows of ``kappa``, ``models`` or ``language`` of all runs, the newest of each."""
    newest = {"kappa": kappa_report, "models": model_report, "language": language_report}
    by_date = sorted(runs, key=lambda run: run.date)
    return newest[kind].newest(row for run in by_date for row in getattr(run, kind))


def tables(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Group rows by case, direction and mode, fastest first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.direction, row.mode), []).append(row)
    return {key: sorted(group, key=lambda row: row.median) for key, group in groups.items()}


def baseline_of(group: Iterable[Row]) -> Row | None:
    """Return what everybody has, where sequences differ in length on padded inputs."""
    found = {row.peer: row for row in group}
    return next((found[name] for name in BASELINES if name in found), None)


def best_peer(group: Iterable[Row]) -> Row | None:
    """Return the fastest row that is not ours."""
    return min((row for row in group if not row.ours), key=lambda row: row.median, default=None)


def faster(row: Row, than: Row | None) -> str:
    """Return how many times faster a row is, or a dash without the other."""
    return "–" if than is None else f"{than.median / row.median:.2f}"


def shape(case: dict[str, Any]) -> str:
    """Return the size of a case of any kind; of attention B·H·N·D, the dtype, and what else it is.

    N is 1×197 where one query meets 197 keys, 49…256 where sequences differ in length, and 14² on a
    square map.
    """
    if "op" in case:
        return f"{case['op'].replace('_', ' ')}, {case['size']}, {case['dtype']}"
    if "vocabulary" in case:
        return language_report.shape(case)
    if "head_dim" not in case:
        return (model_report if "row" in case else kappa_report).shape(case)
    tokens = str(case["tokens"])
    if case["lengths"]:
        tokens = f"{min(case['lengths'])}…{tokens}"
    elif case["rows"] != case["tokens"]:
        tokens = f"{case['rows']}×{tokens}"
    size = f"{case['batch']}·{case['heads']}·{tokens}·{case['head_dim']}"
    kinds = [kind for kind in ("causal", "padded") if case[kind]]
    return " ".join([size, case["dtype"], *kinds])


def table(group: Sequence[Row]) -> Iterable[str]:
    """Render the rows of one case, direction and mode."""
    energy = any(row.joules is not None for row in group)
    head = ["", "median", "IQR", "copy", "matrix", "× default", "× best peer"] + ["mJ"] * energy
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    baseline = baseline_of(group)
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


def overview(rows: Iterable[Row]) -> Iterable[tuple[tuple[str, str, str], tuple[str, ...]]]:
    """Yield case, direction and mode with our fastest row and how it stands against the others."""
    for key, group in tables(rows).items():
        ours = next((row for row in group if row.ours), None)
        if ours is not None:
            peer = best_peer(group)
            versus = faster(ours, peer) + (f" {peer.peer}" if peer else "")
            standing = f"{ours.copy:.0%}", faster(ours, baseline_of(group)), versus
            yield key, (ours.peer, number(ours.median * 1e6), *standing)


def overview_table(rows: Iterable[Row]) -> Iterable[str]:
    """Render ``overview``."""
    yield "|  |  | ours | median | copy | × default | × best peer |"
    yield "|---|---|---|" + "---:|" * 4
    for (case, *how), cells in overview(rows):
        yield f"| {case} | {', '.join(how)} | {' | '.join(cells)} |"


def block_goals(
    rows: Iterable[Row], cases: dict[str, dict[str, Any]]
) -> Iterable[tuple[str, str, str]]:
    """Yield the goal of each operator of XCiT, DaViT and VOLO: forward and backward, on a GPU."""
    for (case, direction, mode), group in tables(rows).items():
        ours = next((row for row in group if row.ours), None)
        peer = best_peer(group)
        has_goal = cases[case].get("op", "").removesuffix("_block") in model_report.BLOCKS
        if has_goal and (direction, mode) == ("both", "graph") and ours and peer:
            yield model_report.block_goal(case, peer.median / ours.median, peer.peer)


def memory_tables(rows: Sequence[Memory], cases: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Render what was kept, a table for each case, the least first."""
    for case in dict.fromkeys(row.case for row in rows):
        here = sorted((row for row in rows if row.case == case), key=lambda row: row.own)
        peak = any(row.peak is not None for row in here)
        yield f"#### {case} ({shape(cases[case])}), memory"
        yield ""
        yield f"| {' | '.join(['', 'kept', 'output', 'inputs'] + ['peak'] * peak)} |"
        yield f"|---|{'---:|' * (3 + peak)}"
        for row in here:
            cells = [f"**{row.peer}**" if row.ours else row.peer]
            cells += [f"{part:,.0f}" for part in (row.own, row.out, row.inputs)]
            if peak:
                cells.append("–" if row.peak is None else f"{row.peak / 2**20:,.0f}")
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


def kernels(rows: Iterable[Row | kappa_report.KappaRow]) -> Iterable[str]:
    """List the kernels that ran in one forward and backward, or one call, of each peer."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        if row.kernels:
            found.setdefault((row.peer, row.kernels), []).append(row.case)
    for (peer, names), cases in found.items():
        where = ", ".join(dict.fromkeys(cases))
        yield f"- {peer} ({where}): {', '.join(f'`{name}`' for name in names)}"


def on_gpus(rows: Iterable[Row]) -> predict.Measured:
    """Return seconds of our fastest row by GPU, case and direction, replayed as a CUDA graph."""
    found: predict.Measured = {}
    for (case, direction, mode), group in tables(rows).items():
        ours = next((row for row in group if row.ours), None)
        for gpu in predict.GPUS:
            if ours is not None and mode == "graph" and gpu in ours.machine:
                found[gpu, case, direction] = ours.median
    return found


def page(
    runs: Sequence[Run],
    pictures: dict[str, tuple[str, str]],
    predicted: Sequence[predict.Prediction],
) -> str:
    """Render everything as Markdown.

    ``pictures`` names the medians and the roofline of each machine.
    """
    files = " ".join(run.path.name for run in runs if run.machines)
    lines = ["# Results", "", f"Written by `python -m bench.report` from {files}.", ""]
    rows, memory = merge(runs), merge_memory(runs)
    kappa, models, language = (merge_others(runs, k) for k in ("kappa", "models", "language"))
    measured_rows = *rows, *kappa, *models, *language
    machines = list(dict.fromkeys(row.machine for row in measured_rows))
    if all(machine.startswith("CPU: ") for machine in machines):
        lines += [NO_GPU, ""]
    lines += [LEGEND]
    cases = {name: facts for run in runs for name, facts in run.cases.items()}
    for machine in machines:
        here = [row for row in rows if row.machine == machine]
        kept = [row for row in memory if row.machine == machine]
        sources = [run for run in runs if machine in run.machines]
        lines += [f"## {machine}", "", *map(provenance, sources), ""]
        for title, name in zip(("Medians", "Roofline"), pictures.get(machine, ())):
            lines += [f"![{title} on {machine}]({name})", ""]
        spectra = [row for row in kappa if row.machine == machine]
        if here:
            lines += ["### Our fastest row of each table below", "", *overview_table(here), ""]
        for (case, direction, mode), group in tables(here).items():
            lines += [f"### {case} ({shape(cases[case])}), {direction}, {mode}", "", *table(group)]
        if kept:
            lines += ["### Memory kept for the backward", "", MEMORY, *memory_tables(kept, cases)]
        blocks = [f"| {' | '.join(goal)} |" for goal in block_goals(here, cases)]
        if blocks:
            lines += ["### Goals of the operators of vision models", ""]
            lines += ["| goal | measured |  |", "|---|---:|---|", *blocks, ""]
        if spectra:
            lines += kappa_report.tables(spectra, cases)
        of_models = [row for row in models if row.machine == machine]
        if of_models:
            lines += model_report.tables(of_models, cases)
        of_language = [row for row in language if row.machine == machine]
        lines += language_report.tables(of_language, cases)
        measured = {row.case for row in (*here, *spectra, *of_models, *of_language)}
        lines += ["### Not measured", "", *missing(sources, measured), ""]
        named = [row for row in spectra if isinstance(row, kappa_report.KappaRow)]
        lines += ["### Kernels that ran", "", *kernels([*here, *named]), ""]
    lines += predict.tables(predicted, on_gpus(rows))
    return "\n".join(lines)


def short(runs: Sequence[Run], predicted: Sequence[predict.Prediction] = ()) -> str:
    """Render one line for each case, direction and mode: our fastest row against the others."""
    line = "{:<38} {:<22} {:>9} {:>6} {:>9}  {}"
    lines = [line.format("case", "ours", "µs", "copy", "× default", "× best peer")]
    lines += [line.format(" ".join(key), *cells) for key, cells in overview(merge(runs))]
    cases = {name: facts for run in runs for name, facts in run.cases.items()}
    for goal, measured, met in block_goals(merge(runs), cases):
        lines.append(f"goal: {goal}: {measured}, {met.strip('*')}")
    lines += predict.against(predicted, on_gpus(merge(runs)))
    lines += kappa_report.short(merge_others(runs, "kappa"))
    lines += model_report.short(merge_others(runs, "models"))
    lines += language_report.short(merge_others(runs, "language"))
    wrong = [entry for run in runs for entry in run.unmeasured if entry["status"] == "wrong"]
    wrong_lines = (f"WRONG: {entry['case']} {entry['peer']}: {entry['reason']}" for entry in wrong)
    lines += dict.fromkeys(wrong_lines)  # once, also when several files say it
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write what it asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files written by bench/")
    parser.add_argument("-o", "--output", type=Path, help="Markdown file to write, plots beside it")
    parser.add_argument("--short", action="store_true", help="one line for each table")
    parser.add_argument(
        "--predictions", type=Path, default=predict.PREDICTIONS, help="what is predicted"
    )
    options = parser.parse_args(arguments)
    paths = options.results or sorted((ROOT / "bench" / "results").glob("20*.json"))
    output = options.output if options.results or options.output else PAGE
    runs = [load(path) for path in paths]
    predicted = predict.predictions(options.predictions) if options.predictions.exists() else []
    if options.short:
        sys.stdout.write(short(runs, predicted))  # of models of others alone, nothing but its head
        return
    if not any(run.machines for run in runs):
        raise SystemExit("no measured row in " + ", ".join(map(str, paths)))
    if output is None:
        sys.stdout.write(page(runs, {}, predicted))
        return
    rows, drawn = merge(runs), {}
    dtypes = {name: facts["dtype"] for run in runs for name, facts in run.cases.items()}
    for machine in dict.fromkeys(row.machine for row in rows):
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        names = f"{output.stem}-{slug}.png", f"{output.stem}-{slug}-roofline.png"
        drawn[machine] = names
        groups = tables(row for row in rows if row.machine == machine)
        plots.medians(groups, output.with_name(names[0]))
        plots.roofline(groups, dtypes, output.with_name(names[1]))
    trained = "" if options.results else language_training.section(ROOT / "bench" / "results")
    output.write_text(page(runs, drawn, predicted) + trained, "utf-8")


if __name__ == "__main__":
    main()
