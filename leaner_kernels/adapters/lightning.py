"""A callback that measures kappa in runs of Lightning's ``Trainer``."""

from typing import Any

from torch import Tensor

from ..extras import needed_by
from ..monitor.run_log import RunLog

with needed_by(__name__):
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as missing:
        try:  # the former package, which is still published
            from pytorch_lightning import Callback
        except ModuleNotFoundError:
            raise missing from None

MOST_BATCHES = 8


class KappaCallback(Callback):  # pyright: ignore[reportGeneralTypeIssues]
    """Measure kappa of every attention block while a ``Trainer`` fits.

        trainer = Trainer(callbacks=[KappaCallback(every=50)])
        trainer.fit(module, batches)

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``; "step" counts the updates before it,
    as ``trainer.global_step``), ``metrics.jsonl`` (the loss of each update, and all logs at the end
    of each validation), ``alarms.jsonl`` and, at the end, ``page.html``. A run resumed from a
    checkpoint continues these files; a new run renames existing ones. The module logs "kappa", the
    newest geometric mean over the layers that are resolved.

    With several optimizers, every step of each counts, and a sample covers one batch: layers that
    the batch does not train have rows without numbers. The first sample lasts until a batch calls
    attention, at most eight batches.

    Args:
        every: optimizer steps between samples, at least 1.
        samples: batch entries captured on each rank, at least 1.
        folder: the trainer's ``log_dir`` or ``default_root_dir`` when None.
        **options: of ``leaner_kernels.monitor.run_log.RunLog``: page, kappa_factor, …

    Raises:
        ValueError: when fitting begins, if ``KappaMonitor`` raises one.
    """

    def __init__(
        self, every: int = 50, samples: int = 4, folder: str | None = None, **options: Any
    ) -> None:
        self.options = {"every": every, "samples": samples, **options}
        self.folder = folder
        self.run: RunLog | None = None
        # Number of updates when the sample began, when the batch began, and before the newest row.
        self._sampled: int | None = None
        self._updates = self._row = 0
        self._batches = 0  # batches of the sample, each with an update

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Construct the monitor of this training."""
        folder = self.folder or trainer.log_dir or trainer.default_root_dir
        first = int(trainer.global_step)
        self.run = RunLog(pl_module, folder, first=first, **self.options)
        self._sampled, self._updates, self._row = None, first, max(first - 1, 0)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with its first batch."""
        assert self.run is not None
        if self._updates != self._sampled and not self.run.monitor.sampling:
            self._sampled, self._batches = self._updates, 0
            self.run.begin(self._updates)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, write the loss, and log kappa, after an update."""
        if self.run is None or trainer.global_step == self._updates:
            return
        self._row, self._updates = self._updates, int(trainer.global_step)
        self._batches += 1
        if not self._awaits_attention(trainer):
            self.run.end()
        values = {}
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # With automatic optimization this is the batch's share of the loss of the update.
            shares = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            values["loss"] = loss.item() * shares
        if self.run.newest is not None and self.run.newest["geometric_mean"] is not None:
            values["kappa"] = self.run.newest["geometric_mean"]
            pl_module.log("kappa", values["kappa"], rank_zero_only=True)
        self.run.log(self._row, values)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """End the sample: a validation may run between the batches of a step."""
        if self.run is None:
            return
        if self._awaits_attention(trainer):
            self.run.monitor.cancel()
        else:
            self.run.end()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write all logs at the end of a validation, with the step of the update before it."""
        # Only during a fit, not in the sanity check before it nor in ``trainer.validate``.
        if self.run is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            logs = trainer.callback_metrics.items()
            numbers = {name: value.item() for name, value in logs if value.numel() == 1}
            self.run.log(self._row, numbers | {"kappa": None})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining rows, and the page."""
        if self.run is not None:
            self.run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Cancel the step that raised an exception."""
        if self.run is not None:
            self.run.monitor.cancel()

    def _awaits_attention(self, trainer: Any) -> bool:
        """Return whether no batch has called attention so far, and later batches still may."""
        assert self.run is not None
        monitor = self.run.monitor
        several = len(trainer.optimizers) > 1 and self._batches < MOST_BATCHES
        return several and monitor.sampling and not monitor.has_attention
