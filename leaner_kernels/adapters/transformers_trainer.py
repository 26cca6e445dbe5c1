"""A callback that measures kappa in runs of Hugging Face's ``Trainer``."""

from typing import Any

from ..extras import needed_by
from ..monitor.run_log import RunLog

with needed_by(__name__):
    from transformers import TrainerCallback


class KappaCallback(TrainerCallback):
    """Measure kappa of every attention block while a ``Trainer`` trains.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[KappaCallback(every=50)])
        trainer.train()

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``), ``metrics.jsonl`` (the logs of the
    trainer), ``alarms.jsonl`` and, at the end, ``page.html``; "step" counts the updates before the
    newest. A run resumed from a checkpoint continues these files; a new run renames existing ones.
    The logs of the trainer get "kappa", the newest geometric mean over the layers that are
    resolved. If an error ends the training in a sampled step, the callback's
    ``run.monitor.cancel()`` or the next training ends the sample.

    Args:
        every: optimizer steps between samples, at least 1.
        samples: batch entries captured on each rank, at least 1.
        folder: ``args.output_dir`` when None.
        **options: of ``leaner_kernels.monitor.run_log.RunLog``: page, kappa_factor, …

    Raises:
        ValueError: when training begins, if ``KappaMonitor`` raises one.
    """

    def __init__(
        self, every: int = 50, samples: int = 4, folder: str | None = None, **options: Any
    ) -> None:
        self.options = {"every": every, "samples": samples, **options}
        self.folder = folder
        self.run: RunLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Construct the monitor of this training."""
        if self.run is not None:
            # The sample of a training that ended with an error, which no callback learns of.
            self.run.monitor.cancel()
        folder, first = self.folder or args.output_dir, int(state.global_step)
        self.run = RunLog(objects["model"], folder, first=first, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin a step of one or more batches."""
        assert self.run is not None
        self.run.begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the step after its last backward."""
        assert self.run is not None
        self.run.end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write the logs with the step of the update before them, and add kappa to them."""
        if self.run is None or logs is None:
            return
        named = {
            f"held_out_{name[5:]}" if name.startswith("eval_") else name: value
            for name, value in logs.items()
        }
        # The totals at the end of a training are in the summary and belong to no step.
        if "train_runtime" not in named:
            self.run.log(max(state.global_step - 1, 0), named)
        if self.run.newest is not None and self.run.newest["geometric_mean"] is not None:
            # For the callbacks after this one, and for the history, which holds a copy.
            for entry in (logs, *state.log_history[-1:]):
                entry["kappa"] = self.run.newest["geometric_mean"]

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write the remaining rows, and the page."""
        if self.run is not None:
            self.run.close()
