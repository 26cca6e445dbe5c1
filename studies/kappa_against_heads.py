"""Does kappa fall with the number of heads?

python -m studies.kappa_against_heads
"""

from collections.abc import Sequence

import numpy as np

from studies import stats
from studies.runner import main
from studies.study import Arm, Claim, Measured, Scale, Study

HEADS = (1, 2, 4, 8, 16)
# A width of 192 has no single head: the kernels take head dimensions up to 128.
FAMILIES = {
    "widen, d = 16": dict.fromkeys(HEADS, 16),
    "widen, d = 8": dict.fromkeys(HEADS, 8),
    "split, h·d = 192": {h: 192 // h for h in HEADS[1:]},
}
TOKENS = 16
# Of every run: kappa of held-out items alone.
ON_DIGITS = ("--kappa-every", "0", "--kappa-probe", "132", "--ckpt-every", "0")
ON_IMAGENET = ("--recipe", "paper", "--kappa-probe", "5000", "--kappa-every", "0")
PEAK = "widen, d = 8"


def _arms(families: dict[str, dict[int, int]], null: int) -> tuple[Arm, ...]:
    arms = [
        Arm(_name(family, h), family, h, ("--heads", str(h), "--head-dim", str(d)))
        for family, dims in families.items()
        for h, d in dims.items()
    ]
    same = next(arm for arm in arms if arm.x == null)
    again = Arm(f"{same.name}-again", "null", null, same.flags, first_seed=1000)
    return (*arms, again)


def _name(family: str, heads: int) -> str:
    word, _, size = family.partition(", ")
    return f"{word}-{size.split('= ')[1]}-heads-{heads}"


def _decide(runs: Sequence[Measured], scale: Scale) -> list[Claim]:
    claims = []
    groups = dict.fromkeys(arm.group for arm in scale.arms if arm.group != "null")
    for group in groups:
        arms = [arm for arm in scale.arms if arm.group == group]
        logs = np.log10(stats.table(runs, [arm.name for arm in arms], "kappa"))
        fall = -stats.slopes(logs, np.log2([arm.x for arm in arms]))
        words = f"κ falls from each number of heads to the next ({group})"
        claims.append(Claim.of_seeds(words, fall, stats.falls(logs), "decades a doubling"))
    if PEAK in groups:
        logs = np.log10(stats.table(runs, [_name(PEAK, h) for h in (1, 2, 4)], "kappa"))
        for place, words in ((0, "below"), (2, "above")):
            rise = logs[:, 1] - logs[:, place]
            claim = f"κ is larger at h·d = N than {words} ({PEAK})"
            claims.append(Claim.of_seeds(claim, rise, stats.above_zero(rise), "decades"))
    again = next(arm for arm in scale.arms if arm.group == "null")
    twins = stats.table(runs, [again.name.removesuffix("-again"), again.name], "kappa")
    return [*claims, Claim.of_twins("κ", np.log10(twins))]


STUDY = Study(
    name="kappa_against_heads",
    question="Does the condition number κ of the attention block fall as heads are added?",
    claims=(
        "The paper (arXiv:2505.20802, Figure 2 and theorem 3.2) says that it does. For "
        "independent Gaussian heads, κ depends only on h·d. It falls as h·d grows past the number "
        "of tokens N, peaks at h·d = N, and does not change if a fixed width is split into more "
        "heads."
    ),
    metric=(
        "κ of the concatenated heads after training, in evaluation mode: the geometric mean over "
        "layers and 16 held-out items, as a base-10 logarithm. If the precision of float32 heads "
        "does not resolve the κ of a layer, it counts as 10⁷. This was added after the runs, and "
        "concerns one head of N columns. It does not affect the trend test, which uses ranks."
    ),
    rule=(
        "A fall is tested by Page's trend test, with the runs of one seed as a block. The peak is "
        "tested by Student's paired test. A claim holds if its one-sided p, corrected after Holm "
        "over the claims of the study, is below 0.05 and the bootstrap interval over seeds is "
        "above 0. It fails if the interval is below 0. Otherwise it is undecided. The null arm "
        "fails if its interval does not contain 0."
    ),
    not_shown=(
        "The models have four layers and read 8 × 8 digits as 16 tokens. In the arms called "
        "widen, more heads also mean more parameters. Nothing here says that a lower κ is useful."
    ),
    scales={
        "cpu": Scale(
            script="train/vit.py",
            flags=("--depth", "4", *ON_DIGITS),
            arms=_arms(FAMILIES, 8),
            seeds=5,
            seconds=28,
        ),
        "paper": Scale(
            script="train/vit.py",
            flags=(*ON_IMAGENET, "--model", "vit_base"),
            arms=_arms({"widen, d = 64": dict.fromkeys((2, 4, 8, 12, 16), 64)}, 12),
            seeds=3,
        ),
    },
    decide=_decide,
    axes=("heads", "κ of held-out items"),
    doubling=True,
)

if __name__ == "__main__":
    main(STUDY)
