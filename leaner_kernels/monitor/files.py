"""Read and write files that may come from anyone, in folders that may, too.

Files are read whole or in lines of bounded size, and only if they are regular files. What is
written never follows a link that leads to another file of the user's, and never waits for a pipe.
"""

import errno
import io
import json
import mmap
import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path, PurePath
from typing import IO, Any, AnyStr

# Bytes of a file that is read whole: of a picture or a text, and of settings as JSON.
DATA, SETTINGS = 1 << 30, 1 << 26
# Of one that is read piece by piece or mapped, such as weights and tables.
LARGEST = 1 << 40
# Of files of a saved model, those that libraries read whole.
_WHOLE = (".jinja", ".json", ".md", ".model", ".txt", ".yaml")
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
# Windows has no such flags, and asks for a privilege before it makes a link.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
# Folders that a run makes in its own.
_FOLDERS = ("checkpoints", "tensorboard")


def open_file(path: str | Path, most: int = LARGEST) -> io.BufferedReader:
    """Open a regular file of at most so many bytes, or raise OSError; links are followed."""
    # Opening a pipe that nobody writes to would wait for ever.
    opener = lambda path, flags: os.open(path, flags | _NO_WAIT)  # noqa: E731
    file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_size <= most:
        return file
    file.close()
    if stat.S_ISREG(about.st_mode):
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def read_file(path: str | Path, most: int) -> bytes:
    """Return the bytes of a file that ``open_file`` opens."""
    with open_file(path, most) as file:
        # Reading up to ``most`` would reserve as much. Files of a kernel claim no size.
        return file.read(os.fstat(file.fileno()).st_size or most)


def check_file(path: str | Path, most: int = LARGEST) -> None:
    """Check a file that a library is to open by its path, as ``open_file`` does."""
    open_file(path, most).close()


def lines_of(file: IO[AnyStr], most: int = DATA) -> Iterator[AnyStr]:
    """Yield the lines of a file, each with its end."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"has a line longer than {most:,}", file.name)
        yield line


def lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield where each line begins, and the line, from the last one on; the rest is not read."""
    end = os.fstat(file.fileno()).st_size
    if not end:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            yield begin, content[begin:end]
            end = begin


def parse_json(text: str | bytes) -> Any:
    """Return JSON that may come from anyone; ValueError where it is none, or nested too deeply.

    A whole number past the range of a float is infinite, as another number is.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= 300 else float(digits)


def text_of(content: bytes) -> str:
    """Return the text of a file in UTF-8, with a byte order mark or not, and any line ends."""
    return plain(content.decode("utf-8-sig"))


def plain(text: str) -> str:
    """Return a text whose lines end as they do in any file that Python reads."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_hidden(path: str | PurePath) -> bool:
    """Whether a path, relative to the root of the data, is no data of the user's.

    A component begins with a dot, as ``.ipynb_checkpoints`` or ``._1.jpg``, or is one of
    ``SYSTEM``.
    """
    return any(part != ".." and _is_hidden(part) for part in PurePath(path).parts)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.casefold() in SYSTEM


def files_below(root: str | Path) -> Iterator[Path]:
    """Yield the files of a folder and its folders, in no order, without hidden ones.

    Links are followed, but not to a folder around them. One that leads nowhere, a pipe and a device
    are yielded, for their reader to name.
    """
    yield from _below(root, {identity(root)})


def _below(folder: str | Path, around: set[Hashable]) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if is_folder(entry):
                inner = identity(entry.path)
                if inner not in around:
                    yield from _below(entry.path, around | {inner})
            else:
                yield Path(entry.path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one; a link to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def identity(path: str | Path) -> Hashable:
    """Return what is equal for all paths and links to one file; of no file, its path."""
    try:
        about = os.stat(path)
    except OSError:
        return str(path)
    # Some file systems have no numbers.
    return (about.st_dev, about.st_ino) if about.st_ino else os.path.realpath(path)


def check_below(folder: str | Path) -> None:
    """Check the files of a folder that a library is to read; links to nowhere are left to it."""
    for path in files_below(folder):
        if path.exists():
            check_file(path, DATA if path.suffix.lower() in _WHOLE else LARGEST)


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file that is whole or as it was; a link of its name is replaced, never followed."""
    with new_path(Path(path)) as partial, open_own(partial, "r+b") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Make an empty ``.NAME.partial`` beside a path, which it becomes unless the context raises."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666))
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def open_own(path: Path, mode: str = "ab") -> IO[bytes]:
    """Open or make a file to append ("ab") or write anywhere ("r+b"); never a link or a pipe."""
    append = os.O_APPEND if mode == "ab" else 0
    flags = os.O_RDWR | os.O_CREAT | append | _NO_LINK | _NO_WAIT | _BINARY
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, mode)


def check_folder(folder: str | Path) -> None:
    """Raise ValueError where the folder of a run holds a link, a pipe or a device."""
    folder = Path(folder)
    below = [Path(place) for name in _FOLDERS for place, _, _ in os.walk(folder / name)]
    for place in (folder, *below):
        if not place.is_dir():
            continue
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise ValueError(
                        f"{entry.path} is a symbolic link: what a run writes there would change "
                        "another file; remove it, or give another folder"
                    )
                if not (entry.is_file() or entry.is_dir()):
                    raise ValueError(f"{entry.path} is neither a file nor a folder: remove it")


def set_aside(folder: Path, names: Iterable[str]) -> str:
    """Rename the files of an earlier run, all by one number, and return the names they have now."""
    there = [path for path in (folder / name for name in names) if path.is_file()]

    def renamed(number: int) -> list[Path]:
        return [path.with_name(f"{path.stem}.{number}{path.suffix}") for path in there]

    kept = next(
        paths for paths in map(renamed, count(1)) if not any(path.exists() for path in paths)
    )
    for path, other in zip(there, kept, strict=True):
        path.rename(other)
    return ", ".join(path.name for path in kept)
