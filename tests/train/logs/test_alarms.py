"""Alarms follow from rows alone; a healthy run sets off none."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from train.logs.alarms import Alarms

WANTED = {"loss_alarm": 8.0, "kappa_alarm": 10.0, "entropy_alarm": 0.1}


def alarms_of(losses=(), *, kappas=(), **wanted) -> list[dict]:
    """What losses, and kappas of one layer, set off; None is what JSON has no number for."""
    alarms = Alarms(SimpleNamespace(**WANTED | wanted))
    found = [a for step, loss in enumerate(losses) for a in alarms.step(step_row(step, loss))]
    return found + alarms.kappa([kappa_row(step, kappa) for step, kappa in enumerate(kappas)])


def step_row(step: int, loss: float | None) -> dict:
    row = {"step": step, "loss": loss}
    return row if loss is not None and math.isfinite(loss) else row | {"skipped": True}


def kappa_row(step: int, kappa: float | None, layer: str = "blocks.0.attn", **other) -> dict:
    row = {"step": step, "layer": layer, "kappa": kappa, "sigma_max": 1.0}
    return row | {"entropy": 2.0, "columns": 16} | other


def noisy(level: float, steps: int, spread: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + draw.gauss(0, spread)) for _ in range(steps)]


def steps_of(alarms: list[dict]) -> list[int]:
    return [alarm["step"] for alarm in alarms]


# The loss.


@pytest.mark.parametrize("seed", range(5))
def test_a_curve_that_falls_with_noise_sets_off_nothing(seed):
    falling = [2.3 * math.exp(-step / 100) + 0.02 for step in range(1000)]
    assert alarms_of([a * b for a, b in zip(falling, noisy(1, 1000, 0.1, seed))]) == []


def test_a_spike_sets_off_one_alarm_that_says_what_is_usual():
    losses = noisy(2.0, 300)
    losses[200:203] = 5.0, 7.0, 6.0
    (alarm,) = alarms_of(losses)
    assert (alarm["step"], alarm["kind"], alarm["loss"]) == (202, "loss", 6.0)
    assert alarm["usual"] == pytest.approx(2.0, rel=0.05)
    assert alarm["usual"] < alarm["limit"] < 6.0
    assert alarm["message"].startswith("step 202: loss rose to 6; its recent median is ")
    assert "\n" not in alarm["message"]


def test_a_flat_or_almost_solved_curve_does_not_alarm_on_noise():
    flat = [2.3, *[1.0] * 300, 1.05, *[1.0] * 100]
    # Near the end most batches have almost no loss, and a few items cause what there is.
    solved = [2.3] * 20 + [1e-4, 1e-4, 2e-4, 1e-4, 5e-2] * 100
    assert alarms_of(flat) == alarms_of(solved) == []
    assert steps_of(alarms_of([*solved, 1.0, 1.0, 1.0])) == [522], "a real rise is still seen"


# Steps that were skipped.


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_skipped_steps_are_told_once_in_a_row_and_counted(loss):
    losses = [1.0, loss, loss, 1.0, loss, 1.0]
    alarms = alarms_of(losses)
    assert [(a["step"], a["kind"], a["skipped"]) for a in alarms] == [
        (1, "skipped", 1),
        (4, "skipped", 3),
    ]
    assert alarms[1]["message"] == (
        "step 4 was skipped because its loss or gradient is not finite; "
        "3 of the last 100 steps were skipped"
    )


# Kappa.


def around(level: float, rows: int, spread: float = 0.2) -> list[float]:
    draw = random.Random(1)
    return [level * math.exp(draw.gauss(0, spread)) for _ in range(rows)]


def test_kappa_that_rises_and_stays_is_told_once():
    kappas = around(50, 30) + around(5000, 30)
    (alarm,) = alarms_of(kappas=kappas)
    # The third sample up there.
    assert (alarm["step"], alarm["kind"], alarm["layer"]) == (32, "kappa", "blocks.0.attn")
    assert 400 < alarm["limit"] < 1000
    assert alarm["message"].startswith("step 32: κ of blocks.0.attn rose to ")


# Entropy.


def test_a_collapse_of_the_entropy_is_told_in_the_words_of_the_monitor():
    rows = [kappa_row(step, 50.0, entropy=2.0 if step < 5 else 0.1) for step in range(10)]
    (alarm,) = Alarms(SimpleNamespace(**WANTED)).kappa(rows)
    assert (alarm["step"], alarm["kind"], alarm["layer"]) == (5, "entropy", "blocks.0.attn")
    assert alarm["message"] == (
        "step 5: attention of blocks.0.attn collapses: its entropy, 0.1 nats, is below 0.277, 0.1 "
        "of the maximum"
    )
    assert Alarms(SimpleNamespace(**WANTED | {"entropy_alarm": 0.0})).kappa(rows) == []


# All of them.


@pytest.mark.parametrize("resumed_after", [0, 1, 130, 203, 210, 399])
def test_a_resumed_run_gives_the_alarms_of_one_that_was_not_interrupted(resumed_after):
    losses = [*noisy(2.0, 200), 6.0, math.nan, math.nan, math.nan, math.inf, *noisy(4.0, 195)]
    metrics = [step_row(step, loss) for step, loss in enumerate(losses)]
    kappas = around(50, 102) + around(5000, 98)
    entropies = [2.0] * 102 + [0.1] * 98
    samples = [kappa_row(2 * i, k, entropy=e) for i, (k, e) in enumerate(zip(kappas, entropies))]

    def alarms_from(alarms: Alarms, first: int) -> list[dict]:
        found = [a for row in metrics[first:] for a in alarms.step(row)]
        return found + alarms.kappa([row for row in samples if row["step"] >= first])

    whole = alarms_from(Alarms(SimpleNamespace(**WANTED)), 0)
    assert {alarm["kind"] for alarm in whole} == {"loss", "skipped", "kappa", "entropy"}
    resumed = Alarms(SimpleNamespace(**WANTED))
    # As the files have them.
    text = json.dumps(metrics[:resumed_after])
    before = json.loads(text.replace("NaN", "null").replace("Infinity", "null"))
    resumed.replay(before, [row for row in samples if row["step"] < resumed_after])
    expected = [alarm for alarm in whole if alarm["step"] >= resumed_after]
    assert alarms_from(resumed, resumed_after) == expected
    assert json.loads(json.dumps(whole)) == whole


def test_a_factor_that_is_no_rise_is_refused():
    with pytest.raises(ValueError, match=r"--kappa-alarm must be 0 or above 1, got 0\.5"):
        alarms_of(kappa_alarm=0.5)
