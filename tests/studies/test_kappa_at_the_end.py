"""What kappa says at the end of training, on results that are made up."""

import json

import numpy as np
import pytest

from studies import depth_for_heads, kappa_at_the_end
from studies.study import judged

ARMS = "original", "lean", "shallow-only", "original-again"


def runs_of(first: tuple[float, ...], last: tuple[float, ...]) -> list[dict]:
    """Return five runs of each arm, with kappa before and after, of which the loss grows by arm."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "kappa_at_first": before * (1 + 0.01 * seed),
            "kappa": after * (1 + 0.02 * seed),
            "kappas": [before, after],
            "held_out_loss": (1 + number) * (1 + 0.001 * seed),
        }
        for number, (arm, before, after) in enumerate(zip(ARMS, first, last))
        for seed in range(5)
    ]


@pytest.fixture
def record(tmp_path, monkeypatch):
    for module in (kappa_at_the_end, depth_for_heads):
        monkeypatch.setattr(module, "RESULTS", tmp_path)

    def write(task: str, runs: list[dict]) -> None:
        (tmp_path / f"depth_for_heads_{task}.json").write_text(json.dumps({"runs": runs}))
        rates = [
            {"arm": f"{arm}-lr-{rate}", "kappa": kappa * (1 + number)}
            for number, arm in enumerate(ARMS[:2])
            for rate, kappa in (("1.5e-3", 2.0), ("3e-3", 9.0), ("6e-3", 5.0 * (1 + number)))
        ]
        path = tmp_path / f"depth_for_heads_{task}-rates.json"
        path.write_text(json.dumps({"runs": rates}))

    return write


def test_rank_correlations_are_those_of_scipy():
    from scipy.stats import spearmanr

    a, b = np.random.default_rng(0).standard_normal((2, 4, 7))
    expected = [spearmanr(x, y).statistic for x, y in zip(a, b)]
    assert kappa_at_the_end.rank_correlations(a, b) == pytest.approx(expected)
    assert kappa_at_the_end.rank_correlations(np.ones((4, 7)), b).tolist() == [0] * 4


def test_verdicts_follow_kappa_and_the_losses(record):
    record("pictures", runs_of((30, 20, 10, 99), (1, 2, 3, 99)))
    verdicts = {claim.claim: verdict for claim, _, verdict in judged(kappa_at_the_end.claims())}
    assert [*verdicts.values()] == ["holds", "fails", "fails", "holds", "holds"]
    said = kappa_at_the_end.section()
    assert "“pictures: κ after training orders the losses better than before” holds." in said
    assert "3 of 5 claims hold, 2 fail and 0 are undecided" in said
    assert (
        "On pictures, a rate of 6e-3 instead of 1.5e-3 multiplies κ after training by 2.5 to 5,"
        in said
    )
    assert "start with the same κ" not in said
    record("pictures", runs_of((30, 20, 20, 99), (1, 2, 3, 99)))
    said = kappa_at_the_end.section()
    assert f"On pictures, {ARMS[1]} and {ARMS[2]} start with the same κ." in said


def test_of_two_arms_only_the_fall_is_tested_and_the_figure_is_drawn(record):
    assert kappa_at_the_end.section() == ""
    two = [run for run in runs_of((1, 2, 3, 4), (2, 3, 4, 5)) if run["arm"] in ARMS[:2]]
    record("python-to-the-end", two)
    (claim,) = kappa_at_the_end.claims()
    assert claim.effect < 0
    record("pictures", runs_of((30, 20, 10, 99), (1, 2, 3, 99)))
    drawn = kappa_at_the_end.drawing()
    _, _, correlation, _, _, none = drawn.axes
    assert correlation.lines[-2].get_ydata() == pytest.approx([-1, 1])  # before and after training
    assert not none.axison
