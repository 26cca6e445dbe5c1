"""Image files in class folders."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from leaner_kernels.monitor.files import files_below, is_hidden, read_file
from leaner_kernels.monitor.pictures import PICTURES

# Names of a folder whose images measure; the first that is there.
HELD_OUT = ("val", "valid", "validation", "dev", "test")
# Up to so many files their sizes distinguish a data set from another.
_SIZED = 50_000


class ImageFiles:
    """Images of one split, a file each.

    Args:
        samples: path and class of each.
        names: of the classes.
    """

    def __init__(self, samples: Iterable[tuple[str, int]], names: list[str]):
        samples = list(samples)
        # Arrays, which processes forked later share: reading a string writes its reference count.
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
        return os.fsdecode(self.paths[index].item())

    def digest(self) -> str:
        """Return what tells these images from others: names, classes, and sizes where few."""
        whole = hashlib.sha256(repr(self.names).encode("utf-8", "surrogateescape"))
        for index, label in enumerate(self.labels.tolist()):
            size = _size(self.name(index)) if len(self) <= _SIZED else None
            whole.update(os.fsencode(f"{self.name(index)} {label} {size}\n"))
        return whole.hexdigest()


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:  # for its reader to name
        return None


def open_folder(root: Path) -> tuple[ImageFiles, ImageFiles | None]:
    """Return the training images of a folder, and those held out where it has a folder for them.

    Args:
        root: holds ``CLASS/IMAGE``, or ``train/CLASS/IMAGE`` and maybe ``val/CLASS/IMAGE``.

    Raises:
        ValueError: no images, a class without any, or other classes among those held out.
    """
    names = _folders(root)
    if "train" not in names:
        return _class_folders(root), None
    train = _class_folders(root / "train")
    part = next((name for name in HELD_OUT if name in names), None)
    if part is None:
        return train, None
    held_out = _class_folders(root / part)
    if train.names != held_out.names:
        unmatched = sorted(set(train.names) ^ set(held_out.names))[0]
        raise ValueError(
            f"--data {root} must have the same classes in train/ and {part}/, got {unmatched} in "
            "only one of them"
        )
    return train, held_out


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not is_hidden(e.name))


def _class_folders(part: Path) -> ImageFiles:
    names = _folders(part)
    if not names:
        raise ValueError(f"--data {part} must contain CLASS/IMAGE, got no class folder")
    samples: list[tuple[str, int]] = []
    for label, name in enumerate(names):
        paths = list(map(str, files_below(part / name)))
        # The order of the split: the files of a folder, then those of its folders.
        images = sorted((p for p in paths if p.lower().endswith(PICTURES)), key=os.path.split)
        if not images:
            raise ValueError(f"--data {part / name} contains no images: add some or remove it")
        samples += [(path, label) for path in images]
    return ImageFiles(samples, names)
