"""A run of Weights & Biases that sends nothing."""

from types import SimpleNamespace
from typing import Any


class FakeRun:
    """As W&B's run: what is logged for a step is merged, and dropped where the step is over."""

    def __init__(self, mode: str = "offline") -> None:
        self.settings = SimpleNamespace(mode=mode)
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.waits: dict[str, Any] = {}
        self.at, self.lost, self.finished = 0, 0, 0

    @property
    def step(self) -> int:
        if self.settings.mode == "shared":
            raise RuntimeError("the step of a shared run is not known")
        return self.at

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict, step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self.at:
            self.lost += 1
            return
        if step is not None and step > self.at:
            self._end_step()
            self.at = step
        self.waits |= values
        if commit or (commit is None and step is None):
            self._end_step()
            self.at += 1

    def _end_step(self) -> None:
        if self.waits:
            self.rows.append(self.waits)
        self.waits = {}

    def finish(self) -> None:
        self._end_step()
        self.finished += 1
