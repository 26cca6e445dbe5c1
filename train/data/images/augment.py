"""How images are changed while training, and what becomes of their pixels.

Changes of one image depend on the seed, the epoch and the image alone; mixing images of a batch
depends on the seed that the loop hands over. torchvision and timm draw from the global generators,
so these are lent a seed each time and get their own state back.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of ImageNet's pixels, as everywhere.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augment:
    """What is done to a training image.

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
    """Lend every global generator of the CPU a seed, then put its state back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def least_side(size: int, augment: Augment) -> int:
    """Return the shorter side of an image of which no crop has to be enlarged."""
    return math.ceil(size / math.sqrt(augment.crop))


def training_view(size: int, augment: Augment) -> Callable[[Any], Tensor]:
    """Return what turns a PIL image into (3, size, size) uint8, drawing from global generators.

    Raises:
        ValueError: RandAugment that timm does not have, or no timm.
    """
    from torchvision.transforms import InterpolationMode, v2

    steps = [
        v2.RandomResizedCrop(
            size, scale=(augment.crop, 1.0), interpolation=InterpolationMode.BICUBIC
        ),
        v2.RandomHorizontalFlip(0.5 if augment.flip else 0.0),
    ]
    if augment.rand_augment is not None:
        steps.append(_rand_augment(augment.rand_augment, size))
    steps.append(v2.PILToTensor())
    if augment.erase:
        erase = v2.RandomErasing(p=1, value="random")
        steps.append(v2.RandomApply([_InUnits(erase)], p=augment.erase))
    return v2.Compose(steps)


def evaluation_view(size: int) -> Callable[[Any], Tensor]:
    """Return what turns a PIL image into its centre, (3, size, size) uint8: 224 of 256 pixels."""
    from torchvision.transforms import InterpolationMode, v2

    resize = v2.Resize(size * 256 // 224, interpolation=InterpolationMode.BICUBIC)
    return v2.Compose([resize, v2.CenterCrop(size), v2.PILToTensor()])


def _rand_augment(policy: str, size: int) -> Callable[[Any], Any]:
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError:
        raise ValueError(
            "--rand-augment needs the package timm: pip install timm; none goes without"
        ) from None
    # What moved out of the picture is filled with the mean colour, as timm's loader does.
    params = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(round(255 * channel) for channel in MEAN),
    }
    try:
        augment = rand_augment_transform(policy, params)
    except (AssertionError, ValueError, KeyError, IndexError):
        raise ValueError(
            f"--rand-augment must be none or as timm writes it, rand-m9-mstd0.5, got {policy!r}"
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


class _InUnits(torch.nn.Module):
    """Apply a change of standardised float pixels to uint8 ones.

    Noise of unit variance is cut where pixels end, at about two deviations.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.change = change

    def forward(self, pixels: Tensor) -> Tensor:
        """Return uint8 pixels, (3, S, S)."""
        mean, std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (MEAN, STD))
        changed = self.change((pixels - mean) / std)
        return (changed * std + mean).round_().clamp_(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Mix:
    """Mix the images of a batch, and their labels alike, by Mixup or CutMix, one or the other.

    Attributes:
        classes: number of classes.
        mixup: alpha of Mixup's Beta(alpha, alpha); 0 leaves it out.
        cutmix: alpha of CutMix's; 0 leaves it out. With both, each batch takes one of them.

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
        mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, STD))
        return images.sub_(mean).div_(std)
