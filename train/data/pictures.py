"""Pictures: decoded as in training, whoever made the file."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of names of images, in small letters.
PICTURES = (
    *(".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)
# What photographs are kept in. Not all that Pillow reads: for EPS it would start Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# An image of one row of pixels would fill the memory once its shorter side is enlarged.
MAX_UNEQUAL = 100  # longer side, in shorter sides


def opened(content: bytes, name: Callable[[], str]) -> Any:
    """Return the PIL image of the bytes of a file, of which only the header is read.

    What is no image is a ValueError, whose message has what ``name()`` returns; so it is below.
    """
    from PIL import Image

    # Of images of half as many pixels as are refused, and of EXIF data that make no sense.
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
    """Return an opened image in RGB, on white, turned as its EXIF data say."""
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
        # Pillow's own message has an address, which differs each time.
        cause = f"{len(content):,} bytes in none of the formats {', '.join(FORMATS)}"
    except Exception as error:  # damaged files make Pillow's readers raise nearly anything
        cause = str(error) or type(error).__name__
    raise ValueError(f"--data holds {name()}, which is not a readable image: {cause}")


def upright(image: Any, pixels: Any) -> Any:
    """Turn and mirror pixels as the EXIF data of their image say."""
    turn = turn_of(image)
    return pixels if turn is None else pixels.transpose(turn)


# Of the EXIF orientations from 2 on, ``PIL.Image.Transpose``.
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"


def turn_of(image: Any) -> Any:
    """Return how the EXIF data of an image turn and mirror it, as Pillow calls it; None for not."""
    from PIL import ExifTags, Image

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # of EXIF data that make no sense Pillow raises nearly anything
        return None
    turns = dict(enumerate(_TURNS.split(), start=2))
    return Image.Transpose[turns[orientation]] if orientation in turns else None
