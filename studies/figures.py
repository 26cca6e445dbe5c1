"""Are the models of a figure of the paper as good as their original? Takes GPUs and the data.

python -m studies.figures --figure 5 -- --data /data/imagenet
"""

from collections.abc import Sequence
from functools import partial

from models import papers
from studies import stats
from studies.runner import main_of
from studies.study import Arm, Claim, Measured, Scale, Study

MARGIN = 1.0  # points of held-out accuracy that a model may lose
_PROBE = ("--kappa-every", "0", "--kappa-probe", "5000")
_ON_IMAGENET = ("train/vit.py", ("--recipe", "paper", *_PROBE), "vit_base")
# The script, its flags, the model that all are compared with, and what varies beside the depth.
FIGURES = {
    "3": (*_ON_IMAGENET, "heads"),
    "4": (*_ON_IMAGENET, "mlp_ratio"),
    "5": (*_ON_IMAGENET, "mlp_ratio"),
    "8": ("train/lra.py", ("--task", "listops", *_PROBE), "nystromformer_listops", "heads"),
    "9": ("train/lra.py", ("--task", "text", *_PROBE), "nystromformer_text", "heads"),
}


def _arms(figure: str, original: str, varied: str) -> tuple[Arm, ...]:
    """Return the original, the points of the figure that differ from it, and the original again."""
    rows = papers.names()
    points = {
        name: row.config
        for name, row in rows.items()
        if row.row == f"figure{figure}" and row.config != rows[original].config
    }
    named = {original: rows[original].config} | points
    arms = [
        Arm(name, f"{of['depth']} layers", of[varied], ("--model", name))
        for name, of in named.items()
    ]
    again = f"{original}-again"
    return (*arms, Arm(again, "null", arms[0].x, arms[0].flags, first_seed=1000))


def _decide(original: str, runs: Sequence[Measured], scale: Scale) -> list[Claim]:
    names = [arm.name for arm in scale.arms if arm.group != "null"]
    points = 100 * stats.table(runs, names, "held_out_accuracy")
    claims = []
    for name, own in zip(names[1:], points.T[1:]):
        effects = own - points[:, 0] + MARGIN
        words = f"{name} is no worse than {original} (within {MARGIN:g} point)"
        claims.append(Claim.of_seeds(words, effects, stats.above_zero(effects), "points"))
    twins = stats.table(runs, (original, f"{original}-again"), "held_out_accuracy")
    return [*claims, Claim.of_twins("accuracy", twins)]


def _study(figure: str) -> Study:
    script, flags, original, varied = FIGURES[figure]
    return Study(
        name=f"figure{figure}",
        command=f"python -m studies.figures --figure {figure}",
        question=f"Are the models of the paper's Figure {figure} as good as {original}?",
        claims=(
            "The paper (arXiv:2505.20802): shallower models with more heads or a narrower MLP are "
            "as accurate as the original."
        ),
        metric="Held-out accuracy, in points.",
        rule=(
            f"Student's paired test over seeds, one-sided. *No worse*: not {MARGIN:g} point or "
            "more below; the effect includes it. p corrected after Holm over the claims."
        ),
        not_shown="Another recipe, or other learning rates for the smaller models.",
        scales={"paper": Scale(script, flags, _arms(figure, original, varied), seeds=3)},
        decide=partial(_decide, original),
        axes=("heads" if varied == "heads" else "MLP ratio", "held-out accuracy"),
        measure="held_out_accuracy",
    )


STUDIES = {figure: _study(figure) for figure in FIGURES}

if __name__ == "__main__":
    main_of("figures", "--figure", STUDIES)
