"""Does kappa cause anything?

python -m studies.kappa_and_loss
"""

from collections.abc import Sequence

import numpy as np

from studies import stats
from studies.kappa_against_heads import ON_DIGITS, ON_IMAGENET
from studies.runner import main, recorded
from studies.study import Arm, Claim, Measured, Scale, Study

WEIGHTS = (0.0, 0.003, 0.01, 0.03)
OTHER = "kappa_against_heads"


def _arms() -> tuple[Arm, ...]:
    arms = [Arm(f"penalty-{w:g}", "penalty", w, ("--kappa-penalty", f"{w:g}")) for w in WEIGHTS]
    return (*arms, Arm("penalty-0-again", "null", 0, arms[0].flags, first_seed=1000))


def _decide(runs: Sequence[Measured], scale: Scale) -> list[Claim]:
    names = [arm.name for arm in scale.arms if arm.group == "penalty"]
    claims = []
    for measure, words, unit in (
        ("kappa", "the penalty lowers κ", "decades a step of the weight"),
        ("held_out_loss", "the penalty lowers the held-out loss", "decades a step of the weight"),
    ):
        logs = np.log10(stats.table(runs, names, measure))
        fall = -stats.slopes(logs, range(len(names)))
        claims.append(Claim.of_seeds(words, fall, stats.falls(logs), unit))
    twins = stats.table(runs, ["penalty-0", "penalty-0-again"], "held_out_loss")
    return [*claims, _correlation(), Claim.of_twins("loss", np.log10(twins))]


def _correlation() -> Claim:
    """Within the arms of the other study, so that what the arms differ in does not count."""
    runs = [run for run in recorded(OTHER) if not run["arm"].endswith("-again")]
    arms = sorted({run["arm"] for run in runs})
    kappa, loss = (np.log10(stats.table(runs, arms, m)) for m in ("kappa", "held_out_loss"))
    r, low, high, p = stats.within(kappa, loss)
    words = f"runs of lower κ have the lower loss, within the arms of {OTHER}"
    return Claim(words, r, low, high, p, "correlation")


STUDY = Study(
    name="kappa_and_loss",
    question="Does a lower κ of the attention block cause a lower loss?",
    claims=(
        "The paper says that models with more heads do well because their attention is better "
        "conditioned. If so, among runs of one architecture that differ in their seed, those with "
        "the lower κ should have the lower loss. A penalty that lowers κ should lower the loss."
    ),
    metric=(
        "κ after training: the geometric mean over layers and 16 held-out items. The loss is the "
        "held-out cross-entropy. Both are base-10 logarithms. The penalty is the logarithm of the "
        "arithmetic mean of the squared singular values over their geometric mean. It is "
        "multiplied by its weight and added to the loss."
    ),
    rule=(
        "The penalty is tested by Page's trend test over its four weights, with the runs of one "
        "seed as a block. The correlation is that of the logarithms after subtracting the mean of "
        "their arm, tested by permutation within arms. A claim holds if its one-sided p, "
        "corrected after Holm, is below 0.05 and the bootstrap interval over seeds is above 0. It "
        "fails if the interval is below 0. Otherwise it is undecided."
    ),
    not_shown=(
        "There is one architecture, of 4 layers and 8 heads of 16, on digits that it learns "
        "almost perfectly. The penalty may have effects besides lowering κ."
    ),
    scales={
        "cpu": Scale(
            script="train/vit.py",
            flags=(*["--depth", "4", "--heads", "8", "--head-dim", "16"], *ON_DIGITS),
            arms=_arms(),
            seeds=8,
            seconds=28,
        ),
        "paper": Scale(
            script="train/vit.py",
            flags=(*ON_IMAGENET, "--model", "vit_base_lean"),
            arms=_arms(),
            seeds=3,
        ),
    },
    decide=_decide,
    axes=("weight of the penalty", "held-out loss"),
    measure="held_out_loss",
)

if __name__ == "__main__":
    main(STUDY)
