"""A run of Weights & Biases keeps every sampled step, and all that others log to it."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leaner_kernels import KappaMonitor
from leaner_kernels.nn import ManyHeadAttention
from tests.adapters.test_callbacks import Tokens, hugging_face
from tests.wandb_runs import FakeRun, kept

LAYERS = "first.0", "second"


@pytest.fixture(params=["fake", "offline"])
def run(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "fake":
        yield FakeRun()
        return
    wandb = offline(monkeypatch)
    run = wandb.init(project="leaner", dir=tmp_path)
    yield run
    run.finish()


def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return pytest.importorskip("wandb", reason="wandb, of the group dev, is not installed")


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


def test_a_shared_run_whose_step_nobody_knows_keeps_samples_too() -> None:
    run, model = FakeRun("shared"), Model()
    monitor = KappaMonitor(model, every=1, writer=run)
    for step in range(3):
        with monitor.step(step):
            model(torch.randn(2, 5, 8))
    check(run.rows, run.axes, [0, 1, 2])


def test_the_module_stands_for_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, model = offline(monkeypatch), Model()
    run = wandb.init(project="leaner", dir=tmp_path)
    monitor = KappaMonitor(model, every=1, writer=wandb)
    for step in range(3):
        with monitor.step(step):
            model(torch.randn(2, 5, 8))
    run.finish()
    check(*kept(tmp_path), [0, 1, 2])


def test_what_only_logs_values_is_passed_each_sample_once() -> None:
    class Logger:
        def __init__(self) -> None:
            self.logged: list[dict] = []

        def log(self, values: dict) -> None:
            self.logged.append(values)

    logger, model = Logger(), Model()
    monitor = KappaMonitor(model, every=2, writer=[logger])
    for step in range(4):
        with monitor.step(step):
            model(torch.randn(2, 5, 8))
    assert [values["kappa/step"] for values in logger.logged] == [0, 2]


def test_samples_of_a_trainer_of_transformers_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from leaner_kernels.adapters.transformers_trainer import KappaCallback

    wandb = offline(monkeypatch)
    run = wandb.init(project="leaner", dir=tmp_path)
    callback = KappaCallback(every=2, page=False, writer=run)
    # Evaluations push W&B's step past the trainer's.
    options = {"eval_strategy": "steps", "eval_steps": 1, "report_to": "wandb"}
    hugging_face(tmp_path, [callback], eval_dataset=Tokens(), **options)
    run.finish()
    rows, axes = kept(tmp_path)
    check(rows, axes, [0, 2, 4], [f"bert.encoder.layer.{i}.attention.self" for i in range(2)])
    assert [row["train/global_step"] for row in rows if "train/loss" in row] == [2, 4, 6]
    assert [row["train/global_step"] for row in rows if "eval/loss" in row] == [*range(1, 7)]


def test_samples_of_a_trainer_of_lightning_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    offline(monkeypatch)
    from lightning.pytorch.loggers import WandbLogger

    from leaner_kernels.adapters.lightning import KappaCallback

    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)

    class Fitted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
            self.log("val_loss", self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    logger = WandbLogger(project="leaner", save_dir=tmp_path, offline=True)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=logger, log_every_n_steps=1,
        callbacks=[KappaCallback(every=2, page=False, writer=logger.experiment)],
        default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(6, 5, 8))
    batches = torch.utils.data.DataLoader(data, batch_size=2)
    trainer.fit(Fitted(), batches, batches)
    logger.experiment.finish()
    rows, axes = kept(tmp_path)
    check(rows, axes, [*range(0, 12, 2)], [f"net.{layer}" for layer in LAYERS])
    losses = [row["trainer/global_step"] for row in rows if "train_loss" in row]
    assert losses == [*range(12)]
    assert sum("val_loss" in row for row in rows) == 4
