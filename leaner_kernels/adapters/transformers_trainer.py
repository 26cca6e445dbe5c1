"""Kappa in a run of Hugging Face's ``Trainer``."""

from typing import Any

from transformers import TrainerCallback

from ..monitor.run_log import RunLog


class KappaCallback(TrainerCallback):
    """Measures kappa of every attention block while a ``Trainer`` trains.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[KappaCallback(every=50)])
        trainer.train()

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``; "step" counts the updates before it),
    ``metrics.jsonl`` (what the trainer logs), ``alarms.jsonl`` and, in the end, ``page.html``. What
    the trainer logs gets "kappa", the newest geometric mean over the layers that are resolved.

    Args:
        every: optimizer steps between samples, at least 1.
        samples: batch entries captured on each rank, at least 1.
        folder: ``args.output_dir`` when None.
        **options: of ``leaner_kernels.monitor.run_log.RunLog``: probe, page, kappa_factor, …

    Raises:
        ValueError: when training begins: what ``KappaMonitor`` refuses.
    """

    def __init__(
        self, every: int = 50, samples: int = 4, folder: str | None = None, **options: Any
    ) -> None:
        self.options = {"every": every, "samples": samples, **options}
        self.folder = folder
        self.run: RunLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Construct the monitor of this training."""
        self.run = RunLog(objects["model"], self.folder or args.output_dir, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin a step, of however many batches."""
        assert self.run is not None
        self.run.monitor.begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the step after its last backward."""
        assert self.run is not None
        self.run.take(self.run.monitor.end())

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add kappa to what is logged."""
        if self.run is None or logs is None:
            return
        named = {
            f"held_out_{name[5:]}" if name.startswith("eval_") else name: value
            for name, value in logs.items()
        }
        self.run.log(state.global_step, named)
        if self.run.newest is not None and self.run.newest["geometric_mean"] is not None:
            # For the callbacks after this one, and for the history, which holds a copy.
            for each in (logs, *state.log_history[-1:]):
                each["kappa"] = self.run.newest["geometric_mean"]

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write what is left, and the page."""
        if self.run is not None:
            self.run.close()
