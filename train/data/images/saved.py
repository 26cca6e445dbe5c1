"""How a picture becomes the input of a trained model, as kept with its weights."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from leaner_kernels.monitor.files import decode
from train.data.images import Images
from train.data.images.augment import MEAN, STD, EvaluationView
from train.data.images.bundled import DigitsToInput
from train.data.images.photographs import Pixels

if TYPE_CHECKING:
    from train.checkpoint.weights import Info


def about(images: Images, size: int, channels: int, names: list[str] | None) -> dict[str, Any]:
    """Return what to keep of images with the weights, as JSON types.

    Args:
        images: that were trained on.
        size: pixels a side that the model takes.
        channels: of its input.
        names: of the classes; None where they have none but their numbers.
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


def picture(info: "Info", content: bytes, name: str) -> Tensor:
    """Return what a model takes of one picture: (channels, image_size, image_size) float32.

    A photograph is resized and cut as held-out ones are. A digit is taken as grey, 8 x 8 pixels,
    light on dark.

    Args:
        info: of the model.
        content: of the picture's file.
        name: of it, for a message.

    Raises:
        ValueError: it is no picture.
    """
    if info.pixels == "digit":
        image = decode(content, lambda: name)
        grey = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32) / 255
        prepare = DigitsToInput(info.mean[0], info.std[0], info.image_size, info.channels)
        return prepare(torch.from_numpy(grey)[None, None])[0]
    pixels = Pixels(EvaluationView(info.image_size))(content, lambda: name).float() / 255
    if info.channels == 1:
        pixels = pixels.mean(0, keepdim=True)
    mean, std = (torch.tensor(of).view(-1, 1, 1) for of in (info.mean, info.std))
    return (pixels - mean) / std
