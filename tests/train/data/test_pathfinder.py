"""Pathfinder-style images: their labels, found in the image itself, and what they depend on."""

from collections import deque
from itertools import pairwise

import numpy as np
import pytest

from train.data.longrange import pathfinder
from train.data.longrange.corpus import SPLITS
from train.data.longrange.pathfinder import SIZE, draw, generate


def drawings(count: int, **how: int) -> list[tuple[int, pathfinder.Drawing]]:
    return [(i % 2, draw(np.random.default_rng((9, i)), i % 2, **how)) for i in range(count)]


def pieces(bright: np.ndarray, reach: int) -> np.ndarray:
    """Number the groups of bright pixels no further apart than ``reach``; 0 elsewhere."""
    numbers = np.zeros(bright.shape, int)
    for start in zip(*np.nonzero(bright)):
        if numbers[start]:
            continue
        numbers[start] = numbers.max() + 1
        waiting = deque([start])
        while waiting:
            row, column = waiting.popleft()
            window = np.s_[
                max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1
            ]
            found = np.argwhere(bright[window] & (numbers[window] == 0))
            for place in map(tuple, found + np.maximum(0, [row - reach, column - reach])):
                numbers[place] = numbers[start]
                waiting.append(place)
    return numbers


def at(numbers: np.ndarray, place: tuple[int, int]) -> int:
    """The number of the group at or beside a place, 0 where there is none."""
    row, column = (np.maximum(0, np.array(place) - 1)).tolist()
    return int(numbers[row : place[0] + 2, column : place[1] + 2].max())


def test_the_painted_dashes_of_one_contour_lead_from_disc_to_disc_exactly_for_label_1():
    clear = 0
    for label, drawing in drawings(32):
        ways = [pieces(contour > 0.4, reach=3) for contour in drawing.contours]
        start, end = ([at(way, disc) for way in ways] for disc in drawing.discs)
        assert any(start)
        assert any(end)
        # Contours may cross where a disc is.
        if np.count_nonzero([start, end]) == 2:
            clear += 1
            assert (start == end) == bool(label)
    assert clear > 16


def test_where_contours_keep_apart_the_image_alone_gives_the_label():
    clear = 0
    for label, drawing in drawings(200, distractors=0):
        numbers = pieces(drawing.image > 40, reach=2)
        # Contours that pass close to each other merge.
        first, second = (set(numbers[contour > 0.6]) for contour in drawing.contours)
        if len(first) != 1 or len(second) != 1 or first == second:
            continue
        clear += 1
        start, end = (numbers[disc] for disc in drawing.discs)
        assert (start == end) == bool(label)
    assert clear >= 3


def test_an_image_is_lines_on_black_with_two_discs():
    for _, drawing in drawings(12):
        assert drawing.image.dtype == np.uint8
        assert drawing.image.shape == (SIZE, SIZE)
        assert drawing.image.max() == 255
        assert 0.4 < (drawing.image == 0).mean() < 0.9
        for row, column in drawing.discs:
            assert drawing.image[row, column] > 200
        # 14 dashes of two or three pixels.
        for contour in drawing.contours:
            assert 24 <= (contour > 0.4).sum() <= 48


def test_images_depend_on_seed_split_and_index_alone_and_labels_balance():
    sizes = {"train": 6, "dev": 4, "test": 2}
    corpora = generate(0, sizes, processes=1)
    for split, count in sizes.items():
        assert corpora[split].labels.tolist() == [0, 1] * (count // 2)
        assert corpora[split].lengths.tolist() == [SIZE * SIZE] * count
    again = generate(0, {"train": 3, "dev": 2, "test": 2}, processes=1)
    other = generate(1, {"train": 1, "dev": 1, "test": 1}, processes=1)
    for split in SPLITS:
        count = len(again[split])
        assert np.array_equal(again[split].tokens, corpora[split].tokens[: count * SIZE * SIZE])
        assert not np.array_equal(other[split][0], corpora[split][0])
    assert not np.array_equal(corpora["train"][0], corpora["dev"][0])


def test_dashes_of_a_contour_follow_each_other_and_keep_off_others():
    rng = np.random.default_rng(3)
    grown = None
    while grown is None:
        grown = pathfinder._grow(rng, pathfinder._two_starts(rng), 14, np.zeros(0, complex))
    contours, taken = grown
    assert taken.shape == (2 * 14 * 4,)
    for contour in contours:
        assert len(contour) == 14
        for one, following in pairwise(contour):
            assert abs(one[-1] - one[0]) == pytest.approx(2)
            assert 1.4 <= abs(following[0] - one[-1]) <= 2 + 1e-9
            assert np.cos(np.angle((following[-1] - following[0]) / (one[-1] - one[0]))) >= -1e-9
    ours, others = (np.concatenate(contour) for contour in contours)
    assert np.abs(ours[4:, None] - others[4:]).min() >= 1 - 1e-9
    inside = np.stack([taken.real, taken.imag])
    assert inside.min() >= 0
    assert inside.max() <= SIZE
