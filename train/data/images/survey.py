"""What a data set of image files is like, and what is held out where nothing is."""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leaner_kernels.monitor.pictures import decode

# Of each class, where the data set has no split for it.
SHARE = 0.15
# Images that are looked at.
SAMPLE = 32


class Part:
    """Some images of a source.

    Args:
        source: of the images, with the class of each as ``labels``.
        indices: of those that are in it.
    """

    def __init__(self, source: Any, indices: Sequence[int]):
        self.source, self.indices = source, np.asarray(indices)
        self.labels = np.asarray(source.labels)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        """Return which image this is."""
        return self.source.name(self.indices[index])


def split(source: Any) -> tuple[Part, Part]:
    """Divide a source into images to train on and images held out, of each class alike.

    It depends on the classes of the images in their order alone, not on ``--seed``: so it is the
    same on every rank, after a resume, and in runs that are to be compared. All items of one
    content, such as copies of a file or the rows of a CSV that repeats it, are on the same side.

    Raises:
        ValueError: no class has two images, or one file has two classes.
    """
    labels = np.asarray(source.labels)
    files = source.files() if hasattr(source, "files") else range(len(labels))
    firsts: dict[Hashable, int] = {}
    first = np.array([firsts.setdefault(file, index) for index, file in enumerate(files)], int)
    once = np.unique(first)
    draw = np.random.default_rng(0)
    held_out: list[int] = []
    for label in np.unique(labels):
        images = draw.permutation(once[labels[once] == label]).tolist()
        count = max(1, round(SHARE * len(images))) if len(images) > 1 else 0
        held_out += images[:count]
    if not held_out:
        raise ValueError("--data must have two images of a class, to hold one out")
    apart = np.isin(first, held_out)
    return Part(source, np.flatnonzero(~apart)), Part(source, np.flatnonzero(apart))


@dataclass(frozen=True)
class Survey:
    """What training images are like.

    Attributes:
        count: how many there are.
        side: median of the shorter sides of a sample, in pixels; None of a stream.
        grey: no image of the sample has colours.
    """

    count: int
    side: int | None = None
    grey: bool = False


def survey(source: Any) -> Survey:
    """Look at a sample of the training images.

    Raises:
        ValueError, OSError: none of the sample can be read; names the first.
    """
    if not hasattr(source, "read"):
        return Survey(len(source))
    sides, coloured, errors = [], False, []
    for index in dict.fromkeys(np.linspace(0, len(source) - 1, SAMPLE).astype(int).tolist()):
        try:
            content, _ = source.read(index)
            image = decode(content, lambda index=index: source.name(index))
        except (ValueError, OSError) as error:
            errors.append(error)
            continue
        sides.append(min(image.size))
        if not coloured:
            red, green, blue = image.split()
            coloured = red.tobytes() != green.tobytes() or red.tobytes() != blue.tobytes()
    if not sides:
        raise errors[0]
    return Survey(len(source), round(statistics.median(sides)), not coloured)


def patch_of(side: int) -> int:
    """Return the largest patch, of 2 to 16 pixels, of which seven fit beside one another."""
    return next((patch for patch in (16, 8, 4) if side >= 7 * patch), 2)
