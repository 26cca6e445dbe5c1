"""Read files that may come from anyone: of bounded size, and none that is no file."""

import errno
import io
import json
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, AnyStr

# Bytes of a file that is read whole: of a picture or a text, and of settings as JSON.
DATA, SETTINGS = 1 << 30, 1 << 26
# Of one that is read piece by piece or mapped, such as weights and tables.
LARGEST = 1 << 40


def open_file(path: str | Path, most: int = LARGEST) -> io.BufferedReader:
    """Open a regular file to read it, its links followed; never a pipe or a device.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be opened, is no regular file, or is larger.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    about = os.fstat(file.fileno())
    if stat.S_ISREG(about.st_mode) and about.st_size <= most:
        return file
    file.close()
    if stat.S_ISREG(about.st_mode):
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", str(path))
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def _without_waiting(path: str, flags: int) -> int:
    # Opening a pipe that nobody writes to would wait for ever.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(path: str | Path, most: int) -> bytes:
    """Return the bytes of a file that ``open_file`` opens.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than ``most``.
    """
    with open_file(path, most) as file:
        # Reading up to ``most`` would reserve as much. Files of a kernel claim no size.
        return file.read(os.fstat(file.fileno()).st_size or most)


def check_file(path: str | Path, most: int = LARGEST) -> None:
    """Check a file that a library is to open by its path, as ``open_file`` does.

    Raises:
        OSError: it cannot be opened, is no regular file, or is larger than ``most``.
    """
    open_file(path, most).close()


def lines_of(file: IO[AnyStr], most: int = DATA) -> Iterator[AnyStr]:
    """Yield the lines of a file, each with its end.

    Raises:
        OSError: one is longer than ``most``, as a hole in a file is.
    """
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"has a line longer than {most:,}", file.name)
        yield line


def lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield where each line of a file begins, and the line with its end, from the last one on.

    Only what is taken is read.
    """
    end = os.fstat(file.fileno()).st_size
    if not end:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            yield begin, content[begin:end]
            end = begin


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
