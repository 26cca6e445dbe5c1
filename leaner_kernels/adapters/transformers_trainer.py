"""A callback that measures kappa in runs of Hugging Face's ``Trainer``."""

import sys
from functools import wraps
from typing import Any

from transformers import Trainer, TrainerCallback

from ..monitor.run_log import RunLog


class KappaCallback(TrainerCallback):
    """Measure kappa of every attention block while a ``Trainer`` trains.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[KappaCallback(every=50)])
        trainer.train()

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``), ``metrics.jsonl`` (the logs of the
    trainer), ``alarms.jsonl`` and, at the end, ``page.html``; "step" counts the updates before the
    newest. A run resumed from a checkpoint continues these files; a new run renames existing ones.
    The logs of the trainer get "kappa", the newest geometric mean over the layers that are
    resolved.

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
        self._trainer: Trainer | None = None
        self._replaced: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Construct the monitor of this training."""
        self._release()
        folder, first = self.folder or args.output_dir, int(state.global_step)
        self.run = RunLog(objects["model"], folder, first=first, **self.options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin a step of one or more batches, each run by the trainer's ``training_step``."""
        assert self.run is not None
        if self._trainer is None:
            self._watch(_trainer_that_calls())
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
        # The sums of a training that ends are in the summary, and no news of a step.
        if "train_runtime" not in named:
            self.run.log(max(state.global_step - 1, 0), named)
        if self.run.newest is not None and self.run.newest["geometric_mean"] is not None:
            # For the callbacks after this one, and for the history, which holds a copy.
            for each in (logs, *state.log_history[-1:]):
                each["kappa"] = self.run.newest["geometric_mean"]

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write the remaining rows, and the page."""
        self._release()
        if self.run is not None:
            self.run.close()

    def _watch(self, trainer: Trainer | None) -> None:
        """Cancel the step if the trainer's ``training_step`` raises, which no callback reports."""
        if trainer is None:
            return
        inner = trainer.training_step

        @wraps(inner)
        def training_step(*args: Any, **named: Any) -> Any:
            try:
                return inner(*args, **named)
            except BaseException:
                self._release()
                raise

        self._trainer, self._replaced = trainer, vars(trainer).get("training_step")
        trainer.training_step = training_step

    def _release(self) -> None:
        """Cancel the step, and restore the trainer's ``training_step``."""
        if self.run is not None:
            self.run.monitor.cancel()
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        if self._replaced is None:
            vars(trainer).pop("training_step", None)
        else:
            trainer.training_step = self._replaced


def _trainer_that_calls() -> Trainer | None:
    """Return the trainer that runs this callback, from the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None
