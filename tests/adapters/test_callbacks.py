"""Kappa in the trainers of others: the rows are those of a loop of one's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leaner_kernels import KappaMonitor
from leaner_kernels.monitor.run_log import RunLog
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import _hooks


def rows_of(folder: Path, name: str = "kappa.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(5, 60, (12,), generator=draw)
        return {"input_ids": tokens, "labels": tokens[0] % 2}


class Ours(nn.Module):
    """A model of one's own, whose attention captures by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.attention = ManyHeadAttention(16, 2, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict:
        logits = self.attention(self.embedding(input_ids)).mean(dim=1)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer_of_transformers(
    folder: Path,
    callbacks: list,
    eval_dataset: Tokens | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    if model is None:
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            num_labels=2,
            attn_implementation="sdpa",
        )
        model = transformers.BertForSequenceClassification(config)
    options = {"max_steps": 6, "logging_steps": 2, "report_to": [], "save_strategy": "no"} | options
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        seed=1,
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(
        model, args, train_dataset=Tokens(), eval_dataset=eval_dataset, callbacks=callbacks
    )


def hugging_face(folder: Path, callbacks: list, eval_dataset: Tokens | None = None, **options: Any):
    trainer = trainer_of_transformers(folder, callbacks, eval_dataset, **options)
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
    metrics = rows_of(tmp_path / "with", "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 3, 5]
    losses = [row["loss"] for row in metrics]
    assert losses == [entry["loss"] for entry in logged]
    summary = json.loads((tmp_path / "with" / "summary.json").read_text("utf-8"))
    assert summary["params"] == trainer.model.num_parameters()
    assert losses == [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    both = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def is_untouched(model: nn.Module) -> bool:
    """Whether nothing is left that a sampled step sets, and functions are compiled."""
    compiled: list[Any] = []
    torch._dynamo.reset()
    add = torch.compile(
        lambda x: x + 1, backend=lambda graph, _: compiled.append(graph) or graph.forward
    )
    add(torch.ones(2))
    modules = [*model.modules()]
    return (
        len(compiled) == 1
        and _hooks.current is None
        and not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
        and not any(getattr(m, "capture_samples", 0) for m in modules)
    )


@pytest.mark.parametrize("ours", [False, True], ids=["traced, forward", "ours, backward"])
def test_a_training_after_one_that_was_interrupted_in_a_sampled_step_leaves_nothing(tmp_path, ours):
    pytest.importorskip("transformers")
    from leaner_kernels.adapters.transformers_trainer import KappaCallback

    callback = KappaCallback(every=1, samples=4, page=False)
    trainer = trainer_of_transformers(tmp_path, [callback], model=Ours() if ours else None)

    def stop(*_: Any) -> None:
        if trainer.state.global_step == 2 and trainer.is_in_train:
            raise KeyboardInterrupt

    if ours:
        handle = trainer.model.attention.proj.weight.register_hook(stop)
    else:
        handle = trainer.model.classifier.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    trainer.train()
    assert is_untouched(trainer.model)
    assert {row["step"] for row in rows_of(tmp_path)} == {*range(6)}
    assert {row["step"] for row in rows_of(tmp_path, "kappa.1.jsonl")} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("resumed_at", [4, 6])
def test_a_trainer_that_goes_on_has_each_row_once(tmp_path, resumed_at):
    transformers = pytest.importorskip("transformers")
    from leaner_kernels.adapters.transformers_trainer import KappaCallback

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == 7:
                raise KeyboardInterrupt

    def train(folder: Path, until: int, resume: Any = None, stop: Any = ()) -> None:
        options = {"max_steps": until, "save_strategy": "steps", "save_steps": 2}
        options |= {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
        callbacks = [KappaCallback(every=2, page=False), *stop]
        trainer_of_transformers(folder, callbacks, Tokens(), **options).train(resume)

    train(tmp_path / "whole", 12)
    folder = tmp_path / "in parts"
    if resumed_at == 6:
        # A training that ended is made longer.
        train(folder, 6)
    else:
        with pytest.raises(KeyboardInterrupt):
            train(folder, 12, stop=[Stops()])
        shutil.rmtree(folder / "checkpoint-6")
    train(folder, 12, resume=str(folder / f"checkpoint-{resumed_at}"))
    for name in ("kappa.jsonl", "metrics.jsonl"):
        parts, whole = rows_of(folder, name), rows_of(tmp_path / "whole", name)
        assert [[row["step"], *row] for row in parts] == [[row["step"], *row] for row in whole]
    assert not list(folder.glob("*.1.*"))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().mean()


BATCHES = torch.randn(6, 4, 10, 16, generator=torch.Generator().manual_seed(0))


def fit(folder: Path, module: Any, *, every: int = 2, ckpt_path: Any = None, **options: Any) -> Any:
    """Fit a module of Lightning to six batches an epoch, and one to validate."""
    lightning = pytest.importorskip("lightning.pytorch")
    from leaner_kernels.adapters.lightning import KappaCallback

    data = torch.utils.data.TensorDataset(BATCHES.flatten(0, 1))
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    held_out = torch.utils.data.DataLoader(data.tensors[0][:4, :7], batch_size=4)
    callbacks = [KappaCallback(every=every, page=False), *options.pop("callbacks", ())]
    options = {"max_epochs": 1, "enable_checkpointing": False} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if "validation_step" not in vars(type(module)):
        held_out = None
    trainer.fit(module, batches, held_out, ckpt_path=ckpt_path)
    return trainer


def fitted(training_step: Any = None, *, optimizers: int = 1, validates: bool = False) -> Any:
    """Return a module of Lightning; with several optimizers each has a net, and steps by hand."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Fitted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.nets = nn.ModuleList([Module() for _ in range(optimizers)])
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: list, index: int) -> Any:
            if training_step is not None:
                return training_step(self, batch[0], index)
            loss = self.nets[0].loss(batch[0])
            self.log("mine", loss)
            self.log("both", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("of_the_epoch", float(self.current_epoch))

        def configure_optimizers(self) -> list:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]

    def validation_step(self: Any, batch: torch.Tensor, _index: int) -> None:
        self.log("val_loss", self.nets[0].loss(batch))

    if validates:
        Fitted.validation_step = validation_step
    return Fitted()


def test_a_trainer_of_lightning_has_the_rows_of_a_loop(tmp_path):
    fit(tmp_path, fitted())
    own = fitted().nets[0]
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
    found = [row | {"layer": row["layer"].removeprefix("nets.0.")} for row in rows_of(tmp_path)]
    assert found == expected
    metrics = rows_of(tmp_path, "metrics.jsonl")
    assert [row["loss"] for row in metrics if "loss" in row] == losses


def adversarial(module: Any, x: torch.Tensor, _index: int) -> torch.Tensor:
    for net, optimizer in zip(module.nets, module.optimizers(), strict=True):
        optimizer.zero_grad()
        loss = net.loss(x)
        module.manual_backward(loss)
        optimizer.step()
    return loss


def alternating(module: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    number = 1 if index % 3 == 2 else 0
    loss = module.nets[number].loss(x)
    optimizer = module.optimizers()[number]
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return loss


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}], ids=["", "validated"])
def test_the_first_batch_of_lightning_may_train_a_network_without_attention(tmp_path, options):
    module = fitted(alternating, optimizers=2, validates=bool(options))
    module.nets[0].block = nn.Linear(16, 16)
    fit(tmp_path, module, every=5, max_epochs=2, **options)
    rows = [row for row in rows_of(tmp_path) if row["kappa"] is not None]
    assert {row["step"] for row in rows} == ({5} if options else {0, 5})
    assert {row["layer"] for row in rows} == {"nets.1.block.self_attn"}
    assert is_untouched(module)


def test_of_several_optimizers_of_lightning_each_step_counts(tmp_path):
    module = fitted(adversarial, optimizers=2)
    fit(tmp_path, module, every=5, max_epochs=2)
    assert sorted({row["step"] for row in rows_of(tmp_path)}) == [0, 6, 10, 16, 20]
    assert is_untouched(module)


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_lightning_run_that_goes_on_has_each_row_once(tmp_path, accumulated):
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint

    def train(folder: Path, until: int, ckpt_path: Any = None) -> None:
        saved = ModelCheckpoint(folder, "at", every_n_train_steps=3, save_top_k=1)
        fit(
            folder,
            fitted(validates=True),
            max_epochs=-1,
            max_steps=until,
            ckpt_path=ckpt_path,
            callbacks=[saved],
            enable_checkpointing=True,
            accumulate_grad_batches=accumulated,
        )

    train(tmp_path / "whole", 8)
    folder = tmp_path / "in parts"
    train(folder, 5)
    train(folder, 8, folder / "at.ckpt")
    for name in ("kappa.jsonl", "metrics.jsonl"):
        steps = [
            [row["step"] for row in rows_of(tmp_path / run, name)] for run in ("whole", folder)
        ]
        assert sorted(set(steps[0])) == sorted(set(steps[1]))
        assert steps[1] == sorted(steps[1])
    parts = [(row["step"], row["layer"]) for row in rows_of(folder)]
    assert parts == [(row["step"], row["layer"]) for row in rows_of(tmp_path / "whole")]
    assert not list(folder.glob("*.1.*"))


def test_a_run_that_goes_on_drops_half_a_line_and_alarms_as_if_it_had_not_stopped(tmp_path):
    row = {"layer": "block", "sigma_max": 1.0, "reason": None, "entropy": 2.0, "columns": 10}
    # It alarms at the third of three that are too high, of which two are before the stop.
    rows = [row | {"step": step, "kappa": 5.0 if step < 13 else 5e5} for step in range(17)]
    before = RunLog(Module(), tmp_path, page=False)
    with (tmp_path / "kappa.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write('{"step": 17, "lay')
    before.log(14, {"loss": 1.0})
    before.log(15, {"loss": 2.0})
    log = RunLog(Module(), tmp_path, page=False, first=15)
    assert rows_of(tmp_path) == rows[:15]
    assert rows_of(tmp_path, "metrics.jsonl") == [{"step": 14, "loss": 1.0}]
    with pytest.warns(UserWarning, match="step 15: κ of block rose to 5e\\+05"):
        log.take(rows[15:])
    (alarm,) = rows_of(tmp_path, "alarms.jsonl")
    assert (alarm["step"], alarm["kind"]) == (15, "kappa")
    RunLog(Module(), tmp_path, page=False, first=15)
    assert rows_of(tmp_path, "alarms.jsonl") == []


def test_a_step_of_lightning_that_fails_leaves_no_hook(tmp_path):
    def training_step(module: Any, x: torch.Tensor, _index: int) -> None:
        module.nets[0].loss(x)
        raise ZeroDivisionError

    module = fitted(training_step)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module)
    assert not any(part._forward_hooks for part in module.modules())
