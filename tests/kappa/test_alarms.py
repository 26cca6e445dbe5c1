"""Alarms on rows of the monitor, without any script of ours."""

import math
import random

import pytest

from leaner_kernels import EntropyAlarm, KappaAlarm


def row(step: int, entropy: float | None, layer: str = "a") -> dict:
    return {"step": step, "layer": layer, "entropy": entropy, "columns": 100}


def fired(alarm: EntropyAlarm, entropies: list[float | None]) -> list[tuple[int, str]]:
    return [(a.step, a.reason) for s, e in enumerate(entropies) for a in alarm.update([row(s, e)])]


def test_shorter_sequences_are_no_collapse() -> None:
    short = [row(step, 0.15 * math.log(5)) | {"columns": 5} for step in range(30)]
    # In nats it is below a tenth of what attention to a hundred tokens can have.
    assert EntropyAlarm().update(short) == []
    assert len(EntropyAlarm().update([row(0, 0.15 * math.log(5))])) == 1


def test_the_floor_fires_once_per_collapse() -> None:
    # log(100) = 4.6: the floor is at 0.46, and at 0.69 it can fire again.
    entropies = [4.0, 0.5, 0.4, 0.3, 0.5, 0.4, 0.7, 0.4]
    assert fired(EntropyAlarm(), entropies) == [(2, "floor"), (7, "floor")]


def test_layers_are_independent_and_the_message_says_it_all() -> None:
    alarm = EntropyAlarm()
    (found,) = alarm.update([row(7, 3.0, "a"), row(7, 0.1, "blocks.1.attn"), row(7, None, "c")])
    assert found[:4] == (7, "blocks.1.attn", "floor", 0.1)
    assert found.limit == pytest.approx(0.1 * math.log(100))
    assert "step 7: attention of blocks.1.attn collapses: its entropy, 0.1 nats" in found.message


# Kappa. That a training run gives the same is tested with the run's alarms.


def around(level: float, rows: int, spread: float = 0.2) -> list[float]:
    draw = random.Random(1)
    return [level * math.exp(draw.gauss(0, spread)) for _ in range(rows)]


def kappas_of(alarm: KappaAlarm, kappas: list[float | None]) -> list[tuple[int, str]]:
    rows = [{"step": s, "layer": "a", "kappa": k, "sigma_max": 1.0} for s, k in enumerate(kappas)]
    return [(found.step, found.reason) for row in rows for found in alarm.update([row])]


def test_a_lasting_rise_fires_once_and_a_spike_never() -> None:
    assert kappas_of(KappaAlarm(), around(50, 30) + around(5000, 30)) == [(32, "rise")]
    assert kappas_of(KappaAlarm(), [*around(50, 30), 1e6, *around(50, 30)]) == []
    assert kappas_of(KappaAlarm(factor=1e4), around(50, 30) + around(5000, 30)) == []


def test_kappa_that_is_resolved_no_more_fires() -> None:
    assert kappas_of(KappaAlarm(), [200.0] * 20 + [None] * 20) == [(22, "rise")]
    assert kappas_of(KappaAlarm(), [None] * 50) == []


def test_rows_without_numbers_are_no_news() -> None:
    rows = [{"step": s, "layer": "a", "kappa": None, "sigma_max": None} for s in range(50)]
    assert KappaAlarm().update(rows) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EntropyAlarm(floor=1), r"floor must be in \[0, 1\), got 1"),
        (lambda: KappaAlarm(factor=1), "factor must be above 1, got 1"),
    ],
)
def test_a_limit_that_is_none_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
