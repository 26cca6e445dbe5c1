"""Can a model have fewer layers if it has more heads? The paper's central claim, on small tasks.

python -m studies.depth_for_heads --task pictures
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from studies import stats, train_small
from studies.runner import RESULTS, main_of
from studies.study import Arm, Claim, Measured, Scale, Study

SCRIPT = "studies/train_small.py"
ORIGINAL, LEAN, SHALLOW = "original", "lean", "shallow-only"
HEADS, WIDE_MLP, LEAN_LONGER = "heads-only", "lean-without-mlp-change", "lean-at-equal-flops"
DEEP_NARROW, AGAIN = "deep-and-narrow", "original-again"
TRIED_SEED = 2000  # of the runs that choose the learning rates
BEFORE_LAST_FIFTH = -1 - train_small.CHECKS // 5  # index into the measurements of a run


@dataclass(frozen=True)
class Setting:
    """How one task is learned.

    Attributes:
        words: what the model predicts.
        task: task of ``train_small.py``.
        flags: its other flags, which all arms have.
        steps: steps of an arm; some take more.
        rates: learning rates. If there are several, each arm takes its best one by held-out loss.
        narrow: width at which ten layers of six heads have the lean model's parameters, to a per
            cent. A test counts both.
        longer: factor of the steps with which lean takes the original's FLOPs. A test counts both.
        seconds: duration of a run, on average over arms.
        score: "loss" or "accuracy", by which arms are compared.
        margin: what a model without four layers may lose, in per cent of the held-out loss or in
            points of accuracy. Set before the runs.
        flat: if not None, the arms are meant, and checked, to be flat at the end of training: over
            the last fifth of the steps, the mean of an arm's losses on the items measured during
            training changes by no more than this, in per cent.
        width: embedding width of the original.
        head_dim: width of a head.
        arm_names: arms, or None for all.
    """

    words: str
    task: str
    flags: tuple[str, ...]
    steps: int
    rates: tuple[str, ...]
    narrow: int
    longer: float
    seconds: float
    score: str = "loss"
    margin: float = 1.0
    flat: float | None = None
    width: int = 96
    head_dim: int = 16
    arm_names: tuple[str, ...] | None = None

    @property
    def common_flags(self) -> tuple[str, ...]:
        """Return the flags of ``train_small.py`` that all arms have."""
        sizes = ("--width", str(self.width), "--head-dim", str(self.head_dim))
        return ("--task", self.task, *sizes, *self.flags, "--steps", str(self.steps))

    @property
    def to_the_end(self) -> bool:
        """Return whether the arms are trained to the end."""
        return self.flat is not None

    @property
    def unit(self) -> str:
        """Return the unit of a difference of scores."""
        return "% of the loss" if self.score == "loss" else "points"


_IN_WORDS = "the next byte of the standard library"
# One seed of a pilot: of ``python``, ten layers had a loss of 1.597 after 1,000 steps and one layer
# 1.650. Of ``listops``, ten layers were right in 63.9% after 800 steps, six in 64.7% and one in
# 44.7%; ten in 58.4% at twice the rate. docs/LOG.md has those of the tasks that train to the end.
SETTINGS = {
    "pictures": Setting(
        "cells that the start of a drawn maze reaches",
        "pictures",
        ("--batch-size", "16"),
        steps=6000,
        rates=("1.5e-3", "3e-3", "6e-3"),
        narrow=30,
        longer=2.02,
        seconds=135,
        score="accuracy",
        margin=0.5,
        flat=5.0,
        width=48,
        head_dim=8,
    ),
    "python-to-the-end": Setting(
        f"{_IN_WORDS}, from 180 kB of it",
        "python",
        ("--every-file", "17", "--batch-size", "16"),
        steps=2000,
        rates=("1.5e-3", "3e-3", "6e-3"),
        narrow=61,
        longer=1.96,
        seconds=180,
        flat=1.0,
        arm_names=(ORIGINAL, LEAN),
    ),
    "python": Setting(
        _IN_WORDS,
        "python",
        (),
        steps=1500,
        rates=("3e-3",),
        narrow=61,
        longer=1.96,
        seconds=200,
    ),
    "listops": Setting(
        "the value of a nested list",
        "listops",
        ("--batch-size", "96"),
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
        if setting.arm_names is None or name in setting.arm_names
    ]
    if setting.arm_names is not None:
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
    """Return the learning rate of each arm with which its loss was lowest at the end of training.

    A rate whose run is not flat is left out, unless none is. If the task has validation items
    beside the held-out ones, their loss counts.

    Raises:
        ValueError: the rates were not tried.
    """
    runs = runs_of_rates(task)

    def badness(arm: str, rate: str) -> tuple[bool, float]:
        run = runs[f"{arm}-lr-{rate}"]
        return not is_flat(task, [run]), loss_of_rate(run)

    best = {
        arm.name: min(SETTINGS[task].rates, key=lambda rate: badness(arm.name, rate))
        for arm in arms(task)
        if arm.group != "null"
    }
    return best | {AGAIN: best[ORIGINAL]}


def runs_of_rates(task: str) -> dict[str, Measured]:
    """Return the runs that tried the learning rates of a task, by arm and rate.

    Raises:
        ValueError: the rates were not tried.
    """
    path = RESULTS / f"{name_of(task)}-rates.json"
    if not path.exists():
        command = f"python -m studies.depth_for_heads --task {task} --scale rates --record"
        raise ValueError(f"the arms of {task} need their learning rates: run {command} first")
    return {run["arm"]: run for run in json.loads(path.read_text())["runs"]}


def loss_of_rate(run: Measured) -> float:
    """Return the loss by which a learning rate is chosen."""
    return run.get("validation_loss", run["held_out_loss"])


def name_of(task: str) -> str:
    """Return the name of a task's results."""
    return f"depth_for_heads_{task}"


