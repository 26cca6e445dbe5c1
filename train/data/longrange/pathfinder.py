"""Pathfinder-style images: do two discs lie on the same of two dashed contours?

Two contours of 14 dashes start near each other and wander over 32 x 32 pixels, among 5 distractors
of 4 dashes. Discs mark the start of one and the end of the same one (class 1) or of the other
(class 0). Numbers and lengths are those of drewlinsley/pathfinder with the Long-Range Arena's
settings of its hardest set, and a dash turns as there, with the squared cosine of the angle. The
images are of its kind, not its own, and were not compared with published ones. On purpose
different: classes alternate, so that both are as frequent; dashes lie between pixels; what a dash
would touch is drawn again, not made less likely; distractors keep off the last dash of both
contours, not of the second alone.

Image i of a split is a function of (seed, split, i) alone.

Source: Linsley et al. 2018 (arXiv:1805.08315); google-research/long-range-arena, data/.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context

import numpy as np
from PIL import Image, ImageDraw

from train.data.longrange.corpus import SPLITS, Corpus

SIZES = {"train": 160_000, "dev": 20_000, "test": 20_000}
SIZE = 32
CLASSES = 2

_DASHES, _DISTRACTOR_DASHES, _DISTRACTORS = 14, 4, 5
_LENGTH, _MARGIN = 2, 1  # of a dash, and of the gap before and after it; pixels
_ALONG = np.linspace(_MARGIN, _MARGIN + _LENGTH, 4)
_KEPT_FREE = 1.0  # from a dash to another; pixels
_APART = 7  # between the starts of the contours
_EDGE = 1  # pixels around the image that stay empty
_RADIUS = 1.5  # of a disc
_FINER = 2  # so many pixels per pixel are drawn, then made smaller
_CONTRAST, _DISTRACTOR_CONTRAST = 1.5, 2.0
_TRIES = 50  # to place one dash
_DISTRACTOR_TRIES = 5
_FEW = 512  # images that are not worth starting processes


# Places are complex, x + iy in pixels. A dash is some places from its start to its end, (4,).
Contour = list[np.ndarray]


@dataclass(frozen=True)
class Drawing:
    """An image and what it hides.

    Attributes:
        image: (SIZE, SIZE) uint8.
        contours: the ink of each of the two contours alone, (2, SIZE, SIZE) float64.
        discs: (row, column) of the two discs.
    """

    image: np.ndarray
    contours: np.ndarray
    discs: list[tuple[int, int]]


def generate(seed: int, sizes: dict[str, int], processes: int | None = None) -> dict[str, Corpus]:
    """Return images by split, each a sequence of pixels row by row, labelled 1 or 0.

    Args:
        seed: of everything.
        sizes: images of "train", "dev" and "test".
        processes: as many as cores when omitted, for more than a few images.
    """
    if processes is None and sum(sizes.values()) <= _FEW:
        processes = 1
    # A copy of a process whose threads talk to a GPU or to other ranks may hang: start new ones.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        corpora = {}
        for number, split in enumerate(SPLITS):
            pixels, indices = partial(_pixels, seed, number), range(sizes[split])
            if processes == 1:
                images: Iterable[np.ndarray] = map(pixels, indices)
            else:
                images = pool.map(pixels, indices, chunksize=32)
            corpora[split] = Corpus.of(images, [index % CLASSES for index in indices])
    return corpora


def _pixels(seed: int, split: int, index: int) -> np.ndarray:
    return draw(np.random.default_rng((seed, split, index)), index % CLASSES).image.ravel()


def draw(rng: np.random.Generator, label: int, distractors: int = _DISTRACTORS) -> Drawing:
    """Return an image whose discs lie on the same contour (label 1) or not (label 0)."""
    grown = None
    while grown is None:
        grown = _grow(rng, _two_starts(rng), _DASHES, np.zeros(0, complex))
    contours, taken = grown
    others: Contour = []
    for _ in range(distractors):
        for _ in range(_DISTRACTOR_TRIES):
            first = _free(_dashes(_places(rng, SIZE), _directions(rng)), taken)
            grown = None if first is None else _grow(rng, [first], _DISTRACTOR_DASHES, taken)
            if grown is not None:
                (distractor,), taken = grown
                others += distractor
                break
    start = int(rng.integers(2))
    marks = contours[start][0][0], contours[start if label else 1 - start][-1][-1]
    inks = np.stack([_CONTRAST * _ink(contour) for contour in contours])
    ink = np.maximum(inks.max(axis=0), _DISTRACTOR_CONTRAST * _ink(others))
    marked = np.maximum(ink, _ink([], discs=marks))
    # As the original's way of saving does: from black to the brightest pixel.
    image = (marked * (255 / marked.max()) + 0.5).astype(np.uint8)
    return Drawing(image, inks, [(int(mark.imag), int(mark.real)) for mark in marks])


def _places(rng: np.random.Generator, side: float) -> np.ndarray:
    """Return places in a square in the middle of the image, (tries,)."""
    x, y = SIZE / 2 + side * (rng.random((2, _TRIES)) - 0.5)
    return x + 1j * y


def _directions(rng: np.random.Generator) -> np.ndarray:
    return np.exp(2j * np.pi * rng.random(_TRIES))


def _dashes(pivots: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Return the dashes that begin a margin after their pivots, (tries, 4)."""
    return pivots[:, None] + directions[:, None] * _ALONG


