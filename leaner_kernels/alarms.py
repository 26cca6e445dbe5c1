"""Alarms on rows of ``KappaMonitor``: attention that collapses, kappa that rises or is lost.

Alarms depend on the rows only: the same rows give the same alarms, on every rank, and in a resumed
run that gets the earlier rows.
"""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from numbers import Integral, Real
from statistics import median
from typing import Any, Literal, NamedTuple

from .ops._checks import LARGEST, shown

# Kappa of float32 heads is not resolved past about this.
UNRESOLVED = 1e7


class Alarm(NamedTuple):
    """An alarm that one row of a layer triggered.

    Attributes:
        step: step of the row.
        layer: as in ``model.named_modules()``.
        reason: "floor" or "drop" of ``EntropyAlarm``, "rise" or "lost" of ``KappaAlarm``.
        value: the entropy in nats, or kappa; None if kappa is not resolved.
        limit: the limit that was crossed; None for "lost".
        message: the alarm as one sentence.
    """

    step: int
    layer: str
    reason: Literal["floor", "drop", "rise", "lost"]
    value: float | None
    limit: float | None
    message: str

    def as_row(self) -> dict[str, Any]:
        """Return the row of ``alarms.jsonl``: step, kind, message, layer, value and limit."""
        kind = "kappa" if self.reason in ("rise", "lost") else "entropy"
        named = {"step": self.step, "kind": kind, "message": self.message, "layer": self.layer}
        return named | {kind: self.value, "limit": self.limit}


class EntropyAlarm:
    """Warn when the attention of a layer collapses, an early sign of unstable training.

        alarm = EntropyAlarm()
        for row in alarm.update(monitor.end()):
            logger.warning(row.message)

    Entropies count as fractions of that of attending to everything alike, log(columns) for rows of
    so many entries, so that sequences may differ in length. Two limits, each with its own alarm:
    "floor", such a fraction; and "drop", a part of the layer's own median fraction over the newest
    rows, once half of the window is filled. Rows of one column are skipped. An alarm fires once
    and can fire again when the entropy is back above ``recover`` times its limit, or, for "drop",
    when the lower level has become the median; below the floor no drop is reported. Rows are equal
    on all ranks, so alarms are too.

    Args:
        floor: fraction of log(columns), in [0, 1).
        drop: how many times below its median the entropy may fall, above 1.
        window: rows of a layer that make the median, at least 2.
        recover: how far above its limit the entropy must be for another alarm, at least 1.
        field: of the rows: "entropy", the mean over heads and samples, or "entropy_min" where the
            rows have it. Single heads may be sharp in healthy models, so the mean is the default.

    Raises:
        ValueError: a number outside the list above.

    Under a causal mask row i sees i tokens only, so attention to all alike has about
    log(columns) - 1 nats: choose ``floor`` with that in mind for short sequences.

    Source: Zhai et al. 2023 (arXiv:2303.06296) for the collapse; the two limits are our own.
    """

    def __init__(
        self,
        floor: float = 0.1,
        drop: float = 3.0,
        window: int = 20,
        recover: float = 1.5,
        field: str = "entropy",
    ) -> None:
        allowed = {
            "floor": (floor, "in [0, 1)", lambda x: 0 <= x < 1),
            "drop": (drop, "above 1", lambda x: 1 < x <= LARGEST or x == math.inf),
            "window": (window, "at least 2", lambda x: 2 <= x <= sys.maxsize),
            "recover": (recover, "at least 1", lambda x: 1 <= x <= LARGEST or x == math.inf),
        }
        for name, (value, range_, holds) in allowed.items():
            if not isinstance(value, Real) or not holds(value):
                raise ValueError(f"{name} must be {range_}, got {shown(value)}")
        if not isinstance(window, Integral):
            raise ValueError(f"window must be a whole number, got {window}")
        self.floor, self.drop, self.window = floor, drop, window
        self.recover, self.field = recover, field
        self._history: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=window))
        self._fired: set[tuple[str, str]] = set()

    def update(self, rows: Iterable[dict[str, Any]]) -> list[Alarm]:
        """Process new rows of ``KappaMonitor`` and return the alarms that they trigger.

        Args:
            rows: each with step, layer, columns and ``field``; None there, and what is not finite,
                is skipped: the loss itself is no number then.

        Returns:
            The alarms, in the order of the rows.

        Raises:
            KeyError: a row without one of these fields.
        """
        known = [
            r
            for r in rows
            if r[self.field] is not None and math.isfinite(r[self.field]) and r["columns"]
        ]
        return [alarm for row in known for alarm in self._check(row)]

    def _check(self, row: dict[str, Any]) -> list[Alarm]:
        layer, entropy, history = row["layer"], row[self.field], self._history[row["layer"]]
        whole = math.log(row["columns"])
        if whole == 0:
            return []
        limits: dict[Literal["floor", "drop"], tuple[float, str]] = {
            "floor": (self.floor, f"{self.floor:g} of log(columns) = {whole:.3g}")
        }
        if 2 * len(history) >= self.window:
            usual = median(history)
            limits["drop"] = (
                usual / self.drop,
                f"1/{self.drop:g} of the usual {usual * whole:.3g}",
            )
        # Rounding can push the entropy of attending to one token below zero.
        fraction = max(entropy, 0.0) / whole
        history.append(fraction)
        alarms = []
        for reason, (limit, words) in limits.items():
            if fraction >= limit * self.recover:
                self._fired.discard((layer, reason))
            elif fraction < limit and not self._fired & {(layer, reason), (layer, "floor")}:
                self._fired.add((layer, reason))
                message = (
                    f"step {row['step']}: attention of {layer} collapses: {self.field} "
                    f"{entropy:.3g} nats, below {limit * whole:.3g}, {words}"
                )
                alarms.append(Alarm(row["step"], layer, reason, entropy, limit * whole, message))
        return alarms


