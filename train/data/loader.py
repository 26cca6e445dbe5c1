"""Data sets, and how their batches are fetched, by worker processes or without.

A bad sample, an item that cannot be read, may be replaced by another, which follows from the item
alone: so a replacement too is the same with any number of workers and after a resume. When a data
worker dies, a new pool begins with the batch that is due: none is lost or repeated. Bad samples
come with the batch, and are counted over all ranks up to a limit.
"""

import gc
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from itertools import tee
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader

# (epoch, index of an item): an item that an epoch repeats has the key of as many epochs.
Key = tuple[int, int]

MAX_REPLACEMENTS = 8  # items that are tried, one after another, in place of one that cannot be read
# What an item that cannot be read raises, or one that claims to be larger than the memory.
_UNREADABLE = (ValueError, OSError, MemoryError)
MAX_POOLS = 3  # of workers that may try to fetch one batch: a pool ends when one of them dies


class DataSet(Protocol):
    """A data set: fetches whole batches, each item by its key.

    One whose items take long to read sets ``one_by_one``: a batch is then put together of single
    items, so that one that cannot be read costs no other.
    """

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, ...]:
        """Return the batch of these items.

        Raises:
            ValueError, OSError: one cannot be read; the message names it.
        """


class DataError(Exception):
    """What was to be fetched cannot be read, or is not what it must be."""


class TooManyBadSamplesError(DataError):
    """More of the data cannot be read than the user allows; all ranks raise it together."""


class BadSample(NamedTuple):
    """An item that could not be read, or a data worker that died, while a batch was fetched.

    Attributes:
        message: one line that names the item or the worker, and why: the same whenever the same
            item is read again.
        places: which entries of the batch are replacements for it.
    """

    message: str
    places: tuple[int, ...] = ()


class Fetched(NamedTuple):
    """A batch, and what could not be read of it."""

    tensors: tuple[Tensor, ...]
    bad_samples: tuple[BadSample, ...] = ()

    def pin_memory(self) -> "Fetched":
        """Return it in pinned memory; a loader calls this."""
        return Fetched(tuple(t.pin_memory() for t in self.tensors), self.bad_samples)


class BadSamples:
    """The bad samples of a run, and data workers that died, counted over all ranks up to a limit.

    An item counts once, however often it is read. Ranks agree on the number at the end of every
    step, so that all of them stop in the same one.

    Args:
        limit: how many are allowed.
        group: the processes, on the host.
        on_new: called with the message of each new one, in order.

    Attributes:
        known: their messages, equal on all ranks after ``share``.
    """

    def __init__(self, limit: int, group: dist.ProcessGroup, on_new: Callable[[str], None]):
        self.limit, self.group, self.on_new = limit, group, on_new
        self.known: set[str] = set()
        self._new: set[str] = set()

    def note(self, bad_samples: Iterable[BadSample]) -> None:
        """Add what this rank found."""
        self._new.update(bad.message for bad in bad_samples if bad.message not in self.known)

    def take(self) -> set[str]:
        """Return what this rank found since the last call."""
        new, self._new = self._new, set()
        return new

    def share(self, new: float, own: set[str]) -> None:
        """Join what the ranks found. Collective unless ``new``, the sum over ranks, is 0.

        Args:
            new: how many all ranks found.
            own: what this rank took.

        Raises:
            TooManyBadSamplesError: they are more than the limit.
        """
        if not new:
            return
        found: list[set[str]] = [set()] * dist.get_world_size(self.group)
        dist.all_gather_object(found, own, group=self.group)
        for message in sorted(set().union(*found) - self.known):
            self.known.add(message)
            self.on_new(message)
        if len(self.known) > self.limit:
            raise TooManyBadSamplesError(
                f"--bad-data-limit allows {self.limit}, got {len(self.known)}, named above: the "
                f"last is {max(set().union(*found))}"
            )


