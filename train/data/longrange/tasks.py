"""Open the five tasks by name, from published files; ListOps is also generated.

As published, every sequence is padded to the same power of two, bytes stand for text, and pixels,
row by row, for images. One thing differs: the published code takes token 0 for padding wherever it
stands, so that in Image and Pathfinder it hides black pixels. Here every pixel counts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train.data.loader import Key
from train.data.longrange import files, listops
from train.data.longrange.corpus import SPLITS, Corpus, load, save
from train.data.longrange.listops import ListLimits
from train.data.text.cache import build_once

GENERATED = "generated"
_PUBLISHED = {
    "text": "the folder aclImdb",
    "retrieval": "the folder of new_aan_pairs.train.tsv",
    "image": "the folder cifar-10-batches-py",
    "pathfinder": "a folder with metadata/*.npy, such as pathfinder32/curv_contour_length_14",
}


@dataclass(frozen=True)
class Shape:
    """What a model of a task takes, whatever the data.

    Attributes:
        classes: how many.
        vocab: tokens, the padding included.
        pairs: whether an item is two sequences.
        pixels: of an image; None where ``--length`` says how much of an item is read.
        shift: added to every token: 1 where 0 is a byte like others, so as not to be the padding.
        names: of the classes.
    """

    classes: int
    vocab: int
    names: tuple[str, ...]
    pairs: bool = False
    pixels: int | None = None
    shift: int = 0

    def length(self, read: int | None) -> int:
        """Return the tokens of a padded sequence, a power of two, where so many are read."""
        return 1 << ((self.pixels or read) - 1).bit_length()


_OF_CIFAR = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
TASKS = {
    "listops": Shape(listops.CLASSES, len(listops.SYMBOLS) + 1, tuple("0123456789")),
    "text": Shape(2, 257, ("negative", "positive"), shift=1),
    "retrieval": Shape(2, 257, ("no citation", "citation"), pairs=True, shift=1),
    "image": Shape(10, 256, _OF_CIFAR, pixels=32 * 32),
    "pathfinder": Shape(2, 256, ("not connected", "connected"), pixels=32 * 32),
}


class Items:
    """Sequences, or pairs of them, padded with 0 to one length; longer ones are cut.

    Args:
        corpus: the sequences.
        rows: (items,) or (items, 2), indices of them.
        labels: (items,) uint8.
        length: tokens of a batch.
        shift: as ``Shape`` has it.
    """

    def __init__(
        self, corpus: Corpus, rows: np.ndarray, labels: np.ndarray, *, length: int, shift: int
    ):
        self.corpus, self.rows, self.labels = corpus, rows, labels
        self.length, self.shift = length, shift

    def __len__(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """Return the SHA-256 of the sequences and the labels."""
        whole = hashlib.sha256()
        corpus = self.corpus
        for array in (corpus.tokens, corpus.offsets, self.rows, self.labels):
            whole.update(f"{array.dtype} {array.shape} ".encode())
            whole.update(np.ascontiguousarray(array))
        return whole.hexdigest()

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, length) or (B, 2, length) int64, lengths int32, labels (B,) int64."""
        chosen = [index for _, index in keys]
        rows = self.rows[chosen]
        tokens = np.zeros((rows.size, self.length), np.int64)
        lengths = np.zeros(rows.size, np.int32)
        for at, row in enumerate(rows.reshape(-1)):
            sequence = self.corpus[row][: self.length]
            lengths[at] = len(sequence)
            tokens[at, : len(sequence)] = sequence
            tokens[at, : len(sequence)] += self.shift
        return (
            torch.from_numpy(tokens.reshape(*rows.shape, self.length)),
            torch.from_numpy(lengths.reshape(rows.shape)),
            torch.from_numpy(self.labels[chosen].astype(np.int64)),
        )


@dataclass(frozen=True)
class LongRange:
    """The items of a task.

    Attributes:
        train: to learn from.
        dev: chooses the weights.
        test: measures them.
        baselines: by name of a trivial rule, the share of the test items that it gets right.
    """

    train: Items
    dev: Items
    test: Items
    baselines: dict[str, float]

    def identity(self, name: str) -> dict[str, str]:
        """Return digests of the splits, by what they are in words; ``name``: of the data."""
        parts = {"training": self.train, "development": self.dev, "test": self.test}
        return {f"the {w} set under {name}": part.digest() for w, part in parts.items()}


def open_task(
    task: str,
    data: str | None,
    *,
    length: int | None,
    sizes: tuple[int, ...] | None,
    limits: ListLimits,
    seed: int,
    cache: str,
) -> LongRange:
    """Open one of the five tasks.

    Args:
        task: one of ``TASKS``.
        data: the published files' folder; or "generated", for ListOps.
        length: tokens that are read of an item of text; images have one for each pixel.
        sizes: of the generated splits; None where nothing is generated.
        limits: of generated lists.
        seed: of generated lists.
        cache: folder of generated lists.

    Raises:
        ValueError: no such files, or damaged ones.
    """
    shape = TASKS[task]
    if data in (None, GENERATED) and task in _PUBLISHED:
        raise ValueError(f"--task {task} needs --data, {_PUBLISHED[task]}")
    folder = Path(data)
    if data == GENERATED:
        corpora = _generated(dict(zip(SPLITS, sizes)), limits, seed, Path(cache))
    elif not folder.exists():
        raise ValueError(f"--data must be {GENERATED} or the folder of published files, got {data}")
    elif task == "retrieval":
        corpora = files.read_pairs(folder, length)
    elif task == "listops":
        corpora = listops.read(folder)
    elif task == "text":
        corpora = files.read_reviews(folder, length)
    else:
        corpora = (files.read_cifar if task == "image" else files.read_pathfinder)(folder)
    if shape.pairs:
        parts = corpora
    else:
        parts = {split: (c, np.arange(len(c)), c.labels) for split, c in corpora.items()}
    labels = {split: part[-1] for split, part in parts.items()}
    for split in SPLITS:
        if len(labels[split]) == 0:
            raise ValueError(
                f"--data must contain items of {', '.join(SPLITS)}, got none of {split}"
            )
    baselines = {"constant_class": baseline(labels["train"], labels["test"])}
    if task == "listops":
        first = {split: c.tokens[c.offsets[:-1]] for split, c in corpora.items()}
        baselines["first_operator"] = baseline(
            labels["train"], labels["test"], first["train"], first["test"]
        )
    padded = {"length": shape.length(length), "shift": shape.shift}
    return LongRange(*(Items(*parts[split], **padded) for split in SPLITS), baselines)


def _generated(
    sizes: dict[str, int], limits: ListLimits, seed: int, cache: Path
) -> dict[str, Corpus]:
    """Return the generated splits of a file in ``cache``, generated first if it is not there."""
    name = "-".join(map(str, ("listops", "v2", *astuple(limits), "seed", seed, *sizes.values())))
    make = lambda path: save(path, listops.generate(seed, sizes, limits))  # noqa: E731
    return load(build_once(f"{name}.npz", make, cache))


def baseline(
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    train_cues: np.ndarray | int = 0,
    test_cues: np.ndarray | int = 0,
) -> float:
    """Return the share of test items with the label most frequent among training items of its cue.

    Args:
        train_labels: (items,) uint8.
        test_labels: (items,) uint8.
        train_cues: (items,) uint8, what the rule sees of an item; 0 where it sees nothing.
        test_cues: as ``train_cues``.
    """
    votes = np.zeros((256, 256), np.int64)
    np.add.at(votes, (train_cues, train_labels), 1)
    return float((votes.argmax(axis=1)[test_cues] == test_labels).mean())
