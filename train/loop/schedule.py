"""Schedule a run: its length, the items and learning rate of each step, and evaluations."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from train.config.flags import Settings
from train.data.sampler import BatchSampler, BatchSplit
from train.loop import Task
from train.loop.parallel import DistributedContext


class Budget:
    """The steps of a run; a pass is one forward and backward on every rank.

    A step has ``accum`` passes. With a batch-size warm-up, the number of passes rises from one to
    ``accum``, so that the batch grows linearly with the items read; the run reads as many items as
    without.

    Args:
        passes: number of passes of the whole run.
        accum: largest number of passes in a step.
        batch_size_warmup: share of the passes over which a step grows to ``accum``, in [0, 1).

    Attributes:
        steps: number of steps.
        passes_before: passes before each step, and finally those of the whole run.
    """

    def __init__(self, passes: int, accum: int, batch_size_warmup: float):
        self.steps = max(1, passes // accum)
        # Not a list: a run may be configured for a billion steps, to be stopped at some time.
        self.passes_before: Sequence[int] = range(0, self.steps * accum + 1, accum)
        if batch_size_warmup:
            self.passes_before = [0, *accumulate(_growing(passes, accum, batch_size_warmup))]
            self.steps = len(self.passes_before) - 1

    def passes_of(self, step: int) -> int:
        """Return the passes of one step."""
        return self.passes_before[step + 1] - self.passes_before[step]

    def position(self, step: int) -> float:
        """Return the progress before a step, in [0, steps], as if all steps were equal."""
        return self.passes_before[step] * self.steps / self.passes_before[-1]


def _growing(passes: int, accum: int, batch_size_warmup: float) -> Iterator[int]:
    done = 0
    while done < passes:
        wanted = min(accum, max(1, round(accum * done / (batch_size_warmup * passes))))
        yield wanted
        done += wanted


def budget_of(settings: Settings, *, steps_per_epoch: int, tokens_per_item: int | None) -> Budget:
    """Return the budget that the flags define.

    Args:
        settings: with one of ``epochs``, ``steps`` and ``tokens``.
        steps_per_epoch: full batches in an epoch.
        tokens_per_item: tokens per item of the training data, or None.

    Raises:
        ValueError: if a batch-size warm-up is combined with a number of steps, or tokens are given
            for items without tokens.
    """
    accum = settings.accum
    if settings.steps is not None:
        if settings.batch_size_warmup:
            raise ValueError(
                "--batch-size-warmup needs the length of the run in --epochs or --tokens, got "
                f"--steps {settings.steps}"
            )
        return Budget(settings.steps * accum, accum, 0.0)
    if settings.tokens is not None:
        if tokens_per_item is None:
            raise ValueError(
                f"--tokens needs a language model, got {settings.tokens:g}: give --epochs or "
                "--steps"
            )
        batches = settings.tokens / (tokens_per_item * settings.batch_size)
    else:
        batches = settings.epochs * steps_per_epoch
    if settings.batch_size_warmup:
        return Budget(max(1, round(batches * accum)), accum, settings.batch_size_warmup)
    return Budget(max(1, round(batches)) * accum, accum, 0.0)


class Schedule:
    """The items of each step of a run, and the actions due after it, from settings and data.

    Args:
        task: what to train.
        settings: how; all values filled in.
        world: the processes.

    Attributes:
        batch_split: how the items of a full batch divide among ranks and passes.
        steps_per_epoch: full batches in an epoch.
        budget: the passes of each step.
        steps: steps of the whole run.

    Raises:
        ValueError: settings that do not fit each other or the data.
    """

    def __init__(self, task: Task, settings: Settings, world: DistributedContext):
        self.task, self.settings, self.world = task, settings, world
        self.batch_split = BatchSplit(settings.batch_size, world.size, settings.accum)
        self.steps_per_epoch = self._sampler(self.batch_split, 0, 0).steps_per_epoch
        self.budget = budget_of(
            settings, steps_per_epoch=self.steps_per_epoch, tokens_per_item=task.tokens_per_item
        )
        self.steps = self.budget.steps

    def sampler(self, first: int, last: int) -> BatchSampler:
        """Return the micro-batches of steps ``first`` to ``last`` for this rank."""
        if not self.settings.batch_size_warmup:
            return self._sampler(self.batch_split, first, last)
        # If steps differ in size, the epoch is cut into passes, and a step reads some of them.
        one_pass = BatchSplit(self.batch_split.micro_batch * self.world.size, self.world.size, 1)
        return self._sampler(one_pass, *(self.budget.passes_before[step] for step in (first, last)))

    def _sampler(self, batch_split: BatchSplit, first: int, last: int) -> BatchSampler:
        own = {"seed": self.settings.seed, "rank": self.world.rank, "repeats": self.task.repeats}
        return BatchSampler(len(self.task.train), batch_split, first=first, last=last, **own)

    def items(self, step: int) -> int:
        """Return the items of a step, over all ranks."""
        return self.budget.passes_of(step) * self.batch_split.micro_batch * self.world.size

    def epochs_before(self, step: int) -> float:
        """Return the number of epochs before a step."""
        return self.budget.passes_before[step] / (self.batch_split.accum * self.steps_per_epoch)

    def evaluation_is_due(self, done: int) -> bool:
        """Return whether an evaluation follows after this many steps."""
        if self.task.held_out is None:
            return False
        if done == self.steps:
            return True
        every = self.settings.eval_every
        if not every:
            return False
        before, after = (self.epochs_before(step) / every for step in (done - 1, done))
        # Compare numbers of multiples, which rounding does not affect.
        return math.floor(after + 1e-9) > math.floor(before + 1e-9)


def learning_rate(
    step: float,
    steps: int,
    *,
    peak: float,
    warmup: float,
    start: float = 0.0,
    end: float = 0.0,
    schedule: str = "cosine",
) -> float:
    """Return the learning rate of a step: linear up to the peak, then down by ``schedule``.

    With ``"linear"``, a warm-up of three quarters from a quarter of the peak is the triangle of
    Geiping and Goldstein 2022 (arXiv:2212.14034).

    Args:
        step: 0 to ``steps`` - 1.
        steps: steps of the whole run.
        peak: the largest rate.
        warmup: fraction of the steps in which it rises.
        start: rate at the start.
        end: rate at the end.
        schedule: ``"cosine"`` falls along half a cosine, ``"linear"`` along a line, ``"constant"``
            not at all.
    """
    rising = warmup * steps
    if step < rising:
        return start + (peak - start) * (step + 1) / (rising + 1)
    if schedule == "constant":
        return peak
    over = (step - rising) / (steps - rising)
    left = 1 - over if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * over))
    return end + (peak - end) * left


def first_beta(step: float, steps: int, *, warmup: float) -> float:
    """Return AdamW's first beta, cycled inversely to the rate: from 0.95 to 0.85 and back.

    This is the default of ``torch.optim.lr_scheduler.OneCycleLR``.
    """
    rising = warmup * steps
    high, low = 0.95, 0.85
    up = step / rising if step < rising else 1 - (step - rising) / (steps - rising)
    return high + (low - high) * up
