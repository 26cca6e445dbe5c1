"""Pathfinder-style images: do two discs lie on the same of two dashed contours?

Two contours of 14 dashes start near each other and wander over 32 x 32 pixels, among 5 distractors
of 4 dashes. Discs mark the start of one and the end of the same one (class 1) or of the other
(class 0). The law is that of drewlinsley/pathfinder with the Long-Range Arena's settings of its
hardest set and, as its script has it, no single dashes. It is written anew: the images are of its
kind, not its own, and were not compared with published ones. On purpose different: classes
alternate, so that both are as frequent; distractors keep off the last dash of both contours, not of
the second alone; a free place is tried by the dash itself, where the original's probe is a pixel
off.

Image i of a split is a function of (seed, split, i) alone.

Source: Linsley et al. 2018 (arXiv:1805.08315); google-research/long-range-arena, data/.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, cos, pi, radians, sin
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from train.data.longrange.corpus import SPLITS, Corpus, cached, in_processes

SIZES = {"train": 160_000, "dev": 20_000, "test": 20_000}
SIZE = 32
CLASSES = 2

_DASHES, _DISTRACTOR_DASHES, _DISTRACTORS = 14, 4, 5
_LENGTH, _THICKNESS, _MARGIN = 2, 0.5, 1  # of a dash, and of what is kept free around it; pixels
_APART = 7  # between the starts of the contours
_EDGE = 1  # pixels around the image that stay empty
_RADIUS = 1.5  # of a disc
_FINER = 2  # dashes are drawn with so many pixels per pixel, then made smaller
_CONTRAST, _DISTRACTOR_CONTRAST = 1.5, 2.0
_TRIES = 3  # to place one dash
_DISTRACTOR_TRIES = 5
_CONTINUITY = 1.0  # a dash turns by at most 90 degrees over this
_OVERLAP = 1.8  # sum of two masks above which dashes touch
_FREE = 0.3  # mask up to which a place is free
_LEAST_FREE = 0.01  # share of the image, under which no distractor is begun
_REACH = _LENGTH + ceil(_THICKNESS) + _MARGIN  # of a stamp, from its centre
_CHUNK = 32  # images of one call of a process


Place = tuple[int, int]  # row and column


@dataclass(frozen=True)
class Stamp:
    """One dash from the centre of a small square: its ink, and what must stay free around it."""

    ink: np.ndarray
    mask: np.ndarray
    free: tuple[np.ndarray, np.ndarray]  # offsets that no other mask may cover


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
    discs: tuple[Place, Place]


@dataclass
class _Contour:
    """A contour that grows.

    Attributes:
        pivot: centre of the circle on which its last dash ends.
        angle: of the last dash from there.
        last: mask of the last dash, which the next one may touch.
        tip: where the contour ends.
    """

    pivot: Place
    angle: float
    last: np.ndarray
    tip: Place


def generate(seed: int, sizes: dict[str, int], processes: int | None = None) -> dict[str, Corpus]:
    """Return images by split, each a sequence of pixels row by row, labelled 1 or 0.

    Args:
        seed: of everything.
        sizes: images of "train", "dev" and "test".
        processes: as many as cores when omitted.
    """
    corpora = {}
    for number, split in enumerate(SPLITS):
        parts = in_processes(_draw, sizes[split], _CHUNK, seed, number, processes=processes)
        corpora[split] = Corpus.joined(parts)
    return corpora


def open_cached(folder: Path, seed: int, sizes: dict[str, int]) -> dict[str, Corpus]:
    """Return the generated splits of a file in ``folder``, generated first if it is not there."""
    name = "-".join(map(str, ("pathfinder", "seed", seed, *(sizes[s] for s in SPLITS))))
    return cached(folder / f"{name}.npz", lambda: generate(seed, sizes))


def _draw(seed: int, split: int, first: int, last: int) -> Corpus:
    rngs = [np.random.default_rng((seed, split, index)) for index in range(first, last)]
    labels = [index % CLASSES for index in range(first, last)]
    images = [draw(rng, label).image.ravel() for rng, label in zip(rngs, labels)]
    return Corpus.of(images, labels)


def draw(rng: np.random.Generator, label: int, distractors: int = _DISTRACTORS) -> Drawing:
    """Return an image whose discs lie on the same contour (label 1) or not (label 0)."""
    contours = None
    while contours is None:
        contours = _two_contours(rng)
    inks, mask, starts, ends = contours
    ink = np.maximum(*inks)
    for _ in range(distractors):
        for _ in range(_DISTRACTOR_TRIES):
            drawn = _distractor(rng, ink, mask)
            if drawn is not None:
                ink, mask = drawn
                break
    start = int(rng.integers(2))
    discs = (starts[start], ends[start if label else 1 - start])
    marked = np.maximum(ink, np.maximum(*map(_disc, discs)))
    # As the original's way of saving does: from black to the brightest pixel.
    image = (marked * (255 / marked.max()) + 0.5).astype(np.uint8)
    return Drawing(image, np.stack(inks), discs)


def _two_contours(rng: np.random.Generator):
    """Return the ink of both, the mask of both, where they start and where they end; or None."""
    mask = np.zeros((SIZE, SIZE))
    mask[:_EDGE] = mask[-_EDGE:] = mask[:, :_EDGE] = mask[:, -_EDGE:] = 1
    middle = mask.copy()
    edge = 2 * _APART
    middle[:edge] = middle[SIZE - edge :] = middle[:, :edge] = middle[:, SIZE - edge :] = 1
    inks = [np.zeros((SIZE, SIZE)) for _ in range(2)]
    first = _begin(rng, middle)
    if first is None:
        return None
    starts = [first]
    for _ in range(_TRIES):
        angle = radians(int(rng.integers(-180, 180)))
        around = radians(int(rng.integers(360)))
        row, column = first[0]
        tip = (round(row + _APART * sin(around)), round(column + _APART * cos(around)))
        if _fits(tip, angle):
            starts.append((tip, angle))
            break
    if len(starts) < 2:
        return None
    growing = []
    for ink, (tip, angle) in zip(inks, starts):
        last = _stamp(ink, _CONTRAST, tip, stamp(angle))
        growing.append(_Contour(_pivot(tip, angle), angle, last, tip))
    for _ in range(_DASHES - 1):
        for ink, contour in zip(inks, growing):
            if not _extend(rng, contour, ink, mask, _CONTRAST):
                return None
    for contour in growing:
        np.maximum(mask, contour.last, out=mask)
    return inks, mask, [tip for tip, _ in starts], [contour.tip for contour in growing]


def _distractor(rng: np.random.Generator, ink: np.ndarray, mask: np.ndarray):
    """Return ink and mask with one more short contour; or None where it found no way."""
    if (np.ceil(mask - _FREE) == 0).mean() < _LEAST_FREE:
        return None
    bordered = mask.copy()
    bordered[0] = bordered[-1] = bordered[:, 0] = bordered[:, -1] = 1
    begun = _begin(rng, bordered)
    if begun is None:
        return None
    tip, angle = begun
    ink, mask = ink.copy(), mask.copy()
    last = _stamp(ink, _DISTRACTOR_CONTRAST, tip, stamp(angle))
    contour = _Contour(_pivot(tip, angle), angle, last, tip)
    for _ in range(_DISTRACTOR_DASHES - 1):
        if not _extend(rng, contour, ink, mask, _DISTRACTOR_CONTRAST):
            return None
    return ink, np.maximum(mask, contour.last)


def _begin(rng: np.random.Generator, mask: np.ndarray) -> tuple[Place, float] | None:
    """Return where a first dash finds room, and its angle; or None."""
    for _ in range(_TRIES):
        angle = radians(int(rng.integers(-180, 180)))
        rows, columns = _room(mask, stamp(angle))
        if len(rows) == 0:
            return None
        chosen = rng.integers(len(rows))
        tip = int(rows[chosen]), int(columns[chosen])
        if _fits(tip, angle):
            return tip, angle
    return None


def _room(mask: np.ndarray, dash: Stamp) -> tuple[np.ndarray, ...]:
    """Return the places from which a dash covers nothing that is taken."""
    taken = np.pad(mask > _FREE, _REACH, constant_values=True)
    hit = np.zeros((SIZE, SIZE), bool)
    for row, column in zip(*dash.free):
        top, left = row + _REACH, column + _REACH
        hit |= taken[top : top + SIZE, left : left + SIZE]
    return np.nonzero(~hit)


def _extend(
    rng: np.random.Generator, contour: _Contour, ink: np.ndarray, mask: np.ndarray, contrast: float
) -> bool:
    """Add a dash to a contour, to ``ink`` and its predecessor to ``mask``; or return False.

    Its far end lies on a circle about a point beyond the last dash, the likelier the straighter.
    """
    pivot = _moved(contour.pivot, contour.angle, _LENGTH + 2 * _MARGIN)
    offsets, angles = _circle()
    ends = offsets + pivot
    inside = ((ends >= 0) & (ends < SIZE)).all(axis=1)
    ends, angles = ends[inside], angles[inside]
    if len(ends) == 0:
        return False
    turns = np.abs(angles - contour.angle)
    turns = np.minimum(np.minimum(turns, 2 * pi - turns) * _CONTINUITY, pi / 2)
    weights = np.cos(turns) ** 2 * (1 - _nearby(mask, ends))
    total = weights.sum()
    if total < 1e-4:
        return False
    shares = np.cumsum(weights / total)
    for _ in range(_TRIES):
        # The last share may be a rounding below one.
        chosen = min(int(np.searchsorted(shares, rng.random(), side="right")), len(ends) - 1)
        end, angle = tuple(ends[chosen].tolist()), float(angles[chosen])
        dash = stamp(angle - pi if angle >= 0 else angle + pi)
        placed = _placed(dash.mask, end)
        if (mask + placed).max() < _OVERLAP:
            _stamp(ink, contrast, end, dash)
            np.maximum(mask, contour.last, out=mask)
            contour.pivot, contour.angle, contour.last, contour.tip = pivot, angle, placed, end
            return True
    return False


@cache
def _circle() -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels on the circle where a dash may end, and their angles."""
    radius = _LENGTH + _MARGIN
    steps = np.arange(0, 2 * pi, 1 / radius)
    offsets = np.unique(np.floor(radius * np.stack([np.sin(steps), np.cos(steps)], 1)), axis=0)
    return offsets.astype(int), np.arctan2(offsets[:, 0], offsets[:, 1])


