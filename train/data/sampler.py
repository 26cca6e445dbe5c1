"""Assign data items to steps and ranks; ``loader`` fetches them.

All randomness is a pure function of (seed, epoch, item): the order of an epoch, and the
augmentation of an item. So the batch of a step depends on no history. It is the same on one process
or on many, with any number of workers, and a resumed run continues with the batch that the stopped
run would have read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from train.data.loader import Key


def seed_of(*keys: int) -> int:
    """Return a seed in [0, 2**63) from several whole numbers of at least 0."""
    return int(np.random.SeedSequence(keys).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class BatchSplit:
    """The division of an optimizer step's ``batch_size`` items among ranks and passes.

    Raises:
        ValueError: ranks times passes do not divide the batch.
    """

    batch_size: int
    ranks: int
    accum: int

    def __post_init__(self):
        if self.batch_size % (self.ranks * self.accum):
            raise ValueError(
                f"--batch-size must be a multiple of ranks x --accum = {self.ranks} x "
                f"{self.accum} = {self.ranks * self.accum}, got {self.batch_size}"
            )

    @property
    def micro_batch(self) -> int:
        """Items of one forward and backward pass on one rank."""
        return self.batch_size // (self.ranks * self.accum)


class BatchSampler:
    """Cut every epoch, in its own order, into batches; drop the items that do not fill a batch.

    Iterating gives the keys of one micro-batch after another for one rank: a batch sampler.

    Args:
        length: items of the data set.
        batch_split: how a batch is divided.
        seed: seed of the order.
        rank: whose share.
        first: optimizer step to start with.
        last: optimizer step to stop before.
        repeats: how often an epoch reads an item, each time with another augmentation ("repeated
            augmentation", Hoffer et al. 2020, arXiv:1901.09335). The epoch then has fewer distinct
            items, not more steps.

    Raises:
        ValueError: the data set is smaller than one batch.
    """

    def __init__(
        self,
        length: int,
        batch_split: BatchSplit,
        *,
        seed: int,
        rank: int,
        first: int,
        last: int,
        repeats: int = 1,
    ):
        if length < batch_split.batch_size:
            raise ValueError(
                f"--batch-size must be at most the {length} training items, got "
                f"{batch_split.batch_size}"
            )
        self.length, self.batch_split, self.seed, self.rank = length, batch_split, seed, rank
        self.first, self.last, self.repeats = first, last, repeats
        self.steps_per_epoch = length // batch_split.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield ``accum`` lists of keys for each step from ``first`` up to ``last``."""
        batch_split, repeats, order, ordered_epoch = self.batch_split, self.repeats, [], None
        for step in range(self.first, self.last):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != ordered_epoch:
                generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
                order = torch.randperm(self.length, generator=generator).tolist()
                ordered_epoch = epoch
            places = range(
                position * batch_split.batch_size, (position + 1) * batch_split.batch_size
            )
            keys = [(epoch * repeats + p % repeats, order[p // repeats]) for p in places]
            keys = _apart(keys, repeats)
            mine = self.rank * batch_split.micro_batch * batch_split.accum
            for micro in range(batch_split.accum):
                begin = mine + micro * batch_split.micro_batch
                yield keys[begin : begin + batch_split.micro_batch]


def _apart(keys: list[Key], repeats: int) -> list[Key]:
    """Spread the copies of an item, which are consecutive, as far apart as the batch allows.

    So they go to different ranks, and are not mixed with each other.
    """
    return [key for copy in range(repeats) for key in keys[copy::repeats]]


def held_out_share(
    length: int, batch: int, *, rank: int, ranks: int
) -> list[tuple[list[Key], int]]:
    """Return one rank's share of held-out items: for each batch its keys, and how many count.

    A forward under FSDP is collective, and a compiled one needs a fixed shape. So every rank gets
    the same number of batches of ``batch`` items, padded with items that do not count.
    """
    mine = [(0, index) for index in range(rank, length, ranks)]
    share = []
    for start in range(0, -(-length // ranks), batch):
        keys = mine[start : start + batch]
        share.append((keys + [(0, 0)] * (batch - len(keys)), len(keys)))
    return share
