"""Labelled images: scikit-learn's digits, noise, or a folder.

A set gives batches (images, labels) as stored: (B, C, S, S) uint8 or float32, and (B,) int64.
``prepare`` turns the images, already on the device, into what the model takes: (B, channels, size,
size) float32 of about zero mean and unit variance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train.data import DataSet, Key, seed_of

Batch = tuple[Tensor, Tensor]

# Of ImageNet's pixels, as everywhere.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """A training set, what is held out from it, and how a batch becomes a model's input."""

    name: str
    classes: int
    train: DataSet
    held_out: DataSet | None
    prepare: Callable[[Tensor], Tensor]


def open_images(name: str, *, size: int, channels: int, seed: int) -> Images:
    """Open a data set by name, for a model of ``size`` x ``size`` images.

    Args:
        name: "digits", "synthetic", or the path of a folder.
        size: pixels a side that the model takes.
        channels: 1 or 3.
        seed: of the augmentation.

    Returns:
        The data set.

    Raises:
        ValueError: no such data set, or a folder that is not laid out as ``train/CLASS/IMAGE`` and
            ``val/CLASS/IMAGE``.
    """
    if name == "digits":
        return _open_digits(size, channels, seed)
    if name == "synthetic":
        noise = _Noise(size, channels)
        return Images(name, _Noise.CLASSES, noise, None, _PixelsToInput(channels))
    if Path(name).is_dir():
        return _open_folder(Path(name), size, channels, seed)
    raise ValueError(
        f"--data must be digits, synthetic, or a folder with train/ and val/ inside, got {name!r}"
    )


# Digits


class _Digits:
    """8 x 8 grey digits in [0, 1], moved a little when a seed is given."""

    ROTATE, SCALE, SHIFT = 0.15, 0.08, 0.6  # at most: radians, relative, pixels

    def __init__(self, images: Tensor, labels: Tensor, seed: int | None):
        self.images, self.labels, self.seed = images, labels, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
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
class _DigitsToInput:
    """Standardise, enlarge and repeat grey 8 x 8 images until they fit the model."""

    mean: float
    std: float
    size: int
    channels: int

    def __call__(self, images: Tensor) -> Tensor:
        images = (images - self.mean) / self.std
        if self.size != images.shape[-1]:
            images = F.interpolate(images, size=self.size, mode="bilinear", align_corners=False)
        return images.expand(-1, self.channels, -1, -1)


def _open_digits(size: int, channels: int, seed: int) -> Images:
    """1,797 digits (UCI, Alpaydin and Kaynak 1998): every fifth of each class is held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        held_out[torch.nonzero(labels == label)[::5]] = True
    train = _Digits(images[~held_out], labels[~held_out], seed)
    prepare = _DigitsToInput(train.images.mean().item(), train.images.std().item(), size, channels)
    return Images("digits", 10, train, _Digits(images[held_out], labels[held_out], None), prepare)


# Noise


class _Noise:
    """As many images as ImageNet has, all from a small pool of noise: for throughput."""

    LENGTH, CLASSES, POOL = 1_281_167, 1000, 64

    def __init__(self, size: int, channels: int):
        generator = torch.Generator().manual_seed(0)
        shape = (self.POOL, channels, size, size)
        self.pool = torch.randint(256, shape, dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self.LENGTH

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        index = torch.tensor([index for _, index in keys], dtype=torch.long)
        return self.pool[index % self.POOL], index % self.CLASSES


# A folder


class _Folder:
    """Images of a folder, cropped to (3, size, size) uint8; at random when a seed is given."""

    def __init__(self, root: Path, size: int, seed: int | None):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        try:
            self.files = ImageFolder(root)
        except FileNotFoundError as error:
            raise ValueError(f"--data must hold {root.name}/CLASS/IMAGE, got {error}") from None
        self.classes, self.seed = self.files.classes, seed
        if seed is None:
            # The centre, at the usual 224 of 256 pixels.
            crop = [v2.Resize(size * 256 // 224), v2.CenterCrop(size)]
        else:
            crop = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        self.crop = v2.Compose([*crop, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        images, labels = zip(*(self._item(*key) for key in keys))
        return torch.stack(images), torch.tensor(labels)

    def _item(self, epoch: int, index: int) -> tuple[Tensor, int]:
        path, label = self.files.samples[index]
        try:
            image = self.files.loader(path)
        except OSError as error:
            raise ValueError(f"--data holds {path}, which is no readable image: {error}") from None
        # torchvision draws from the global generator: lend it a seed, then put its state back.
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed_of(self.seed or 0, epoch, index))
            return self.crop(image), label


@dataclass(frozen=True)
class _PixelsToInput:
    """Standardise uint8 pixels, and turn them grey for a model of one channel."""

    channels: int

    def __call__(self, images: Tensor) -> Tensor:
        images = images.float().div_(255)
        if self.channels == 1:
            return (images.mean(1, keepdim=True) - _MEAN[1]) / _STD[1]
        mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (_MEAN, _STD))
        return images.sub_(mean).div_(std)


def _open_folder(root: Path, size: int, channels: int, seed: int) -> Images:
    missing = [part for part in ("train", "val") if not (root / part).is_dir()]
    if missing:
        raise ValueError(f"--data {root} must hold train/ and val/, found no {missing[0]}/")
    train, held_out = _Folder(root / "train", size, seed), _Folder(root / "val", size, None)
    if train.classes != held_out.classes:
        odd = sorted(set(train.classes) ^ set(held_out.classes))[0]
        raise ValueError(f"--data {root} must have the same classes in train/ and val/, not {odd}")
    return Images(str(root), len(train.classes), train, held_out, _PixelsToInput(channels))
