"""The window of softmax attention: which columns a row sees."""

from itertools import product

import pytest
import torch

from leaner_kernels.ops.attention import reference

SIDES = -1, 0, 1, 3, 99


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_sees_what_the_definition_says(rows: int, cols: int, is_causal: bool) -> None:
    for left, right in product(SIDES, SIDES):
        seen = reference.visible(
            rows, cols, None, is_causal, torch.device("cpu"), window=(left, right)
        )
        for row, col in product(range(rows), range(cols)):
            place = col - (row + cols - rows)
            expected = (left < 0 or place >= -left) and (right < 0 or place <= right)
            expected = expected and (not is_causal or col <= row)
            actual = seen is None or bool(seen[0, 0, row, col])
            assert actual == expected, (left, right, row, col)
