"""Does kappa say more at the end of training than before it?

python -m studies.kappa_at_the_end
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import gmean, rankdata

from studies import depth_for_heads, stats
from studies.planner import arms_of
from studies.runner import RESULTS, table
from studies.study import Claim, judged

QUESTION = "Does κ say more at the end of training than before it?"
NAME = "kappa_at_the_end"
ORDERS = "κ after training orders the losses better than before"
_SAID = {"holds": "holds", "fails": "fails", "undecided": "is undecided"}


def claims() -> list[Claim]:
    """Test the claims on every recorded study that trains to the end."""
    return [claim for task, found in results().items() for claim in _of_task(task, found["runs"])]


def results() -> dict[str, dict[str, Any]]:
    """Return the recorded results by task, of the tasks that train to the end."""
    paths = {
        task: RESULTS / f"{depth_for_heads.name_of(task)}.json"
        for task, setting in depth_for_heads.SETTINGS.items()
        if setting.to_the_end
    }
    return {task: json.loads(path.read_text()) for task, path in paths.items() if path.exists()}


def _of_task(task: str, runs: Sequence[dict[str, Any]]) -> list[Claim]:
    names = arms_of(runs)
    first, last, loss = (
        np.log10(stats.table(runs, names, measure))
        for measure in ("kappa_at_first", "kappa", "held_out_loss")
    )

    def claim(words: str, effects: np.ndarray, unit: str) -> Claim:
        return Claim.of_seeds(f"{task}: {words}", effects, stats.above_zero(effects), unit)

    fall = claim("κ is lower after training than before it", (first - last).mean(1), "decades")
    if len(names) < 3:
        return [fall]
    at_first, at_last = rank_correlations(first, loss), rank_correlations(last, loss)
    return [
        fall,
        claim("κ orders the arms after training as before it", rank_correlations(first, last), "r"),
        claim("arms with a lower κ before training end with a lower loss", at_first, "r"),
        claim("arms with a lower κ after training end with a lower loss", at_last, "r"),
        claim(ORDERS, at_last - at_first, "r"),
    ]


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (seeds,): Spearman's correlation over arms of two (seeds, arms); 0 without ranks."""
    a, b = (rankdata(values, axis=1) for values in (a, b))
    a, b = (values - values.mean(1, keepdims=True) for values in (a, b))
    sizes = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.divide((a * b).sum(1), sizes, out=np.zeros(len(a)), where=sizes > 0)


def section() -> str:
    """Return the study's part of the page, or nothing if there are no results."""
    tested, recorded = claims(), results().items()
    if not tested:
        return ""
    measured = (
        "**Measured.** κ on 16 items that are not learned from, the geometric mean over layers, of "
        "the runs that train to the end, before the first step and after each twentieth of the "
        "steps. A layer whose κ float32 heads do not resolve counts as 10⁷. r is Spearman's rank "
        "correlation over the arms of one seed."
    )
    rule = (
        "**Rule.** Student's test over seeds, one-sided; p is corrected after Holm over all claims "
        "of the table. The rule and the claims were committed before the results."
    )
    verdicts = {claim.claim: verdict for claim, _, verdict in judged(tested)}
    counts = Counter(verdicts.values())
    said = "; ".join(
        f"“{words}” {_SAID[verdict]}" for words, verdict in verdicts.items() if ORDERS in words
    )
    verdict = (
        f"**Found.** {f'{said}. ' if said else ''}{counts['holds']} of {len(tested)} claims hold, "
        f"{counts['fails']} fail and {counts['undecided']} are undecided."
    )
    not_shown = (
        "**Not shown.** κ was not changed on purpose here. The arms differ in depth, width, number "
        "of heads, learning rate and steps. Any of these may cause a correlation over arms. p is "
        "about other seeds of these arms, not about other arms."
    )
    not_shown += "".join(_twins(task, found["runs"]) + _of_rates(task) for task, found in recorded)
    figure = f"![κ over training](images/study-{NAME}.png)"
    parts = (measured, rule, table(tested, "github"), figure, verdict, not_shown)
    return "\n\n".join([f"## {QUESTION}", *parts]) + "\n"


def _twins(task: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return which arms of a task start with the same kappa."""
    names = arms_of(runs)
    first = stats.table(runs, names, "kappa_at_first")
    alike = [
        f"{one} and {other}"
        for (i, one), (j, other) in combinations(enumerate(names), 2)
        if (first[:, i] == first[:, j]).all()
    ]
    return f" On {task}, {'; '.join(alike)} start with the same κ." if alike else ""


def _of_rates(task: str) -> str:
    """Return by how much kappa after training depends on the learning rate."""
    kappa = {name: run["kappa"] for name, run in depth_for_heads.runs_of_rates(task).items()}
    low, *_, high = depth_for_heads.SETTINGS[task].rates
    names = [name.removesuffix(f"-lr-{low}") for name in kappa if name.endswith(f"-lr-{low}")]
    ratios = [kappa[f"{name}-lr-{high}"] / kappa[f"{name}-lr-{low}"] for name in names]
    return (
        f" On {task}, a rate of {high} instead of {low} multiplies κ after training by "
        f"{min(ratios):.3g} to {max(ratios):.3g}, and by {median(ratios):.3g} at the median. These "
        "are the runs that chose the rates."
    )


def draw(path: Path) -> None:
    """Write the figure of kappa over training to a file."""
    drawing().savefig(path, dpi=120)


def drawing() -> Any:
    """Draw kappa over training, and its correlation with the final loss, one row a task."""
    from matplotlib.figure import Figure

    found = results()
    figure = Figure(figsize=(13, 3.8 * len(found)), layout="constrained")
    for row, (task, measured) in zip(figure.subplots(len(found), 3, squeeze=False), found.items()):
        names = arms_of(measured["runs"])
        own = [[run for run in measured["runs"] if run["arm"] == name] for name in names]
        kappas = np.array([[run["kappas"] for run in runs] for runs in own])  # (arms, seeds, times)
        losses = np.array([[run["held_out_loss"] for run in runs] for runs in own])
        times = np.linspace(0, 100, kappas.shape[2])
        over, against, correlation = row
        for number, (name, of_arm, loss) in enumerate(zip(names, kappas, losses)):
            colour = f"C{number}"
            over.plot(times, gmean(of_arm, axis=0), color=colour, label=name)
            against.plot(of_arm[:, 0], loss, "o", mfc="none", color=colour, alpha=0.6)
            against.plot(of_arm[:, -1], loss, "o", color=colour, alpha=0.8)
        over.set(yscale="log", xlabel="training, %", ylabel=f"κ, {task}")
        against.set(
            xscale="log", xlabel="κ before (open) and after training", ylabel="held-out loss"
        )
        for axis in (over.yaxis, against.xaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        if len(names) > 2:
            r = np.array(
                [rank_correlations(kappas[:, :, t].T, losses.T) for t in range(len(times))]
            )
            correlation.plot(times, r, ".", color="C0", alpha=0.4)
            correlation.plot(times, r.mean(1), color="C0")
            correlation.axhline(0, color="grey", linewidth=0.8)
            correlation.set(
                ylim=(-1.05, 1.05), xlabel="training, %", ylabel="r of κ with the final loss"
            )
        else:
            correlation.axis("off")
        correlation.legend(
            handles=over.lines, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5)
        )
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Print the study's part of the page."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{NAME}", description=QUESTION)
    parser.parse_args(argv)
    sys.stdout.write(section())


if __name__ == "__main__":
    main()
