"""Pictures: decoded as in training, whoever made the file."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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


def decode(content: bytes, name: Callable[[], str]) -> Any:
    """Return a PIL image in RGB of the bytes of a file, on white, turned as its EXIF data say.

    What is no image is a ValueError, whose message has what ``name()`` returns; so it is below.
    """
    return decoded(opened(content, name), name)


def opened(content: bytes, name: Callable[[], str]) -> Any:
    """Return the PIL image of the bytes of a file, of which only the header is read."""
    with _named(content, name):
        image = _pillow().open(io.BytesIO(content), formats=FORMATS)
        if max(image.size) > MAX_UNEQUAL * min(image.size):
            raise ValueError(f"{image.width} x {image.height} pixels are no photograph")
        return image


def decoded(image: Any, name: Callable[[], str]) -> Any:
    """Return an opened image in RGB, on white, turned as its EXIF data say."""
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

    Its warnings of half as many and of EXIF data that make no sense are silenced.
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
