"""Labelled images: handwritten digits, noise, a folder, tar files, Hugging Face's datasets.

A set gives batches (images, labels) as stored: (B, C, S, S) uint8 or float32, and (B,) int64.
``prepare`` turns the images, already on the device, into what the model takes: (B, channels, size,
size) float32 of about zero mean and unit variance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from train.data.images import hub
from train.data.images.augment import Augment, PixelsToInput, evaluation_view, training_view
from train.data.images.bundled import NoiseImages, open_digits
from train.data.images.photographs import ImageFolderSource, Photographs, StreamedPhotographs
from train.data.loader import DataSet, StreamedDataSet

NAMES = "digits", "synthetic"  # sets that are no image files; each has a recipe of its own
KINDS = (
    f"{', '.join(NAMES)}, a folder with train/ and val/ or with train-*.tar and val-*.tar inside, "
    "hf:NAME or hf-stream:NAME"
)


@dataclass(frozen=True)
class Images:
    """A training set, what is held out from it, and how a batch becomes a model's input."""

    name: str
    classes: int
    train: DataSet | StreamedDataSet
    held_out: DataSet | StreamedDataSet | None
    prepare: Callable[[Tensor], Tensor]


def open_images(
    name: str, *, size: int, channels: int, seed: int, augment: Augment | None = None
) -> Images:
    """Open a data set by name, for a model of ``size`` x ``size`` images.

    Args:
        name: of ``NAMES``, a folder, "hf:" or "hf-stream:" and a data set of Hugging Face.
        size: pixels a side that the model takes.
        channels: 1 or 3.
        seed: of the augmentation.
        augment: what else to do to training images that are files.

    Returns:
        The data set.

    Raises:
        ValueError: no such data set, or one that is not laid out as it must be.
    """
    if name in NAMES and augment not in (None, Augment()):
        raise ValueError(
            f"--data {name} is no image files, which --recipe, --rand-augment or --erase would "
            "change: give --rand-augment none --erase 0"
        )
    if name == "digits":
        return Images(name, 10, *open_digits(size, channels, seed))
    if name == "synthetic":
        noise = NoiseImages(size, channels)
        return Images(name, NoiseImages.CLASSES, noise, None, PixelsToInput(channels))
    if name in ("hf:", "hf-stream:"):
        raise ValueError(f"--data must be {KINDS}, got {name!r}")
    views = (training_view(size, augment or Augment()), seed), (evaluation_view(size), None)
    photographs = Photographs
    if name.startswith("hf:") or any(Path(name).glob("*.tar")):
        *sources, classes = hub.open_tables(name.removeprefix("hf:"))
    elif name.startswith("hf-stream:"):
        *sources, classes = hub.open_streams(name.removeprefix("hf-stream:"), seed)
        photographs = StreamedPhotographs
    elif Path(name).is_dir():
        sources, classes = _open_folder(Path(name))
    else:
        raise ValueError(f"--data must be {KINDS}, got {name!r}")
    train, held_out = (photographs(source, *view) for source, view in zip(sources, views))
    return Images(name, classes, train, held_out, PixelsToInput(channels))


def _open_folder(root: Path) -> tuple[list[ImageFolderSource], int]:
    missing = [part for part in ("train", "val") if not (root / part).is_dir()]
    if missing:
        raise ValueError(f"--data {root} must hold train/ and val/, found no {missing[0]}/")
    train, held_out = ImageFolderSource(root / "train"), ImageFolderSource(root / "val")
    if train.classes != held_out.classes:
        unmatched = sorted(set(train.classes) ^ set(held_out.classes))[0]
        raise ValueError(
            f"--data {root} must have the same classes in train/ and val/, not {unmatched}"
        )
    return [train, held_out], len(train.classes)
