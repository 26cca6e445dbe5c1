"""Write the files of a run, in a folder that may come from somebody else.

A link under the name of a file that is about to be written would lead what is written to any other
file of the user's, and a pipe would make the run wait for ever.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Windows has no such flags, and asks for a privilege before it makes a link.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
# Folders that a run makes in its own.
_FOLDERS = ("checkpoints", "tensorboard")


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file that is whole or as it was; a link of its name is replaced, never followed.

    Args:
        path: of the file.
        content: text is written as UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    with new_path(Path(path)) as partial, open_own(partial, "r+b") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_path(path: Path) -> Iterator[Path]:
    """Make an empty file ``.NAME.partial`` beside a path, which it becomes at the end.

    An exception in the context leaves what the path had before.

    Raises:
        OSError: it cannot be made, or not put in place.
    """
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
    """Open a file to change it, made where there is none: never through a link, never a pipe.

    Args:
        path: of the file.
        mode: "ab" to append, "r+b" to write anywhere.

    Raises:
        OSError: it is no file, or cannot be opened.
    """
    append = os.O_APPEND if mode == "ab" else 0
    flags = os.O_RDWR | os.O_CREAT | append | _NO_LINK | _NO_WAIT | _BINARY
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return open(descriptor, mode)


def check_folder(folder: str | Path) -> None:
    """Check that the folder of a run, which is to go on, leads nowhere else.

    Raises:
        ValueError: it, or a folder that a run makes in it, holds a link, a pipe or a device.
        OSError: it cannot be read.
    """
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
