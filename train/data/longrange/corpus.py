"""Labelled sequences of bytes: how they are kept, made by many processes, and cached on disk.

Nothing here needs torch, so that processes that make sequences start fast.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

SPLITS = ("train", "dev", "test")
_LEAST_CHUNKS = 8  # for which starting a process is worth it


@dataclass(frozen=True)
class Corpus:
    """Sequences one after another, each with a label.

    Attributes:
        tokens: (all tokens,) uint8.
        offsets: (sequences + 1,) int64: sequence i is ``tokens[offsets[i] : offsets[i + 1]]``.
        labels: (sequences,) uint8.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, (sequences,)."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, sequences: Iterable[bytes | np.ndarray], labels: Sequence[int]) -> "Corpus":
        """Gather sequences of bytes and their labels."""
        parts = [np.frombuffer(s, np.uint8) if isinstance(s, bytes) else s for s in sequences]
        offsets = np.cumsum([0, *map(len, parts)])
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        return cls(tokens, offsets, np.asarray(labels, np.uint8))

    @classmethod
    def joined(cls, parts: Sequence["Corpus"]) -> "Corpus":
        """Return the sequences of several, in their order."""
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.cumsum(np.concatenate([[0], *(p.lengths for p in parts)])),
            np.concatenate([p.labels for p in parts]),
        )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    make: Callable[..., Any], count: int, chunk: int, *args: Any, processes: int | None = None
) -> list[Any]:
    """Call ``make(*args, first, last)`` for chunk after chunk of ``count`` items.

    Args:
        make: a function of a module; its result may not depend on how the items are cut.
        count: of the items.
        chunk: items of one call.
        *args: of every call.
        processes: how many; when omitted as many as cores, if each has some chunks to do. One
            means this one.

    Returns:
        The results in order.
    """
    firsts = range(0, count, chunk)
    lasts = [min(first + chunk, count) for first in firsts]
    if processes is None:
        processes = min(usable_cores(), len(lasts) // _LEAST_CHUNKS)
    if processes <= 1:
        return [make(*args, first, last) for first, last in zip(firsts, lasts)]
    # A copy of a process whose threads talk to a GPU or to other ranks may hang: start new ones.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(make, *args, first, last) for first, last in zip(firsts, lasts)]
        return [call.result() for call in calls]


def cached(path: Path, make: Callable[[], dict[str, Corpus]]) -> dict[str, Corpus]:
    """Return the corpora by split of a file, made first if it is not there.

    Of several processes that want the file, one makes it. It gets its name when it is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_suffix(".lock")):
        if not path.exists():
            _save(path, make())
    parts = ("tokens", "offsets", "labels")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {s: Corpus(*(arrays[f"{s}_{part}"] for part in parts)) for s in SPLITS}
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"--cache has {path}, which is damaged, remove it: {error}") from None


def _save(path: Path, corpora: dict[str, Corpus]) -> None:
    arrays = {
        f"{split}_{part}": getattr(corpus, part)
        for split, corpus in corpora.items()
        for part in ("tokens", "offsets", "labels")
    }
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    try:
        np.savez(unfinished, **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path):
    """Hold a lock among the processes of this machine; it goes when its holder ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
