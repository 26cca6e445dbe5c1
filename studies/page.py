"""Write the studies of docs/studies.md and their plots from the recorded results.

python -m studies.page
"""

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mean, median, median_high
from typing import Any

from tabulate import tabulate

from studies import (
    allocation,
    depth_for_heads,
    ideal_observer,
    kappa_against_heads,
    kappa_and_loss,
    kappa_at_the_end,
    planner,
    printed_memory,
    printed_tables,
    stats,
    theorem_gap,
)
from studies.runner import RESULTS, ROOT, table
from studies.study import Claim, Study, judged

PAGE = ROOT / "docs" / "studies.md"
ON_KAPPA = kappa_against_heads.STUDY, kappa_and_loss.STUDY
ON_DEPTH = tuple(depth_for_heads.STUDIES.values())  # which have one figure, of costs
ON_HEADS = tuple(allocation.STUDIES.values())
STUDIES = (*ON_KAPPA, *ON_DEPTH, *ON_HEADS)
_TO_THE_END = [task for task, of in depth_for_heads.SETTINGS.items() if of.to_the_end]
COSTS = {  # of a run: what it is called, and its unit
    "params": ("parameters, millions", 1e6),
    "train_flops": ("FLOPs of the training, 10¹²", 1e12),
    "peak_memory_bytes": ("peak memory, MB", 1e6),
    "cpu_seconds": ("seconds of one core", 1),
}

BEGIN = "<!-- studies begin: written by python -m studies.page -->"
END = "<!-- studies end -->"
WIDTH = 120  # of a line of Markdown


def text() -> str:
    """Return the page, with what stands between its markers rendered anew."""
    parts = [BEGIN + "\n", *_sections(ON_KAPPA), *_sections(ON_DEPTH)]
    if any(read(study.name) for study in ON_DEPTH):
        parts.append("![held-out loss against its costs](images/study-depth_for_heads.png)\n")
    parts += _sections(ON_HEADS)
    if at_the_end := kappa_at_the_end.section():
        parts.append(at_the_end)
    parts.append(planner.section())
    gap = read(theorem_gap.NAME)
    if gap is not None:
        parts.append(theorem_gap.section(gap))
    parts.append(printed_tables.section())
    sizes = read(printed_memory.NAME)
    if sizes is not None:
        parts.append(printed_memory.section(sizes))
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return head + "\n".join([*map(wrap, parts), END]) + rest.split(END)[1]


