"""Does kappa before training predict which model will be better?

python -m studies.planner
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from tabulate import tabulate

from studies.runner import RESULTS
from studies.stats import DRAWS, table

QUESTION = "Does κ before training predict which model will be better?"
# Studies of architectures, whose results a part of the name begins.
SOURCES = "kappa_against_heads", "depth_for_heads", "allocation"
# What ranks, the best first where it is small: kappa before training, kappa after it, and what a
# model costs, where more is expected to be better.
RANKS = {"κ before training": "kappa_at_first", "κ after training": "kappa", "parameters": "params"}


def correlations() -> list[dict[str, Any]]:
    """Return, for each recorded study, each ranking's correlation with the held-out loss."""
    found = []
    for source in SOURCES:
        for path in sorted(RESULTS.glob(f"{source}*.json")):
            results = json.loads(path.read_text())
            # Runs that try learning rates compare these, and two arms have no order to speak of.
            if results.get("scale") != "rates" and len(arms_of(results["runs"])) > 2:
                found.append({"study": path.stem, **_of_runs(results["runs"])})
    return found


def arms_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the arms but the null."""
    return [name for name in dict.fromkeys(run["arm"] for run in runs) if "again" not in name]


def _of_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = arms_of(runs)
    loss = table(runs, names, "held_out_loss")
    draws = np.random.default_rng(0).integers(len(loss), size=(DRAWS // 10, len(loss)))
    rankings = {}
    for words, measure in RANKS.items():
        values = table(runs, names, measure) * (-1 if measure == "params" else 1)
        drawn = [_correlation(values[rows], loss[rows]) for rows in draws]
        low, high = np.percentile(drawn, (2.5, 97.5))
        rankings[words] = (_correlation(values, loss), float(low), float(high))
    return {"arms": len(names), "seeds": len(loss), **rankings}


def _correlation(values: np.ndarray, loss: np.ndarray) -> float:
    """Return Spearman's correlation over arms, of means over (seeds, arms); nan without ranks."""
    if np.ptp(values) == 0:
        return math.nan
    means = np.exp(np.log(np.abs(values)).mean(axis=0)) * np.sign(values[0])
    return float(spearmanr(means, loss.mean(axis=0)).statistic)


def section() -> str:
    """Return the study's part of the page."""
    found = correlations()
    rows = [
        (
            of["study"],
            of["arms"],
            of["seeds"],
            *(_shown(of[ranking]) for ranking in RANKS),
        )
        for of in found
    ]
    shown = tabulate(rows, ("study", "arms", "seeds", *RANKS), "github", disable_numparse=True)
    measured = (
        "**Measured.** Spearman's rank correlation over the arms of each study with more than two, "
        "of means over seeds. It is 1 if the ranking orders the models as their held-out losses "
        "do. The interval comes from resampling seeds."
    )
    above, below = (
        [sum(sign * of[ranking][edge] > 0 for of in found) for ranking in RANKS]
        for sign, edge in ((1, 1), (-1, 2))
    )
    verdict = (
        f"**Found.** The interval is above 0 in {above[0]} of {len(found)} recorded runs for κ "
        f"before training (below 0 in {below[0]}), in {above[1]} for κ after training "
        f"({below[1]}), and in {above[2]} for the number of parameters ({below[2]}). "
    )
    ranked = [sum(math.isfinite(of[ranking][0]) for of in found) for ranking in RANKS]
    reliable = [name for name, count, of in zip(RANKS, above, ranked) if count == of]
    if reliable:
        verdict += f"The interval of {' and '.join(reliable)} is above 0 in all of them."
    else:
        verdict += (
            "No ranking is above 0 in all of them, so nothing here chooses a model by κ or by size."
        )
    return "\n\n".join([f"## {QUESTION}", measured, shown, verdict]) + "\n"


def _shown(correlation: tuple[float, float, float]) -> str:
    return "–" if math.isnan(correlation[0]) else "{:.2f} [{:.2f}, {:.2f}]".format(*correlation)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the study's part of the page."""
    argparse.ArgumentParser(prog="python -m studies.planner", description=QUESTION).parse_args(argv)
    sys.stdout.write(section())


if __name__ == "__main__":
    main()
