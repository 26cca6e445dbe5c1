"""Warn of instabilities during a run that raise no error.

Alarms depend only on the rows, so a resumed run that gets the earlier rows raises the same alarms.
They do not change the run: steps that are not finite are skipped elsewhere.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, Protocol

from leaner_kernels.alarms import EntropyAlarm, KappaAlarm, RiseDetector

# Number of newest steps with which a loss is compared.
LOSSES = 100
# This many consecutive steps are not due to one batch: among 16 items, one is often difficult.
RISEN = 3
# A loss must also rise by this fraction of the run's first losses: near the end, when most losses
# are almost zero, one difficult item exceeds many deviations.
FLOOR = 0.05


class AlarmSettings(Protocol):
    """The fields of ``Settings`` that choose a run's alarms."""

    loss_alarm: float
    kappa_alarm: float
    entropy_alarm: float


class Alarms:
    """Turn the rows of a run into warnings.

        alarms = Alarms(settings)
        alarms.replay(metrics, kappa)  # earlier rows, in a resumed run
        for alarm in alarms.step(row):
            print(alarm["message"])

    Each is a dict of JSON values with "step", "kind" and "message", one line:

    - "loss": in three consecutive steps it was far above its newest 100 values, see
      ``RiseDetector``. It is not raised in the first 50 steps.
    - "skipped": a step was skipped because its loss or gradient was not finite; raised once for
      several consecutive steps.
    - "kappa": of a layer, as ``leaner_kernels.KappaAlarm`` defines it.
    - "entropy": attention of a layer collapses, as ``leaner_kernels.EntropyAlarm`` defines it.

    Args:
        settings: ``loss_alarm`` in deviations, ``kappa_alarm`` as a factor, ``entropy_alarm`` as a
            part of log(columns); 0 leaves one out.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, settings: AlarmSettings):
        if 0 < settings.kappa_alarm <= 1:
            raise ValueError(f"--kappa-alarm must be 0 or above 1, got {settings.kappa_alarm:g}")
        self._loss = None
        if settings.loss_alarm:
            self._loss = RiseDetector(settings.loss_alarm, LOSSES, RISEN)
        self._first_losses: list[float] = []
        # Whether each of the newest steps was skipped.
        self._skipped: deque[bool] = deque(maxlen=LOSSES)
        self._kappa = KappaAlarm(settings.kappa_alarm) if settings.kappa_alarm else None
        self._entropy = EntropyAlarm(settings.entropy_alarm) if settings.entropy_alarm else None

    def replay(self, metrics: list[dict[str, Any]], kappa: list[dict[str, Any]]) -> None:
        """Process the rows from before a resume, whose alarms were raised then."""
        for row in metrics:
            self.step(row)
        self.kappa(kappa)

    def step(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Process the row of a step: "step", "loss", and "skipped" if it was.

        Returns:
            The new alarms.
        """
        first = not (self._skipped and self._skipped[-1])
        self._skipped.append(bool(row.get("skipped")))
        if self._skipped[-1]:
            return [self._not_finite(row["step"])] if first else []
        loss = row["loss"]
        # A loss that is not finite is None, as in JSON.
        if self._loss is None or loss is None or not math.isfinite(loss):
            return []
        if len(self._first_losses) < LOSSES // 10:
            self._first_losses.append(loss)
        rise = self._loss.take(loss, FLOOR * abs(median(self._first_losses)))
        if rise is None:
            return []
        message = (
            f"step {row['step']}: loss rose to {loss:.4g}; its recent median is {rise.usual:.4g}, "
            f"the limit {rise.limit:.4g}"
        )
        return [_alarm(row["step"], "loss", message, loss=loss, **rise._asdict())]

    def _not_finite(self, step: int) -> dict[str, Any]:
        skipped = sum(self._skipped)
        message = (
            f"step {step} was skipped because its loss or gradient is not finite; "
            f"{skipped} of the last {LOSSES} steps were skipped"
        )
        return _alarm(step, "skipped", message, skipped=skipped)

    def kappa(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Process rows of ``KappaMonitor``.

        Returns:
            The new alarms.
        """
        rows = list(rows)
        wanted = [alarm for alarm in (self._kappa, self._entropy) if alarm is not None]
        return [found.as_row() for alarm in wanted for found in alarm.update(rows)]


def _alarm(step: int, kind: str, message: str, **values: Any) -> dict[str, Any]:
    return {"step": step, "kind": kind, "message": message, **values}
