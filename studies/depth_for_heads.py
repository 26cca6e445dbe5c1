"""Can a model have fewer layers if it has more heads? The paper's central claim, on small tasks.

python -m studies.depth_for_heads --task pictures
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from studies import stats
from studies.runner import RESULTS, main_of, recorded
from studies.study import Arm, Claim, Measured, Scale, Study

SCRIPT = "studies/train_small.py"
# What a model without four layers may lose: per cent of the held-out loss, or points of accuracy.
# Set before the runs.
MARGIN = 1.0
# A run is at the end of its training if its held-out loss changes by no more than this over the
# last fifth of the steps, in per cent of its change over all steps. Set before the runs.
FLAT = 1.0
ORIGINAL, LEAN, SHALLOW = "original", "lean", "shallow-only"
HEADS, WIDE_MLP, LEAN_LONGER = "heads-only", "lean-without-mlp-change", "lean-at-equal-flops"
DEEP_NARROW, AGAIN = "deep-and-narrow", "original-again"
TRIED_SEED = 2000  # of the runs that choose the learning rates


@dataclass(frozen=True)
class Setting:
    """How one task is learned.

    Attributes:
        words: what the model predicts.
        flags: flags of ``train_small.py`` that all its arms have.
        steps: steps of an arm; some take more.
        rates: learning rates. Of several, each arm takes the one with which its loss was lowest.
        narrow: width at which ten layers of six heads have the lean model's parameters, to a per
            cent. A test counts both.
        longer: factor of the steps with which lean takes the original's FLOPs. A test counts both.
        seconds: that a run took in a pilot.
        names: arms, or None for all.
        score: "loss" or "accuracy", by which arms are compared.
    """

    words: str
    flags: tuple[str, ...]
    steps: int
    rates: tuple[str, ...]
    narrow: int
    longer: float
    seconds: float
    names: tuple[str, ...] | None = None
    score: str = "loss"

    @property
    def to_the_end(self) -> bool:
        """Whether it trains its arms until their losses are flat, at rates of their own."""
        return len(self.rates) > 1


_IN_WORDS = "the next byte of the standard library"
# One seed of a pilot: of ``python``, ten layers had a loss of 1.597 after 1,000 steps and one layer
# 1.650. Of ``listops``, ten layers were right in 63.9% after 800 steps, six in 64.7% and one in
# 44.7%; ten in 58.4% at twice the rate. docs/LOG.md has those of the tasks that train to the end.
SETTINGS = {
    "pictures": Setting(
        "cells that the start of a drawn maze reaches",
        ("--task", "pictures", "--width", "48", "--head-dim", "8", "--batch-size", "16"),
        steps=4500,
        rates=("1e-3", "2e-3", "4e-3"),
        narrow=30,
        longer=2.02,
        seconds=90,
        score="accuracy",
    ),
    "python-to-the-end": Setting(
        f"{_IN_WORDS}, from a fifteenth of its text",
        ("--task", "python", "--every-file", "12", "--batch-size", "16"),
        steps=2000,
        rates=("1.5e-3", "3e-3", "6e-3"),
        narrow=61,
        longer=1.96,
        seconds=180,
        names=(ORIGINAL, LEAN),
    ),
    "python": Setting(
        _IN_WORDS,
        ("--task", "python"),
        steps=1500,
        rates=("3e-3",),
        narrow=61,
        longer=1.96,
        seconds=200,
    ),
    "listops": Setting(
        "the value of a nested list",
        ("--task", "listops", "--batch-size", "96"),
        steps=1000,
        rates=("1e-3",),
        narrow=60,
        longer=2.05,
        seconds=170,
        score="accuracy",
    ),
}


def arms(task: str) -> tuple[Arm, ...]:
    """Return the arms of a task; ``x`` is the number of layers."""
    setting = SETTINGS[task]
    longer = str(round(setting.steps * setting.longer))
    sizes = {
        ORIGINAL: (10, 6),
        LEAN: (6, 8, "--mlp-ratio", "2"),
        SHALLOW: (6, 6),
        HEADS: (10, 8),
        WIDE_MLP: (6, 8),
        DEEP_NARROW: (10, 6, "--width", str(setting.narrow)),
        LEAN_LONGER: (6, 8, "--mlp-ratio", "2", "--steps", longer),
    }
    made = [
        Arm(name, "arms", depth, ("--depth", str(depth), "--heads", str(heads), *more))
        for name, (depth, heads, *more) in sizes.items()
        if setting.names is None or name in setting.names
    ]
    if setting.names is not None:
        return tuple(made)
    return (*made, Arm(AGAIN, "null", 10, made[0].flags, first_seed=1000))


def tried(task: str) -> tuple[Arm, ...]:
    """Return each arm of a task but the null with each learning rate; ``x`` is the rate."""
    return tuple(
        Arm(f"{arm.name}-lr-{rate}", arm.name, float(rate), (*arm.flags, "--lr", rate), TRIED_SEED)
        for arm in arms(task)
        if arm.group != "null"
        for rate in SETTINGS[task].rates
    )


def best_rates(task: str) -> dict[str, str]:
    """Return the learning rate of each arm with which its held-out loss was lowest.

    Raises:
        ValueError: the rates were not tried.
    """
    loss = {run["arm"]: run["held_out_loss"] for run in recorded(f"{name_of(task)}-rates")}
    best = {
        arm.name: min(SETTINGS[task].rates, key=lambda rate: loss[f"{arm.name}-lr-{rate}"])
        for arm in arms(task)
        if arm.group != "null"
    }
    return best | {AGAIN: best[ORIGINAL]}


def name_of(task: str) -> str:
    """Return the name of a task's results."""
    return f"depth_for_heads_{task}"


