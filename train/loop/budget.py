"""How long a run is, and how its passes are cut into optimizer steps."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from train.config.flags import Settings


class Budget:
    """The steps of a run; a pass is one forward and backward on every rank.

    A step has ``accum`` passes. With a ramp it has one at first, and as many more as share of the
    ramp is over: so the batch grows linearly in the items seen, and the run is the same number of
    items long as without.

    Args:
        passes: of the whole run.
        accum: passes of a step, at most.
        ramp: share of the passes over which a step grows to ``accum``, in [0, 1).

    Attributes:
        steps: how many.
        passes_before: each step, and last of all the whole run's.
    """

    def __init__(self, passes: int, accum: int, ramp: float):
        self.steps = max(1, passes // accum)
        # No list: a run may be of a billion steps, to be stopped some day.
        self.passes_before: Sequence[int] = range(0, self.steps * accum + 1, accum)
        if ramp:
            self.passes_before = [0, *accumulate(_growing(passes, accum, ramp))]
            self.steps = len(self.passes_before) - 1

    def passes_of(self, step: int) -> int:
        """Return the passes of one step."""
        return self.passes_before[step + 1] - self.passes_before[step]

    def position(self, step: int) -> float:
        """Return how much of the run is over before a step, in [0, steps], as if all were equal."""
        return self.passes_before[step] * self.steps / self.passes_before[-1]


def _growing(passes: int, accum: int, ramp: float) -> Iterator[int]:
    done = 0
    while done < passes:
        wanted = min(accum, max(1, round(accum * done / (ramp * passes))))
        yield wanted
        done += wanted


def budget_of(settings: Settings, *, steps_per_epoch: int, tokens_per_item: int | None) -> Budget:
    """Return the budget that the flags give.

    Args:
        settings: with one of ``epochs``, ``steps`` and ``tokens``.
        steps_per_epoch: full batches in an epoch.
        tokens_per_item: of the training data, or None.

    Raises:
        ValueError: a ramp over a number of steps, or tokens of items that have none.
    """
    accum = settings.accum
    if settings.steps is not None:
        if settings.ramp:
            raise ValueError(
                f"--ramp needs --epochs or --tokens, from which the steps follow, got --steps "
                f"{settings.steps}"
            )
        return Budget(settings.steps * accum, accum, 0.0)
    if settings.tokens is not None:
        if tokens_per_item is None:
            raise ValueError(f"--tokens needs a model of language, got {settings.tokens:g}")
        batches = settings.tokens / (tokens_per_item * settings.batch_size)
    else:
        batches = settings.epochs * steps_per_epoch
    if settings.ramp:
        return Budget(max(1, round(batches * accum)), accum, settings.ramp)
    return Budget(max(1, round(batches)) * accum, accum, 0.0)
