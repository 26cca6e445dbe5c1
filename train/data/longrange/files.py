"""The published files of Text, Retrieval and Image, and the official Pathfinder images.

Nothing of it is redistributed here: IMDB's reviews (aclImdb), the pairs of papers of the ACL
Anthology Network as the Long-Range Arena's archive has them, CIFAR-10's Python version, and that
archive's ``pathfinder32``.
"""

import io
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from PIL import Image

from train.data.longrange.corpus import SPLITS, Corpus

# What the arrays in CIFAR-10's pickles are made of. Loading anything else would run its code.
_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}
_GREY = np.array([0.2989, 0.5870, 0.1140], np.float32)
_HELD_OUT = 10  # of the training data, one in so many


def read_reviews(folder: Path, length: int, *, upstream_dev: bool) -> dict[str, Corpus]:
    """Read ``{train,test}/{pos,neg}/*.txt`` of aclImdb as bytes, labelled 1 and 0.

    Args:
        folder: aclImdb, or what holds it.
        length: bytes of a review that are read.
        upstream_dev: choose weights on the test reviews, as the Long-Range Arena does, instead of
            on every tenth training review, which is then not trained on.

    Raises:
        ValueError: no such reviews.
    """
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    parts = {}
    for part in ("train", "test"):
        files = {
            label: sorted((folder / part / name).glob("*.txt"))
            for label, name in enumerate(("neg", "pos"))
        }
        missing = [name for name, found in zip(("neg", "pos"), files.values()) if not found]
        if missing:
            raise ValueError(
                f"--data must hold reviews {{train,test}}/{{pos,neg}}/*.txt, found none in "
                f"{folder / part / missing[0]}"
            )
        texts = [path.read_bytes()[:length] for found in files.values() for path in found]
        if not all(texts):
            raise ValueError(f"--data must hold reviews, but one in {folder / part} is empty")
        parts[part] = Corpus.of(texts, [label for label, found in files.items() for _ in found])
    if upstream_dev:
        return {"train": parts["train"], "dev": parts["test"], "test": parts["test"]}
    train, dev = held_out(parts["train"])
    return {"train": train, "dev": dev, "test": parts["test"]}


def held_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Return a corpus without every tenth sequence, and these."""
    chosen = np.arange(len(corpus)) % _HELD_OUT == 0
    rest, dev = (
        Corpus.of([corpus[i] for i in np.flatnonzero(part)], corpus.labels[part])
        for part in (~chosen, chosen)
    )
    return rest, dev


def read_pairs(
    folder: Path, length: int
) -> tuple[Corpus, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Read ``new_aan_pairs.{train,eval,test}.tsv``: label, two ids, two texts with tabs between.

    Args:
        folder: of the three files.
        length: bytes of a text that are read.

    Returns:
        Every text once, and by split the indices of the pairs in it, (pairs, 2), with their labels,
        (pairs,): a paper stands in many pairs.

    Raises:
        ValueError: a file that is not there, or is not laid out as it must be.
    """
    texts: dict[bytes, int] = {}
    splits = {}
    for split, name in zip(SPLITS, ("train", "eval", "test")):
        path = folder / f"new_aan_pairs.{name}.tsv"
        if not path.is_file():
            raise ValueError(f"--data must hold new_aan_pairs.train.tsv, eval and test, no {path}")
        pairs, labels = [], []
        for label, *both in _pairs(path):
            labels.append(label)
            pairs.append([texts.setdefault(text[:length], len(texts)) for text in both])
        splits[split] = np.array(pairs, np.int64), np.array(labels, np.uint8)
    return Corpus.of(texts, [0] * len(texts)), splits


def _pairs(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            cells = line.rstrip(b"\r\n").split(b"\t")
            label = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}.get(cells[0])
            if label is None or len(cells) != 5 or not (cells[3] and cells[4]):
                raise ValueError(
                    f"--data {path} line {number} must be label, two ids and two texts with tabs "
                    f"between, got {line[:40]!r}"
                )
            yield label, cells[3], cells[4]


