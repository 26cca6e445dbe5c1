"""A picture as the input of a trained model, by what was kept with its weights."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leaner_kernels.monitor.pictures import decode
from train.data.images import DigitsToInput
from train.data.images.augment import EvaluationView
from train.data.images.photographs import Pixels

if TYPE_CHECKING:
    from train.checkpoint.weights import Info


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
