"""Read files that may come from anyone: of bounded size, and none that is no file."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

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
