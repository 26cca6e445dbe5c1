"""Write the studies of docs/studies.md and their plots from the recorded results.

python -m studies.page
"""

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mean, median_high
from typing import Any

from tabulate import tabulate

from studies import (
    allocation,
    depth_for_heads,
    planner,
    printed_memory,
    printed_tables,
    theorem_gap,
)
from studies.runner import RESULTS, ROOT, table
from studies.study import Claim, Study, judged

PAGE = ROOT / "docs" / "studies.md"
STUDIES = ("kappa_against_heads", "kappa_and_loss")
# Studies in parts, which have one figure.
PARTED = {"depth_for_heads": depth_for_heads.STUDIES, "allocation": allocation.STUDIES}
COSTS = {  # of a run: what it is called, and its unit
    "params": ("parameters, millions", 1e6),
    "train_flops": ("FLOPs of the training, 10¹²", 1e12),
    "peak_memory_bytes": ("peak memory, MB", 1e6),
    "cpu_seconds": ("seconds of one core", 1),
}

BEGIN = "<!-- studies begin: written by python -m studies.page -->"
END = "<!-- studies end -->"


def text() -> str:
    """Return the page, with what stands between its markers rendered anew."""
    parts = [BEGIN + "\n"]
    for name in STUDIES:
        study: Study = importlib.import_module(f"studies.{name}").STUDY
        found = read(name)
        if found is not None:
            parts.append(_section(study, found))
    for name, studies in PARTED.items():
        parts += _parted(name, studies)
    parts.append(planner.section())
    gap = read(theorem_gap.NAME)
    if gap is not None:
        parts.append(theorem_gap.section(gap))
    parts.append(printed_tables.section())
    sizes = read(printed_memory.NAME)
    if sizes is not None:
        parts.append(printed_memory.section(sizes))
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return head + "\n".join([*parts, END]) + rest.split(END)[1]


