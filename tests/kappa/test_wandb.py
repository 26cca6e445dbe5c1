"""A run of Weights & Biases keeps every sampled step, and all that others log to it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leaner_kernels import KappaMonitor
from leaner_kernels.nn import ManyHeadAttention
from tests.wandb_runs import FakeRun, kept

LAYERS = "first.0", "second"


@pytest.fixture(params=["fake", "offline"])
def run(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "fake":
        yield FakeRun()
        return
    for name, value in {"MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb = pytest.importorskip("wandb", reason="wandb, of the group dev, is not installed")
    run = wandb.init(project="leaner", dir=tmp_path)
    yield run
    run.finish()


def rows_and_axes(run: Any, folder: Path) -> tuple[list[dict], dict]:
    run.finish()
    return (run.rows, run.axes) if isinstance(run, FakeRun) else kept(folder)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(ManyHeadAttention(8, 2, 4))
        self.second = ManyHeadAttention(8, 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


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
    run: Any, log: Callable[[Any, int], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 8)
    monitor = KappaMonitor(model, every=3, writer=run)
    for step in range(10):
        with monitor.step(step):
            model(x)
        log(run, step)
    rows, axes = rows_and_axes(run, tmp_path)
    check(rows, axes, [0, 3, 6, 9])
    if log is not log_nothing:
        assert [row["loss"] for row in rows if "loss" in row] == [*range(10)]
        assert sum("rate" in row for row in rows) == 10


def test_a_run_keeps_samples_that_arrive_together(run: Any, tmp_path: Path) -> None:
    """On a GPU rows are late, and those of several steps are returned at once."""
    monitor = KappaMonitor(Model(), writer=run)
    values = [
        {"step": step, "layer": layer, "kappa": 2.0, "entropy": 1.0, "reason": None}
        for step in range(4)
        for layer in LAYERS
    ]
    run.log({"loss": 0.0}, step=0)
    for step in range(3):
        monitor._write([row for row in values if row["step"] == step])
    run.log({"rate": 0.1}, step=2)
    rows, axes = rows_and_axes(run, tmp_path)
    check(rows, axes, [0, 1, 2])
    assert [row.get("loss", row.get("rate")) for row in rows] == [0.0, None, 0.1]
