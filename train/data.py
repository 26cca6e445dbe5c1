"""Which items each step takes, on which rank, and how they are fetched.

Everything random is a pure function of (seed, epoch, item): the order of an epoch, and how an item
is augmented. So a step's batch needs no history. It is the same on one process or on many, with
any number of workers, and a resumed run continues with the batch that the stopped one would have
taken.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

Key = tuple[int, int]  # (epoch, index of an item)


class DataSet(Protocol):
    """A data set: fetches whole batches, each item by its key."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        """Return the batch of these items."""


def seed_of(*keys: int) -> int:
    """Return a seed in [0, 2**63) that mixes several whole numbers, each at least 0."""
    return int(np.random.SeedSequence(keys).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Split:
    """How one optimizer step's ``batch_size`` items divide among ranks and passes.

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


class Order:
    """Every epoch in its own order, cut into batches; what does not fill a batch is left out.

    Iterating gives the keys of one micro-batch after another for one rank: a batch sampler.

    Args:
        length: items of the data set.
        split: how a batch is divided.
        seed: of the order.
        rank: whose share.
        first: optimizer step to start with.
        last: optimizer step to stop before.

    Raises:
        ValueError: the data set is smaller than one batch.
    """

    def __init__(self, length: int, split: Split, *, seed: int, rank: int, first: int, last: int):
        if length < split.batch_size:
            raise ValueError(
                f"--batch-size must be at most the {length} training items, got {split.batch_size}"
            )
        self.length, self.split, self.seed, self.rank = length, split, seed, rank
        self.first, self.last = first, last
        self.steps_per_epoch = length // split.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield ``accum`` lists of keys for each step from ``first`` up to ``last``."""
        split, order, ordered_epoch = self.split, [], None
        for step in range(self.first, self.last):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != ordered_epoch:
                generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
                order = torch.randperm(self.length, generator=generator).tolist()
                ordered_epoch = epoch
            start = position * split.batch_size + self.rank * split.micro_batch * split.accum
            for micro in range(split.accum):
                begin = start + micro * split.micro_batch
                yield [(epoch, index) for index in order[begin : begin + split.micro_batch]]


def held_out_share(
    length: int, batch: int, *, rank: int, ranks: int
) -> list[tuple[list[Key], int]]:
    """Return one rank's share of ``length`` held-out items: the keys of each batch, how many count.

    A forward under FSDP is collective and a compiled one wants one shape: so every rank gets the
    same number of batches, each of ``batch`` items, padded by items that do not count.
    """
    mine = [(0, index) for index in range(rank, length, ranks)]
    share = []
    for start in range(0, -(-length // ranks), batch):
        keys = mine[start : start + batch]
        share.append((keys + [(0, 0)] * (batch - len(keys)), len(keys)))
    return share


@contextmanager
def loading(
    data: DataSet, batches: Order | list[list[Key]], *, workers: int, device: torch.device
) -> Iterator[Iterator[Any]]:
    """Fetch batches ahead, by ``workers`` processes, or one at a time by this one with 0.

    Yields:
        An iterator of the batches, in pinned memory when ``device`` is a GPU.
    """
    loader = DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=_as_fetched,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_rank,
        # A loader draws a seed for its workers; from here, so as not to touch the global generator.
        generator=torch.Generator().manual_seed(0),
    )
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        if workers:
            # Not left to the garbage collector: it may come too late, when the interpreter ends
            # and waits for children whom it sent a SIGTERM that they ignore.
            iterator._shutdown_workers()


def _as_fetched(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_rank(_worker: int) -> None:
    # A scheduler signals every process at once. The rank saves and then stops its workers itself;
    # if they went first it would see only that they are gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