def fall_at_end(losses: Sequence[float]) -> float:
    """Return the share of a loss's fall that came in the last fifth of training, in per cent.

    Below 0 the loss rose.

    Args:
        losses: before the first step, and after each of equal parts of the training.
    """
    fifth = (len(losses) - 1) // 5
    return 100 * (losses[-1 - fifth] - losses[-1]) / (losses[0] - losses[-1])


def score(task: str, runs: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """Return (seeds, arms): points of accuracy, or -100 times the logarithm of the loss."""
    if SETTINGS[task].score == "loss":
        return -100 * np.log(stats.table(runs, names, "held_out_loss"))
    return 100 * stats.table(runs, names, "held_out_accuracy")


def decide(task: str, runs: Sequence[Measured]) -> list[Claim]:
    """Test the claims of a task on its runs; of runs that try rates there are none."""
    names = {run["arm"] for run in runs}
    if ORIGINAL not in names:
        return []
    unit, within = _units(task)

    def gain(one: str, other: str) -> np.ndarray:
        of = score(task, runs, (one, other))
        return of[:, 0] - of[:, 1]

    def claim(words: str, effects: np.ndarray) -> Claim:
        return Claim.of_seeds(words, effects, stats.above_zero(effects), unit)

    no_worse = f"lean is no worse than the original (within {within})"
    claims = [claim(no_worse, gain(LEAN, ORIGINAL) + MARGIN)]
    if names == {ORIGINAL, LEAN}:
        return [*claims, claim("lean is better than the original", gain(LEAN, ORIGINAL))]
    twins = np.log10(stats.table(runs, (ORIGINAL, AGAIN), "held_out_loss"))
    return [
        *claims,
        claim("six layers gain from eight heads, all else as it was", gain(WIDE_MLP, SHALLOW)),
        claim(
            f"eight heads alone make up for four layers (within {within})",
            gain(WIDE_MLP, ORIGINAL) + MARGIN,
        ),
        claim("ten layers gain from eight heads", gain(HEADS, ORIGINAL)),
        claim("lean beats ten narrow layers of as many parameters", gain(LEAN, DEEP_NARROW)),
        claim("lean beats the original at equal training FLOPs", gain(LEAN_LONGER, ORIGINAL)),
        *(
            [
                claim(
                    f"twice the steps do not improve lean (by {within})",
                    MARGIN - gain(LEAN_LONGER, LEAN),
                )
            ]
            if SETTINGS[task].to_the_end
            else []
        ),
        Claim.of_twins("loss", twins),
    ]


def _units(task: str) -> tuple[str, str]:
    """Return the unit of effects, and the margin in it."""
    if SETTINGS[task].score == "loss":
        return "% of the loss", f"{MARGIN:g} % of the loss"
    return "points", f"{MARGIN:g} point"


def scales(task: str) -> dict[str, Scale]:
    """Return the scales of a task; before its rates were tried, nothing else can run."""
    setting = SETTINGS[task]
    flags = (*setting.flags, "--steps", str(setting.steps))
    if not setting.to_the_end:
        flags += ("--lr", *setting.rates)
        chosen = arms(task)
    elif (RESULTS / f"{name_of(task)}-rates.json").exists():
        rates = best_rates(task)
        chosen = tuple(
            replace(arm, flags=(*arm.flags, "--lr", rates[arm.name])) for arm in arms(task)
        )
    else:
        chosen = None
    found = {}
    if chosen:
        found["cpu"] = Scale(SCRIPT, flags, chosen, seeds=5, seconds=setting.seconds)
        found["gpu15"] = Scale(SCRIPT, (*flags, "--device", "cuda"), chosen, seeds=5, jobs=8)
    if setting.to_the_end:
        found["rates"] = Scale(SCRIPT, flags, tried(task), seeds=1, seconds=setting.seconds)
    return found


def _study(task: str) -> Study:
    setting = SETTINGS[task]
    of_loss = setting.score == "loss"
    unit = "per cent of the loss" if of_loss else "point"
    width = "48" if task == "pictures" else "96"
    wide = "8" if task == "pictures" else "16"
    rule = (
        "Student's paired test over seeds, one-sided. *No worse* means less than "
        f"{MARGIN:g} {unit} worse. This margin was set before the runs, and the effect includes "
        "it. p is corrected after Holm over the claims of the task."
    )
    if setting.to_the_end:
        rule += (
            f" Each arm was first trained with the learning rates {', '.join(setting.rates)}, from "
            "one other seed, and takes the one with the lowest held-out loss. A run is at the end "
            "of its training if no more than "
            f"{FLAT:g}% of the change of its held-out loss falls into the last fifth of the steps."
        )
        not_shown = (
            "The models have up to a million parameters, and the schedule lowers the learning rate "
            "to 0, which flattens every loss. Twice the steps could still lower it."
        )
    else:
        not_shown = (
            "The models have a million parameters and were trained for minutes, at one learning "
            "rate that was chosen for the original."
        )
    return Study(
        name=name_of(task),
        command=f"python -m studies.depth_for_heads --task {task}",
        question=f"Can a model have fewer layers if it has more heads? ({setting.words})",
        claims=(
            "The paper says that with more heads, depth can be cut without a loss of quality. Its "
            "ViT-B goes from 12 layers of 12 heads to 7 layers of 16, and halves the width of the "
            f"MLP. The heads stay equally wide. Here, models of width {width} go from 10 layers of "
            f"6 heads to 6 layers of 8. All heads are {wide} wide."
        ),
        metric=(
            "Held-out loss; differences are in per cent of the loss."
            if of_loss
            else "Held-out accuracy, in percentage points."
        ),
        rule=rule,
        not_shown=not_shown,
        scales=scales(task),
        decide=lambda runs, _scale: decide(task, runs),
        axes=("layers", "held-out loss"),
        measure="held_out_loss",
    )


STUDIES = {task: _study(task) for task in SETTINGS}

if __name__ == "__main__":
    main_of("depth_for_heads", "--task", STUDIES)
