"""Store labelled byte sequences as three arrays, in memory and in a file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from leaner_kernels.monitor.files import open_file

SPLITS = ("train", "dev", "test")
_PARTS = ("tokens", "offsets", "labels")


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


def save(path: Path, corpora: dict[str, Corpus]) -> None:
    """Write corpora by split into one file of NumPy's."""
    arrays = {f"{s}_{part}": getattr(corpora[s], part) for s in SPLITS for part in _PARTS}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def load(path: Path) -> dict[str, Corpus]:
    """Read what ``save`` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
            return {s: Corpus(*(arrays[f"{s}_{part}"] for part in _PARTS)) for s in SPLITS}
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"--cache contains {path}, which is damaged: remove it ({error})"
        ) from None