def default_workers(local_size: int) -> int:
    """Return how many processes prepare the batches of one rank: its share of cores, less its own.

    There is at least one, which works while the rank waits for its GPU.

    Args:
        local_size: ranks on this machine.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(affinity or 1, _quota())
    return max(1, int(cores / local_size) - 1)


def _quota(system: Path = Path("/")) -> float:
    """Return how many cores the control groups of this process allow; infinite without a limit.

    Args:
        system: holds ``proc`` and ``sys``.
    """
    allowed = math.inf
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
            # In a container the path may be the host's, of which only the root is mounted.
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                allowed = min(allowed, _quota_of(folder))
                if folder == root:
                    break
    return allowed


def _quota_of(group: Path) -> float:
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # versions 2 and 1
        with suppress(OSError, ValueError):  # no such file; "max" is no number
            quota, period = map(int, " ".join((group / f).read_text() for f in files).split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def loading(
    data: DataSet,
    batches: Iterable[list],
    *,
    workers: int,
    device: torch.device,
) -> AbstractContextManager[Iterator[Fetched]]:
    """Fetch batches ahead, by ``workers`` processes, or one at a time by this one with 0.

    Items that cannot be read, and workers that die, are replaced, and named with the batch.

    Args:
        data: fetches them; what it raises as ``ValueError`` or ``OSError`` is an item that cannot
            be read.
        batches: the items of each.
        workers: processes; they start with the first batch and end with the context.
        device: batches are in pinned memory when it is a GPU.

    Returns:
        A context of an iterator of the batches. It raises a ``DataError`` in place of the first
        that cannot be had: where no replacement can be read either, or where workers die again and
        again before they give a single batch.
    """
    # Workers take batches in turn: so each reads lanes of its own.
    lanes = getattr(data, "lanes", 1)
    while workers and workers % lanes and lanes % workers:
        workers -= 1
    return closing(_fetch_in_order(_Fetcher(data), batches, workers, device))


def _fetch_in_order(
    fetcher: "_Fetcher", batches: Iterable[list], workers: int, device: torch.device
) -> Iterator[Fetched]:
    deaths: list[list[str]] = []  # of the workers of each pool since the last batch
    with closing(_with_errors_in_place(batches)) as due:
        while True:
            # What was drawn to be fetched ahead is still due when the workers are gone.
            due, ahead = tee(due)
            pool = _Workers()
            with closing(_from_workers(pool, fetcher, ahead, workers, device)) as fetched:
                for batch in fetched:
                    next(due)
                    if isinstance(batch, DataError):
                        raise batch
                    dead = (BadSample(message) for messages in deaths for message in messages)
                    yield Fetched(batch.tensors, (*dead, *batch.bad_samples))
                    deaths = []
            if not pool.deaths:
                return
            deaths.append(pool.deaths)
            if len(deaths) == MAX_POOLS:
                raise DataError(f"{pool.deaths[-1]}, as in {MAX_POOLS - 1} tries before")


def _with_errors_in_place(batches: Iterable[list]) -> Iterator[list | DataError]:
    """Yield the items of each batch, and last what kept the next one from being drawn."""
    try:
        yield from batches
    except _UNREADABLE as error:
        yield DataError(_cause(error))


def _from_workers(
    pool: "_Workers",
    fetcher: "_Fetcher",
    batches: Iterable[list],
    workers: int,
    device: torch.device,
) -> Iterator[Fetched | DataError]:
    """Yield batches up to the last, or until a worker has died: ``pool`` then has its death."""
    loader = DataLoader(
        fetcher,
        batch_sampler=batches,
        collate_fn=_as_fetched,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=_ignore_signals,
        multiprocessing_context=pool if workers else None,
        # A loader draws a seed for its workers; from here, so as not to touch the global generator.
        generator=torch.Generator().manual_seed(0),
    )
    fetched = None
    try:
        fetched = _started(loader)
        # A loader notices what died while its batch was not yet due after 5 s.
        while not pool.find_deaths() and (batch := next(fetched, None)) is not None:
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        # Sockets and pipes of a process that ends break a little before it counts as dead.
        pool.join_exiting()
        if not pool.find_deaths():
            if isinstance(error, OSError):
                raise DataError(f"data workers: {_cause(error)}") from error
            raise
    finally:
        if pool.deaths:
            pool.kill()  # not requested to end: the dead may hold locks of queues
        del fetched  # requests them to end
        pool.kill()


def _started(loader: DataLoader) -> Iterator[Any]:
    """Return an iterator whose workers neither disturb this process nor collect its garbage.

    A process group of an earlier run, taken apart in a worker, waits for threads that were not
    forked with it, for ever or to a crash. Pages that are not touched are not copied either.

    The loader's handler of SIGCHLD would raise an error wherever the rank happens to be when a
    worker dies: in the middle of an optimizer step, of a save, or of drawing the next batches,
    which would be lost.
    """
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class _Fetcher:
    """What a worker does: fetches batches, with replacements of items that cannot be read.

    An error takes the place of a batch, or of its items, which is due when those before it are had.
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
                read[place] = self._single(item)
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

    def _single(self, item: Any) -> tuple[Tensor, ...]:
        """Return one item as a batch, read a second time where the first fails."""
        if getattr(self.data, "one_by_one", False):
            with suppress(*_UNREADABLE):
                return self.data.__getitems__([item])
        return self.data.__getitems__([item])

    def _replacement(self, key: Key, cause: str) -> tuple[Tensor, ...]:
        """Return the next item of the data set that can be read."""
        epoch, index = key
        for step in range(1, MAX_REPLACEMENTS + 1):
            with suppress(*_UNREADABLE):
                return self.data.__getitems__([(epoch, (index + step) % len(self.data))])
        raise DataError(f"{cause}; nor can the {MAX_REPLACEMENTS} items after it be read")


