"""A run of Weights & Biases keeps every sampled step, and all that others log to it."""

from collections.abc import Callable
from typing import Any

import pytest

from leaner_kernels import KappaMonitor
from leaner_kernels.monitor.writers import WandbRun
from tests.kappa.test_monitor import Model, batch
from tests.wandb_runs import FakeRun

LAYERS = "first", "second.0"


def plain_log(run: Any, step: int) -> None:
    run.log({"loss": float(step)})
    run.log({"rate": 0.1})


def log_with_the_step(run: Any, step: int) -> None:
    run.log({"loss": float(step)}, step=step)
    run.log({"rate": 0.1}, step=step)


def log_with_a_step_far_ahead(run: Any, step: int) -> None:
    run.log({"loss": float(step), "rate": 0.1}, step=1000 * step)


def log_nothing(run: Any, step: int) -> None:
    pass


def check(rows: list[dict], axes: dict, steps: list[int], layers: Any = LAYERS) -> None:
    sampled = [row for row in rows if "kappa/step" in row]
    assert [row["kappa/step"] for row in sampled] == steps
    assert all(f"entropy/{layer}" in row for row in sampled for layer in layers)
    assert not axes["kappa/step"]
    ours = {name for row in sampled for name in row if name.endswith(tuple(layers))}
    assert {axes[name] for name in ours} == {"kappa/step"}


@pytest.mark.parametrize(
    "log", [plain_log, log_with_the_step, log_with_a_step_far_ahead, log_nothing]
)
def test_a_run_keeps_every_sample_and_every_row_of_the_loop(
    log: Callable[[Any, int], None],
) -> None:
    run, model, x = FakeRun(), Model(), batch()
    monitor = KappaMonitor(model, every=3, writer=run)
    for step in range(10):
        with monitor.step(step):
            model(x)
        log(run, step)
    run.finish()
    check(run.rows, run.axes, [0, 3, 6, 9])
    if log is not log_nothing:
        assert [row["loss"] for row in run.rows if "loss" in row] == [*range(10)]
        assert sum("rate" in row for row in run.rows) == 10


def test_a_run_keeps_samples_that_arrive_together() -> None:
    """On a GPU rows are late, and those of several steps are returned at once."""
    run = FakeRun()
    writer = WandbRun(run)
    values = [
        {"step": step, "layer": layer, "kappa": 2.0, "entropy": 1.0, "reason": None}
        for step in range(4)
        for layer in LAYERS
    ]
    run.log({"loss": 0.0}, step=0)
    for step in range(3):
        writer.append([row for row in values if row["step"] == step])
    run.log({"rate": 0.1}, step=2)
    run.finish()
    check(run.rows, run.axes, [0, 1, 2])
    assert [row.get("loss", row.get("rate")) for row in run.rows] == [0.0, None, 0.1]
