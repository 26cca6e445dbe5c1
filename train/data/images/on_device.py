"""RandAugment and erasing of a batch on its device, each picture with its own draws.

What is drawn, and from what, is the same as for pictures that data workers change. An operation is
done once for all pictures of a batch that it fell to. Draws are made on the host and sent in pinned
memory, so that nothing waits for the device.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train.data.images.augment import (
    MEAN,
    STD,
    Augment,
    RandAugment,
    channels,
    erased_box,
    seeded,
)

# What happens to (B, 3, S, S) uint8 by one argument of each picture, (B, 1, 1, 1) float32.
Change = Callable[[Tensor, Tensor], Tensor]


class OnDevice:
    """Change the pictures of a batch.

    Args:
        augment: its ``rand_augment`` and ``erase`` are done.
        size: pixels a side.

    Raises:
        ValueError: a policy that timm does not know, or with an operation that is not here.
    """

    def __init__(self, augment: Augment, size: int):
        policy, self.erase = augment.rand_augment, augment.erase
        self.rand_augment = None if policy is None else RandAugment(policy, size)
        for op in self.rand_augment.ops if self.rand_augment else ():
            if _name(op) not in {*_CHANGES, *_MATRICES}:
                raise ValueError(f"--augment-on device has no {op.name}, of {policy}")

    def __call__(self, images: Tensor, seed: int) -> Tensor:
        """Return (B, 3, S, S) uint8 of the same, which are left as they are."""
        with seeded(seed):
            pictures = range(len(images))
            drawn = [self.rand_augment.draw() if self.rand_augment else [] for _ in pictures]
            size = images.shape[-1]
            boxes = [erased_box(size) if random.random() < self.erase else None for _ in drawn]
            noise_seed = random.getrandbits(63)
            groups = [*_grouped(drawn, size)]
        erased = [number for number, box in enumerate(boxes) if box is not None]
        groups.append(("erase", erased, [list(box[:4]) for box in boxes if box is not None]))
        images = images.clone()
        numbers = _sent([n for _, of, _ in groups for n in of], torch.int64, images.device)
        arguments = _sent(
            [value for *_, of in groups for row in of for value in row],
            torch.float32,
            images.device,
        )
        first = start = 0
        for name, of, rows in groups:
            if not of:
                continue
            width = len(rows[0])
            places = numbers[first : first + len(of)]
            values = arguments[start : start + width * len(of)].view(len(of), width)
            first, start = first + len(of), start + width * len(of)
            chosen = images.index_select(0, places)
            if name == "erase":
                chosen = _erased(chosen, values, noise_seed)
            elif name in _CHANGES:
                chosen = _CHANGES[name](chosen, values.view(-1, 1, 1, 1) if width else values)
            else:
                chosen = _moved(chosen, values, name)
            images.index_copy_(0, places, chosen)
        return images


def _grouped(
    drawn: list[list[tuple[Any, tuple]]], size: int
) -> Iterator[tuple[str, list[int], list[list[float]]]]:
    """Yield the operations of a batch in order: a name, which pictures, and each one's arguments.

    What moves pixels is named for how it interpolates, and has a matrix as its arguments.
    """
    for layer in range(max(map(len, drawn), default=0)):
        groups: dict[str, tuple[list[int], list[list[float]]]] = {}
        for number, ops in enumerate(drawn):
            if layer < len(ops):
                op, arguments = ops[layer]
                name, row = _name(op), list(arguments)
                if name in _MATRICES:
                    row = _MATRICES[name](*arguments, size)
                    name = random.choice(op.kwargs["resample"]).name.lower()
                numbers, rows = groups.setdefault(name, ([], []))
                numbers.append(number)
                rows.append(row)
        for name, (numbers, rows) in groups.items():
            yield name, numbers, rows


def _name(op: Any) -> str:
    return op.aug_fn.__name__


def _sent(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _rotation(degrees: float, size: int) -> list[float]:
    cos, sin = math.cos(math.radians(degrees)), -math.sin(math.radians(degrees))
    centre = size / 2
    return [cos, sin, centre * (1 - cos - sin), -sin, cos, centre * (1 + sin - cos)]


# Where the pixels of a picture come from, as Pillow has it: x' = ax + by + c, y' = dx + ey + f.
_MATRICES: dict[str, Callable[..., list[float]]] = {
    "rotate": _rotation,
    "shear_x": lambda factor, size: [1, factor, 0, 0, 1, 0],
    "shear_y": lambda factor, size: [1, 0, 0, factor, 1, 0],
    "translate_x_rel": lambda share, size: [1, 0, share * size, 0, 1, 0],
    "translate_y_rel": lambda share, size: [1, 0, 0, 0, 1, share * size],
}


def _moved(images: Tensor, matrices: Tensor, mode: str) -> Tensor:
    """Move pixels by a matrix of each picture; show the mean colour where none comes from."""
    size = images.shape[-1]
    centres = torch.arange(size, device=images.device) + 0.5
    a, b, c, d, e, f = matrices.view(-1, 6, 1, 1).unbind(1)
    x = a * centres + b * centres[:, None] + c
    y = d * centres + e * centres[:, None] + f
    inside = ((x >= 0) & (x < size) & (y >= 0) & (y < size)).unsqueeze(1)
    grid = torch.stack([x, y], -1) * (2 / size) - 1
    moved = F.grid_sample(
        images.float(), grid, mode=mode, padding_mode="border", align_corners=False
    )
    fill = (255 * channels(MEAN, images.device)).round()
    return _pixels(torch.where(inside, moved, fill))


def _pixels(values: Tensor) -> Tensor:
    # Pillow cuts fractions off.
    return values.clamp(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    return _pixels(other + factors * (images.float() - other))


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.int().unbind(1)
    return (((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).float()).unsqueeze(1)


def _mean_grey(images: Tensor) -> Tensor:
    return (_grey(images).mean((1, 2, 3), keepdim=True) + 0.5).floor()


def _smooth(images: Tensor) -> Tensor:
    weights = torch.full((3, 1, 3, 3), 1 / 13, device=images.device)
    weights[:, :, 1, 1] = 5 / 13
    smooth = images.float()
    smooth[..., 1:-1, 1:-1] = (F.conv2d(smooth, weights, groups=3) + 0.5).floor()
    return smooth


def _equalized(images: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.equalize_image(images)


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    return functional.autocontrast_image(images)


_CHANGES: dict[str, Change] = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalized,
    "invert": lambda images, _: 255 - images,
    "posterize": lambda images, bits: images & (256 - 2 ** (8 - bits)).to(torch.uint8),
    "solarize": lambda images, least: torch.where(images < least, images, 255 - images),
    "solarize_add": lambda images, add: _pixels(images + add * (images < 128)),
    "color": lambda images, factors: _blend(images, _grey(images), factors),
    "desaturate": lambda images, factors: _blend(images, _grey(images), (1 - factors).clamp(0, 1)),
    "contrast": lambda images, factors: _blend(images, _mean_grey(images), factors),
    "brightness": lambda images, factors: _pixels(factors * images),
    "sharpness": lambda images, factors: _blend(images, _smooth(images), factors),
}


def _erased(images: Tensor, boxes: Tensor, seed: int) -> Tensor:
    """Fill a box of each picture with noise of unit variance."""
    generator = torch.Generator(images.device).manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    noise = 255 * (noise * channels(STD, images.device) + channels(MEAN, images.device))
    places = torch.arange(images.shape[-1], device=images.device)
    top, left, height, width = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    inside = (places >= left) & (places < left + width)
    inside = inside & (places[:, None] >= top) & (places[:, None] < top + height)
    return torch.where(inside, _pixels(noise.round()), images)
