"""Alarms on rows of ``KappaMonitor``: attention that collapses, kappa that rises.

Alarms depend on the rows only: the same rows give the same alarms, on every rank, and in a resumed
run that gets the earlier rows.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from numbers import Real
from statistics import median
from typing import Any, Literal, NamedTuple

from .ops._checks import LARGEST, shown
from .removed import refuse_removed_arguments

# Kappa of float32 heads is not resolved above about this value.
UNRESOLVED = 1e7
# The number of newest rows of a layer over which the median of its kappa is taken.
WINDOW = 20


class Alarm(NamedTuple):
    """An alarm that one row of a layer triggered.

    Attributes:
        step: step of the row.
        layer: as in ``model.named_modules()``.
        reason: "floor" of ``EntropyAlarm``, "rise" of ``KappaAlarm``.
        value: the entropy in nats, or kappa; None if kappa is not resolved.
        limit: the limit that was crossed.
        message: the alarm as one sentence.
    """

    step: int
    layer: str
    reason: Literal["floor", "rise"]
    value: float | None
    limit: float
    message: str

    def as_row(self) -> dict[str, Any]:
        """Return the row of ``alarms.jsonl``: step, kind, message, layer, value and limit."""
        kind = "kappa" if self.reason == "rise" else "entropy"
        named = {"step": self.step, "kind": kind, "message": self.message, "layer": self.layer}
        return named | {kind: self.value, "limit": self.limit}


class EntropyAlarm:
    """Warn when the attention of a layer collapses, an early sign of unstable training.

        alarm = EntropyAlarm()
        for row in alarm.update(monitor.end()):
            logger.warning(row.message)

    The limit is a fraction of the entropy of uniform attention, log(columns) for rows of that many
    entries, so that sequences may differ in length. Rows of one column are skipped. An alarm fires
    once and can fire again when the entropy is back above 1.5 times its limit. Rows, and so alarms,
    are equal on all ranks.

    Args:
        floor: fraction of log(columns), in [0, 1).

    Raises:
        ValueError: the floor is outside [0, 1).

    Under a causal mask row i sees only i tokens, so uniform attention has about log(columns) - 1
    nats. Keep that in mind when you choose ``floor`` for short sequences.

    Source: Zhai et al. 2023 (arXiv:2303.06296) for the collapse; the limit is our own.
    """

    RECOVER = 1.5

    @refuse_removed_arguments
    def __init__(self, floor: float = 0.1) -> None:
        if not isinstance(floor, Real) or not 0 <= floor < 1:
            raise ValueError(f"floor must be in [0, 1), got {shown(floor)}")
        self.floor = floor
        self._fired: set[str] = set()

    def update(self, rows: Iterable[dict[str, Any]]) -> list[Alarm]:
        """Process new rows of ``KappaMonitor`` and return the alarms that they trigger.

        Args:
            rows: each with step, layer, columns and entropy. Rows are skipped if a value is None or
                not finite: then the loss itself is not finite.

        Returns:
            The alarms, in the order of the rows.
        """
        alarms = []
        for row in rows:
            layer, entropy, columns = row["layer"], row["entropy"], row["columns"]
            if entropy is None or not math.isfinite(entropy) or not columns or columns == 1:
                continue
            limit = self.floor * math.log(columns)
            if entropy >= limit * self.RECOVER:
                self._fired.discard(layer)
            elif entropy < limit and layer not in self._fired:
                self._fired.add(layer)
                message = (
                    f"step {row['step']}: attention of {layer} collapses: its entropy, "
                    f"{entropy:.3g} nats, is below {limit:.3g}, {self.floor:g} of the maximum"
                )
                alarms.append(Alarm(row["step"], layer, "floor", entropy, limit, message))
        return alarms


class Rise(NamedTuple):
    """A value above ``limit``, and far above ``usual``, the median of earlier values."""

    usual: float
    limit: float


class RiseDetector:
    """Detect when a series rises far above its recent values.

    The limit exceeds their median by ``deviations`` times their spread, but at least by the floor.
    The spread is 1.48 times the median distance from the median, which is the standard deviation of
    a normal distribution. A single spike moves neither. A rise is ``patience`` consecutive values
    above the limit. After a rise, the next is returned only once a value has been below the middle
    between median and limit, and ``window / 2`` values have passed.
    """

    def __init__(self, deviations: float, window: int, patience: int):
        self.deviations, self.window, self.patience = deviations, window, patience
        self.newest: deque[float] = deque(maxlen=window)
        self._armed, self._since, self._above = True, window, 0

    def take(self, value: float, floor: float) -> Rise | None:
        """Add the next value, which is finite, and return the rise that it completes, or None.

        ``floor`` is the least distance of a rise from the median.
        """
        recent, least = list(self.newest), self.window / 2
        self.newest.append(value)
        self._since += 1
        if len(recent) < least:
            return None
        usual = median(recent)
        spread = 1.48 * median(abs(value - usual) for value in recent)
        above = max(self.deviations * spread, floor)
        if value <= usual + above / 2:
            self._armed = True
        self._above = self._above + 1 if value > usual + above else 0
        if self._above < self.patience or not self._armed or self._since < least:
            return None
        self._armed, self._since = False, 0
        return Rise(usual, usual + above)


class KappaAlarm:
    """Warn when kappa of a layer rises far above its recent values.

        alarm = KappaAlarm()
        for found in alarm.update(monitor.end()):
            logger.warning(found.message)

    A healthy kappa depends on the shape, the layer and the age of a model, so that no absolute
    limit suits all. The alarm fires if, in three consecutive rows, a layer's kappa is above
    ``factor`` times the median of its newest 20 values, and also six of their deviations above that
    median: with few heads, kappa varies by orders of magnitude between batches. It never fires in
    the first ten rows. A kappa that is not resolved, as when all tokens attend to one, counts as
    1e7.

    Args:
        factor: factor of the median, above 1.

    Raises:
        ValueError: the factor is not above 1.
    """

    DEVIATIONS = 6.0
    # This many consecutive rows are not due to one batch, which often has an unresolved kappa.
    RISEN = 3

    @refuse_removed_arguments
    def __init__(self, factor: float = 10.0) -> None:
        if not isinstance(factor, Real) or not 1 < factor <= LARGEST:
            raise ValueError(f"factor must be above 1, got {shown(factor)}")
        self.factor = factor
        self._rises = defaultdict(partial(RiseDetector, self.DEVIATIONS, WINDOW, self.RISEN))

    def update(self, rows: Iterable[dict[str, Any]]) -> list[Alarm]:
        """As ``EntropyAlarm.update``, of rows with step, layer, kappa and sigma_max.

        Rows without sigma_max, as of heads that are not finite or did not run, are skipped.
        """
        alarms = []
        for row in rows:
            step, layer, kappa = row["step"], row["layer"], row["kappa"]
            if row["sigma_max"] is None:
                continue
            rise = self._rises[layer].take(math.log(kappa or UNRESOLVED), math.log(self.factor))
            if rise is not None:
                usual, limit = map(math.exp, rise)
                now = "past what float32 resolves" if kappa is None else f"to {kappa:.3g}"
                message = (
                    f"step {step}: κ of {layer} rose {now}; its recent median is {usual:.3g}, "
                    f"the limit {limit:.3g}"
                )
                alarms.append(Alarm(step, layer, "rise", kappa, limit, message))
        return alarms