def wrap(section: str) -> str:
    """Return Markdown with long lines wrapped, except rows of tables; spans of code stay whole."""
    lines = []
    for line in section.split("\n"):
        if len(line) <= WIDTH or line.startswith("|"):
            lines.append(line)
            continue
        joined = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), line)
        indent = "  " * line.startswith("- ")
        wrapped = textwrap.wrap(
            joined,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [text.replace("\0", " ") for text in wrapped]
    return "\n".join(lines)


def read(name: str) -> dict[str, Any] | None:
    """Return the recorded results of a study, if there are some."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def converged(task: str, found: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> str:
    """Return what the rates of a task gave, and whether its runs are at the end of training.

    Args:
        task: name of the task.
        found: its results.
        others: those of its repetitions.
    """
    setting, best = depth_for_heads.SETTINGS[task], depth_for_heads.best_rates(task)
    tried = depth_for_heads.runs_of_rates(task)
    loss = {
        name: f"{depth_for_heads.loss_of_rate(run):.4f}"
        + "*" * (not depth_for_heads.is_flat(task, [run]))
        for name, run in tried.items()
    }
    rows, open_ended, all_falls = [], [], []
    for arm, own in _by_arms(found).items():
        falls = [depth_for_heads.fall_at_end(run) for run in own]
        all_falls += falls
        of_rates = [loss.get(f"{arm}-lr-{rate}", "") for rate in setting.rates]
        shown = ", ".join(f"{fall:.1f}" for fall in falls)
        train = [f"{mean(run['train_loss'] for run in own):.4f}"] if "train_loss" in own[0] else []
        rows.append((arm, *of_rates, best[arm], shown, f"{mean(falls):.2f}", *train))
        if not depth_for_heads.is_flat(task, own):
            open_ended.append(arm)
    rates = [f"loss at {rate}" for rate in setting.rates]
    headers = ("arm", *rates, "taken", "fall of the loss, %, by seed", "mean", "training loss")
    headers = headers[: len(rows[0])]
    shown = tabulate(rows, headers, "github", disable_numparse=True)
    if open_ended:
        verdict = (
            f"By the rule, {' and '.join(open_ended)} had not reached the end of training"
            f"{'; all other arms had' if len(open_ended) < len(rows) else ''}."
        )
    else:
        arms = "Both arms" if len(rows) == 2 else f"All {len(rows)} arms"
        verdict = f"{arms} are at the end of their training."
    ends = setting.rates[0], setting.rates[-1]
    edge = [arm for arm, *_ in rows if arm != depth_for_heads.AGAIN and best[arm] in ends]
    on_rates = (
        f" For {' and '.join(edge)}, the rate taken is the lowest or the highest of the three. A "
        "better one may lie beyond it."
        if edge
        else ""
    )
    for arm, *_ in rows:
        own = {
            rate: depth_for_heads.loss_of_rate(tried[f"{arm}-lr-{rate}"])
            for rate in setting.rates
            if f"{arm}-lr-{rate}" in tried
        }
        lowest = min(own, key=own.__getitem__, default=best[arm])
        if lowest != best[arm]:
            on_rates += f" {arm} had a lower loss at {lowest}, in a run that was not flat."
    said = (
        f"**At the end.** {verdict} The last columns show by how much the last fifth of the steps "
        "lowered the loss of the items measured during training. This was "
        f"{min(all_falls):.1f}% to {max(all_falls):.1f}% in a run, and {median(all_falls):.1f}% at "
        f"the median. {sum(abs(fall) > setting.flat for fall in all_falls)} of "
        f"{len(all_falls)} runs changed by more than {setting.flat:g}%. The losses at the "
        f"three rates are of seed {depth_for_heads.TRIED_SEED}; a star marks a run that was not "
        "flat."
        f"{on_rates}"
    )
    all_results = (found, *others)
    leads = [depth_for_heads.lead_during(task, of["runs"]) for of in all_results]
    rows = [
        (
            time,
            *(
                "{:.2f} [{:.2f}, {:.2f}]".format(of[time].mean(), *stats.interval(of[time]))
                for of in leads
            ),
        )
        for time in leads[0]
    ]
    headers = (
        f"lean's lead on the items measured during training, {setting.unit}",
        *(f"seeds from {of.get('first_seed', 0)}" for of in all_results),
    )
    during = tabulate(rows, headers, "github", disable_numparse=True)
    return f"{said}\n\n{shown}\n\n{during}"


def _by_arms(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each arm."""
    arms = dict.fromkeys(run["arm"] for run in found["runs"])
    return {arm: [run for run in found["runs"] if run["arm"] == arm] for arm in arms}


def figure_of(study: Study) -> Path:
    """Return the path of a study's figure."""
    name = "depth_for_heads" if study in ON_DEPTH else study.name
    return PAGE.parent / "images" / f"study-{name}.png"


def _sections(studies: Sequence[Study]) -> Iterator[str]:
    """Yield a section for each study that has results."""
    for study in studies:
        if found := read(study.name):
            yield _section(study, found)


def _section(study: Study, found: dict[str, Any]) -> str:
    scale, plot = study.scales[found["scale"]], []
    if study not in ON_DEPTH:
        plot = [f"![{study.axes[1]} against {study.axes[0]}](images/{figure_of(study).name})"]
    runs, arms = len(found["runs"]), len({run["arm"] for run in found["runs"]})
    seconds = mean(run["seconds"] for run in found["runs"])
    machine = found["machine"]
    others = [
        other
        for path in sorted(RESULTS.glob(f"{study.name}-*.json"))
        if (other := json.loads(path.read_text()))["study"] == study.name
        and other["scale"] != "rates"
    ]
    # A repetition at another scale, or of the central claim, is shown next to the claims.
    elsewhere = [
        claim
        for other in others
        if other["scale"] != found["scale"] or study in ON_DEPTH
        for claim in _claims(other)
    ]
    ran = (
        f"{arms} arms of {found['seeds']} seeds, `{scale.script} {' '.join(scale.flags)}`: "
        f"{runs} runs, {machine['jobs']} at once, {seconds:.0f} s each on one core of "
        f"{machine['processor']}; commit {found['commit']['hash'][:12]}, "
        f"torch {found['versions']['torch']}"
    )
    about = {"Claimed": study.claims, "Measured": study.metric, "Run": f"{ran}."}
    about |= {"Rule": study.rule}
    parts = [
        f"## {study.question}",
        "\n".join(f"- **{word}.** {text}" for word, text in about.items()),
        table(_claims(found), "github", elsewhere),
        *plot,
        _by_group(study, found) or _by_arm(study, found),
        *_converged(study, found, others),
        *(_rerun(other, found) for other in others),
        f"**Not shown.** {study.not_shown}",
    ]
    return "\n\n".join(parts) + "\n"


def _converged(
    study: Study, found: dict[str, Any], others: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Yield what a study whose arms train to the end says about it."""
    if study is depth_for_heads.STUDIES["pictures"] and (ceiling := ideal_observer.section()):
        yield ceiling
    for task in _TO_THE_END:
        if depth_for_heads.STUDIES[task] is study:
            yield converged(task, found, others)


def _claims(found: dict[str, Any]) -> list[Claim]:
    return [Claim(**claim) for claim in found["claims"]]


def _by_group(study: Study, found: dict[str, Any]) -> str | None:
    """Return the mean losses, a row a group, if the same is varied in each of several groups."""
    groups: dict[str, dict[float, str]] = {}
    for arm in study.scales[found["scale"]].arms:
        losses = [run["held_out_loss"] for run in found["runs"] if run["arm"] == arm.name]
        groups.setdefault(arm.group, {})[arm.x] = f"{mean(losses):.4f}"
    varied = [*map(tuple, groups.values())]
    if len(varied) < 2 or len({*varied}) > 1:
        return None
    rows = [(group, *losses.values()) for group, losses in groups.items()]
    headers = (f"held-out loss by {study.axes[0]}", *varied[0])
    return tabulate(rows, headers, "github", disable_numparse=True)


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
    """Return how the verdicts of other seeds compare."""
    before, after = (
        {claim.claim: verdict for claim, _, verdict in judged(_claims(results))}
        for results in (original, other)
    )
    differ = [
        f"The verdict on “{name}” was “{before[name]}”, then “{after[name]}”."
        for name in after
        if before[name] != after[name]
    ]
    text = f"**Again**, with seeds from {other['first_seed']}"
    if other["scale"] != original["scale"]:
        seconds = mean(run["seconds"] for run in other["runs"])
        text += (
            f" and `--scale {other['scale']}`: {other['machine']['jobs']} runs at once, "
            f"{seconds:.0f} s each, Python {other['versions']['python']}, torch "
            f"{other['versions']['torch']}"
        )
    text += f". Same verdicts: {len(after) - len(differ)} of {len(after)}."
    if task := next((t for t in _TO_THE_END if depth_for_heads.name_of(t) == other["study"]), None):
        flat = [depth_for_heads.is_flat(task, own) for own in _by_arms(other).values()]
        differ.append(f"{sum(flat)} of {len(flat)} arms are at the end of their training.")
    return " ".join([text, *differ])


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
    """Draw the mean loss of each arm, and its seeds, against its costs; one row for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(COSTS), 3.2 * len(results)), layout="constrained")
    for row, (part, found) in zip(
        figure.subplots(len(results), len(COSTS), squeeze=False), results.items()
    ):
        for axes, (cost, (words, unit)) in zip(row, COSTS.items()):
            for number, (arm, own) in enumerate(_by_arms(found).items()):
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
    about, *_ = __doc__.splitlines()
    argparse.ArgumentParser(prog="python -m studies.page", description=about).parse_args(argv)
    for study in (*ON_KAPPA, *ON_HEADS):
        if found := read(study.name):
            draw(study, found, figure_of(study))
    parts = {part: read(study.name) for part, study in depth_for_heads.STUDIES.items()}
    if measured := {part: found for part, found in parts.items() if found}:
        draw_costs(measured, figure_of(ON_DEPTH[0]))
    if kappa_at_the_end.results():
        kappa_at_the_end.draw(PAGE.parent / "images" / f"study-{kappa_at_the_end.NAME}.png")
    PAGE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