def _two_starts(rng: np.random.Generator) -> Contour:
    """Return the first dashes of both contours."""
    first = _places(rng, SIZE - 4 * _APART)[0]
    pivots = np.array([first, first + _APART * _directions(rng)[0]])
    return list(_dashes(pivots, _directions(rng)[:2]))


def _grow(
    rng: np.random.Generator, starts: Contour, length: int, taken: np.ndarray
) -> tuple[list[Contour], np.ndarray] | None:
    """Return contours of ``length`` dashes from these, and what is taken then.

    They grow in turns; None where one is stuck.
    """
    contours = [[first] for first in starts]
    for _ in range(length - 1):
        for contour in contours:
            last = contour[-1]
            ahead = (last[-1] - last[0]) / _LENGTH
            turns = np.interp(rng.random(_TRIES), *_turns())
            pivots = np.full(_TRIES, last[-1] + _MARGIN * ahead)
            dash = _free(_dashes(pivots, ahead * np.exp(1j * turns)), taken)
            if dash is None:
                return None
            # Late, since a dash may touch its predecessor.
            taken = np.append(taken, last)
            contour.append(dash)
    return contours, np.concatenate([taken, *(contour[-1] for contour in contours)])


@cache
def _turns() -> tuple[np.ndarray, np.ndarray]:
    """Return shares, (181,), and the turns under which these fall: their density is cos squared."""
    turns = np.linspace(-np.pi / 2, np.pi / 2, 181)
    return (turns + np.sin(turns) * np.cos(turns)) / np.pi + 0.5, turns


def _free(dashes: np.ndarray, taken: np.ndarray) -> np.ndarray | None:
    """Return the first of the dashes that is in the image and near nothing; or None."""
    off_centre = np.maximum(abs(dashes.real - SIZE / 2), abs(dashes.imag - SIZE / 2))
    apart = np.abs(dashes[:, :, None] - taken).min(axis=(1, 2), initial=SIZE)
    free = (off_centre.max(axis=1) <= SIZE / 2 - _EDGE) & (apart >= _KEPT_FREE)
    return dashes[free.argmax()] if free.any() else None


def _ink(dashes: Contour, discs: Iterable[complex] = ()) -> np.ndarray:
    """Draw dashes and discs in 0 to 1: fine, and then made smaller."""
    fine = Image.new("L", (SIZE * _FINER, SIZE * _FINER))
    canvas = ImageDraw.Draw(fine)
    for dash in dashes:
        canvas.line([(_FINER * z.real, _FINER * z.imag) for z in (dash[0], dash[-1])], fill=255)
    for disc in discs:
        canvas.circle((_FINER * disc.real, _FINER * disc.imag), _FINER * _RADIUS, fill=255)
    return np.asarray(fine.resize((SIZE, SIZE), Image.Resampling.LANCZOS)) / 255
