"""Data sets, and how their batches are fetched, by worker processes or without.

A bad sample, an item that cannot be read, may be replaced by another, which follows from the item
alone, or in a stream from its batch: so a replacement too is the same with any number of workers
and after a resume. When a data worker dies, a new pool begins with the batch that is due: none is
lost or repeated. Bad samples come with the batch, and are counted over all ranks up to a limit.
"""

import gc
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

# (epoch, index of an item): an item that an epoch repeats has the key of as many epochs.
Key = tuple[int, int]

MAX_REPLACEMENTS = 8  # items that are tried, one after another, in place of one that cannot be read
MAX_POOLS = 3  # of workers that may try to fetch one batch: a pool ends when one of them dies


class DataSet(Protocol):
    """A data set: fetches whole batches, each item by its key."""

    def __len__(self) -> int:
        """Return the number of items."""

    def __getitems__(self, keys: Sequence[Key]) -> "tuple[Tensor, ...] | Fetched":
        """Return the batch of these items.

        Raises:
            ValueError, OSError: one cannot be read; the message names it.
        """


class StreamedDataSet(Protocol):
    """An iterable data set: its items are read one after another, and never by key."""

    def __len__(self) -> int:
        """Return the number of items."""

    def stream(self, epoch: int, rank: int, ranks: int) -> Iterator[Any]:
        """Yield one rank's items as they are stored, in the epoch's order."""

    def __getitems__(self, items: Sequence[Any]) -> "tuple[Tensor, ...] | Fetched":
        """Return the batch of these items; raises what ``DataSet`` does."""


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

    @property
    def new(self) -> int:
        """How many this rank found since ``share``."""
        return len(self._new)

    def share(self, new: float) -> None:
        """Join what the ranks found. Collective unless ``new``, the sum over ranks, is 0.

        Raises:
            TooManyBadSamplesError: they are more than the limit.
        """
        if not new:
            return
        found: list[set[str]] = [set()] * dist.get_world_size(self.group)
        dist.all_gather_object(found, self._new, group=self.group)
        self._new = set()
        for message in sorted(set().union(*found) - self.known):
            self.known.add(message)
            self.on_new(message)
        if len(self.known) > self.limit:
            raise TooManyBadSamplesError(
                f"--bad-data-limit allows {self.limit}, got {len(self.known)}, named above: the "
                f"last is {message}"
            )


@contextmanager
def loading(
    data: DataSet | StreamedDataSet,
    batches: Iterable[list],
    *,
    workers: int,
    device: torch.device,
    tolerant: bool = False,
) -> Iterator[Iterator[Fetched]]:
    """Fetch batches ahead, by ``workers`` processes, or one at a time by this one with 0.

    Args:
        data: fetches them; what it raises as ``ValueError`` or ``OSError`` is an item that cannot
            be read.
        batches: the items of each.
        workers: processes.
        device: batches are in pinned memory when it is a GPU.
        tolerant: replace items that cannot be read, and workers that die, and return which with the
            batch.

    Yields:
        An iterator of the batches. It raises a ``DataError`` in place of the first that cannot be
        had: of any when not ``tolerant``; else where no replacement can be read either, or where
        workers die again and again before they give a single batch.
    """
    due = _PendingBatches(batches)
    pool = _WorkerPool(_Fetcher(data, tolerant), due, workers, device)
    try:
        pool.start()
        yield _in_order(pool, due, tolerant)
    finally:
        pool.stop()
        due.close()


def _in_order(pool: "_WorkerPool", due: "_PendingBatches", tolerant: bool) -> Iterator[Fetched]:
    while True:
        deaths: list[list[str]] = []
        while isinstance(fetched := pool.next_or_deaths(), list):
            deaths.append(fetched)
            if not tolerant or len(deaths) == MAX_POOLS:
                again = f", as in {MAX_POOLS - 1} tries before" if tolerant else ""
                raise DataError(fetched[-1] + again)
        if fetched is None:
            if due.error is not None:
                raise due.error
            return
        due.delivered()
        if isinstance(fetched, _Unreadable):
            raise DataError(fetched.message)
        dead = (BadSample(message) for messages in deaths for message in messages)
        yield Fetched(fetched.tensors, (*dead, *fetched.bad_samples))


class _PendingBatches:
    """The batches from the one that is due on: those drawn to be fetched ahead, then the rest."""

    def __init__(self, batches: Iterable[list]):
        self.source, self.drawn = iter(batches), deque[list]()
        self.error: DataError | None = None

    def __iter__(self) -> Iterator[list]:
        """Yield the items of each; what keeps them from being drawn is left in ``error``."""
        yield from tuple(self.drawn)
        while True:
            try:
                items = next(self.source)
            except StopIteration:
                return
            except (ValueError, OSError) as error:
                # Raised when the batches before it have been delivered.
                self.error = DataError(_cause(error))
                return
            self.drawn.append(items)
            yield items

    def delivered(self) -> None:
        """The one that was due has been had."""
        self.drawn.popleft()

    def close(self) -> None:
        """End what reads ahead."""
        if hasattr(self.source, "close"):
            self.source.close()


class _Unreadable(NamedTuple):
    """Sent by a worker in place of a batch."""

    message: str


