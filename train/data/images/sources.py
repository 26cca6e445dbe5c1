"""Find the image files of a data set, and split them into training and held-out images."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leaner_kernels.monitor.command_line import one_line
from train.data.files import is_hidden
from train.data.hub import OF_PICTURES, tables_below
from train.data.images import KINDS, hub
from train.data.images.files import in_classes, open_folder
from train.data.images.photographs import ImageSource

SHARE = 0.15  # of each class is held out if the data set has no split for that


class Part:
    """Some images of a source.

    Args:
        source: source of the images, with the class of each as ``labels``.
        indices: of those that are in it.
    """

    def __init__(self, source: Any, indices: Sequence[int]):
        self.source, self.indices = source, np.asarray(indices)
        self.labels = np.asarray(source.labels)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        """Return which image this is."""
        return self.source.name(self.indices[index])

    def digest(self) -> str:
        """Return what tells these images from others."""
        whole = self.source.digest().encode() + self.indices.tobytes()
        return hashlib.sha256(whole).hexdigest()


def split(source: Any) -> tuple[Part, Part]:
    """Split a source into training and held-out images, with equal shares of each class.

    The split depends only on the classes of the images in their order, not on ``--seed``: it is the
    same on every rank, after a resume, and in runs to be compared.

    Raises:
        ValueError: no class has two images.
    """
    labels = np.asarray(source.labels)
    draw = np.random.default_rng(0)
    held_out: list[int] = []
    for label in np.unique(labels):
        images = draw.permutation(np.flatnonzero(labels == label)).tolist()
        count = max(1, round(SHARE * len(images))) if len(images) > 1 else 0
        held_out += images[:count]
    if not held_out:
        raise ValueError("--data must have at least two images of some class, to hold one out")
    apart = np.isin(np.arange(len(labels)), held_out)
    return Part(source, np.flatnonzero(~apart)), Part(source, np.flatnonzero(apart))


@dataclass(frozen=True)
class Sources:
    """Where the image files of a data set are.

    Attributes:
        train: images to train on.
        held_out: images that measure.
        classes: how many there are.
        names: names of the classes; None where they have none.
        made: whether the held-out images were chosen here, from the training images.
        splits: which parts of the data set train and are held out, in words.
        left_out: which files beside the images are not read, in words.
    """

    train: ImageSource
    held_out: ImageSource
    classes: int
    names: list[str] | None
    made: bool = False
    splits: str = ""
    left_out: str = ""

    def facts(self) -> dict[str, Any]:
        """Return facts for the plan of a run."""
        held_out = f"{SHARE:.0%} of each class, the same in every run" if self.made else ""
        facts = {"splits": self.splits, "held_out": held_out, "left_out": self.left_out}
        return {name: said for name, said in facts.items() if said}

    def identity(self) -> dict[str, str]:
        """Return digests of the classes and the images by a description of each."""
        names = hashlib.sha256(repr(self.names).encode("utf-8", "surrogateescape"))
        return {
            "the list of classes of --data": names.hexdigest(),
            "the set of pictures of --data": self.train.digest(),
            "the held-out set of --data": self.held_out.digest(),
        }

    def files(self) -> dict[str, str]:
        """Return the text files that a run stores: names of classes, and of held-out images."""
        files = {}
        if self.names is not None:
            files["classes.txt"] = "".join(f"{one_line(name)}\n" for name in self.names)
        if self.made:
            names = map(self.held_out.name, range(len(self.held_out)))
            files["held_out.txt"] = "".join(f"{one_line(name)}\n" for name in names)
        return files


def find_images(name: str) -> Sources:
    """Find the image files of a data set; hold some out if it has no split for that.

    Args:
        name: a folder, or "hf:" and a data set of Hugging Face.

    Raises:
        ValueError: no such data set, or one that is not laid out as it must be.
    """
    path, splits, left_out = Path(name), "", ""
    if (name.startswith("hf:") and name != "hf:") or _is_tables(path):
        train, held_out = hub.open_tables(name.removeprefix("hf:"))
    elif path.is_dir():
        train, held_out, splits = open_folder(path)
        left_out = "; ".join(filter(None, (_tables_beside(path), train.left_out)))
    else:
        end = "which is a file" if path.is_file() else "which does not exist"
        raise ValueError(f"--data must be {KINDS}, got {name!r}, {end}")
    classes = max(part.classes for part in (train, held_out) if part is not None)
    if classes == 1:
        raise ValueError(f"--data {name} must have at least two classes, got one")
    names, made = train.names, held_out is None
    if made:
        train, held_out = split(train)
    return Sources(train, held_out, classes, names, made=made, splits=splits, left_out=left_out)


def _is_tables(path: Path) -> bool:
    """Return whether a folder holds parquet files, tars, or what ``datasets`` saved.

    Tables or archives beside class folders do not count.
    """
    if not path.is_dir():
        return False
    saved = (path / "dataset_dict.json").is_file()
    return saved or (not in_classes(path) and bool(tables_below(path, OF_PICTURES)))


def _tables_beside(path: Path) -> str:
    """Return how many tables or archives lie beside class folders, in words."""
    names = (entry for entry in path.iterdir() if entry.suffix.lower() in OF_PICTURES)
    tables = sorted(entry.name for entry in names if not is_hidden(entry.name))
    if not tables:
        return ""
    more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
    return f"{tables[0]}{more}, beside class folders; --data hf:{path} reads tables"
