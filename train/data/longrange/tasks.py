"""The five tasks by name, from files or generated.

As published, every sequence is padded to the same power of two, bytes stand for text, and pixels,
row by row, for images. One thing differs: the published code takes token 0 for padding wherever it
stands, so that in Image and Pathfinder it hides black pixels. Here every pixel counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data.longrange import files, listops, pathfinder
from train.data.longrange.corpus import SPLITS, Corpus
from train.data.longrange.listops import ListLimits
from train.data.longrange.sequences import PaddedSequences, Pairs

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
GENERATED = "generated"
_BYTES = 257  # a byte plus one; 0 pads
_PUBLISHED = {
    "text": "the folder aclImdb",
    "retrieval": "the folder of new_aan_pairs.train.tsv",
    "image": "the folder cifar-10-batches-py",
}


@dataclass(frozen=True)
class LongRange:
    """A classification task.

    Attributes:
        classes: how many.
        vocab: tokens, the padding included.
        length: tokens of a padded sequence, a power of two.
        pairs: whether an item is two sequences.
        train: batches of tokens (B, length) or (B, 2, length) int64, their lengths (B,) or (B, 2)
            int32, labels (B,) int64.
        dev: chooses the weights.
        test: measures them.
        baselines: by name of a trivial rule, the share of the test items that it gets right.
    """

    classes: int
    vocab: int
    length: int
    pairs: bool
    train: PaddedSequences | Pairs
    dev: PaddedSequences | Pairs
    test: PaddedSequences | Pairs
    baselines: dict[str, float]


def open_task(
    task: str,
    data: str,
    *,
    length: int | None,
    sizes: tuple[int, ...] | None,
    limits: ListLimits,
    seed: int,
    cache: str,
    upstream_dev: bool,
) -> LongRange:
    """Open one of the five tasks.

    Args:
        task: one of ``TASKS``.
        data: the published files' folder; or "generated", for ListOps and Pathfinder.
        length: tokens that are read of an item of text; images have one for each pixel.
        sizes: of the generated splits; None where nothing is generated.
        limits: of generated ListOps.
        seed: of generated data.
        cache: folder of generated data.
        upstream_dev: choose the weights of Text on its test reviews, as published.

    Raises:
        ValueError: no such files, or damaged ones.
    """
    folder = Path(data)
    if data == GENERATED and task in _PUBLISHED:
        raise ValueError(f"--task {task} needs --data, {_PUBLISHED[task]}")
    if data != GENERATED and not folder.exists():
        raise ValueError(f"--data must be {GENERATED} or the folder of published files, got {data}")
    wanted = dict(zip(SPLITS, sizes or ()))
    if task == "retrieval":
        return _open_pairs(folder, length)
    if task == "listops":
        if data == GENERATED:
            corpora = listops.open_cached(Path(cache), seed, wanted, limits)
        else:
            corpora = listops.read(folder)
        return _of_sequences(corpora, listops.CLASSES, len(listops.SYMBOLS) + 1, length)
    if task == "text":
        corpora = files.read_reviews(folder, length, upstream_dev=upstream_dev)
        return _of_sequences(corpora, 2, _BYTES, length, shift=1)
    if task == "image":
        return _of_sequences(files.read_cifar(folder), 10, 256, 32 * 32)
    if data == GENERATED:
        corpora = pathfinder.open_cached(Path(cache), seed, wanted)
    else:
        corpora = files.read_pathfinder(folder)
    return _of_sequences(corpora, pathfinder.CLASSES, 256, pathfinder.SIZE**2)


def _of_sequences(
    corpora: Mapping[str, Corpus], classes: int, vocab: int, length: int, shift: int = 0
) -> LongRange:
    length = _power_of_two(length)
    labels = {split: corpus.labels for split, corpus in corpora.items()}
    _check_none_is_empty(labels)
    baselines = {"constant_class": baseline(labels["train"], labels["test"])}
    if classes == listops.CLASSES and vocab == len(listops.SYMBOLS) + 1:
        first = {split: corpus.tokens[corpus.offsets[:-1]] for split, corpus in corpora.items()}
        baselines["first_operator"] = baseline(
            labels["train"], labels["test"], first["train"], first["test"]
        )
    sets = [PaddedSequences(corpora[split], length, shift) for split in SPLITS]
    return LongRange(classes, vocab, length, False, *sets, baselines)


def _open_pairs(folder: Path, length: int) -> LongRange:
    corpus, splits = files.read_pairs(folder, length)
    _check_none_is_empty({split: labels for split, (_, labels) in splits.items()})
    length = _power_of_two(length)
    sets = [Pairs(corpus, *splits[split], length, shift=1) for split in SPLITS]
    labels = [splits[split][1] for split in ("train", "test")]
    return LongRange(2, _BYTES, length, True, *sets, {"constant_class": baseline(*labels)})


def _check_none_is_empty(labels: Mapping[str, np.ndarray]) -> None:
    for split in SPLITS:
        if len(labels[split]) == 0:
            raise ValueError(f"--data must hold items of {', '.join(SPLITS)}, has none of {split}")


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


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()
