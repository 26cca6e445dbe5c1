"""Effects over seeds: bootstrap intervals, and tests on pairs of runs with one seed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

DRAWS = 10_000


def table(runs: Sequence[Any], arms: Sequence[str], measure: str) -> np.ndarray:
    """Return (seeds, arms): a measure of each run, seeds in order in every arm.

    Raises:
        ValueError: a run that is missing, or without the measure.
    """
    columns = []
    for arm in arms:
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: run["seed"])
        values = [run[measure] for run in own]
        if None in values:
            raise ValueError(f"{measure} of {arm} must be known for every seed")
        columns.append(values)
    if len({len(column) for column in columns}) != 1 or not columns[0]:
        raise ValueError(
            f"every arm of {list(arms)} must have as many runs, got "
            f"{[len(column) for column in columns]}"
        )
    return np.array(columns, dtype=float).T


def interval(of_seeds: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the mean of (seeds,) values, by resampling seeds.

    Percentiles of the bootstrap are too close to each other for few seeds: these are moved out as
    far as Student's quantiles are (Hesterberg 2015, "What teachers should know about the
    bootstrap", the expanded percentile interval).
    """
    draws = np.random.default_rng(0).integers(len(of_seeds), size=(DRAWS, len(of_seeds)))
    low, high = np.percentile(of_seeds[draws].mean(axis=1), _percentiles(len(of_seeds)))
    return float(low), float(high)


def _percentiles(seeds: int) -> tuple[float, float]:
    out = stats.t.ppf(0.025, seeds - 1) * np.sqrt(seeds / (seeds - 1))
    share = float(100 * stats.norm.cdf(out))
    return share, 100 - share


def slopes(values: np.ndarray, x: Sequence[float]) -> np.ndarray:
    """Return (seeds,): least-squares slopes of (seeds, arms) over (arms,)."""
    return np.polyfit(x, values.T, 1)[0]


def falls(values: np.ndarray) -> float:
    """Return the p of Page's test that (seeds, arms) fall from each arm to the next."""
    found = stats.page_trend_test(values, predicted_ranks=np.arange(values.shape[1], 0, -1))
    return float(found.pvalue)


def above_zero(of_seeds: np.ndarray) -> float:
    """Return the one-sided p of Student's test that (seeds,) differences are above 0."""
    return float(stats.ttest_1samp(of_seeds, 0, alternative="greater").pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for how many there are, after Holm 1979."""
    order = np.argsort(ps)
    least = np.minimum(1.0, np.arange(len(ps), 0, -1) * np.take(ps, order))
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(least)
    return corrected.tolist()


def within(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float]:
    """Return the correlation of two (seeds, arms) within arms, its 95% interval, and its p.

    The interval is by resampling seeds, the one-sided p by permuting the seeds of each arm.
    """
    generator = np.random.default_rng(0)

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a - a.mean(axis=0), b - b.mean(axis=0)
        return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))

    found = correlation(a, b)
    rows = (generator.integers(len(a), size=len(a)) for _ in range(DRAWS))
    # Of one seed alone, nothing varies.
    drawn = [correlation(a[row], b[row]) for row in rows if len(set(row)) > 1]
    permuted = [correlation(generator.permuted(a, axis=0), b) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, _percentiles(len(a)))
    p = (1 + sum(each >= found for each in permuted)) / (1 + DRAWS)
    return found, float(low), float(high), float(p)
