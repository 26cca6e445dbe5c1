"""Data sets of image files, wherever they are kept: read, decode, crop, change."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from leaner_kernels.monitor.files import decode
from train.data.images.augment import seeded
from train.data.loader import Key
from train.data.sampler import seed_of

Batch = tuple[Tensor, Tensor]


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


class _Views:
    """Pixels of files, (3, S, S) uint8: changed at random when a seed is given."""

    def __init__(self, view: Callable[[Any], Tensor], seed: int | None, least: int | None):
        self.view, self.seed, self.least = view, seed, least

    def __call__(self, content: bytes, key: Key, name: Callable[[], str]) -> Tensor:
        image = decode(content, name, self.least)
        try:
            if self.seed is None:
                return self.view(image)
            with seeded(seed_of(self.seed, *key)):
                return self.view(image)
        except (ValueError, OSError) as error:
            # The loader would take these for a picture that cannot be read, and replace it.
            raise RuntimeError(f"{name()} was read, but not changed: {error}") from error


class Photographs:
    """Batches (B, 3, S, S) uint8 and (B,) int64 of the images of a source, by their keys.

    Args:
        source: of the images.
        view: makes (3, S, S) uint8 of a PIL image, drawing from the global generators.
        seed: of what it draws; None where it draws nothing.
        least: as ``decode`` takes it.
    """

    def __init__(
        self,
        source: ImageSource,
        view: Callable[[Any], Tensor],
        seed: int | None,
        least: int | None = None,
    ):
        self.source, self.pixels = source, _Views(view, seed, least)
        # Those of a source that is read soonest in an order of its own.
        self.order, self.lanes = getattr(source, "order", None), getattr(source, "LANES", 1)

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """Return the batch of these images."""
        images, labels = [], []
        for key in keys:
            content, label = self.source.read(key[1])
            images.append(self.pixels(content, key, partial(self.source.name, key[1])))
            labels.append(label)
        return torch.stack(images), torch.tensor(labels)
