"""Images that are always there: handwritten digits, and noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train.data.loader import Key


class Digits:
    """8 x 8 grey digits in [0, 1], moved a little when a seed is given."""

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
    """1,797 digits (UCI, Alpaydin and Kaynak 1998): every fifth of each class is held out."""
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
    """As many images as ImageNet has, all from a small pool of noise: for throughput."""

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
