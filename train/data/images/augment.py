"""Augment training images, and convert pixels to the model's input.

The changes of an image depend only on the seed, the epoch and the image. Mixing the images of a
batch depends on a seed from the loop. timm draws from Python's global generator and torchvision
from PyTorch's, so these are seeded each time and restored afterwards.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from leaner_kernels.extras import how_to_install

# The usual values of ImageNet's pixels.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augment:
    """The augmentation of a training image.

    Attributes:
        rand_augment: RandAugment as timm writes it, such as ``"rand-m9-mstd0.5"``; or None.
        erase: probability of filling a random box of it with noise.
        crop: smallest part of its area that a crop at random keeps.
        flip: mirror every other one, left to right.
    """

    rand_augment: str | None = None
    erase: float = 0.0
    crop: float = 0.08
    flip: bool = True


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and PyTorch; restore their states at the end."""
    states = random.getstate(), torch.default_generator.get_state()
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.default_generator.set_state(states[1])


class Region(NamedTuple):
    """A box of an image, in pixels; it may be decoded at 1 / ``reduction`` of its size."""

    top: int
    left: int
    height: int
    width: int
    reduction: int = 1


class EvaluationView:
    """Take the centre of an image, (3, size, size) uint8: 224 of 256 pixels.

    Args:
        size: pixels a side.
    """

    def __init__(self, size: int):
        self.size = size

    def region(self, width: int, height: int) -> Region:
        """Return the region of an image to decode: all of it."""
        return Region(0, 0, height, width)

    def __call__(self, pixels: np.ndarray) -> Tensor:
        """Return (3, size, size) uint8 of (H, W, 3) uint8."""
        height, width = pixels.shape[:2]
        side, shorter = self.size * 256 // 224, min(height, width)
        pixels = _resized(pixels, side * height // shorter, side * width // shorter)
        top, left = (round((length - self.size) / 2) for length in pixels.shape[:2])
        return _channels_first(pixels[top : top + self.size, left : left + self.size])


class TrainingView:
    """Cut, resize, mirror and change an image at random, drawing from Python's global generator.

    Args:
        size: pixels a side.
        augment: what is done.

    Raises:
        ValueError: RandAugment that timm does not have, or no timm.
    """

    def __init__(self, size: int, augment: Augment):
        self.size, self.augment = size, augment
        policy, self.erase = augment.rand_augment, augment.erase
        self.rand_augment = None if policy is None else RandAugment(policy, size)

    def region(self, width: int, height: int) -> Region:
        """Draw a crop as torchvision's ``RandomResizedCrop`` does; a large one may be reduced."""
        least, most = 3 / 4, 4 / 3
        crop = _box(width, height, (self.augment.crop, 1.0), (least, most))
        if crop is None:
            cut_width = min(width, round(height * most))
            cut_height = min(height, round(width / least))
            corner = (height - cut_height) // 2, (width - cut_width) // 2
            crop = Region(*corner, cut_height, cut_width)
        fits = (n for n in (8, 4, 2) if min(crop.height, crop.width) >= n * self.size)
        reduction = next(fits, 1)
        # Round to whole pixels of the decoded image.
        return Region(*(place - place % reduction for place in crop[:4]), reduction)

    def __call__(self, pixels: np.ndarray) -> Tensor:
        """Return (3, size, size) uint8 of a crop, (H, W, 3) uint8."""
        pixels = _resized(pixels, self.size, self.size)
        if self.augment.flip and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        if self.rand_augment is not None:
            pixels = self.rand_augment(pixels)
        changed = _channels_first(pixels)
        if random.random() < self.erase:
            _erase(changed)
        return changed


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (H, W, 3) to (height, width, 3) uint8, nearly as Pillow does, but faster."""
    pixels = torch.from_numpy(pixels.reshape(1, *pixels.shape)).permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return pixels[0].permute(1, 2, 0).numpy()


def _channels_first(pixels: np.ndarray) -> Tensor:
    # NumPy does this twice as fast as PyTorch.
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def _box(
    width: int, height: int, shares: tuple[float, float], ratios: tuple[float, float]
) -> Region | None:
    """Draw a box by its share of the area and its aspect ratio; return None if ten do not fit."""
    for _ in range(10):
        area = width * height * random.uniform(*shares)
        ratio = math.exp(random.uniform(*map(math.log, ratios)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top, left = random.randint(0, height - high), random.randint(0, width - wide)
            return Region(top, left, high, wide)
    return None


def _erase(pixels: Tensor) -> None:
    """Fill a random box with noise of unit variance, clipped at about two deviations.

    The box is drawn as torchvision's ``RandomErasing`` does.
    """
    size = pixels.shape[-1]
    box = _box(size, size, (0.02, 0.33), (0.3, 3.3))
    if box is not None:
        noise = np.random.default_rng(random.getrandbits(64)).standard_normal(
            (3, box.height, box.width), np.float32
        )
        mean, std = _channels(MEAN), _channels(STD)
        noise = (255 * (torch.from_numpy(noise) * std + mean)).round_().clamp_(0, 255)
        pixels[:, box.top :, box.left :][:, : box.height, : box.width] = noise.to(torch.uint8)


@cache
def _channels(values: tuple[float, ...], device: torch.device | None = None) -> Tensor:
    """Return values of the channels, (C, 1, 1) float32: made once for each device."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


class RandAugment:
    """Change images by operations of timm, drawn from Python's global generator.

    timm's own ``RandAugment`` draws them from NumPy's generator, which is slow to seed.

    Args:
        policy: as timm writes it, without weights of operations.
        size: pixels a side.

    Raises:
        ValueError: timm does not know the policy, or there is no timm.

    Source: Cubuk et al. 2020 (arXiv:1909.13719), with timm's noise on magnitudes.
    """

    def __init__(self, policy: str, size: int):
        augment = _rand_augment(policy, size)
        self.ops, self.count = augment.ops, augment.num_layers

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Augment (S, S, 3) uint8."""
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(pixels))
        for op in random.choices(self.ops, k=self.count):
            image = op(image)
        return np.asarray(image)


def _rand_augment(policy: str, size: int) -> Any:
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError:
        raise ValueError(
            f"--rand-augment needs the package timm: {how_to_install('timm')}, or give "
            "--rand-augment none"
        ) from None
    # Pixels from outside the picture get the mean colour, as in timm's loader.
    params = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(round(255 * channel) for channel in MEAN),
    }
    try:
        augment = rand_augment_transform(policy, params)
        if augment.choice_weights is not None:
            raise ValueError(policy)
    except (AssertionError, ValueError, KeyError, IndexError):
        raise ValueError(
            "--rand-augment must be none or a policy of timm such as rand-m9-mstd0.5, got "
            f"{policy!r}"
        ) from None
    for op in augment.ops:
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_bits, op.level_fn)
    return augment


def _bits(level_fn: Callable[..., tuple[int]], level: float, hparams: Any) -> tuple[int]:
    """Return how many bits of a channel timm's posterize keeps, at least one.

    At the ends of its range timm asks for 0 or fewer, which Pillow 13 refuses.
    """
    (bits,) = level_fn(level, hparams)
    return (min(max(bits, 1), 8),)


@dataclass(frozen=True)
class Mix:
    """Mix the images of a batch and their labels, by either Mixup or CutMix.

    Attributes:
        classes: number of classes.
        mixup: alpha of Mixup's Beta(alpha, alpha); 0 disables it.
        cutmix: alpha of CutMix's Beta; 0 disables it. With both, each batch uses one of them.

    Source: Zhang et al. 2018 (arXiv:1710.09412); Yun et al. 2019 (arXiv:1905.04899).
    """

    classes: int
    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return the images, (B, C, S, S), and their labels: (B,), or (B, classes) when mixed."""
        from torchvision.transforms import v2

        kinds: Sequence[tuple[type, float]] = ((v2.MixUp, self.mixup), (v2.CutMix, self.cutmix))
        choices = [kind(alpha=alpha, num_classes=self.classes) for kind, alpha in kinds if alpha]
        if not choices:
            return images, labels
        with seeded(seed):
            return v2.RandomChoice(choices)(images, labels)


@dataclass(frozen=True)
class PixelsToInput:
    """Standardise uint8 pixels, and turn them grey for a model of one channel."""

    channels: int

    def __call__(self, images: Tensor) -> Tensor:
        """Return (B, channels, S, S) float32 of (B, 3, S, S) uint8."""
        images = images.float().div_(255)
        if self.channels == 1:
            return (images.mean(1, keepdim=True) - MEAN[1]) / STD[1]
        return images.sub_(_channels(MEAN, images.device)).div_(_channels(STD, images.device))
