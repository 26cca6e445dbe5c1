"""Data sets of image files: read, decode, crop and augment them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from train.data.images.augment import EvaluationView, Region, TrainingView, seeded
from train.data.loader import Key
from train.data.pictures import decoded, opened, turn_of, upright
from train.data.sampler import seed_of


class ImageSource(Protocol):
    """Images of one split, as files: any of them at any time."""

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class.

        Raises:
            ValueError, OSError: it cannot be read; the message names it.
        """

    def name(self, index: int) -> str:
        """Return which image this is, for a message."""

    def digest(self) -> str:
        """Return what tells these images from others."""


# As Pillow's Transpose: TRANSPOSE, ROTATE_270, TRANSVERSE and ROTATE_90.
_ON_THEIR_SIDE = {5, 4, 6, 2}


View = EvaluationView | TrainingView


def pixels_of(content: bytes, name: Callable[[], str], view: View) -> Tensor:
    """Return a model's pixels of a file's bytes, (3, S, S) uint8.

    Raises:
        ValueError: these are no image.
    """
    image = opened(content, name)
    turned = turn_of(image) in _ON_THEIR_SIDE
    region = view.region(*(image.size[::-1] if turned else image.size))
    pixels = _cut(image, content, name, region)
    try:
        return view(pixels)
    except (ValueError, OSError) as error:
        # The loader would treat these errors as an unreadable picture, and replace it.
        raise RuntimeError(f"{name()} was read, but could not be augmented: {error}") from error


def _cut(image: Any, content: bytes, name: Callable[[], str], region: Region) -> np.ndarray:
    """Return (H, W, 3) uint8 of a region of an opened image."""
    whole, reduction = image.size, region.reduction
    array = _fast(image, content, reduction)
    if array is None:
        if reduction > 1:
            image.draft(None, tuple(side // reduction for side in whole))
        array = np.array(decoded(image, name))
    scale = max(array.shape[:2]) / max(whole)  # less than 1 where it was decoded smaller
    top, left, high, wide = (round(place * scale) for place in region[:4])
    return np.ascontiguousarray(array[top : top + max(high, 1), left : left + max(wide, 1)])


def _fast(image: Any, content: bytes, reduction: int) -> np.ndarray | None:
    """Decode a plain JPEG to (H, W, 3) uint8; return None if Pillow must decode it.

    Both use libjpeg-turbo and give the same pixels; Pillow takes half as long again.
    """
    simplejpeg = _simplejpeg()
    if simplejpeg is None or image.format != "JPEG" or image.mode not in ("L", "RGB"):
        return None
    try:
        # Pillow checked the size in the header; the decoded size must be the same.
        if simplejpeg.decode_jpeg_header(content)[1::-1] != image.size:
            return None
        width, height = (-(-side // reduction) for side in image.size)
        array = simplejpeg.decode_jpeg(content, min_height=height, min_width=width)
    except ValueError:  # more or less damaged, which Pillow distinguishes
        return None
    if turn_of(image) is None:
        return array
    from PIL import Image

    return np.array(upright(image, Image.fromarray(array)))


@cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


class Photographs:
    """Batches (B, 3, S, S) uint8 and (B,) int64 of the images of a source, by their keys.

    Args:
        source: source of the images.
        view: makes their pixels.
        seed: seed of its random draws; None if it draws nothing.
    """

    one_by_one = True

    def __init__(self, source: ImageSource, view: View, seed: int | None):
        self.source, self.view, self.seed = source, view, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        """Return the batch of these images."""
        images, labels = [], []
        for key in keys:
            content, label = self.source.read(key[1])
            with nullcontext() if self.seed is None else seeded(seed_of(self.seed, *key)):
                images.append(pixels_of(content, partial(self.source.name, key[1]), self.view))
            labels.append(label)
        # The loader asks for one image at a time, and copies it once more.
        batch = torch.stack(images) if len(images) > 1 else images[0].unsqueeze(0)
        return batch, torch.tensor(labels)
