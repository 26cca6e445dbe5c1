"""Warns a person while a run still goes on: of what its rows show and no error does.

Alarms follow from the rows alone, so a resumed run, which is given those from before, gives the
same ones. They change nothing: steps that are not finite are skipped elsewhere.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol

from leaner_kernels import EntropyAlarm

# The newest steps that a loss is held against, and the newest rows of a layer for its kappa.
LOSSES, KAPPAS = 100, 20
# A loss must rise by this part of the run's first ones besides: near the end, when a loss is almost
# zero on most batches, one difficult item is many of its deviations.
FLOOR = 0.05
# Kappa must leave what is usual by so many deviations besides: of a model with few heads it varies
# by orders of magnitude from batch to batch.
KAPPA_DEVIATIONS = 6.0
# Kappa of float32 heads is not resolved past about this.
UNRESOLVED = 1e7
# So many rows in a row above the limit are no accident of a batch, nor so many without a kappa, of
# a layer that had one: of a model with few heads a single row often has none.
RISEN, LOST = 3, 5


class AlarmSettings(Protocol):
    """The fields of ``Settings`` that choose a run's alarms."""

    loss_alarm: float
    kappa_alarm: float
    entropy_alarm: float


class Rise(NamedTuple):
    """A value far above the ones before.

    Attributes:
        usual: the median of these.
        limit: what the value is above.
    """

    usual: float
    limit: float


class RiseDetector:
    """Detects when a series leaves its newest values upwards.

    The limit lies above their median by ``deviations`` times their spread, and at least by the
    floor. Spread is the median distance from the median times 1.48, of a normal distribution its
    standard deviation. Neither minds a spike among them. A rise is returned once; the next one only
    when a value was below the middle between median and limit, which after a lasting rise it is
    when the new level has become the median, and at least ``window / 2`` values later.

    Args:
        deviations: how many.
        window: values that count. There is no limit before half of it is filled.
        patience: only so many values above the limit, one after another, are a rise.
    """

    def __init__(self, deviations: float, window: int, patience: int = 1):
        self.deviations, self.patience = deviations, patience
        self.newest: deque[float] = deque(maxlen=window)
        self._armed, self._since, self._above = True, window, 0

    def take(self, value: float, floor: float) -> Rise | None:
        """Add the next value, and return the rise if it is one.

        Args:
            value: finite.
            floor: how far above the median it must be in any case.
        """
        known, least = list(self.newest), self.newest.maxlen / 2
        self.newest.append(value)
        self._since += 1
        if len(known) < least:
            return None
        usual = median(known)
        spread = 1.48 * median(abs(each - usual) for each in known)
        above = max(self.deviations * spread, floor)
        if value <= usual + above / 2:
            self._armed = True
        self._above = self._above + 1 if value > usual + above else 0
        if self._above < self.patience or not self._armed or self._since < least:
            return None
        self._armed, self._since = False, 0
        return Rise(usual, usual + above)


class _Found(NamedTuple):
    limit: float | None
    words: str


class _LayerKappa:
    """The kappa of one layer over time: None is past what is resolved."""

    def __init__(self, factor: float):
        self._factor, self._rises = factor, RiseDetector(KAPPA_DEVIATIONS, KAPPAS, RISEN)
        # As if it had been resolved so far: the first row decides.
        self._resolved, self._rows_alike, self._may_be_lost = True, LOST - 1, False

    def take(self, kappa: float | None) -> _Found | None:
        rise = self._rises.take(math.log(kappa or UNRESOLVED), math.log(self._factor))
        alike = (kappa is not None) == self._resolved
        self._resolved, self._rows_alike = kappa is not None, self._rows_alike + 1 if alike else 1
        if self._rows_alike >= LOST and self._resolved:
            self._may_be_lost = True
        found = None
        if rise is not None:
            usual, limit = map(math.exp, rise)
            found = _Found(limit, f"the usual {usual:.3g}, limit {limit:.3g}")
        elif self._rows_alike >= LOST and not self._resolved and self._may_be_lost:
            found = _Found(None, f"as in the {LOST - 1} samples before")
        if found is not None:
            self._may_be_lost = False
        return found