class Rise(NamedTuple):
    """A value above ``limit``, far above ``usual``, the median of earlier values."""

    usual: float
    limit: float


class RiseDetector:
    """Detect when a series rises far above its recent values.

    The limit lies above their median by ``deviations`` times their spread, 1.48 times the median
    distance from it (of a normal distribution the standard deviation), and at least by the floor: a
    spike among them moves neither. Only ``patience`` values above it, one after another, are a
    rise. The next one is returned only after a value below the middle between median and limit, and
    ``window / 2`` values.
    """

    def __init__(self, deviations: float, window: int, patience: int):
        self.deviations, self.window, self.patience = deviations, window, patience
        self.newest: deque[float] = deque(maxlen=window)
        self._armed, self._since, self._above = True, window, 0

    def take(self, value: float, floor: float) -> Rise | None:
        """Add the next value, finite, and return the rise if it is one.

        ``floor`` is how far above the median it must be in any case.
        """
        known, least = list(self.newest), self.window / 2
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


class KappaAlarm:
    """Warn when kappa of a layer rises far above its recent values, or is no longer resolved.

        alarm = KappaAlarm()
        for found in alarm.update(monitor.end()):
            logger.warning(found.message)

    A healthy kappa depends on the shape, the layer and the age of a model, so that no absolute
    limit suits all. "rise": in three consecutive rows, a layer's kappa is above ``factor`` times
    the median of its newest ``window`` values, and also six of their deviations above it (with few
    heads, kappa varies by orders of magnitude between batches); not in the first half window. A
    kappa that is not resolved, as when all tokens attend to one, counts as 1e7. "lost": a layer
    that had a kappa has none for five rows, the effect of a collapse in the first steps.

    Args:
        factor: factor of the median, above 1.
        window: number of recent rows of a layer, at least 2.

    Raises:
        ValueError: if a number is out of range.
    """

    DEVIATIONS = 6.0
    # So many rows in a row are no accident of a batch: a single one often has no kappa.
    RISEN, LOST = 3, 5

    def __init__(self, factor: float = 10.0, window: int = 20) -> None:
        if not isinstance(factor, Real) or not 1 < factor <= LARGEST:
            raise ValueError(f"factor must be above 1, got {shown(factor)}")
        if not isinstance(window, Integral) or not 2 <= window <= sys.maxsize:
            raise ValueError(f"window must be a whole number of at least 2, got {shown(window)}")
        self.factor, self.window = factor, window
        self._rises = defaultdict(partial(RiseDetector, self.DEVIATIONS, window, self.RISEN))
        # Of each layer: whether its newest rows have a kappa, how many, and whether it may be lost.
        # As if it had been resolved so far: the first row decides.
        self._rows = defaultdict(partial(_Rows, True, self.LOST - 1, False))

    def update(self, rows: Iterable[dict[str, Any]]) -> list[Alarm]:
        """Process new rows of ``KappaMonitor`` and return the alarms that they trigger.

        Args:
            rows: each with step, layer, kappa and sigma_max; without sigma_max, as of heads that
                are not finite or did not run, it is skipped.

        Returns:
            The alarms, in the order of the rows.
        """
        checked = (self._check(row) for row in rows if row["sigma_max"] is not None)
        return [alarm for alarm in checked if alarm is not None]

    def _check(self, row: dict[str, Any]) -> Alarm | None:
        layer, kappa = row["layer"], row["kappa"]
        rise = self._rises[layer].take(math.log(kappa or UNRESOLVED), math.log(self.factor))
        resolved, alike, may_be_lost = self._rows[layer]
        alike = alike + 1 if (kappa is not None) == resolved else 1
        resolved = kappa is not None
        may_be_lost |= resolved and alike >= self.LOST
        now = f"{kappa:.3g}" if resolved else "past what is resolved"
        alarm = None
        if rise is not None:
            usual, limit = map(math.exp, rise)
            words = f"the usual {usual:.3g}, limit {limit:.3g}"
            message = f"step {row['step']}: κ of {layer} is {now}, {words}"
            alarm = Alarm(row["step"], layer, "rise", kappa, limit, message)
        elif alike >= self.LOST and not resolved and may_be_lost:
            words = f"as in the {self.LOST - 1} samples before"
            message = f"step {row['step']}: κ of {layer} is {now}, {words}"
            alarm = Alarm(row["step"], layer, "lost", None, None, message)
        self._rows[layer] = _Rows(resolved, alike, may_be_lost and alarm is None)
        return alarm


class _Rows(NamedTuple):
    resolved: bool
    alike: int
    may_be_lost: bool
