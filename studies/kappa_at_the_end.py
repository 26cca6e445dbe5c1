"""What does kappa say at the end of training that it did not say before?

python -m studies.kappa_at_the_end
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from studies import depth_for_heads, stats
from studies.runner import RESULTS, table
from studies.study import Claim, judged

QUESTION = "Does κ say more at the end of training than before it?"
NAME = "kappa_at_the_end"


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
    names = _arms(runs)
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
        claim("κ after training orders the losses better than before", at_last - at_first, "r"),
    ]


def _arms(runs: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in dict.fromkeys(run["arm"] for run in runs) if "again" not in name]


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (seeds,): Spearman's correlation over arms of two (seeds, arms)."""
    a, b = (rankdata(values, axis=1) for values in (a, b))
    a, b = (values - values.mean(1, keepdims=True) for values in (a, b))
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def section() -> str:
    """Return the study's part of the page, or nothing if there are no results."""
    tested = claims()
    if not tested:
        return ""
    measured = (
        "**Measured.** κ on 16 held-out items, the geometric mean over layers, of the runs that "
        "train to the end, before the first step and after each twentieth of the steps. r is "
        "Spearman's rank correlation over the arms of one seed."
    )
    rule = (
        "**Rule.** Student's test over seeds, one-sided; p is corrected after Holm. The rule and "
        "the claims were committed before the results."
    )
    holding = [claim.claim for claim, _, verdict in judged(tested) if verdict == "holds"]
    others = dict.fromkeys(("fails", "undecided"), 0)
    for *_, verdict in judged(tested):
        if verdict in others:
            others[verdict] += 1
    verdict = (
        f"**Found.** {len(holding)} of {len(tested)} claims hold, {others['fails']} fail and "
        f"{others['undecided']} are undecided."
    )
    not_shown = (
        "**Not shown.** κ was not changed on purpose here. The arms differ in depth, width and "
        "number of heads, so a correlation over arms may have any of these as its cause."
    )
    parts = (
        measured,
        rule,
        table(tested, "github"),
        f"![κ over training](images/study-{NAME}.png)",
    )
    return "\n\n".join([f"## {QUESTION}", *parts, verdict, not_shown]) + "\n"


def draw(path: Path) -> None:
    """Draw kappa over training, and its correlation with the final loss, one row a task."""
    from matplotlib.figure import Figure

    found = results()
    figure = Figure(figsize=(11, 3.6 * len(found)), layout="constrained")
    for row, (task, of) in zip(figure.subplots(len(found), 3, squeeze=False), found.items()):
        names = _arms(of["runs"])
        own = [[run for run in of["runs"] if run["arm"] == name] for name in names]
        kappas = np.log10([[run["kappas"] for run in runs] for runs in own])  # (arms, seeds, times)
        losses = np.log10([[run["held_out_loss"] for run in runs] for runs in own])
        times = np.linspace(0, 100, kappas.shape[2])
        over, against, correlation = row
        for number, (name, of_arm, loss) in enumerate(zip(names, kappas, losses)):
            colour = f"C{number}"
            over.plot(times, 10 ** of_arm.mean(0), color=colour, label=name)
            over.fill_between(
                times, 10 ** of_arm.min(0), 10 ** of_arm.max(0), color=colour, alpha=0.15
            )
            against.plot(10 ** of_arm[:, 0], 10**loss, "o", mfc="none", color=colour, alpha=0.6)
            against.plot(10 ** of_arm[:, -1], 10**loss, "o", color=colour, alpha=0.8)
        over.set(yscale="log", xlabel="training, %", ylabel=f"κ, {task}")
        over.legend(fontsize="x-small")
        against.set(
            xscale="log",
            yscale="log",
            xlabel="κ before (open) and after training",
            ylabel="held-out loss",
        )
        if len(names) < 3:
            correlation.set_visible(False)
            continue
        r = np.array([rank_correlations(kappas[:, :, t].T, losses.T) for t in range(len(times))])
        correlation.plot(times, r, ".", color="C0", alpha=0.4)
        correlation.plot(times, r.mean(1), color="C0")
        correlation.axhline(0, color="grey", linewidth=0.8)
        correlation.set(
            ylim=(-1.05, 1.05), xlabel="training, %", ylabel="r of κ with the final loss"
        )
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the study's part of the page."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{NAME}", description=QUESTION)
    parser.parse_args(argv)
    sys.stdout.write(section())


if __name__ == "__main__":
    main()