def _cause(error: Exception) -> str:
    """Return one line that names what could not be read and why."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


class _Flag:
    """An event without a lock, which a process that is killed might hold."""

    def __init__(self):
        self.value = multiprocessing.RawValue("b", False)

    def set(self) -> None:
        self.value.value = True

    def is_set(self) -> bool:
        return bool(self.value.value)


class _Workers(ForkContext):
    """How a loader starts its processes, and what became of them."""

    Event = _Flag

    def __init__(self):
        self.made: list[ForkProcess] = []
        self.deaths: list[str] = []

    def Process(self, *args: Any, **kwargs: Any) -> ForkProcess:  # noqa: N802
        """Return a process, and remember it."""
        self.made.append(super().Process(*args, **kwargs))
        return self.made[-1]

    def find_deaths(self) -> list[str]:
        """Return how those that are dead by now have died."""
        codes = [(worker.pid, worker.exitcode) for worker in self.made]
        self.deaths = [_exit_message(pid, code) for pid, code in codes if code is not None]
        return self.deaths

    def join_exiting(self) -> None:
        """Wait for those that are about to end, a second at most if there are none."""
        sentinels = {worker.sentinel: worker for worker in self._started()}
        for sentinel in wait(sentinels, timeout=1):
            sentinels[sentinel].join()

    def kill(self) -> None:
        """End those that live, whatever state they are in."""
        for worker in self._started():
            worker.kill()
        for worker in self._started():
            worker.join()

    def _started(self) -> list[ForkProcess]:
        return [worker for worker in self.made if worker.pid is not None]


def _exit_message(pid: int, code: int) -> str:
    if code >= 0:
        return f"data worker {pid} ended with status {code}"
    hint = {signal.SIGKILL: "memory", signal.SIGBUS: "shared memory, or a file that shrank"}.get(
        -code
    )
    return f"data worker {pid} was killed by signal {-code}" + (
        f" (out of {hint}?)" if hint else ""
    )


def _as_fetched(batch: Any) -> Any:
    return batch


def _ignore_signals(_worker: int) -> None:
    # A scheduler signals every process at once. The rank saves and then stops its workers itself;
    # if they went first it would see only that they are gone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
