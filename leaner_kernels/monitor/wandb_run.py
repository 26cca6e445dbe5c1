"""Rows in a run of Weights & Biases, on an axis of their own, whatever else is logged there."""

from types import ModuleType
from typing import Any

# The step of the rows in the model's training, over which W&B draws them.
AXIS = "kappa/step"


class WandbRun:
    """Logs rows to a run that others log to, and loses none of theirs or of its own.

    W&B merges what is logged for one of its steps, and drops what comes for an earlier one. Rows
    arrive late, and the loop may count its steps otherwise than the run. So rows are added to the
    step that the run is at, which the next ``log`` of the loop ends; where rows wait there already,
    they begin the next.

    Args:
        run: of ``wandb.init``; ``wandb`` itself, for the run of the moment; or anything with
            ``log(values)``.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._defined: set[str] = set()
        self._waits_at: int | None = None

    def log(self, values: dict[str, float]) -> None:
        """Log the values of a sampled step, which is among them, as ``AXIS``."""
        run = self.run.run if isinstance(self.run, ModuleType) else self.run
        for name in sorted(values.keys() - self._defined, key=lambda name: name != AXIS):
            if hasattr(run, "define_metric"):
                run.define_metric(name, **({} if name == AXIS else {"step_metric": AXIS}))
            self._defined.add(name)
        mode = getattr(getattr(run, "settings", None), "mode", None)
        # Several processes log to a shared run, and only W&B's server knows its step.
        if mode is None or mode == "shared":
            run.log(values)
            return
        at = run.step
        if at == self._waits_at:
            at += 1
            run.log(values, step=at)
        else:
            run.log(values, commit=False)
        self._waits_at = at
