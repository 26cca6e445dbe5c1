"""Define a study: its question, its arms as data, and its decision rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from studies import stats

Verdict = Literal["holds", "fails", "undecided"]
# An effect with a p below this, after Holm's correction, is significant.
LEVEL = 0.05


@dataclass(frozen=True)
class Arm:
    """One configuration.

    Attributes:
        name: name of it, and of its folder.
        group: of the arms that are compared with each other.
        x: value that varies within the group.
        flags: flags of the script.
        first_seed: first seed of its runs; arms with the same one start from the same seeds.
    """

    name: str
    group: str
    x: float
    flags: tuple[str, ...]
    first_seed: int = 0


@dataclass(frozen=True)
class Scale:
    """How large a study is.

    Attributes:
        script: that every run starts.
        flags: flags of every run.
        arms: arms that are compared.
        seeds: runs of each arm.
        seconds: that one run took on one core of a CPU, or None where none has run.
        jobs: runs at once.
    """

    script: str
    flags: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: int
    seconds: float | None = None
    jobs: int = 2


@dataclass(frozen=True)
class Claim:
    """One claim, tested.

    Attributes:
        claim: in words.
        effect: its size, positive as claimed.
        low: where its 95% interval, by the bootstrap over seeds, begins.
        high: where that ends.
        p: one-sided, before correction.
        unit: unit of the effect.
        null: of two arms with the same configuration, which should not differ.
    """

    claim: str
    effect: float
    low: float
    high: float
    p: float
    unit: str
    null: bool = False

    @classmethod
    def of_seeds(cls, claim: str, effects: np.ndarray, p: float, unit: str) -> Self:
        """Return the claim that the mean of (seeds,) effects is above 0."""
        return cls(claim, float(effects.mean()), *stats.interval(effects), p, unit)

    @classmethod
    def of_twins(cls, measure: str, pair: np.ndarray) -> Self:
        """Return the null claim on (seeds, 2): logarithms of one configuration's runs, twice."""
        apart = pair[:, 1] - pair[:, 0]
        p = 2 * min(stats.above_zero(apart), stats.above_zero(-apart))
        words = f"one configuration twice, with other seeds, has the same {measure}"
        return replace(cls.of_seeds(words, apart, p, "decades"), null=True)

    def verdict(self, corrected: float) -> Verdict:
        """Return the verdict of the study's rule, given the corrected p."""
        if self.null:
            return "holds" if self.low <= 0 <= self.high else "fails"
        if corrected < LEVEL and self.low > 0:
            return "holds"
        return "fails" if self.high < 0 else "undecided"


def judged(claims: Sequence[Claim]) -> list[tuple[Claim, float, Verdict]]:
    """Return each claim, its p after Holm's correction (of a null as it is), and its verdict."""
    corrected = iter(stats.holm([claim.p for claim in claims if not claim.null]))
    ps = [claim.p if claim.null else next(corrected) for claim in claims]
    return [(claim, p, claim.verdict(p)) for claim, p in zip(claims, ps)]


# Results of a run: its arm, its seed and measures by name.
Measured = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """One study.

    Attributes:
        name: name of its results.
        question: question that it asks.
        claims: expected results, and whose expectation it is.
        metric: measured quantity.
        rule: rule of decision, in addition to ``Claim.verdict``.
        not_shown: questions that it cannot answer.
        scales: by name, such as "cpu" and "paper", the smallest first.
        decide: tests its claims on runs.
        axes: labels of the plot: of the varied value, and of the measure.
        measure: of a run, plotted.
        doubling: whether what varies is plotted by its logarithm.
        command: that runs it; by default its module is its name.
    """

    name: str
    question: str
    claims: str
    metric: str
    rule: str
    not_shown: str
    scales: Mapping[str, Scale]
    decide: Callable[[Sequence[Measured], Scale], list[Claim]]
    axes: tuple[str, str]
    measure: str = "kappa"
    doubling: bool = False
    command: str = ""
