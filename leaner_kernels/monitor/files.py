"""Which files are data, and how they are read: the same in training, prediction, measurement."""

import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from .reading import DATA, LARGEST, check_file, open_file

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
# Of names of images, in small letters.
PICTURES = (
    *(".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)
# What photographs are kept in. Not all that Pillow reads: for EPS it would start Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Of files of a saved model, those that libraries read whole.
_WHOLE = (".jinja", ".json", ".md", ".model", ".txt", ".yaml")
# An image of one row of pixels would fill the memory once its shorter side is enlarged.
MAX_UNEQUAL = 100  # longer side, in shorter sides


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

    Links are followed. One that leads nowhere, a pipe and a device are yielded, for their reader to
    name; a link that leads to a folder around it is not.

    Raises:
        OSError: a folder cannot be read.
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
    """Check all files of a folder that a library is to read: regular ones, of bounded size.

    A link that leads nowhere is left to the library.

    Raises:
        OSError: one is another, or cannot be opened.
    """
    for path in files_below(folder):
        if path.exists():
            check_file(path, DATA if path.suffix.lower() in _WHOLE else LARGEST)


def contents(paths: Iterable[str | Path]) -> list[Hashable]:
    """Return what is equal for files of the same bytes, and for all paths and links to one file.

    Files are read only as far as others are like them: of one size, and with the same last bytes.
    """
    paths = list(paths)
    kinds: list[Hashable] = list(map(_size, paths))
    for read in (_end, _digest):
        alike = Counter(kinds)
        kinds = [
            (kind, read(path)) if alike[kind] > 1 else kind for kind, path in zip(kinds, paths)
        ]
    # A file alone of its kind is told from others by its place.
    alike = Counter(kinds)
    return [kind if alike[kind] > 1 else index for index, kind in enumerate(kinds)]


def _size(path: str | Path) -> Hashable:
    try:
        return os.path.getsize(path)
    except OSError:
        return str(path)


def _end(path: str | Path) -> Hashable:
    return _read(
        path, lambda file: (file.seek(max(0, os.path.getsize(path) - 4096)), file.read())[1]
    )


def _digest(path: str | Path) -> Hashable:
    return _read(path, lambda file: hashlib.file_digest(file, "sha256").digest())


def _read(path: str | Path, of: Callable[[io.BufferedReader], Hashable]) -> Hashable:
    try:
        with open_file(path) as file:
            return of(file)
    except OSError:
        return str(path)  # for its reader to name


def text_of(content: bytes) -> str:
    """Return the text of a file: UTF-8, with a byte order mark or not, and any line ends.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return plain(content.decode("utf-8-sig"))


def plain(text: str) -> str:
    """Return a text whose lines end as they do in any file that Python reads."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode(content: bytes, name: Callable[[], str]) -> Any:
    """Return a PIL image in RGB of the bytes of a file, on white, turned as its EXIF data say.

    Args:
        content: of the file.
        name: returns which image this is, for a message.

    Raises:
        ValueError: these are no image.
    """
    return decoded(opened(content, name), name)


def opened(content: bytes, name: Callable[[], str]) -> Any:
    """Return the PIL image of the bytes of a file, of which only the header is read.

    Raises:
        ValueError: these are no image, or one that is too large or too long.
    """
    with _named(content, name):
        image = _pillow().open(io.BytesIO(content), formats=FORMATS)
        if max(image.size) > MAX_UNEQUAL * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are no photograph")
        return image


def decoded(image: Any, name: Callable[[], str]) -> Any:
    """Return an opened image in RGB, on white, turned as its EXIF data say.

    Raises:
        ValueError: its data are damaged.
    """
    with _named(b"", name), image:
        return upright(image, _in_rgb(image))


@contextmanager
def _named(content: bytes, name: Callable[[], str]) -> Iterator[None]:
    from PIL import UnidentifiedImageError

    try:
        yield
        return
    except UnidentifiedImageError:
        # Pillow's own message has an address, which differs each time.
        cause = f"{len(content):,} bytes of none of the formats {', '.join(FORMATS)}"
    except Exception as error:  # damaged files make Pillow's readers raise nearly anything
        cause = str(error) or type(error).__name__
    raise ValueError(f"--data holds {name()}, which is no readable image: {cause}")


@cache
def _pillow() -> Any:
    """Return ``PIL.Image``, which refuses images of 179 million pixels.

    It also warns of half as many, and of EXIF data that make no sense. What cannot be read is named
    by who reads it, and the rest can be.
    """
    from PIL import Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _in_rgb(image: Any) -> Any:
    """Return the pixels as 8 bits a colour; what is transparent shows white behind it."""
    from PIL import Image

    if image.mode in ("I", "F") and image.format not in ("PNG", "PPM"):
        raise ValueError(f"its pixels are of Pillow's mode {image.mode}, whose range is unknown")
    if image.mode.startswith("I"):
        import numpy as np

        # 16 bits; Pillow would cut them off at 255 and leave a white image.
        deep = np.asarray(image)
        clear = deep == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(clear, 255, deep >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, tuple) and max(clear) > 255:
        image.info["transparency"] = tuple(value >> 8 for value in clear)  # of 16 bits, as pixels
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def upright(image: Any, pixels: Any) -> Any:
    """Turn and mirror pixels as the EXIF data of their image say."""
    turn = turn_of(image)
    return pixels if turn is None else pixels.transpose(turn)


def turn_of(image: Any) -> Any:
    """Return how the EXIF data of an image turn and mirror it, as Pillow calls it; None for not."""
    from PIL import ExifTags, Image

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # of EXIF data that make no sense Pillow raises nearly anything
        return None
    return {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation)
