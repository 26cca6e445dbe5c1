"""How long a run is, the batch that grows, and schedules."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from train.loop.schedule import Budget, budget_of, first_beta, learning_rate


def budget(**flags: object) -> Budget:
    given = {"steps": None, "epochs": None, "tokens": None, "accum": 1, "batch_size_warmup": 0.0}
    settings = SimpleNamespace(**given | {"batch_size": 8} | flags)
    return budget_of(settings, steps_per_epoch=10, tokens_per_item=flags.get("length"))


def test_epochs_steps_and_tokens_say_the_same_length():
    assert budget(epochs=2.5, accum=4).steps == 25
    assert budget(steps=25, accum=4).steps == 25
    assert budget(tokens=25 * 8 * 16, length=16, accum=4).steps == 25
    assert budget(epochs=0.001).steps == 1


def test_a_batch_size_warmup_grows_the_batch_in_a_line_and_keeps_the_number_of_items():
    plain, grown = (
        budget(epochs=100, accum=16),
        budget(epochs=100, accum=16, batch_size_warmup=0.6),
    )
    assert plain.passes_before[-1] == 16_000
    assert 16_000 <= grown.passes_before[-1] < 16_016
    before, sizes = grown.passes_before, [grown.passes_of(s) for s in range(grown.steps)]
    assert (sizes[0], sizes[-1]) == (1, 16)
    assert all(a <= b for a, b in pairwise(sizes))
    for share in (0.15, 0.3, 0.45):
        step = next(s for s in range(grown.steps) if before[s] >= share * 16_000)
        assert sizes[step] == pytest.approx(16 * share / 0.6, abs=1)
    full = next(s for s in range(grown.steps) if sizes[s] == 16)
    assert before[full] / 16_000 == pytest.approx(0.6, abs=0.03)
    # A schedule goes by items seen.
    assert grown.position(full) / grown.steps == pytest.approx(0.6, abs=0.03)
    assert [plain.position(s) for s in (0, 7, 1000)] == [0, 7, 1000]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"steps": 10, "batch_size_warmup": 0.5},
            "--batch-size-warmup needs .* --epochs or --tokens, got --steps 10",
        ),
        ({"tokens": 1e6}, r"--tokens needs a language model, got 1e\+06"),
    ],
)
def test_a_length_that_means_nothing_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        budget(**flags)


def test_the_linear_schedule_is_that_of_one_cycle_and_so_is_the_momentum():
    weight, peak, steps = nn.Parameter(torch.zeros(1)), 1e-4, 200
    optimizer = AdamW([weight], lr=peak)
    cycle = OneCycleLR(optimizer, peak, steps, pct_start=0.2, anneal_strategy="linear")
    for step in range(steps):
        ours = learning_rate(
            step, steps, peak=peak, warmup=0.2, start=peak / 25, end=0, schedule="linear"
        )
        # Ours rises from the first step and falls past the last: a step apart at most.
        assert ours == pytest.approx(cycle.get_last_lr()[0], abs=peak * 1.1 / 39)
        beta = optimizer.param_groups[0]["betas"][0]
        assert first_beta(step, steps, warmup=0.2) == pytest.approx(beta, abs=0.1 * 1.1 / 39)
        optimizer.step()
        cycle.step()


def test_the_constant_schedule_stays_and_the_triangle_has_its_corners():
    rates = [learning_rate(s, 10, peak=2, warmup=0.2, schedule="constant") for s in range(10)]
    assert rates[2:] == [2] * 8
    assert 0 < rates[0] < rates[1] < 2
    triangle = {"peak": 1.0, "warmup": 0.75, "start": 0.25, "schedule": "linear"}
    corners = [learning_rate(s, 4000, **triangle) for s in (0, 1500, 3000, 3999)]
    assert corners == pytest.approx([0.25, 0.625, 1.0, 0.0], abs=2e-3)
    assert math.isclose(learning_rate(3500, 4000, **triangle), 0.5)
