"""Load batches of a data set, with or without worker processes.

A bad sample is an item that cannot be read. It may be replaced by another, which depends only on
the item, so that replacements are the same with any number of workers and after a resume. Bad
samples come with the batch, and are counted over all ranks up to a limit. If a worker dies, the run
ends; started again, it continues from its newest checkpoint.
"""

import gc
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader

# (epoch, index of an item); repeats of an item in an epoch have the keys of different epochs.
Key = tuple[int, int]

MAX_REPLACEMENTS = 8  # items to try, one after another, instead of one that cannot be read
# Errors of an item that cannot be read, or claims to be larger than the memory.
_UNREADABLE = (ValueError, OSError, MemoryError)


class DataSet(Protocol):
    """A data set: fetches whole batches, each item by its key.

    If items take long to read, the data set sets ``one_by_one``: a batch is then assembled from
    single items, so that an unreadable one does not affect the others.
    """

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, ...]:
        """Return the batch of these items.

        Raises:
            ValueError, OSError: one cannot be read; the message names it.
        """


class DataError(Exception):
    """A batch cannot be read, or is invalid."""


class TooManyBadSamplesError(DataError):
    """More items are unreadable than the user allows; all ranks raise this together."""


class BadSample(NamedTuple):
    """An item that could not be read while a batch was fetched.

    Attributes:
        message: one line that names the item, and why: the same whenever it is read again.
        places: which entries of the batch are replacements for it.
    """

    message: str
    places: tuple[int, ...] = ()


class Fetched(NamedTuple):
    """A batch, and its unreadable items."""

    tensors: tuple[Tensor, ...]
    bad_samples: tuple[BadSample, ...] = ()

    def pin_memory(self) -> "Fetched":
        """Return it in pinned memory; a loader calls this."""
        return Fetched(tuple(t.pin_memory() for t in self.tensors), self.bad_samples)


class BadSamples:
    """The bad samples of a run, counted over all ranks up to a limit.

    An item counts once, however often it is read. Ranks agree on the number at the end of every
    step, so that all stop in the same step.

    Args:
        limit: how many are allowed.
        group: the processes, on the host.
        on_new: called with the message of each new one, in order.

    Attributes:
        messages: messages of those that cannot be read, equal on all ranks after ``share``.
    """

    def __init__(self, limit: int, group: dist.ProcessGroup, on_new: Callable[[str], None]):
        self.limit, self.group, self.on_new = limit, group, on_new
        self.messages: set[str] = set()
        self._new: set[str] = set()

    def note(self, bad_samples: Iterable[BadSample]) -> None:
        """Add bad samples that this rank found."""
        self._new.update(bad.message for bad in bad_samples if bad.message not in self.messages)

    def take(self) -> set[str]:
        """Return the bad samples that this rank found since the last call."""
        new, self._new = self._new, set()
        return new

    def share(self, new: float, own: set[str]) -> None:
        """Join the bad samples of all ranks. Collective unless ``new``, the sum over ranks, is 0.

        Args:
            new: how many all ranks found.
            own: what this rank took.

        Raises:
            TooManyBadSamplesError: they are more than the limit.
        """
        if not new:
            return
        by_rank: list[set[str]] = [set()] * dist.get_world_size(self.group)
        dist.all_gather_object(by_rank, own, group=self.group)
        for message in sorted(set().union(*by_rank) - self.messages):
            self.messages.add(message)
            self.on_new(message)
        if len(self.messages) > self.limit:
            raise TooManyBadSamplesError(
                f"--bad-data-limit allows {self.limit} unreadable items, got {len(self.messages)}, "
                f"named above; the last is {max(set().union(*by_rank))}"
            )


