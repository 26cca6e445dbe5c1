"""Read and write the files of data and runs: regular files only, written whole or not at all.

Files of data may be links. The files in a run's folder may not: the folder may come from anyone.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path, PurePath
from typing import IO

# Names that operating systems, archivers and file servers add to a folder, in small letters.
SYSTEM = frozenset(
    {
        *("__macosx", "$recycle.bin", "system volume information", "lost+found", "__pycache__"),
        *("desktop.ini", "ehthumbs.db", "thumbs.db"),  # Windows
        *("#recycle", "#snapshot", "@eadir", "@recently-snapshot", "@recycle", "~snapshot"),  # NAS
    }
)
# Windows has neither flag. There, a link that is made after ``check_own`` is followed.
_NO_LINK_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def check_own(path: str | Path, *, folder: bool = False) -> None:
    """Check that a path in a run's folder is a regular file, or a folder, or missing.

    Raises:
        OSError: it is a link, a pipe or another thing.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.EINVAL, "is a link, and no link in a run's folder is used", str(path))
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        raise OSError(errno.EINVAL, f"is no {'folder' if folder else 'regular file'}", str(path))


def open_own(path: str | Path, mode: str = "rb", buffering: int = -1) -> IO[bytes]:
    """Open a file in a run's folder; no link is followed, and no pipe is waited for.

    Args:
        path: of the file. The folder itself may be a link.
        mode: "rb", "ab" or "xb", as of ``open``.
        buffering: as of ``open``.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    check_own(path)
    return open(path, mode, buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _NO_LINK_NO_WAIT, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no regular file", path)


def read_own(path: str | Path) -> bytes:
    """Return the bytes of a file that ``open_own`` opens."""
    with open_own(path) as file:
        return file.read()


def open_file(path: str | Path) -> IO[bytes]:
    """Open a regular file of data, or raise OSError; links are followed."""
    # Opening a pipe that nobody writes to would wait for ever.
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return open(path, "rb")


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a file that ``open_file`` opens."""
    with open_file(path) as file:
        return file.read()


def plain(text: str) -> str:
    """Return a text whose lines end as they do in any file that Python reads."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_hidden(path: str | PurePath) -> bool:
    """Whether a part of a path below the root of the data begins with a dot or is in ``SYSTEM``."""
    parts = PurePath(path).parts
    return any(p != ".." and (p.startswith(".") or p.casefold() in SYSTEM) for p in parts)


def files_below(root: str | Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, in no order, without hidden ones.

    Links are followed, but not to a folder around them.
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


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file that is whole or as it was; a link of its name is replaced, never followed."""
    with new_file(Path(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync(descriptor: int) -> None:
    """See a file or folder to the disk, on file systems that can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Of folders some network file systems say so.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open ``.NAME.partial`` beside a path, which it becomes unless the context raises."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def set_aside(folder: Path, names: Iterable[str]) -> str:
    """Rename what an earlier run left, all by one number, and return the names that it has now."""
    paths = [folder / name for name in names]
    there = [path for path in paths if path.is_file() or (path.is_dir() and not path.suffix)]

    def aside(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    number = next(n for n in count(1) if not any(aside(path, n).exists() for path in there))
    return ", ".join(path.rename(aside(path, number)).name for path in there)