def read_pathfinder(folder: Path) -> dict[str, Corpus]:
    """Read the published images that the text files ``metadata/*.npy`` name, 80, 10 and 10%.

    Args:
        folder: such as ``pathfinder32/curv_contour_length_14``.

    Raises:
        ValueError: no such files, or an image of another size.
    """
    lists = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path))
    if not lists:
        raise ValueError(f"--data must hold metadata/*.npy and the images they name, got {folder}")
    images, labels = [], []
    for path in lists:
        for place, name, label in _listed(path):
            content = (folder / place / name).read_bytes()
            if content:  # some published images are empty
                images.append(_pixels(folder / place / name, content))
                labels.append(label)
    ends = len(images) * 8 // 10, len(images) * 9 // 10
    parts = (slice(ends[0]), slice(*ends), slice(ends[1], None))
    return {split: Corpus.of(images[part], labels[part]) for split, part in zip(SPLITS, parts)}


def _listed(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the folder, the name and the class of each image that a list names."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            place, name, _, label, *_ = line.split(" ")
            yield place, name, ("0", "1").index(label)
    except ValueError as error:
        raise ValueError(
            f"--data {path} must be lines of folder, name, number and class 0 or 1: {error}"
        ) from None


def _pixels(path: Path, content: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(content)) as image:
            size, pixels = image.size, np.asarray(image.convert("L"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"--data {path} must be an image: {error}") from None
    if size != (32, 32):
        raise ValueError(f"--data {path} must be 32 x 32 pixels, got {size}")
    return pixels.reshape(-1)


def read_cifar(folder: Path) -> dict[str, Corpus]:
    """Read CIFAR-10 in grey, pixels row by row: 45,000, 5,000 and 10,000 images.

    Args:
        folder: of ``data_batch_1`` to ``data_batch_5`` and ``test_batch``, or one named
            ``cifar-10-batches-py`` in it; or a file .npz of x_train, y_train, x_test, y_test.

    Raises:
        ValueError: a file that is not there, is damaged, or holds anything but arrays.
    """
    if folder.suffix == ".npz":
        (images, labels), test = _read_arrays(folder)
    else:
        inner = folder / "cifar-10-batches-py"
        folder = inner if inner.is_dir() else folder
        parts = [_read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
        images, labels = (np.concatenate(each) for each in zip(*parts))
        test = _read_batch(folder / "test_batch")
    first = len(images) * (_HELD_OUT - 1) // _HELD_OUT
    splits = ((images[:first], labels[:first]), (images[first:], labels[first:]), test)
    return {split: _grey(*part) for split, part in zip(SPLITS, splits)}


class _ArraysOnly(pickle.Unpickler):
    """Loads arrays, and refuses what would call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few functions that make an array."""
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images (B, 3, 32, 32) and labels (B,) of one pickle."""
    if not path.is_file():
        raise ValueError(f"--data must hold CIFAR-10's data_batch_1 to 5 and test_batch, no {path}")
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"--data {path} must be a batch of CIFAR-10: {error}") from None
    return _checked(path, images, labels, (3 * 32 * 32,)).reshape(-1, 3, 32, 32), labels


def _read_arrays(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            parts = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
    except (OSError, KeyError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"--data {path} must hold x_train, y_train, x_test and y_test: {error}"
        ) from None
    read = []
    for images, labels in parts:
        labels = labels.reshape(-1)
        images = _checked(path, images, labels, (32, 32, 3)).transpose(0, 3, 1, 2)
        read.append((images, labels))
    return read


def _checked(path: Path, images: Any, labels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    right = isinstance(images, np.ndarray) and images.dtype == np.uint8
    if not right or images.shape != (len(labels), *shape):
        got = getattr(images, "shape", None), getattr(images, "dtype", type(images).__name__)
        raise ValueError(f"--data {path} must hold uint8 images (B, {shape}) and B labels: {got}")
    if (
        labels.ndim != 1
        or labels.dtype.kind not in "iu"
        or not np.isin(labels, np.arange(10)).all()
    ):
        raise ValueError(f"--data {path} must hold labels from 0 to 9")
    return images


def _grey(images: np.ndarray, labels: np.ndarray) -> Corpus:
    """Return images (B, 3, 32, 32) in grey: TensorFlow's weights, and its way back to 8 bits."""
    grey = np.tensordot(images.transpose(0, 2, 3, 1) * np.float32(1 / 255), _GREY, 1)
    pixels = (grey * np.float32(255.5)).astype(np.uint8)
    offsets = np.arange(len(images) + 1) * 1024
    return Corpus(pixels.reshape(-1), offsets, labels.astype(np.uint8))
