"""Effects over seeds: what the tests of a study find in numbers whose answer is known."""

import numpy as np
import pytest

from studies import stats
from studies.study import Claim, judged

draw = np.random.default_rng(0)


def test_a_table_has_the_seeds_of_each_arm_in_order() -> None:
    runs = [{"arm": a, "seed": s, "m": 10 * s + ord(a)} for s in (2, 1) for a in "ab"]
    assert stats.table(runs, ["b", "a"], "m").tolist() == [[108, 107], [118, 117]]
    with pytest.raises(ValueError, match=r"must have as many runs, got \[2, 1\]"):
        stats.table(runs[:3], ["a", "b"], "m")
    with pytest.raises(ValueError, match="m of b must be known for every seed"):
        stats.table([*runs[:3], runs[3] | {"m": None}], ["a", "b"], "m")


def test_slopes_are_those_of_lines() -> None:
    x = np.array([0.0, 1, 3, 4])
    lines = np.array([[2.0], [-1]]) * x + np.array([[5.0], [7]])
    assert stats.slopes(lines, x) == pytest.approx([2, -1])


def test_a_fall_is_found_and_its_absence_too() -> None:
    falling = np.arange(5, 0, -1) + 0.1 * draw.normal(size=(5, 5))
    assert stats.falls(falling) < 1e-4
    assert stats.falls(falling[:, ::-1]) > 0.99
    ps = [stats.falls(draw.normal(size=(5, 4))) for _ in range(200)]
    assert 0.01 < np.mean(np.array(ps) < 0.05) < 0.1


@pytest.mark.parametrize("seeds", [5, 20])
def test_an_interval_holds_the_mean_as_often_as_it_says(seeds: int) -> None:
    samples = np.random.default_rng(seeds).normal(1, size=(400, seeds))
    inside = [low <= 1 <= high for low, high in map(stats.interval, samples)]
    # Of five seeds it is somewhat too short.
    assert 0.87 < np.mean(inside) < 0.98


def test_students_test_is_one_sided() -> None:
    above = stats.above_zero(np.array([1.0, 1.1, 0.9, 1.2, 1.0]))
    assert above < 1e-4
    assert stats.above_zero(-np.array([1.0, 1.1, 0.9, 1.2, 1.0])) == pytest.approx(1 - above)


def test_a_correlation_within_arms_ignores_what_arms_differ_in() -> None:
    noise = draw.normal(size=(8, 6))
    arms = 100 * draw.normal(size=6)
    r, low, high, p = stats.within(noise + arms, noise + 0.3 * draw.normal(size=(8, 6)) - arms)
    assert r > 0.9
    assert low > 0.7
    assert high <= 1
    assert p < 1e-3
    r, low, high, p = stats.within(arms + noise, arms + draw.normal(size=(8, 6)))
    assert low < 0 < high
    assert p > 0.05


def test_holms_correction() -> None:
    # Worked by hand: 0.01 x 4, 0.02 x 3, then no smaller than the one before, and at most 1.
    assert stats.holm([0.02, 0.01, 0.03, 0.9]) == pytest.approx([0.06, 0.04, 0.06, 0.9])
    assert stats.holm([0.6, 0.7]) == [1, 1]
    assert stats.holm([]) == []


def test_verdicts_follow_the_rule() -> None:
    claims = [
        Claim("large", 1, 0.5, 1.5, 0.001, "x"),
        Claim("accident", 1, 0.1, 1.5, 0.04, "x"),
        Claim("opposite", -1, -1.5, -0.5, 0.9, "x"),
        Claim("unclear", 0.1, -0.5, 0.7, 0.01, "x"),
        Claim("nothing", 0.1, -0.5, 0.7, 0.01, "x", null=True),
        Claim("something", 1, 0.5, 1.5, 0.9, "x", null=True),
    ]
    verdicts = [verdict for _, _, verdict in judged(claims)]
    assert verdicts == ["holds", "undecided", "fails", "undecided", "holds", "fails"]