class Alarms:
    """Turns the rows of a run into warnings.

        alarms = Alarms(settings)
        alarms.replay(metrics, kappa)  # the rows of before, in a resumed run
        for alarm in alarms.step(row):
            print(alarm["message"])

    Each is a dict of JSON values with "step", "kind" and "message", one line:

    - "loss": it rose far above its newest 100 values, see ``RiseDetector``. Not in the first 50
      steps.
    - "skipped": a step was skipped because its loss or gradient was not finite; once for several
      in a row.
    - "kappa": of a layer, it rose by a factor above its newest 20 values and by six of their
      deviations, in three rows one after another; not in the first 10 rows. Past what is resolved,
      as when all tokens attend to one, it counts as 1e7. What is healthy depends on the shape, the
      layer and the age of a model, so there is no limit for all of them. And whenever a layer that
      had a kappa has none for five rows, which a collapse in the first steps brings about.
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
        self._loss = RiseDetector(settings.loss_alarm, LOSSES) if settings.loss_alarm else None
        self._first_losses: list[float] = []
        self._skipped, self._skipping = 0, False
        self._factor = settings.kappa_alarm
        self._kappas: defaultdict[str, _LayerKappa] = defaultdict(
            partial(_LayerKappa, settings.kappa_alarm)
        )
        self._entropy = EntropyAlarm(settings.entropy_alarm) if settings.entropy_alarm else None

    def replay(self, metrics: list[dict[str, Any]], kappa: list[dict[str, Any]]) -> None:
        """Take in the rows of before a resume, whose alarms were given then."""
        for row in metrics:
            self.step(row)
        self.kappa(kappa)

    def step(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Take in the row of a step: "step", "loss", and "skipped" where it was.

        Returns:
            The new alarms.
        """
        if row.get("skipped"):
            self._skipped += 1
            first, self._skipping = not self._skipping, True
            return [self._not_finite(row["step"])] if first else []
        self._skipping = False
        loss = row["loss"]
        # As JSON has it, None.
        if self._loss is None or loss is None or not math.isfinite(loss):
            return []
        if len(self._first_losses) < LOSSES // 10:
            self._first_losses.append(loss)
        rise = self._loss.take(loss, FLOOR * abs(median(self._first_losses)))
        if rise is None:
            return []
        message = (
            f"step {row['step']}: loss is {loss:.4g}, the usual {rise.usual:.4g}, "
            f"limit {rise.limit:.4g}"
        )
        return [_alarm(row["step"], "loss", message, loss=loss, **rise._asdict())]

    def _not_finite(self, step: int) -> dict[str, Any]:
        message = (
            f"step {step} skipped: its loss or gradient is not finite; {self._skipped} skipped "
            "so far"
        )
        return _alarm(step, "skipped", message, skipped=self._skipped)

    def kappa(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take in rows of ``KappaMonitor``.

        Returns:
            The new alarms.
        """
        rows = list(rows)
        alarms = []
        if self._factor:
            # Heads that are not finite have no sigma_max: then the loss shows it.
            alarms += [a for row in rows if row["sigma_max"] is not None for a in self._one(row)]
        if self._entropy is not None:
            for found in self._entropy.update(rows):
                values = {name: getattr(found, name) for name in ("layer", "entropy", "limit")}
                alarms.append(_alarm(found.step, "entropy", found.message, **values))
        return alarms

    def _one(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        layer, kappa = row["layer"], row["kappa"]
        found = self._kappas[layer].take(kappa)
        if found is None:
            return []
        now = "past what is resolved" if kappa is None else f"{kappa:.3g}"
        message = f"step {row['step']}: κ of {layer} is {now}, {found.words}"
        values = {"layer": layer, "kappa": kappa, "limit": found.limit}
        return [_alarm(row["step"], "kappa", message, **values)]


def _alarm(step: int, kind: str, message: str, **values: Any) -> dict[str, Any]:
    return {"step": step, "kind": kind, "message": message, **values}
