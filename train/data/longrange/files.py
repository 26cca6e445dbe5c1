"""Read the published files of Text, Retrieval and Image, and the official Pathfinder images.

Nothing of it is redistributed here: IMDB's reviews (aclImdb), the pairs of papers of the ACL
Anthology Network as the Long-Range Arena's archive has them, CIFAR-10's Python version, and that
archive's ``pathfinder32``.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from leaner_kernels.monitor.files import (
    DATA,
    check_file,
    is_hidden,
    lines_of,
    open_file,
    read_file,
)
from leaner_kernels.monitor.pictures import decode
from train.data.longrange.corpus import SPLITS, Corpus

_GREY = np.array([0.2989, 0.5870, 0.1140], np.float32)
_HELD_OUT = 10  # of the training data, one in so many


def read_reviews(folder: Path, length: int) -> dict[str, Corpus]:
    """Read ``{train,test}/{pos,neg}/*.txt`` of aclImdb as bytes, labelled 1 and 0.

    Every tenth training review is held out.

    Args:
        folder: aclImdb, or what holds it.
        length: bytes of a review that are read.

    Raises:
        ValueError: no such reviews.
    """
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    parts = {}
    for part in ("train", "test"):
        files = {
            label: _visible(folder / part / name, "*.txt")
            for label, name in enumerate(("neg", "pos"))
        }
        missing = [name for name, found in zip(("neg", "pos"), files.values()) if not found]
        if missing:
            raise ValueError(
                f"--data must contain reviews {{train,test}}/{{pos,neg}}/*.txt, got none in "
                f"{folder / part / missing[0]}"
            )
        texts = [_beginning(path, length) for found in files.values() for path in found]
        if not all(texts):
            raise ValueError(
                f"--data must contain reviews with text, got an empty one in {folder / part}"
            )
        labels = [label for label, found in files.items() for _ in found]
        parts[part] = Corpus.of(texts, labels)
    train, dev = held_out(parts["train"])
    return {"train": train, "dev": dev, "test": parts["test"]}


def _beginning(path: Path, length: int) -> bytes:
    with open_file(path) as file:
        return file.read(length)


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not is_hidden(path.name))


def held_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Return a corpus without every tenth sequence, and these."""
    chosen = np.arange(len(corpus)) % _HELD_OUT == 0
    rest, dev = (
        Corpus.of([corpus[i] for i in np.flatnonzero(part)], corpus.labels[part])
        for part in (~chosen, chosen)
    )
    return rest, dev


def read_pairs(folder: Path, length: int) -> dict[str, tuple[Corpus, np.ndarray, np.ndarray]]:
    """Read ``new_aan_pairs.{train,eval,test}.tsv``: label, two ids, two texts with tabs between.

    Args:
        folder: of the three files.
        length: bytes of a text that are read.

    Returns:
        By split every text of all splits once, since a paper stands in many pairs; the indices of
        the pairs in it, (pairs, 2); and their labels, (pairs,).

    Raises:
        ValueError: a file that is not there, or is not laid out as it must be.
    """
    texts: dict[bytes, int] = {}
    splits = {}
    for split, name in zip(SPLITS, ("train", "eval", "test")):
        path = folder / f"new_aan_pairs.{name}.tsv"
        if not path.is_file():
            raise ValueError(
                f"--data must contain new_aan_pairs.{{train,eval,test}}.tsv, got no {path}"
            )
        pairs, labels = [], []
        for label, *both in _pairs(path):
            labels.append(label)
            pairs.append([texts.setdefault(text[:length], len(texts)) for text in both])
        splits[split] = np.array(pairs, np.int64), np.array(labels, np.uint8)
    corpus = Corpus.of(texts, [0] * len(texts))
    return {split: (corpus, *part) for split, part in splits.items()}


def _pairs(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    with open_file(path) as file:
        for number, line in enumerate(lines_of(file), start=1):
            cells = line.rstrip(b"\r\n").split(b"\t")
            label = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}.get(cells[0])
            if label is None or len(cells) != 5 or not (cells[3] and cells[4]):
                raise ValueError(
                    f"--data {path} line {number} must be a label, two ids and two texts separated "
                    f"by tabs, got {line[:40]!r}"
                )
            yield label, cells[3], cells[4]


def read_pathfinder(folder: Path) -> dict[str, Corpus]:
    """Read the published images that the text files ``metadata/*.npy`` name, 80, 10 and 10%.

    Args:
        folder: such as ``pathfinder32/curv_contour_length_14``.

    Raises:
        ValueError: no such files, or an image of another size.
    """
    lists = _visible(folder / "metadata", "*.npy")
    lists.sort(key=lambda path: (len(path.name), path))
    if not lists:
        raise ValueError(
            f"--data must contain metadata/*.npy and the images that they name, got {folder}"
        )
    images, labels = [], []
    for path in lists:
        try:
            lines = [line.split(" ") for line in read_file(path, DATA).decode().splitlines()]
            listed = [
                (folder / place / name, ("0", "1").index(label))
                for place, name, _, label, *_ in lines
            ]
        except ValueError as error:
            raise ValueError(
                f"--data {path} must contain lines of folder, name, number and class 0 or 1: "
                f"{error}"
            ) from None
        for image, label in listed:
            if image.stat().st_size:  # some published images are empty
                images.append(_grey_of(read_file(image, DATA), f"--data {image}"))
                labels.append(label)
    ends = len(images) * 8 // 10, len(images) * 9 // 10
    parts = (slice(ends[0]), slice(*ends), slice(ends[1], None))
    return {split: Corpus.of(images[part], labels[part]) for split, part in zip(SPLITS, parts)}


def _grey_of(content: bytes, name: str) -> np.ndarray:
    """Return the pixels of an image file in grey, row by row, (1024,) uint8.

    Args:
        content: of the file.
        name: of it, for messages.

    Raises:
        ValueError: it is no image of 32 x 32 pixels.
    """
    image = decode(content, lambda: name.removeprefix("--data "))
    if image.size != (32, 32):
        raise ValueError(f"{name} must be 32 x 32 pixels, got {image.size}")
    return np.asarray(image.convert("L")).reshape(-1)


def read_cifar(folder: Path) -> dict[str, Corpus]:
    """Read CIFAR-10 in grey, pixels row by row: 45,000, 5,000 and 10,000 images.

    Args:
        folder: ``cifar-10-batches-py``, or what holds it.

    Raises:
        ValueError: its files are not there, or are not the published ones, by their MD5: they are
            pickles, and no other is opened.
    """
    from torchvision.datasets import CIFAR10

    root = folder.parent if folder.name == CIFAR10.base_folder else folder
    try:
        for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list):
            check_file(root / CIFAR10.base_folder / name, DATA)
        training, test = (CIFAR10(root, train=train) for train in (True, False))
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--data must contain CIFAR-10's published files, got {folder}: {error}"
        ) from None
    first = len(training) * (_HELD_OUT - 1) // _HELD_OUT
    images, labels = training.data, training.targets
    parts = (
        (images[:first], labels[:first]),
        (images[first:], labels[first:]),
        (test.data, test.targets),
    )
    return {split: Corpus.of(_grey(i), labels) for split, (i, labels) in zip(SPLITS, parts)}


def _grey(images: np.ndarray) -> np.ndarray:
    """Return images (B, 32, 32, 3) in grey, (B, 1024): TensorFlow's weights and rounding."""
    grey = np.tensordot(images * np.float32(1 / 255), _GREY, 1)
    return (grey * np.float32(255.5)).astype(np.uint8).reshape(-1, 32 * 32)