class _Fetcher:
    """What a worker does: fetches batches, with replacements where they are allowed."""

    def __init__(self, data: DataSet | StreamedDataSet, tolerant: bool):
        self.data, self.tolerant = data, tolerant

    def __getitems__(self, items: Sequence[Any]) -> Fetched | _Unreadable:
        try:
            return self._fetch(items)
        except (ValueError, OSError) as error:
            if not self.tolerant:
                return _Unreadable(_cause(error))
        try:
            return self._one_by_one(items)
        except DataError as error:
            return _Unreadable(str(error))

    def _fetch(self, items: Sequence[Any]) -> Fetched:
        batch = self.data.__getitems__(items)
        return batch if isinstance(batch, Fetched) else Fetched(batch)

    def _one_by_one(self, items: Sequence[Any]) -> Fetched:
        read: dict[int, Fetched] = {}
        causes: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            try:
                read[place] = self._fetch([item])
            except (ValueError, OSError) as error:
                causes.setdefault(_cause(error), []).append(place)
        singles = dict(read)
        for cause, places in causes.items():
            for place in places:
                singles[place] = self._replacement(items, place, read, cause)
        bad_samples = (
            *(bad for place in read for bad in _moved(read[place].bad_samples, place)),
            *(BadSample(cause, tuple(places)) for cause, places in causes.items()),
        )
        ordered = [singles[place].tensors for place in range(len(items))]
        return Fetched(tuple(torch.cat(parts) for parts in zip(*ordered)), bad_samples)

    def _replacement(
        self, items: Sequence[Any], place: int, read: dict[int, Fetched], cause: str
    ) -> Fetched:
        """Return the next item of the data set that can be read; of a stream, of the batch."""
        if hasattr(self.data, "stream"):
            if not read:
                raise DataError(f"{cause}; nor can the rest of its batch be read")
            return read[min(read, key=lambda other: (other - place) % len(items))]
        epoch, index = items[place]
        for step in range(1, MAX_REPLACEMENTS + 1):
            try:
                return self._fetch([(epoch, (index + step) % len(self.data))])
            except (ValueError, OSError):
                continue
        raise DataError(f"{cause}; nor can the {MAX_REPLACEMENTS} items after it be read")


def _moved(bad_samples: Iterable[BadSample], place: int) -> Iterator[BadSample]:
    return (BadSample(bad.message, tuple(place for _ in bad.places)) for bad in bad_samples)


def _cause(error: Exception) -> str:
    """Return one line that names what could not be read and why."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


class _WorkerPool:
    """The processes that fetch, replaced as a whole when one of them dies."""

    def __init__(self, fetcher: _Fetcher, due: _PendingBatches, workers: int, device: torch.device):
        self.fetcher, self.due, self.workers, self.device = fetcher, due, workers, device
        self.batches: Any = None

    def next_or_deaths(self) -> "Fetched | _Unreadable | list[str] | None":
        """Return the batch that is due, None after the last, or how workers have just died."""
        try:
            if self.batches is None:
                self.start()
            # Those that died since the last batch; otherwise a loader notices after 5 s.
            deaths = self._deaths()
            if not deaths:
                return next(self.batches, None)
        except (RuntimeError, OSError, EOFError) as error:
            # Sockets and pipes of a process that ends break a little before it counts as dead.
            self._join_exiting()
            deaths = self._deaths()
            if not deaths and isinstance(error, OSError):
                raise DataError(f"data workers: {_cause(error)}") from error
            if not deaths:
                raise
        self.stop()
        return deaths

    def start(self) -> None:
        """Start them: they begin with the batch that is due."""
        loader = DataLoader(
            self.fetcher,
            batch_sampler=self.due,
            collate_fn=_as_fetched,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_signals,
            # A loader draws a seed for its workers; from here, so as not to touch the global
            # generator.
            generator=torch.Generator().manual_seed(0),
        )
        with _hidden_from_sigchld(), _garbage_frozen():
            self.batches = iter(loader)
        if self.workers:
            self.batches._worker_pids_set = False

    def _processes(self) -> list[Any]:
        return self.batches._workers if self.workers and self.batches is not None else []

    def _deaths(self) -> list[str]:
        return [_exit_message(w.pid, w.exitcode) for w in self._processes() if not w.is_alive()]

    def _join_exiting(self) -> None:
        workers = self._processes()
        dying = wait([w.sentinel for w in workers], timeout=1) if workers else ()
        for worker in workers:
            if worker.sentinel in dying:
                worker.join()

    def stop(self) -> None:
        """Stop them, whatever state they are in."""
        workers, batches = self._processes(), self.batches
        if self._deaths():
            # Killed, not requested to end: the dead may hold locks of queues and events.
            batches._workers_done_event = multiprocessing.Event()
            _kill(workers)
        if workers:
            # Not left to the garbage collector: it may come too late, when the interpreter ends
            # and waits for children whom it sent a SIGTERM that they ignore.
            batches._shutdown_workers()
            _kill(workers)
        self.batches = None


@contextmanager
def _hidden_from_sigchld() -> Iterator[None]:
    """Hide the workers of loaders made here from torch's handler of SIGCHLD.

    It raises an error wherever the rank happens to be when a worker dies: in the middle of an
    optimizer step, of a save, or of drawing the next batches, which would be lost.
    """
    register = signal_handling._set_worker_pids
    signal_handling._set_worker_pids = lambda *_: None
    try:
        yield
    finally:
        signal_handling._set_worker_pids = register


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Let no process forked here collect what is garbage in this one.

    A process group of an earlier run, taken apart in a worker, waits for threads that were not
    forked with it, for ever or to a crash. Pages that are not touched are not copied either.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _kill(workers: Iterable[Any]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


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
