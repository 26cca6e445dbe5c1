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

    The folder gets ``kappa.jsonl`` (rows of ``KappaMonitor``; "step" counts the updates before it),
    ``metrics.jsonl`` (the logs of the trainer), ``alarms.jsonl`` and, at the end, ``page.html``. A
    run resumed from a checkpoint continues these files; a new run renames existing ones. The logs
    of the trainer get "kappa", the newest geometric mean over the layers that are resolved.

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
        first = int(state.global_step)
        folder = self.folder or args.output_dir

        def is_before(row: dict[str, Any]) -> bool:
            # A row counts the updates before it was logged, the checkpoint's among them. The sums
            # of a training that ended there are not those of this one.
            return row["step"] < first or (row["step"] == first and "train_runtime" not in row)

        self.run = RunLog(
            objects["model"], folder, first=first, is_before=is_before, **self.options
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin a step of one or more batches, each run by the trainer's ``training_step``."""
        assert self.run is not None
        if self._trainer is None:
            self._watch(_trainer_that_calls())
        if self._trainer is None:
            self.run.begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the step after its last backward."""
        assert self.run is not None
        self.run.end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add kappa to the logs."""
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
        """Write the remaining rows, and the page."""
        self._release()
        if self.run is not None:
            self.run.close()

    def _watch(self, trainer: Trainer | None) -> None:
        """Sample inside the trainer's ``training_step``, since no callback reports an error."""
        if trainer is None:
            return
        run, inner = self.run, trainer.training_step
        assert run is not None

        @wraps(inner)
        def training_step(*args: Any, **named: Any) -> Any:
            try:
                with run.batch(trainer.state.global_step):
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
