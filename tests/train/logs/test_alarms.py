"""Alarms follow from rows alone; a healthy run sets off none."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from leaner_kernels.monitor.writers import JsonLines, finite
from train.logs.alarms import Alarms
from train.logs.report import _SAMPLED, _STEPS

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
    assert alarm["message"].startswith("step 202: loss is 6, the usual ")
    assert "\n" not in alarm["message"]


def test_a_difficult_batch_or_two_set_off_nothing():
    losses = noisy(2.0, 300)
    for step in (100, 200, 201, 250):
        losses[step] = 60.0
    assert alarms_of(losses) == []


def test_a_spike_does_not_hide_the_next_one():
    losses = noisy(2.0, 400)
    for step in (*range(200, 205), 260, 261, 262):
        losses[step] = 60.0
    assert steps_of(alarms_of(losses)) == [202, 262]


def test_spikes_close_together_are_one_alarm():
    losses = noisy(2.0, 300)
    for step in range(200, 240, 8):
        losses[step : step + 4] = [6.0] * 4
    assert steps_of(alarms_of(losses)) == [202]


def test_a_higher_plateau_is_told_once_and_then_usual():
    losses = noisy(1.0, 300) + noisy(4.0, 300)
    losses[500:503] = [12.0] * 3
    assert steps_of(alarms_of(losses)) == [302, 502]


def test_a_flat_or_almost_solved_curve_does_not_alarm_on_noise():
    flat = [2.3, *[1.0] * 300, 1.05, *[1.0] * 100]
    # Near the end most batches have almost no loss, and a few items cause what there is.
    solved = [2.3] * 20 + [1e-4, 1e-4, 2e-4, 1e-4, 5e-2] * 100
    assert alarms_of(flat) == alarms_of(solved) == []
    assert steps_of(alarms_of([*solved, 1.0, 1.0, 1.0])) == [522], "a real rise is still seen"


def test_the_first_steps_are_nobodys_usual():
    losses = [2.3, 17.0, 17.0, 17.0, *noisy(2.3, 100)]
    assert alarms_of(losses) == []
    assert steps_of(alarms_of([*noisy(2.3, 50), *[17.0] * 3])) == [52]


def test_more_deviations_are_required_by_the_setting_and_0_warns_of_none():
    losses = [*noisy(2.0, 200), 3.5, 3.5, 3.5]
    assert steps_of(alarms_of(losses, loss_alarm=8.0)) == [202]
    assert alarms_of(losses, loss_alarm=30.0) == alarms_of(losses, loss_alarm=0.0) == []


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
        "step 4 skipped: its loss or gradient is not finite; 3 of the newest 100 steps"
    )


def test_a_step_skipped_for_its_gradient_leaves_the_losses_alone():
    alarms = Alarms(SimpleNamespace(**WANTED))
    for step, loss in enumerate(noisy(2.0, 100)):
        assert alarms.step({"step": step, "loss": loss}) == []
    (alarm,) = alarms.step({"step": 100, "loss": 50.0, "skipped": True})
    assert alarm["kind"] == "skipped"
    assert alarms.step({"step": 101, "loss": 50.0}) == []
    assert alarms.step({"step": 102, "loss": 50.0}) == []
    (alarm,) = alarms.step({"step": 103, "loss": 50.0})
    assert alarm["kind"] == "loss"


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
    assert alarm["message"].startswith("step 32: κ of blocks.0.attn is ")


def test_kappa_of_one_batch_or_two_sets_off_nothing():
    kappas = around(50, 60)
    kappas[30] = kappas[31] = 1e6
    assert alarms_of(kappas=kappas) == []


def test_kappa_that_varies_by_orders_of_magnitude_is_healthy_where_it_always_does():
    # As of two heads of width 8 and 17 tokens, an almost square matrix.
    kappas = [None if kappa > 1e6 else kappa for kappa in around(3e4, 400, 1.5)]
    assert None in kappas
    assert alarms_of(kappas=kappas) == []


def test_kappa_that_is_lost_is_told_even_in_the_first_steps():
    (alarm,) = alarms_of(kappas=[200.0, *[None] * 20])
    assert (alarm["step"], alarm["kappa"], alarm["limit"]) == (5, None, None)
    assert "past what is resolved, as in the 4 samples before" in alarm["message"]
    # Later it is a rise, and not returned a second time.
    assert steps_of(alarms_of(kappas=[*around(50, 30), *[None] * 60])) == [32]


def test_kappa_that_was_never_resolved_is_no_news():
    assert alarms_of(kappas=[None] * 50) == []
    assert alarms_of(kappas=[None] * 20 + [1e6] + [None] * 20) == []


def test_each_layer_has_its_own_usual_and_heads_that_are_not_finite_none():
    alarms = Alarms(SimpleNamespace(**WANTED))
    for step, kappa in enumerate(around(50, 30)):
        rows = [kappa_row(step, kappa), kappa_row(step, 1e3 * kappa, "blocks.1.attn")]
        rows += [kappa_row(step, None, "blocks.2.attn", sigma_max=None, entropy=None)]
        assert alarms.kappa(rows) == []


def test_kappa_is_left_alone_where_nobody_wants_the_alarm():
    kappas = around(50, 30) + around(5000, 30)
    assert alarms_of(kappas=kappas, kappa_alarm=0.0) == []


# Entropy.


def test_a_collapse_of_the_entropy_is_told_in_the_words_of_the_monitor():
    rows = [kappa_row(step, 50.0, entropy=2.0 if step < 5 else 0.1) for step in range(10)]
    (alarm,) = Alarms(SimpleNamespace(**WANTED)).kappa(rows)
    assert (alarm["step"], alarm["kind"], alarm["layer"]) == (5, "entropy", "blocks.0.attn")
    assert alarm["message"] == (
        "step 5: attention of blocks.0.attn collapses: entropy 0.1 nats, below 0.277, 0.1 of "
        "log(columns) = 2.77"
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


@pytest.mark.parametrize("resumed_after", [1, 350, 1900, 1999, 2210, 2396, 2500, 2999])
def test_what_a_log_keeps_of_a_long_run_gives_the_same_alarms(tmp_path, resumed_after):
    levels = [8.0, 2.0, 2.2, 6.0, 1.0, 0.01]
    losses = [loss for n, level in enumerate(levels) for loss in noisy(level, 500, seed=n)]
    losses[2200:2203], losses[2390:2395] = [math.nan] * 3, [9.0] * 5
    losses[2900:2904] = [0.3] * 4  # no alarm: little of the first losses
    metrics = [step_row(step, loss) for step, loss in enumerate(losses)]
    samples = [
        kappa_row(step, kappa, f"l.{layer}", entropy=entropy)
        for step, kappa, entropy in zip(
            range(0, 3000, 10),
            around(5000, 100) + around(50, 100) + around(9000, 100),
            [0.1] * 60 + [2.0] * 150 + [0.05] * 90,
        )
        for layer in range(3)
    ]

    def alarms_from(alarms: Alarms, first: int) -> list[dict]:
        found = [alarm for row in metrics[first:] for alarm in alarms.step(row)]
        return found + alarms.kappa([row for row in samples if row["step"] >= first])

    whole = alarms_from(Alarms(SimpleNamespace(**WANTED)), 0)
    late = [alarm for alarm in whole if alarm["step"] >= 2000]
    assert {alarm["kind"] for alarm in late} == {"loss", "skipped", "kappa", "entropy"}
    logs = []
    for name, rows, steps in (("m", metrics, _STEPS), ("k", samples, _SAMPLED)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(finite(row)) + "\n" for row in rows))
        logs.append(JsonLines(path, resumed_after, steps=steps))
    resumed = Alarms(SimpleNamespace(**WANTED))
    resumed.replay(logs[0].rows, logs[1].rows)
    expected = [alarm for alarm in whole if alarm["step"] >= resumed_after]
    assert alarms_from(resumed, resumed_after) == expected


def test_a_factor_that_is_no_rise_is_refused():
    with pytest.raises(ValueError, match=r"--kappa-alarm must be 0 or above 1, got 0\.5"):
        alarms_of(kappa_alarm=0.5)