def fall_at_end(run: Measured) -> float:
    """Return by how many per cent the last fifth of a run's steps lowered its loss."""
    return 100 * (1 - run["losses"][-1] / run["losses"][BEFORE_LAST_FIFTH])


def is_flat(task: str, runs: Sequence[Measured]) -> bool:
    """Return whether one arm, given all its runs, is at the end of its training.

    Raises:
        ValueError: the task is not trained to the end.
    """
    limit = SETTINGS[task].flat
    if limit is None:
        raise ValueError(f"{task} is not trained to the end")
    return abs(fmean(map(fall_at_end, runs))) <= limit


def lead_during(task: str, runs: Sequence[Measured]) -> dict[str, np.ndarray]:
    """Return lean's lead over the original on the items measured during training.

    Each is (seeds,): after 80% of the steps, after all of them, and at the measurement of each run
    with its lowest loss.

    Raises:
        ValueError: the two arms have other seeds.
    """
    of_arms: dict[str, list[np.ndarray]] = {}
    seeds = []
    for arm in (ORIGINAL, LEAN):
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: run["seed"])
        seeds.append([run["seed"] for run in own])
        losses = np.array([run["losses"] for run in own])
        scores = -100 * np.log(losses)
        if SETTINGS[task].score == "accuracy":
            scores = 100 * np.array([run["accuracies"] for run in own])
        best = scores[np.arange(len(own)), losses.argmin(axis=1)]
        of_arms[arm] = [scores[:, BEFORE_LAST_FIFTH], scores[:, -1], best]
    if seeds[0] != seeds[1]:
        raise ValueError(f"original and lean have the seeds {seeds[0]} and {seeds[1]}")
    times = "after 80% of the steps", "after all steps", "where the loss of each run was lowest"
    return {
        time: lean - original
        for time, lean, original in zip(times, of_arms[LEAN], of_arms[ORIGINAL])
    }


def score(task: str, runs: Sequence[Measured], names: Sequence[str]) -> np.ndarray:
    """Return (seeds, arms): points of accuracy, or -100 times the logarithm of the loss."""
    if SETTINGS[task].score == "loss":
        return -100 * np.log(stats.table(runs, names, "held_out_loss"))
    return 100 * stats.table(runs, names, "held_out_accuracy")


def decide(task: str, runs: Sequence[Measured]) -> list[Claim]:
    """Test the claims of a task on its runs. Runs that try rates have no claims."""
    if {run["arm"] for run in runs} <= {arm.name for arm in tried(task)}:
        return []
    setting = SETTINGS[task]
    unit = setting.unit if setting.score == "loss" else "point"
    margin, within = setting.margin, f"{setting.margin:g} {unit}"

    def gain(one: str, other: str) -> np.ndarray:
        of = score(task, runs, (one, other))
        return of[:, 0] - of[:, 1]

    def claim(words: str, effects: np.ndarray) -> Claim:
        return Claim.of_seeds(words, effects, stats.above_zero(effects), setting.unit)

    no_worse = f"lean is no worse than the original (within {within})"
    claims = [claim(no_worse, gain(LEAN, ORIGINAL) + margin)]
    if setting.arm_names is not None:
        return [*claims, claim("lean is better than the original", gain(LEAN, ORIGINAL))]
    if {run["arm"] for run in runs} == {ORIGINAL, LEAN}:
        return claims
    claims += [
        claim("six layers gain from eight heads, all else as it was", gain(WIDE_MLP, SHALLOW)),
        claim(
            f"eight heads alone make up for four layers (within {within})",
            gain(WIDE_MLP, ORIGINAL) + margin,
        ),
        claim("ten layers gain from eight heads", gain(HEADS, ORIGINAL)),
        claim("lean beats ten narrow layers of as many parameters", gain(LEAN, DEEP_NARROW)),
        claim("lean beats the original at equal training FLOPs", gain(LEAN_LONGER, ORIGINAL)),
    ]
    if setting.to_the_end:
        claims += [
            claim(
                f"twice the steps improve lean by less than {within}",
                margin - gain(LEAN_LONGER, LEAN),
            ),
            claim("ten layers beat six, both of six heads", gain(ORIGINAL, SHALLOW)),
            claim(
                f"six layers are no worse than ten, both of six heads (within {within})",
                gain(SHALLOW, ORIGINAL) + margin,
            ),
        ]
    twins = np.log10(stats.table(runs, (ORIGINAL, AGAIN), "held_out_loss"))
    return [*claims, Claim.of_twins("loss", twins)]


