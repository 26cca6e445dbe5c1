"""Convert a picture to the input of a trained model, as its weights describe."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from train.data.images import DigitsToInput
from train.data.images.augment import EvaluationView
from train.data.images.photographs import pixels_of
from train.data.pictures import decoded, opened

if TYPE_CHECKING:
    from train.checkpoint.weights import Info


def model_input(info: "Info", content: bytes, name: Callable[[], str]) -> Tensor:
    """Return one picture as a model's input, (channels, image_size, image_size) float32.

    A photograph is resized and cropped like held-out ones. A digit is taken as grey, 8 x 8 pixels,
    light on dark.

    Args:
        info: of the model.
        content: bytes of the picture's file.
        name: returns which picture it is, for a message.

    Raises:
        ValueError: it is no picture.
    """
    if info.pixels == "digit":
        image = decoded(opened(content, name), name)
        grey = np.asarray(image.convert("L").resize((8, 8)), dtype=np.float32) / 255
        prepare = DigitsToInput(info.mean[0], info.std[0], info.image_size, info.channels)
        return prepare(torch.from_numpy(grey)[None, None])[0]
    pixels = pixels_of(content, name, EvaluationView(info.image_size)).float() / 255
    if info.channels == 1:
        pixels = pixels.mean(0, keepdim=True)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    return (pixels - mean) / std
