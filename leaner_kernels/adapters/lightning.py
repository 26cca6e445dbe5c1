"""Kappa in a run of Lightning's ``Trainer``."""

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the package of before, which is still published
    from pytorch_lightning import Callback

from ..monitor.run_log import RunLog


class KappaCallback(Callback):  # pyright: ignore[reportGeneralTypeIssues]
    """Measures kappa of every attention block while a ``Trainer`` fits.

        trainer = Trainer(callbacks=[KappaCallback(every=50)])
        trainer.fit(module, batches)

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``; "step" counts the updates before it),
    ``metrics.jsonl`` (each update's loss, and what is logged on the way), ``alarms.jsonl`` and, in
    the end, ``page.html``. The module logs "kappa", the newest geometric mean over the layers that
    are resolved.

    Args:
        every: optimizer steps between samples, at least 1.
        samples: batch entries captured on each rank, at least 1.
        folder: the trainer's ``log_dir`` or ``default_root_dir`` when None.
        **options: of ``leaner_kernels.monitor.run_log.RunLog``: probe, page, kappa_factor, …

    Raises:
        ValueError: when fitting begins: what ``KappaMonitor`` refuses.
    """

    def __init__(
        self, every: int = 50, samples: int = 4, folder: str | None = None, **options: Any
    ) -> None:
        self.options = {"every": every, "samples": samples, **options}
        self.folder = folder
        self.run: RunLog | None = None
        self._step: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Construct the monitor of this training."""
        folder = self.folder or trainer.log_dir or trainer.default_root_dir
        self.run, self._step = RunLog(pl_module, folder, **self.options), None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step with its first batch."""
        assert self.run is not None
        if trainer.global_step != self._step:
            step = self._step = int(trainer.global_step)
            self.run.monitor.begin(step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """End the step after its last backward."""
        assert self.run is not None
        self.run.take(self.run.monitor.end())

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the loss, and log kappa, of an update."""
        if self.run is None or self._step is None or trainer.global_step == self._step:
            return
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            logged["loss"] = loss.item()
        self.run.log(self._step, logged)
        if self.run.newest is not None and self.run.newest["geometric_mean"] is not None:
            pl_module.log("kappa", self.run.newest["geometric_mean"], rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what is left, and the page."""
        if self.run is not None:
            self.run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the step that an error ended."""
        if self.run is not None:
            self.run.monitor.cancel()
