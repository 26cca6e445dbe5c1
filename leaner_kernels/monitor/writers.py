"""Write rows to TensorBoard and Weights & Biases."""

from types import ModuleType
from typing import Any

from ..ops.statistics import COLUMNS
from .run_files import MEANS, layer_means

# The columns that TensorBoard and W&B get, of every layer.
WRITTEN = (
    *("kappa", "kappa_before_skip", "kappa_after_skip"),
    *(column.name for column in COLUMNS if column.written),
    *("effective_rank", "stable_rank", "head_correlation", "isotropy", "mean_share"),
)
# The step of the rows in the model's training, over which W&B draws them.
AXIS = "kappa/step"


def scalars(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers that TensorBoard and W&B get of the rows of one step, by name."""
    values = {
        f"{key}/{row['layer']}": row[key]
        for row in rows
        for key in WRITTEN
        if row.get(key) is not None
    }
    (means,) = layer_means(rows)
    return values | {f"kappa/{key}": means[key] for key in MEANS if means[key] is not None}


class TensorBoard:
    """Logs rows to a ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows of one step."""
        for name, value in scalars(rows).items():
            self.writer.add_scalar(name, value, rows[0]["step"])


class WandbRun:
    """Log rows to a run to which other code logs too, without losing rows of either.

    W&B merges the values of one of its steps, and drops values of earlier steps. Rows arrive late,
    and the loop may count its steps differently. So rows are added to the current step of the run,
    which the next ``log`` of the loop ends. If rows already wait there, the new ones begin the next
    step.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._defined: set[str] = set()
        self._waits_at: int | None = None

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Log the rows of one step."""
        self.log({**scalars(rows), AXIS: rows[0]["step"]})

    def log(self, values: dict[str, float]) -> None:
        """Log the values of a sampled step; ``AXIS`` among them is the step."""
        run = self.run.run if isinstance(self.run, ModuleType) else self.run
        for name in sorted(values.keys() - self._defined, key=lambda name: name != AXIS):
            if hasattr(run, "define_metric"):
                run.define_metric(name, **({} if name == AXIS else {"step_metric": AXIS}))
            self._defined.add(name)
        mode = getattr(getattr(run, "settings", None), "mode", None)
        # If several processes share a run, only W&B's server knows its step.
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
