"""Can a model have fewer layers if it has more heads? The paper's central claim, on small tasks.

python -m studies.depth_for_heads --task python
"""

from collections.abc import Sequence

import numpy as np

from studies import stats
from studies.runner import main_of
from studies.study import Arm, Claim, Measured, Scale, Study

# What a model without four layers may lose: per cent of the held-out loss, or points of accuracy.
# Set before the runs.
MARGIN = 1.0
TASKS = {
    "python": "the next byte of the standard library",
    "listops": "the value of a nested list",
}
# The pilot of one seed: of ``python``, ten layers had a loss of 1.597 after 1,000 steps and one
# layer 1.650. Of ``listops``, ten layers were right in 63.9% after 800 steps, six in 64.7% and one
# in 44.7%; ten in 58.4% at twice the rate.
STEPS = {"python": 1500, "listops": 1000}
RATES = {"python": "3e-3", "listops": "1e-3"}
BATCHES: dict[str, tuple[str, ...]] = {"python": (), "listops": ("--batch-size", "96")}
SECONDS = {"python": 200, "listops": 170}  # the pilot's, on a busy machine
# The widths at which ten layers of six heads have the lean model's parameters, to a per cent, and
# the steps at which lean takes the original's FLOPs: tests count both.
NARROW = {"python": 61, "listops": 60}
LONGER = {"python": 1.96, "listops": 2.05}
ORIGINAL, LEAN, SHALLOW = "original", "lean", "shallow-only"
HEADS, WIDE_MLP, LEAN_LONGER = "heads-only", "lean-without-mlp-change", "lean-at-equal-flops"
DEEP_NARROW, AGAIN = "deep-and-narrow", "original-again"


def arms(task: str) -> tuple[Arm, ...]:
    """Return the arms of a task; ``x`` is the number of layers."""
    longer = str(round(STEPS[task] * LONGER[task]))
    sizes = {
        ORIGINAL: (10, 6),
        LEAN: (6, 8, "--mlp-ratio", "2"),
        SHALLOW: (6, 6),
        HEADS: (10, 8),
        WIDE_MLP: (6, 8),
        DEEP_NARROW: (10, 6, "--width", str(NARROW[task])),
        LEAN_LONGER: (6, 8, "--mlp-ratio", "2", "--steps", longer),
    }
    made = [
        Arm(name, "arms", depth, ("--depth", str(depth), "--heads", str(heads), *more))
        for name, (depth, heads, *more) in sizes.items()
    ]
    return (*made, Arm(AGAIN, "null", 10, made[0].flags, first_seed=1000))


def scores(task: str, runs: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """Return (seeds, arms): points of accuracy; of ``python`` -100 times the loss's logarithm."""
    if task == "python":
        return -100 * np.log(stats.table(runs, names, "held_out_loss"))
    return 100 * stats.table(runs, names, "held_out_accuracy")


def decide(task: str, runs: Sequence[Measured]) -> list[Claim]:
    """Test the claims of a task on its runs."""
    unit = "% of the loss" if task == "python" else "points"

    def gain(one: str, other: str) -> np.ndarray:
        score = scores(task, runs, (one, other))
        return score[:, 0] - score[:, 1]

    def claim(words: str, effects: np.ndarray) -> Claim:
        return Claim.of_seeds(words, effects, stats.above_zero(effects), unit)

    within = f"within {MARGIN:g} {'% of the loss' if task == 'python' else 'point'}"
    twins = np.log10(stats.table(runs, (ORIGINAL, AGAIN), "held_out_loss"))
    return [
        claim(f"lean is no worse than the original ({within})", gain(LEAN, ORIGINAL) + MARGIN),
        claim("six layers gain from eight heads, all else as it was", gain(WIDE_MLP, SHALLOW)),
        claim(
            f"eight heads alone make up for four layers ({within})",
            gain(WIDE_MLP, ORIGINAL) + MARGIN,
        ),
        claim("ten layers gain from eight heads", gain(HEADS, ORIGINAL)),
        claim("lean beats ten narrow layers of as many parameters", gain(LEAN, DEEP_NARROW)),
        claim("lean beats the original at equal training FLOPs", gain(LEAN_LONGER, ORIGINAL)),
        Claim.of_twins("loss", twins),
    ]


def _study(task: str) -> Study:
    flags = ("--task", task, "--steps", str(STEPS[task]), "--lr", RATES[task], *BATCHES[task])
    script = "studies/train_small.py"
    return Study(
        name=f"depth_for_heads_{task}",
        command=f"python -m studies.depth_for_heads --task {task}",
        question=f"Can a model have fewer layers if it has more heads? ({TASKS[task]})",
        claims=(
            "The paper says that with more heads, depth can be cut without a loss of quality. Its "
            "ViT-B goes from 12 layers of 12 heads to 7 layers of 16, and halves the width of the "
            "MLP. The heads stay equally wide. Here, models of width 96 go from 10 layers of 6 "
            "heads to 6 layers of 8. All heads are 16 wide."
        ),
        metric=(
            "Held-out loss; differences are in per cent of the loss."
            if task == "python"
            else "Held-out accuracy, in percentage points."
        ),
        rule=(
            "Student's paired test over seeds, one-sided. *No worse* means less than "
            f"{MARGIN:g} {'per cent of the loss' if task == 'python' else 'point'} worse. This "
            "margin was set before the runs, and the effect includes it. p is corrected after Holm "
            "over the claims of the task."
        ),
        not_shown=(
            "The models have a million parameters and were trained for minutes, at one learning "
            "rate that was chosen for the original."
        ),
        scales={
            "cpu": Scale(script, flags, arms(task), seeds=5, seconds=SECONDS[task]),
            "gpu15": Scale(script, (*flags, "--device", "cuda"), arms(task), seeds=5, jobs=8),
        },
        decide=lambda runs, _scale: decide(task, runs),
        axes=("layers", "held-out loss"),
        measure="held_out_loss",
    )


STUDIES = {task: _study(task) for task in TASKS}

if __name__ == "__main__":
    main_of("depth_for_heads", "--task", STUDIES)