def default_workers(local_size: int) -> int:
    """Return the number of data workers of one rank: its share of the cores minus one.

    There is at least one, which works while the rank waits for its GPU.

    Args:
        local_size: ranks on this machine.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(affinity or 1, _quota())
    return max(1, int(cores / local_size) - 1)


def _quota() -> float:
    """Return how many cores the control group of this process allows; infinite without a limit."""
    with suppress(OSError, ValueError):  # no such file, or "max" instead of a number
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        return quota / period
    return math.inf


@contextmanager
def loading(
    data: DataSet, batches: Iterable[list], *, workers: int, device: torch.device
) -> Iterator[Iterator[Fetched]]:
    """Fetch batches ahead, by ``workers`` processes, or one at a time by this one with 0.

    Items that cannot be read are replaced, and named with the batch.

    Args:
        data: data set to fetch from; a ``ValueError`` or ``OSError`` marks an unreadable item.
        batches: the items of each.
        workers: processes; they start with the first batch and end with the context.
        device: batches are in pinned memory when it is a GPU.

    Yields:
        An iterator of the batches. It raises a ``DataError`` for the first batch that cannot be
        fetched, because no replacement can be read or a worker has died.
    """
    loader = DataLoader(
        _Fetcher(data),
        batch_sampler=_with_errors_in_place(batches),
        collate_fn=_as_fetched,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_signals,
        multiprocessing_context="fork" if workers else None,
        # A loader draws a seed for its workers: give it a generator, so that it does not use the
        # global one.
        generator=torch.Generator().manual_seed(0),
    )
    with closing(_fetch(loader)) as fetched:
        yield fetched


def _fetch(loader: DataLoader) -> Iterator[Fetched]:
    # Freeze the garbage collector, so that workers neither collect objects of this process, such as
    # process groups of an earlier run, nor copy its pages.
    gc.freeze()
    try:
        fetched = iter(loader)
    except OSError as error:
        raise DataError(f"data workers: {_cause(error)}") from error
    finally:
        gc.unfreeze()
        # When a worker dies, the loader's handler would raise at an arbitrary place in this
        # process.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        for batch in fetched:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(" ".join(str(error).split())) from error
    finally:
        if loader.num_workers:
            # Not left to garbage collection, which the traceback of an exception delays.
            fetched._shutdown_workers()


def _with_errors_in_place(batches: Iterable[list]) -> Iterator[list | DataError]:
    """Yield the items of each batch, and finally the error that prevented the next one."""
    try:
        yield from batches
    except _UNREADABLE as error:
        yield DataError(_cause(error))


class _Fetcher:
    """Fetch batches in a worker, replacing items that cannot be read.

    An error takes the place of a batch, or of its items; it is raised after all earlier batches.
    """

    def __init__(self, data: DataSet):
        self.data = data

    def __getitems__(self, items: Sequence[Any] | DataError) -> Fetched | DataError:
        if isinstance(items, DataError):
            return items
        if not getattr(self.data, "one_by_one", False):
            with suppress(*_UNREADABLE):
                return Fetched(self.data.__getitems__(items))
        try:
            return self._one_by_one(items)
        except DataError as error:
            return error

    def _one_by_one(self, items: Sequence[Any]) -> Fetched:
        read: dict[int, tuple[Tensor, ...]] = {}
        causes: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            try:
                read[place] = self.data.__getitems__([item])
            except _UNREADABLE as error:
                causes.setdefault(_cause(error), []).append(place)
        replacements = {
            place: self._replacement(items[place], cause)
            for cause, places in causes.items()
            for place in places
        }
        singles = [part for _, part in sorted((read | replacements).items())]
        bad_samples = (BadSample(cause, tuple(places)) for cause, places in causes.items())
        return Fetched(tuple(torch.cat(parts) for parts in zip(*singles)), tuple(bad_samples))

    def _replacement(self, key: Key, cause: str) -> tuple[Tensor, ...]:
        """Return the next item of the data set that can be read."""
        epoch, index = key
        for step in range(1, MAX_REPLACEMENTS + 1):
            with suppress(*_UNREADABLE):
                return self.data.__getitems__([(epoch, (index + step) % len(self.data))])
        raise DataError(f"{cause}; the next {MAX_REPLACEMENTS} items cannot be read either")


def _cause(error: Exception) -> str:
    """Return one line that names what could not be read and why."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _as_fetched(batch: Any) -> Any:
    return batch


def _ignore_signals(_worker: int) -> None:
    # Ignore signals: a scheduler sends them to every process at once. The rank saves its state and
    # then stops its workers itself; if they ended first, it would only see that they are gone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