def _nearby(mask: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the largest value of the mask at or beside each place."""
    beside = _discs_offsets(_MARGIN)
    rows, columns = (np.clip(places[:, None] + beside, 0, SIZE - 1)).transpose(2, 0, 1)
    return mask[rows, columns].max(axis=1)


@cache
def _discs_offsets(radius: int) -> np.ndarray:
    """Return the pixels of a disc, (pixels, 2), from its centre."""
    grid = np.stack(np.mgrid[-radius : radius + 1, -radius : radius + 1], -1).reshape(-1, 2)
    return grid[(grid**2).sum(1) <= radius**2]


@cache
def stamp(angle: float) -> Stamp:
    """Draw a dash that starts in the centre and points ``angle`` radians from right to down."""
    side, centre = 2 * _REACH * _FINER + 1, _REACH * _FINER
    row, column = _moved((centre, centre), angle, _LENGTH * _FINER)
    fine = Image.new("L", (side, side))
    width = round(_THICKNESS * _FINER)
    ImageDraw.Draw(fine).line([(centre, centre), (column, row)], fill=255, width=width)
    thick = np.zeros((side, side), np.uint8)
    for d_row, d_column in _discs_offsets(_MARGIN * _FINER):
        np.maximum(thick, np.roll(fine, (d_row, d_column), (0, 1)), out=thick)
    small = 2 * _REACH + 1
    ink, mask = (
        np.asarray(Image.fromarray(each).resize((small, small), Image.Resampling.LANCZOS)) / 255
        for each in (np.asarray(fine), thick)
    )
    rows, columns = np.nonzero(mask == 1)
    return Stamp(ink, mask, (rows - _REACH, columns - _REACH))


def _placed(small: np.ndarray, centre: Place) -> np.ndarray:
    """Return an empty image with a small one about a pixel, cut off at the edges."""
    padded = np.zeros((SIZE + 2 * _REACH, SIZE + 2 * _REACH))
    row, column = centre
    padded[row : row + len(small), column : column + len(small)] = small
    return padded[_REACH : _REACH + SIZE, _REACH : _REACH + SIZE]


def _stamp(ink: np.ndarray, contrast: float, tip: Place, dash: Stamp) -> np.ndarray:
    """Add a dash to ``ink`` and return its mask."""
    np.maximum(ink, contrast * _placed(dash.ink, tip), out=ink)
    return _placed(dash.mask, tip)


def _moved(place: Place, angle: float, distance: float) -> Place:
    return ceil(place[0] + distance * sin(angle)), ceil(place[1] + distance * cos(angle))


def _pivot(tip: Place, angle: float) -> Place:
    """Return the centre of the circle on which a dash from ``tip`` ends: _MARGIN before it."""
    head = _moved(tip, angle, _LENGTH)
    return _moved(head, angle - pi if angle >= 0 else angle + pi, _LENGTH + _MARGIN)


def _fits(tip: Place, angle: float) -> bool:
    """Return whether a first dash, and the centre of its circle, are within the image."""
    places = (*_moved(tip, angle, _LENGTH), *_pivot(tip, angle))
    return all(0 <= place < SIZE for place in places)


def _disc(centre: Place) -> np.ndarray:
    """Return a bright disc, drawn fine and made smaller."""
    rows, columns = (
        np.arange(SIZE * _FINER)[:, None] - centre[0] * _FINER,
        np.arange(SIZE * _FINER) - centre[1] * _FINER,
    )
    fine = np.uint8(255) * (rows**2 + columns**2 <= (_RADIUS * _FINER) ** 2)
    return np.asarray(Image.fromarray(fine).resize((SIZE, SIZE), Image.Resampling.LANCZOS)) / 255
