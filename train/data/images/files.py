"""Image files in class folders."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data.classes import composed
from train.data.files import files_below, is_hidden, read_file
from train.data.pictures import PICTURES
from train.data.splits import HELD_OUT, split_in, splits_of

# Up to this number of files, their sizes too identify a data set.
_SIZED = 50_000


class ImageFiles:
    """Images of one split, one per file.

    Args:
        root: folder of all of them.
        samples: path below it and class of each.
        names: names of the classes.
        left_out: description of files in class folders that are not pictures; "" without any.
    """

    def __init__(
        self, root: Path, samples: Iterable[tuple[str, int]], names: list[str], left_out: str = ""
    ):
        samples = list(samples)
        self.root, self.left_out = str(root), left_out
        # Arrays, which later forks share: reading a string would write its reference count.
        self.paths = np.array([os.fsencode(path) for path, _ in samples], bytes)
        self.labels = np.array([label for _, label in samples], np.int64)
        self.names, self.classes = names, len(names)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        return read_file(self.name(index)), int(self.labels[index])

    def name(self, index: int) -> str:
        """Return which image this is."""
        return os.path.join(self.root, self._path(index))

    def digest(self) -> str:
        """Return a digest of these images that does not depend on the location of their folder.

        It covers paths in the folder, classes, and sizes if there are few images.
        """
        whole = hashlib.sha256(repr(self.names).encode("utf-8", "surrogateescape"))
        for index, label in enumerate(self.labels.tolist()):
            size = size_of(self.name(index)) if len(self) <= _SIZED else None
            whole.update(os.fsencode(f"{composed(self._path(index))} {label} {size}\n"))
        return whole.hexdigest()

    def _path(self, index: int) -> str:
        return os.fsdecode(self.paths[index].item())


def size_of(path: str) -> int | None:
    """Return the bytes of a file; None if it cannot be read."""
    try:
        return os.path.getsize(path)
    except OSError:  # its reader will report it
        return None


class Folder(NamedTuple):
    """The images of a folder.

    Attributes:
        train: to train on.
        held_out: held-out images, if there is a folder of them.
        splits: description of the folders that are and are not read; "" without splits.
    """

    train: ImageFiles
    held_out: ImageFiles | None = None
    splits: str = ""


def open_folder(root: Path) -> Folder:
    """Return the images of a folder.

    Args:
        root: holds ``CLASS/IMAGE``, or ``train/CLASS/IMAGE`` and maybe ``val/CLASS/IMAGE``, where
            splits may have any of their usual names.

    Raises:
        ValueError: no images, a class without any, other classes among those held out, or a folder
            that may be a split or a class.
    """
    split = _find_split(root)
    if split is None:
        return Folder(class_folders(root))
    train = class_folders(root / split.train)
    if split.held_out is None:
        return Folder(train, splits=split.shown())
    held_out = class_folders(root / split.held_out)
    if train.names != held_out.names:
        unmatched = sorted(set(train.names) ^ set(held_out.names))[0]
        raise ValueError(
            f"--data {root} must have the same classes in {split.train}/ and {split.held_out}/, "
            f"got {unmatched} in only one of them"
        )
    return Folder(train, held_out, split.shown())


def in_classes(root: Path) -> bool:
    """Return whether two or more subfolders of a folder contain pictures."""
    folders: set[Path] = set()
    for path in files_below(root):
        if path.parent != root and _is_picture(path.name):
            folders.add(path.parent)
        if len(folders) > 1:
            return True
    return False


class _Split(NamedTuple):
    """Names of the training and held-out folders, and of those that are not read."""

    train: str
    held_out: str | None
    unread: list[str]

    def shown(self) -> str:
        held_out = "" if self.held_out is None else f", held out {self.held_out}"
        unread = f"; not read: {', '.join(self.unread)}" if self.unread else ""
        return f"trained on {self.train}{held_out}{unread}"


def _find_split(root: Path) -> _Split | None:
    """Return the training and held-out folders, or None if all folders are classes.

    A folder of pictures is a class and a folder of such folders is a split. So ``train`` is a class
    beside ``bus`` and ``car``, and a split beside ``test`` or alone.

    Raises:
        ValueError: a folder may be either, no folder trains, or two do.
    """
    folders = _folders(root)
    splits = splits_of(folders)
    if not splits:
        return None
    others = [name for name in folders if name not in splits and _holds_picture(root / name)]
    inner = {name: _folders(root / name) for name in splits}
    nested = [name for name in splits if inner[name]]
    if others:
        # A folder with pictures beside its subfolders is a class.
        nested = [name for name in nested if not any(map(_is_picture, os.listdir(root / name)))]
        kinds = {splits[name] for name in nested}
        if not ("train" in kinds and len(kinds) > 1):
            for name in nested:
                if splits[name] == "train" or set(inner[name]) & set(others):
                    raise ValueError(
                        f"--data {root} has {name}/{inner[name][0]}/ beside {others[0]}/: is "
                        f"{name} a class or a split? Give a folder with train/CLASS/ and "
                        "val/CLASS/ alone, or with CLASS/ alone"
                    )
            return None
    if "train" not in splits.values():
        raise ValueError(f"--data {root} has {', '.join(splits)} but no train/")
    chosen: dict[str, str] = {}
    for name, split in splits.items():
        # Test pictures without classes cannot be scored.
        if name not in nested and (others or split == "test"):
            continue
        if split in chosen:
            raise ValueError(
                f"--data {root} has two folders for {split}, {chosen[split]} and {name}: keep one"
            )
        chosen[split] = name
    train = chosen["train"]
    held_out = next((chosen[split] for split in HELD_OUT if split in chosen), None)
    unread = [name for name in (*splits, *others) if name not in (train, held_out)]
    return _Split(train, held_out, unread)


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not is_hidden(e.name))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURES) and not is_hidden(name)


def _holds_picture(folder: Path) -> bool:
    return any(_is_picture(path.name) for path in files_below(folder))


def _inner(part: Path) -> Path:
    """Return the folder of the classes of a split: some archives have train/train/CLASS/IMAGE."""
    inside = _folders(part)
    named = split_in(part.name)
    same = named is not None and [split_in(name) for name in inside] == [named]
    return _inner(part / inside[0]) if same and _folders(part / inside[0]) else part


def class_folders(part: Path) -> ImageFiles:
    """Return the images of one split, in a folder for each class.

    Raises:
        ValueError: no such folder, or one without images.
    """
    part = _inner(part)
    folders = _folders(part)
    if not folders:
        raise ValueError(f"--data {part} must contain CLASS/IMAGE, got no class folder")
    # Folders whose names differ only in their Unicode form are one class.
    names = sorted({*map(composed, folders)})
    numbers = {name: number for number, name in enumerate(names)}
    samples: list[tuple[str, int]] = []
    others: list[Path] = []
    for folder in folders:
        root = part / folder
        inner = splits_of(_folders(root))
        if len(set(inner.values())) > 1 and "train" in inner.values():
            raise ValueError(
                f"--data {root} has the splits {', '.join(inner)} in a class: give a folder with "
                f"{next(iter(inner))}/{folder}/ in place of {folder}/{next(iter(inner))}/"
            )
        images: list[str] = []
        for path in files_below(root):
            if _is_picture(path.name):
                images.append(str(path)[len(str(root)) + 1 :])
            else:
                others.append(path)
        # Sort as the split does: the files of a folder, then those of its subfolders.
        images.sort(key=lambda path: os.path.split(composed(path)))
        if not images:
            raise ValueError(f"--data {root} contains no images: add some or remove it")
        samples += [(os.path.join(folder, path), numbers[composed(folder)]) for path in images]
    samples.sort(key=lambda sample: sample[1])
    left_out = (
        f"{len(others):,} files that are not pictures, such as {min(others)}" if others else ""
    )
    return ImageFiles(part, samples, names, left_out)
