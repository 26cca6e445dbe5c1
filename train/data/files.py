"""Read data files, which must be regular; links are followed, as the data may be anywhere."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO

# Names that operating systems, archivers and file servers add to folders, in lower case.
SYSTEM = frozenset(
    {
        *("__macosx", "$recycle.bin", "system volume information", "lost+found", "__pycache__"),
        *("desktop.ini", "ehthumbs.db", "thumbs.db"),  # Windows
        *("#recycle", "#snapshot", "@eadir", "@recently-snapshot", "@recycle", "~snapshot"),  # NAS
    }
)


def open_file(path: str | Path) -> IO[bytes]:
    """Open a regular file of data, or raise OSError; links are followed."""
    # Opening a pipe without a writer would block forever.
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return open(path, "rb")


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a file that ``open_file`` opens."""
    with open_file(path) as file:
        return file.read()


def plain(text: str) -> str:
    """Return a text with the line endings of a file that Python reads in text mode."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_hidden(path: str | PurePath) -> bool:
    """Return whether a part of a path below a root begins with a dot or is in ``SYSTEM``."""
    parts = PurePath(path).parts
    return any(p != ".." and (p.startswith(".") or p.casefold() in SYSTEM) for p in parts)


def files_below(root: str | Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, in no order, without hidden ones.

    Links are followed, except to an enclosing folder.
    """
    for folder, folders, names in os.walk(root, followlinks=True):
        around = os.path.join(os.path.realpath(folder), "")
        inner = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        folders[:] = [
            name
            for name, real in inner.items()
            if not is_hidden(name) and not around.startswith(os.path.join(real, ""))
        ]
        yield from (Path(folder, name) for name in names if not is_hidden(name))
