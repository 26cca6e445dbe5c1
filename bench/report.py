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
from bench.pages import (
    attention_report,
    kappa_report,
    language_report,
    language_training,
    loss_report,
    model_report,
    paper_rows,
    plots,
)
from bench.pages.markdown import goal_lines, provenance
from bench.pages.rows import MeasuredRow

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
NO_GPU = (
    "**No GPU run is committed yet.** The rows below are from a CPU, where `attention` and "
    "`attention_qkvpacked` call PyTorch: they show that the benchmark works, and say nothing about "
    "the kernels."
)
# By the kind of an entry: the attribute of ``Run`` that its row goes to, and its class.
KINDS: dict[str, tuple[str, type[MeasuredRow]]] = {
    "attention": ("attention", attention_report.AttentionRow),
    "memory": ("memory", attention_report.MemoryRow),
    "kappa": ("kappa", kappa_report.KappaRow),
    "step": ("kappa", kappa_report.MonitorRow),
    "model": ("models", model_report.ModelRow),
    "one_step": ("models", paper_rows.OneStepRow),
    "language": ("language", language_report.LanguageRow),
    "language_step": ("language", paper_rows.OneStepRow),
    "cross_entropy": ("losses", loss_report.LossRow),
}
# What renders the rows beside attention's, in the order of the page.
SUBJECTS = {
    "kappa": kappa_report,
    "models": model_report,
    "language": language_report,
    "losses": loss_report,
}


@dataclass(frozen=True)
class Run:
    """One JSON file: what was measured, what was not and why, and where."""

    path: Path
    date: str
    unmeasured: list[dict[str, str]]
    cases: dict[str, dict[str, Any]]
    machine_info: dict[str, Any]
    commit: dict[str, Any]
    attention: list[attention_report.AttentionRow]
    memory: list[attention_report.MemoryRow]
    kappa: list[kappa_report.KappaRow | kappa_report.MonitorRow]
    models: list[model_report.AnyRow]
    language: list[language_report.AnyRow]
    losses: list[loss_report.LossRow]

    @property
    def machines(self) -> list[str]:
        """The machines that its times are of: the GPU, the CPU, or both."""
        rows = *self.attention, *self.kappa, *self.models, *self.language, *self.losses
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
        rows: dict[str, list[Any]] = {name: [] for name, _ in KINDS.values()}
        for entry in data["benchmarks"]:
            extra = entry["extra_info"]
            facts = cases[extra["case"]]
            kind = extra.get("kind", "memory" if "kept_bytes" in extra else "attention")
            if kind != ADAPTER:  # of other people's models: docs/compatibility.md
                name, row = KINDS[kind]
                rows[name].append(row.read(entry, facts, names[facts["device"]]))
        for facts in cases.values():
            shape(facts)  # a file of another kind shows here, not halfway through a page
        commit, date = data["commit_info"], data["datetime"]
        return Run(path, date, data["unmeasured"], cases, info, commit, **rows)
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a result of bench/ ({error!r})") from None


def newest(runs: Iterable[Run], name: str) -> list[Any]:
    """Return the rows of all runs under an attribute, the newest of each kind, as measured."""
    by_date = sorted(runs, key=lambda run: run.date)
    return list({row.identity: row for run in by_date for row in getattr(run, name)}.values())


def shape(case: dict[str, Any]) -> str:
    """Return the size of a case of any kind."""
    if "op" in case or "head_dim" in case:
        return attention_report.shape(case)
    if "loss_tokens" in case:
        return loss_report.shape(case)
    if "row" in case:
        return (language_report if "vocabulary" in case else model_report).shape(case)
    return kappa_report.shape(case)


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


def kernels(rows: Iterable[attention_report.AttentionRow | kappa_report.KappaRow]) -> Iterable[str]:
    """List the kernels that ran in one forward and backward, or one call, of each peer."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        if row.kernels:
            found.setdefault((row.peer, tuple(row.kernels)), []).append(row.case)
    for (peer, names), cases in found.items():
        where = ", ".join(dict.fromkeys(cases))
        yield f"- {peer} ({where}): {', '.join(f'`{name}`' for name in names)}"


def on_gpus(groups: attention_report.Groups) -> predict.Measured:
    """Return seconds of our fastest row by GPU, case and direction, replayed as a CUDA graph."""
    found: predict.Measured = {}
    for (case, direction, mode), group in groups.items():
        ours = attention_report.our_best(group)
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
    rows = {name: newest(runs, name) for name, _ in KINDS.values()}
    timed = [row for name, found in rows.items() if name != "memory" for row in found]
    machines = list(dict.fromkeys(row.machine for row in timed))
    if all(machine.startswith("CPU: ") for machine in machines):
        lines += [NO_GPU, ""]
    lines += [attention_report.LEGEND]
    cases = {name: facts for run in runs for name, facts in run.cases.items()}
    for machine in machines:
        here = {name: [r for r in found if r.machine == machine] for name, found in rows.items()}
        sources = [run for run in runs if machine in run.machines]
        lines += [f"## {machine}", "", *map(provenance, sources), ""]
        for title, name in zip(("Medians", "Roofline"), pictures.get(machine, ())):
            lines += [f"![{title} on {machine}]({name})", ""]
        lines += attention_report.tables(here["attention"], here["memory"], cases)
        for name, subject in SUBJECTS.items():
            lines += subject.tables(here[name], cases)
        measured = {row.case for row in timed if row.machine == machine}
        lines += ["### Not measured", "", *missing(sources, measured), ""]
        named = [row for row in here["kappa"] if isinstance(row, kappa_report.KappaRow)]
        lines += ["### Kernels that ran", "", *kernels([*here["attention"], *named]), ""]
    lines += predict.tables(predicted, on_gpus(attention_report.groups_of(rows["attention"])))
    return "\n".join(lines)


def short(runs: Sequence[Run], predicted: Sequence[predict.Prediction] = ()) -> str:
    """Render one line for each case, direction and mode: our fastest row against the others."""
    line = "{:<38} {:<22} {:>9} {:>6} {:>9}  {}"
    groups = attention_report.groups_of(newest(runs, "attention"))
    lines = [line.format("case", "ours", "µs", "copy", "× default", "× best peer")]
    lines += [
        line.format(" ".join(key), *cells) for key, cells in attention_report.overview(groups)
    ]
    cases = {name: facts for run in runs for name, facts in run.cases.items()}
    lines += goal_lines(attention_report.goals(groups, cases))
    lines += predict.against(predicted, on_gpus(groups))
    for name, subject in SUBJECTS.items():
        lines += subject.short(newest(runs, name))
    wrong = [entry for run in runs for entry in run.unmeasured if entry["status"] == "wrong"]
    wrong_lines = (f"WRONG: {entry['case']} {entry['peer']}: {entry['reason']}" for entry in wrong)
    lines += dict.fromkeys(wrong_lines)  # once, also when several files hold it
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write what it requests."""
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
    rows, drawn = newest(runs, "attention"), {}
    dtypes = {name: facts["dtype"] for run in runs for name, facts in run.cases.items()}
    for machine in dict.fromkeys(row.machine for row in rows):
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        names = f"{output.stem}-{slug}.png", f"{output.stem}-{slug}-roofline.png"
        drawn[machine] = names
        groups = attention_report.groups_of(row for row in rows if row.machine == machine)
        plots.medians(groups, output.with_name(names[0]))
        plots.roofline(groups, dtypes, output.with_name(names[1]))
    trained = "" if options.results else language_training.section(ROOT / "bench" / "results")
    output.write_text(page(runs, drawn, predicted) + trained, "utf-8")


if __name__ == "__main__":
    main()
