"""How should heads be spread over layers, and how wide should a head be?

python -m studies.allocation --part spread
"""

from collections.abc import Sequence

import numpy as np

from models.allocation import allocate
from studies import stats
from studies.runner import main_of
from studies.study import Arm, Claim, Measured, Scale, Study

UNIT = "% of the loss"
SCRIPT = "studies/train_small.py"
# Forty-eight heads of 16 in eight layers; or six a layer, whose widths are 128 in all.
EARLY, _ = allocate("early", heads=6, head_dim=16, depth=8)
NARROWING = (26, 24, 20, 16, 14, 12, 10, 6)
UNIFORM, AGAIN = "uniform", "uniform-again"
# By how much heads that are 32 wide are narrowed: those of the later four layers of eight, or of
# all eight, for whom the four numbers stand twice.
CUTS = {
    5: ((3, 3, 3, 3), (1, 2, 1, 2)),
    15: ((10, 9, 10, 9), (5, 5, 5, 4)),
    25: ((16, 16, 16, 16), (8, 8, 8, 8)),
}
WIDTHS, CONTEXTS, TOKENS = (4, 8, 16, 32, 64), (64, 256, 1024), 2048


def _joined(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _spread() -> tuple[Arm, ...]:
    layers = ("--depth", "8", "--mlp-ratio", "2")
    uniform = (*layers, "--heads", "6")
    return (
        Arm(UNIFORM, "spread", 0, uniform),
        Arm("early", "spread", 1, (*layers, "--heads", _joined(EARLY))),
        Arm("late", "spread", -1, (*layers, "--heads", _joined(EARLY[::-1]))),
        Arm("narrowing", "spread", 2, (*uniform, "--head-dim", _joined(NARROWING))),
        Arm(AGAIN, "null", 0, uniform, first_seed=1000),
    )


def _cuts() -> tuple[Arm, ...]:
    layers = ("--depth", "8", "--mlp-ratio", "2", "--heads", "3", "--head-dim")
    arms = [Arm("whole", "whole", 0, (*layers, "32"))]
    for share, (late, uniform) in CUTS.items():
        narrowed = {"late": (0, 0, 0, 0, *late), "uniform": uniform * 2}
        dims = {name: [32 - cut for cut in cuts] for name, cuts in narrowed.items()}
        arms += [
            Arm(f"{name}-{share}", name, share, (*layers, _joined(of))) for name, of in dims.items()
        ]
    return tuple(arms)


def _saturation() -> tuple[Arm, ...]:
    layers = ("--depth", "4", "--mlp-ratio", "2", "--heads", "4")
    return tuple(
        Arm(
            f"context-{context}-width-{width}",
            f"{context} tokens",
            width,
            (
                *layers,
                *("--head-dim", str(width), "--context", str(context)),
                *("--batch-size", str(TOKENS // context)),
            ),
        )
        for context in CONTEXTS
        for width in WIDTHS
    )


def _logs(runs: Sequence[Measured], *names: str) -> np.ndarray:
    """Return (seeds, arms): a hundred times the logarithm of the held-out loss."""
    return 100 * np.log(stats.table(runs, names, "held_out_loss"))


def _less(claim: str, runs: Sequence[Measured], one: str, other: str) -> Claim:
    """Return the claim that one arm has a lower loss than another."""
    logs = _logs(runs, one, other)
    effects = logs[:, 1] - logs[:, 0]
    return Claim.of_seeds(claim, effects, stats.above_zero(effects), UNIT)


def _decide_spread(runs: Sequence[Measured], _scale: Scale) -> list[Claim]:
    twins = np.log10(stats.table(runs, (UNIFORM, AGAIN), "held_out_loss"))
    return [
        _less("more heads in early layers beat a uniform spread", runs, "early", UNIFORM),
        _less("they beat more heads in late layers", runs, "early", "late"),
        _less("heads that narrow with depth beat a uniform width", runs, "narrowing", UNIFORM),
        Claim.of_twins("loss", twins),
    ]


def _decide_cuts(runs: Sequence[Measured], _scale: Scale) -> list[Claim]:
    return [
        _less(
            f"of {share}% of attention, a cut in the later half costs less than a uniform one",
            runs,
            f"late-{share}",
            f"uniform-{share}",
        )
        for share in CUTS
    ]


def _decide_saturation(runs: Sequence[Measured], _scale: Scale) -> list[Claim]:
    claims, later = [], {}
    for context in CONTEXTS:
        logs = _logs(runs, *(f"context-{context}-width-{width}" for width in (4, 16, 64)))
        first, second = -np.diff(logs).T
        later[context] = second - first
        words = f"{context} tokens: heads from 4 to 16 wide gain more than from 16 to 64"
        claims.append(
            Claim.of_seeds(words, -later[context], stats.above_zero(-later[context]), UNIT)
        )
    short, long = CONTEXTS[0], CONTEXTS[-1]
    earlier = later[short] - later[long]
    words = f"the gain falls off more at {long} tokens than at {short}"
    return [*claims, Claim.of_seeds(words, earlier, stats.above_zero(earlier), UNIT)]


_TASK = ("--task", "python", "--lr", "3e-3", "--steps", "1000")
_ON_GPU = ("--device", "cuda")
_PARTS = {
    "spread": (
        "Do early layers want more heads?",
        "The companion paper (arXiv:2510.03784) argues that early layers do, and that later "
        "layers need fewer. It prints no schedule, so these schedules are our own. All arms have "
        "the same total number of heads, or the same total width, and therefore as many "
        "parameters and FLOPs.",
        _spread(),
        5,
        _decide_spread,
        ("heads late (-1), uniform (0), early (1) or narrowing (2)", "held-out loss"),
    ),
    "cuts": (
        "Does it cost less to narrow the heads of later layers?",
        "The companion paper says that later layers can do with less. Attention loses 5, 15 or "
        "25% of its total width. Either the heads of the last four of eight layers are narrowed, "
        "or those of all layers.",
        _cuts(),
        5,
        _decide_cuts,
        ("share of attention's width cut, %", "held-out loss"),
    ),
    "saturation": (
        "Does wider attention gain less and less, and sooner for long sequences?",
        "The companion paper says that softmax saturates as heads widen, most of all for long "
        "sequences. Here each layer has four heads, which are widened in two steps of 4 times "
        "each.",
        _saturation(),
        3,
        _decide_saturation,
        ("width of a head", "held-out loss"),
    ),
}


def _study(part: str) -> Study:
    question, claims, arms, seeds, decide, axes = _PARTS[part]
    return Study(
        name=f"allocation_{part}",
        command=f"python -m studies.allocation --part {part}",
        question=question,
        claims=claims,
        metric=(
            "Held-out loss of the next byte of the standard library; differences are in per cent "
            "of the loss."
        ),
        rule=(
            "Student's paired test over seeds, one-sided. p is corrected after Holm over the "
            "claims of the part."
        ),
        not_shown=(
            "The models have up to a million parameters and were trained on one text, for "
            "minutes, at one learning rate."
        ),
        scales={
            "cpu": Scale(SCRIPT, _TASK, arms, seeds=seeds, seconds=120),
            "gpu15": Scale(SCRIPT, (*_TASK, *_ON_GPU), arms, seeds=seeds, jobs=8),
        },
        decide=decide,
        axes=axes,
        measure="held_out_loss",
        doubling=part == "saturation",
    )


STUDIES = {part: _study(part) for part in _PARTS}

if __name__ == "__main__":
    main_of("allocation", "--part", STUDIES)