def read(name: str) -> dict[str, Any] | None:
    """Return the recorded results of a study, if there are some."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _parted(name: str, studies: Mapping[str, Study]) -> list[str]:
    """Return a section for each part that has results, and the figure of them all."""
    results = {part: read(study.name) for part, study in studies.items()}
    sections = [_section(studies[p], found, plot="") for p, found in results.items() if found]
    if sections:
        sections.append(f"![held-out loss against its costs](images/study-{name}.png)\n")
    return sections


def _section(study: Study, found: dict[str, Any], plot: str | None = None) -> str:
    scale = study.scales[found["scale"]]
    if plot is None:
        plot = f"![{study.axes[1]} against {study.axes[0]}](images/study-{study.name}.png)"
    runs, arms = len(found["runs"]), len({run["arm"] for run in found["runs"]})
    seconds = mean(run["seconds"] for run in found["runs"])
    machine = found["machine"]
    again = [
        path
        for scale in ("", *(f"{name}-" for name in study.scales))
        for path in sorted(RESULTS.glob(f"{study.name}-{scale}from-*.json"))
    ]
    reruns = [_rerun(json.loads(path.read_text()), found) for path in again]
    ran = (
        f"{arms} arms of {found['seeds']} seeds, `{scale.script} {' '.join(scale.flags)}`: "
        f"{runs} runs, {machine['jobs']} at once, {seconds:.0f} s each on one core of "
        f"{machine['processor']}; commit {found['commit']['hash'][:12]}, "
        f"torch {found['versions']['torch']}"
    )
    parts = [
        f"## {study.question}",
        f"**Claimed.** {study.claims}",
        f"**Measured.** {study.metric}",
        f"**Run.** {ran}.",
        f"**Rule.** {study.rule}",
        table(_claims(found), "github"),
        *([plot] if plot else []),
        _by_arm(study, found),
        *reruns,
        f"**Not shown.** {study.not_shown}",
    ]
    return "\n\n".join(parts) + "\n"


def _claims(found: dict[str, Any]) -> list[Claim]:
    return [Claim(**claim) for claim in found["claims"]]


def _by_arm(study: Study, found: dict[str, Any]) -> str:
    """Return the means of each arm as a table."""
    rows = []
    for arm in study.scales[found["scale"]].arms:
        own = [run for run in found["runs"] if run["arm"] == arm.name]
        kappas = [run["kappa"] for run in own]
        above = "over " if any(run["unresolved"] for run in own) else ""
        spread = f"{above}{min(kappas):.3g} to {max(kappas):.3g}"
        middle = f"{above}{median_high(kappas):.3g}"
        loss, accuracy = (mean(run[f"held_out_{of}"] for run in own) for of in ("loss", "accuracy"))
        costs = [f"{own[0]['params']:,}"]
        if "train_flops" in own[0]:
            memory = mean(run["peak_memory_bytes"] for run in own) / 1e6
            costs += [f"{own[0]['train_flops']:.2e}", f"{memory:.0f} MB"]
        rows.append((arm.name, *costs, middle, spread, f"{loss:.4f}", f"{accuracy:.2%}"))
    extra = ("FLOPs", "memory") if len(rows[0]) > 6 else ()
    headers = ("arm", "parameters", *extra, "κ, median", "κ, seeds", "held-out loss", "accuracy")
    return tabulate(rows, headers, "github", disable_numparse=True)


def _rerun(other: dict[str, Any], original: dict[str, Any]) -> str:
    """Return how the verdicts of other seeds compare; of another scale, also its claims."""
    before, after = (
        {claim.claim: verdict for claim, _, verdict in judged(_claims(results))}
        for results in (original, other)
    )
    differ = [
        f"{name}: {before[name]}, then {after[name]}"
        for name in after
        if before[name] != after[name]
    ]
    alike = f"{len(after) - len(differ)} of {len(after)} verdicts are the same"
    text = f"**Again** with seeds from {other['first_seed']}"
    if other["scale"] == original["scale"]:
        return f"{text}: " + "; ".join([alike, *differ]) + "."
    seconds = mean(run["seconds"] for run in other["runs"])
    text += (
        f", `--scale {other['scale']}`, {other['machine']['jobs']} at once, {seconds:.0f} s each "
        f"(Python {other['versions']['python']}, torch {other['versions']['torch']}): "
    )
    return text + "; ".join([alike, *differ]) + ".\n\n" + table(_claims(other), "github")


def draw(study: Study, found: dict[str, Any], path: Path) -> None:
    """Draw every run, and the geometric mean of each arm, by group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    arms = [arm for arm in study.scales[found["scale"]].arms if arm.group != "null"]
    for number, group in enumerate(dict.fromkeys(arm.group for arm in arms)):
        means = {}
        for arm in (arm for arm in arms if arm.group == group):
            values = [r[study.measure] for r in found["runs"] if r["arm"] == arm.name]
            axes.plot([arm.x] * len(values), values, ".", color=f"C{number}", alpha=0.4)
            means[arm.x] = geometric_mean(values)
        axes.plot([*means], [*means.values()], "o-", color=f"C{number}", label=group)
    if study.doubling:
        axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel=study.axes[0], ylabel=study.axes[1])
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_costs(results: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the mean loss of each arm, and its seeds, against what the arm costs; a row a part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(COSTS), 3.2 * len(results)), layout="constrained")
    for row, (part, found) in zip(
        figure.subplots(len(results), len(COSTS), squeeze=False), results.items()
    ):
        for axes, (cost, (words, unit)) in zip(row, COSTS.items()):
            for number, arm in enumerate(dict.fromkeys(run["arm"] for run in found["runs"])):
                own = [run for run in found["runs"] if run["arm"] == arm]
                x = mean(run[cost] for run in own) / unit
                losses = [run["held_out_loss"] for run in own]
                colour, sign = f"C{number % 10}", "os^Dv"[number // 10 % 5]
                axes.plot([x] * len(losses), losses, ".", color=colour, alpha=0.4)
                axes.plot(x, mean(losses), sign, color=colour, label=arm)
            axes.set(xlabel=words, ylabel=f"held-out loss, {part}")
            axes.set_xlim(left=0)
        row[-1].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the plots."""
    argparse.ArgumentParser(prog="python -m studies.page", description=__doc__).parse_args(argv)
    for name in STUDIES:
        found = read(name)
        if found is not None:
            study = importlib.import_module(f"studies.{name}").STUDY
            draw(study, found, PAGE.parent / "images" / f"study-{name}.png")
    for name, studies in PARTED.items():
        results = {part: read(study.name) for part, study in studies.items()}
        if known := {part: found for part, found in results.items() if found}:
            draw_costs(known, PAGE.parent / "images" / f"study-{name}.png")
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
