"""Which files of a folder are data, and how any of them is read: for all readers alike."""

import errno
import json
import os
import stat
from collections.abc import Hashable, Iterator
from pathlib import Path, PurePath
from typing import Any

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


# Bytes of a file that is read whole: of a picture or a text, and of settings as JSON.
DATA, SETTINGS = 1 << 30, 1 << 26


def read_file(path: str | Path, most: int) -> bytes:
    """Return the bytes of a regular file, its links followed; of a pipe or a device none.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
        return file.read(most)


def _without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def parse_json(text: str | bytes) -> Any:
    """Return JSON that may come from anyone.

    A whole number past the range of a float is infinite, as another number is.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= 300 else float(digits)
