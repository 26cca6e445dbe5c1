"""Which files of a folder are data: the same for training, prediction and measurement."""

import os
from collections.abc import Hashable, Iterator
from pathlib import Path, PurePath

# Names that operating systems, archivers and file servers add to a folder, in small letters.
SYSTEM = frozenset(
    {
        *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
        *("$recycle.bin", "system volume information"),  # Windows
        *("desktop.ini", "ehthumbs.db", "thumbs.db"),
        *("#recycle", "#snapshot", "@eadir", "@recently-snapshot", "@recycle", "~snapshot"),  # NAS
        *("__pycache__", "lost+found"),
    }
)


def is_hidden(path: str | PurePath) -> bool:
    """Return whether a path, relative to the root of the data, is no data of the user's.

    That is so where a component begins with a dot, as ``.ipynb_checkpoints`` or ``._1.jpg``, or is
    one of ``SYSTEM``. The path does not exist for any reader.
    """
    return any(part != ".." and _is_hidden(part) for part in PurePath(path).parts)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in SYSTEM


def files_below(root: str | Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, in no order, without hidden ones.

    Links are followed. One that leads nowhere is yielded, for its reader to name; one that leads to
    a folder around it is not.

    Raises:
        OSError: a folder cannot be read.
    """
    yield from _below(root, {identity(root)})


def _below(folder: str | Path, around: set[Hashable]) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                inner = identity(entry.path)
                if inner not in around:
                    yield from _below(entry.path, around | {inner})
            elif entry.is_file() or not os.path.exists(entry.path):
                yield Path(entry.path)


def identity(path: str | Path) -> Hashable:
    """Return what is equal for all paths and links to one file; of no file, its path."""
    try:
        about = os.stat(path)
    except OSError:
        return str(path)
    # Some file systems have no numbers.
    return (about.st_dev, about.st_ino) if about.st_ino else os.path.realpath(path)
