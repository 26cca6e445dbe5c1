"""Kappa in the trainers of others: the rows are those of a loop of one's own."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from leaner_kernels import KappaMonitor


def rows_of(folder: Path, name: str = "kappa.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(5, 60, (12,), generator=draw)
        return {"input_ids": tokens, "labels": tokens[0] % 2}


def hugging_face(folder: Path, callbacks: list, eval_dataset: Tokens | None = None, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, num_labels=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=6, logging_steps=2, use_cpu=True,
        seed=1, disable_tqdm=True, **{"report_to": [], "save_strategy": "no"} | options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, args, train_dataset=Tokens(), eval_dataset=eval_dataset, callbacks=callbacks
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainer_of_transformers_has_rows_losses_and_the_same_weights(tmp_path, accumulated):
    pytest.importorskip("transformers")
    from leaner_kernels.adapters.transformers_trainer import KappaCallback

    options = {"gradient_accumulation_steps": accumulated}
    callback = KappaCallback(every=2, samples=4, page=False)
    trainer = hugging_face(tmp_path / "with", [callback], **options)
    plain = hugging_face(tmp_path / "without", [], **options)
    rows = rows_of(tmp_path / "with")
    assert [row["step"] for row in rows] == [0, 0, 2, 2, 4, 4]
    assert {row["layer"] for row in rows} == {
        f"bert.encoder.layer.{i}.attention.self" for i in range(2)
    }
    assert all(row["kappa"] > 1 and row["heads"] == 4 and row["tokens"] == 12 for row in rows)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    assert all(entry["kappa"] > 1 for entry in logged)
    losses = [row["loss"] for row in rows_of(tmp_path / "with", "metrics.jsonl") if "loss" in row]
    assert losses == [entry["loss"] for entry in logged]
    summary = json.loads((tmp_path / "with" / "summary.json").read_text("utf-8"))
    assert summary["params"] == trainer.model.num_parameters()
    assert losses == [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    both = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def test_a_page_has_the_losses_of_a_trainer_that_logs_and_evaluates_at_one_step(tmp_path):
    pytest.importorskip("transformers")
    from leaner_kernels.adapters.transformers_trainer import KappaCallback
    from leaner_kernels.monitor import page

    callback = KappaCallback(every=2, page=False)
    options = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = hugging_face(tmp_path, [callback], eval_dataset=Tokens(), **options)
    # A trainer of one's own may log both at once.
    trainer.state.global_step = 8
    callback.on_log(trainer.args, trainer.state, None, {"loss": 0.5, "eval_loss": 0.25})
    (losses,) = page._of_metrics([page._read_run(tmp_path, "run")])
    lines = {line["name"]: list(line["x"]) for line in losses.data}
    assert lines == {"training": [2, 4, 6, 8], "held out": [2, 4, 6, 8]}


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().mean()


BATCHES = torch.randn(6, 4, 10, 16, generator=torch.Generator().manual_seed(0))


def test_a_trainer_of_lightning_has_the_rows_of_a_loop(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from leaner_kernels.adapters.lightning import KappaCallback

    class Fitted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Module()

        def training_step(self, batch, _index):
            return self.net.loss(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = KappaCallback(every=2, samples=4, folder=str(tmp_path), page=False)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(BATCHES), batch_size=None)
    trainer.fit(Fitted(), batches)

    torch.manual_seed(0)
    own = Module()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    monitor, expected, losses = KappaMonitor(own, every=2, samples=4), [], []
    for step, batch in enumerate(BATCHES):
        with monitor.step(step) as rows:
            loss = own.loss(batch)
            loss.backward()
        expected += rows
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = [row | {"layer": row["layer"].removeprefix("net.")} for row in rows_of(tmp_path)]
    assert found == expected
    assert [row["loss"] for row in rows_of(tmp_path, "metrics.jsonl")] == losses


def test_a_step_of_lightning_that_fails_leaves_no_hook(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from leaner_kernels.adapters.lightning import KappaCallback

    class Failing(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Module()

        def training_step(self, batch, _index):
            self.net.loss(batch[0])
            raise ZeroDivisionError

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Failing()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        callbacks=[KappaCallback(folder=str(tmp_path))], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(BATCHES), batch_size=None)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, batches)
    assert not any(module._forward_hooks for module in model.modules())


def test_alarms_of_a_run_are_warned_of_and_kept(tmp_path):
    from leaner_kernels.monitor.run_log import RunLog

    log = RunLog(Module(), tmp_path, page=False)
    row = {"step": 3, "layer": "block", "kappa": 5.0, "sigma_max": 1.0, "reason": None}
    with pytest.warns(UserWarning, match="attention of block collapses"):
        log.take([row | {"entropy": 0.01, "columns": 10}])
    (alarm,) = rows_of(tmp_path, "alarms.jsonl")
    assert (alarm["step"], alarm["layer"], alarm["kind"]) == (3, "block", "entropy")
    assert log.newest["geometric_mean"] == pytest.approx(5.0)