def scales(task: str) -> dict[str, Scale]:
    """Return the scales of a task; before its rates were tried, nothing else can run.

    The scale "central" has the arms of the central claim alone, to repeat it with other seeds.
    """
    setting = SETTINGS[task]
    flags, chosen = setting.common_flags, arms(task)
    if not setting.to_the_end:
        return _cpu_and_gpu((*flags, "--lr", *setting.rates), chosen, setting.seconds)
    trying = Scale(SCRIPT, flags, tried(task), seeds=1, seconds=setting.seconds)
    try:
        rates = best_rates(task)
    except ValueError:
        return {"rates": trying}
    chosen = tuple(replace(arm, flags=(*arm.flags, "--lr", rates[arm.name])) for arm in chosen)
    made = {**_cpu_and_gpu(flags, chosen, setting.seconds), "rates": trying}
    if setting.arm_names is None:
        central = tuple(arm for arm in chosen if arm.name in (ORIGINAL, LEAN))
        made["central"] = replace(made["cpu"], arms=central)
    return made


def _cpu_and_gpu(flags: tuple[str, ...], arms: tuple[Arm, ...], seconds: float) -> dict[str, Scale]:
    return {
        "cpu": Scale(SCRIPT, flags, arms, seeds=5, seconds=seconds),
        "gpu15": Scale(SCRIPT, (*flags, "--device", "cuda"), arms, seeds=5, jobs=8),
    }


def _study(task: str) -> Study:
    setting = SETTINGS[task]
    of_loss = setting.score == "loss"
    unit = "per cent of the loss" if of_loss else "points" if setting.margin < 1 else "point"
    rule = (
        "Student's paired test over seeds, one-sided. *No worse* means less than "
        f"{setting.margin:g} {unit} worse. This margin was set before the runs, and the effect "
        "includes it. p is corrected after Holm over the claims of the task."
    )
    not_shown = (
        "The models have a million parameters and were trained for minutes, at one learning rate "
        "that was chosen for the original."
    )
    if setting.to_the_end:
        rule += (
            f" One run of each arm tried each learning rate ({', '.join(setting.rates)}) with "
            "another seed. Each arm takes the rate of its flat run with the lowest loss. If none "
            "was flat, all count. An arm is at the end of its training if the last fifth of the "
            f"steps changes its loss by no more than {setting.flat:g}%, averaged over the seeds."
        )
        not_shown = (
            "The schedule lowers the learning rate to 0, which flattens every curve. Other "
            "schedules, or regularisation, could lower the loss further."
        )
    if task == "pictures":
        not_shown += (
            " A model sees each of its 1,250 mazes 77 times (lean at equal FLOPs: 155 times), each "
            "time with other noise. In part, the loss may be flat because learning and memorising "
            "balance: in pilots with 1,500 and 2,000 mazes it fell by 3 to 5%, and with 700 it "
            "rose by 2%. The rates were tried on 1,000 mazes. That a rate must be flat was decided "
            "after they were tried."
        )
    if task == "python-to-the-end":
        not_shown += (
            " The text is short enough to be read eleven times, so that the held-out loss is flat "
            "while the training loss still falls."
        )
    return Study(
        name=name_of(task),
        command=f"python -m studies.depth_for_heads --task {task}",
        question=f"Can a model have fewer layers if it has more heads? ({setting.words})",
        claims=(
            "The paper says that with more heads, depth can be cut without a loss of quality. Its "
            "ViT-B goes from 12 layers of 12 heads to 7 layers of 16, and halves the width of the "
            f"MLP. The heads stay equally wide. Here, models of width {setting.width} go from 10 "
            f"layers of 6 heads to 6 layers of 8. All heads are {setting.head_dim} wide."
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
