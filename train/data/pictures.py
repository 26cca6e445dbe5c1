"""Decode pictures as in training, from untrusted files."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Endings of the names of images, in lower case.
PICTURES = (
    *(".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)
# Formats of photographs. Not all that Pillow reads: for EPS it would start Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# An image with a single row of pixels would fill the memory when it is enlarged.
MAX_UNEQUAL = 100  # largest ratio of the longer side to the shorter


def opened(content: bytes, name: Callable[[], str]) -> Any:
    """Return the PIL image of a file's bytes, reading only the header.

    If the file is not an image, raise a ValueError with the result of ``name()``, here and below.
    """
    from PIL import Image

    # Pillow warns of images with half the pixels that it refuses, and of malformed EXIF data.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with _named(content, name):
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if max(image.size) > MAX_UNEQUAL * min(image.size):
            raise ValueError(
                f"its longer side must be at most {MAX_UNEQUAL} times the shorter, got "
                f"{image.width} x {image.height} pixels"
            )
        return image


def decoded(image: Any, name: Callable[[], str]) -> Any:
    """Return an opened image in RGB, on white, rotated according to its EXIF data."""
    from PIL import Image

    with _named(b"", name), image:
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise ValueError(f"its pixels are of mode {image.mode}: save them with 8 bits a colour")
        pixels = image
        if image.has_transparency_data:
            pixels = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
            pixels = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
        return upright(image, pixels.convert("RGB"))


@contextmanager
def _named(content: bytes, name: Callable[[], str]) -> Iterator[None]:
    from PIL import UnidentifiedImageError

    try:
        yield
        return
    except UnidentifiedImageError:
        # Pillow's own message has a memory address, which always differs.
        cause = f"{len(content):,} bytes in none of the formats {', '.join(FORMATS)}"
    except Exception as error:  # Pillow's readers raise nearly any exception for damaged files
        cause = str(error) or type(error).__name__
    raise ValueError(f"--data holds {name()}, which is not a readable image: {cause}")


def upright(image: Any, pixels: Any) -> Any:
    """Rotate and mirror pixels according to the EXIF data of their image."""
    turn = turn_of(image)
    return pixels if turn is None else pixels.transpose(turn)


# The ``PIL.Image.Transpose`` of the EXIF orientations from 2 on.
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"


def turn_of(image: Any) -> Any:
    """Return Pillow's name for the rotation and mirroring in an image's EXIF data, or None."""
    from PIL import ExifTags, Image

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow raises nearly any exception for malformed EXIF data
        return None
    turns = dict(enumerate(_TURNS.split(), start=2))
    return Image.Transpose[turns[orientation]] if orientation in turns else None
