"""Labelled images: digits, noise, folders, tar files and Hugging Face data sets.

A set gives batches (images, labels) as stored: (B, C, S, S) uint8 or float32, and (B,) int64.
``prepare`` turns the images, already on the device, into the model's input: (B, channels, size,
size) float32 with a mean near zero and a variance near one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train.data.images.augment import (
    MEAN,
    STD,
    Augment,
    EvaluationView,
    PixelsToInput,
    TrainingView,
)
from train.data.loader import DataSet, Key

if TYPE_CHECKING:
    from train.data.images.sources import Sources

NAMES = "digits", "synthetic"  # data sets without image files; each has a recipe of its own
KINDS = (
    f"{', '.join(NAMES)}, a folder with one subfolder of images per class, or with such subfolders "
    "in train/ and val/, a folder of tar or parquet files, or hf:NAME for a Hugging Face data set"
)


@dataclass(frozen=True)
class Images:
    """A training set, a held-out set, and the conversion of batches to a model's input."""

    classes: int
    train: DataSet
    held_out: DataSet | None
    prepare: Callable[[Tensor], Tensor]


def about(images: Images, size: int, channels: int, names: list[str] | None) -> dict[str, Any]:
    """Return the description of images to store with the weights, as JSON types.

    Args:
        images: that were trained on.
        size: pixels a side that the model takes.
        channels: number of channels of its input.
        names: names of the classes; None where they have none but their numbers.
    """
    if isinstance(images.prepare, DigitsToInput):
        pixels, mean, std = "digit", [images.prepare.mean], [images.prepare.std]
        mean, std = mean * channels, std * channels
    else:
        pixels = "photograph"
        mean, std = ([MEAN[1]], [STD[1]]) if channels == 1 else (list(MEAN), list(STD))
    of = {"size": size, "channels": channels, "mean": mean, "std": std, "pixels": pixels}
    return {
        "task": "images",
        "images": of,
        "classes": names or [str(number) for number in range(images.classes)],
    }


def open_images(
    name: str,
    *,
    size: int,
    channels: int,
    seed: int,
    augment: Augment | None = None,
    sources: "Sources | None" = None,
) -> Images:
    """Open a data set by name, for a model of ``size`` x ``size`` images.

    Args:
        name: name of ``NAMES``, or as ``sources.find_images`` takes it.
        size: pixels a side that the model takes.
        channels: 1 or 3.
        seed: seed of the augmentation.
        augment: what else to do to training images that are files.
        sources: of ``find_images``, where it was called before.

    Returns:
        The data set.

    Raises:
        ValueError: no such data set, or one that is not laid out as it must be.
    """
    if name in NAMES and augment not in (None, Augment()):
        raise ValueError(
            f"--data {name} supports no augmentation by --recipe, --crop, --flip, --rand-augment "
            "or --erase: give --crop 0.08 --flip --rand-augment none --erase 0"
        )
    if name == "digits":
        return Images(10, *open_digits(size, channels, seed))
    if name == "synthetic":
        noise = NoiseImages(size, channels)
        return Images(NoiseImages.CLASSES, noise, None, PixelsToInput(channels))
    if channels not in (1, 3):
        raise ValueError(f"--in-chans must be 1 or 3 for image files, got {channels}")
    # Imported late: a run on bundled images needs no code to find and decode files.
    from train.data.images.photographs import Photographs
    from train.data.images.sources import find_images

    sources = sources or find_images(name)
    augment = augment or Augment()
    views = (TrainingView(size, augment), seed), (EvaluationView(size), None)
    both = zip((sources.train, sources.held_out), views)
    train, held_out = (Photographs(source, *view) for source, view in both)
    return Images(sources.classes, train, held_out, PixelsToInput(channels))


class Digits:
    """8 x 8 grey digits in [0, 1], shifted slightly if a seed is given."""

    ROTATE, SCALE, SHIFT = 0.15, 0.08, 0.6  # at most: radians, relative, pixels

    def __init__(self, images: Tensor, labels: Tensor, seed: int | None):
        self.images, self.labels, self.seed = images, labels, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        index = torch.tensor([index for _, index in keys], dtype=torch.long)
        images, labels = self.images[index], self.labels[index]
        if self.seed is None:
            return images, labels
        draws = np.array(
            [np.random.default_rng((self.seed, *key)).uniform(-1, 1, 4) for key in keys]
        )
        angle, scale, *shift = torch.from_numpy(draws).float().unbind(1)
        angle, scale = self.ROTATE * angle, 1 + self.SCALE * scale
        cos, sin = angle.cos() * scale, angle.sin() * scale
        # affine_grid's coordinates run from -1 to 1 over 8 pixels: a quarter is one pixel.
        dx, dy = (self.SHIFT * s / 4 for s in shift)
        theta = torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False), labels


@dataclass(frozen=True)
class DigitsToInput:
    """Standardise, enlarge and repeat grey 8 x 8 images until they fit the model."""

    mean: float
    std: float
    size: int
    channels: int

    def __call__(self, images: Tensor) -> Tensor:
        """Return (B, channels, size, size) of (B, 1, 8, 8)."""
        images = (images - self.mean) / self.std
        if self.size != images.shape[-1]:
            images = F.interpolate(images, size=self.size, mode="bilinear", align_corners=False)
        return images.expand(-1, self.channels, -1, -1)


def open_digits(size: int, channels: int, seed: int) -> tuple[Digits, Digits, DigitsToInput]:
    """Open 1,797 digits (UCI, Alpaydin and Kaynak 1998); every fifth of each class is held out."""
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        images = torch.from_numpy(arrays["images"]).unsqueeze(1).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        held_out[torch.nonzero(labels == label)[::5]] = True
    train = Digits(images[~held_out], labels[~held_out], seed)
    prepare = DigitsToInput(train.images.mean().item(), train.images.std().item(), size, channels)
    return train, Digits(images[held_out], labels[held_out], None), prepare


class NoiseImages:
    """As many noise images as ImageNet has images, from a small pool, to measure throughput."""

    LENGTH, CLASSES, POOL = 1_281_167, 1000, 64

    def __init__(self, size: int, channels: int):
        generator = torch.Generator().manual_seed(0)
        shape = (self.POOL, channels, size, size)
        self.pool = torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self.LENGTH

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor]:
        index = torch.tensor([index for _, index in keys], dtype=torch.long)
        return self.pool[index % self.POOL], index % self.CLASSES
