"""Sliding windows of softmax attention: which columns a row sees, and what the operators return."""

from itertools import product

import pytest
import torch
from torch import Tensor

from leaner_kernels import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_with_stats,
)
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
            distance = col - (row + cols - rows)
            expected = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
            expected = expected and (not is_causal or col <= row)
            actual = seen is None or bool(seen[0, 0, row, col])
            assert actual == expected, (left, right, row, col)


def window_mask(rows: int, cols: int, left: int, right: int) -> Tensor:
    """Return (rows, cols), True where the definition lets a row see a column."""
    distance = torch.arange(cols)[None, :] - torch.arange(rows)[:, None] - (cols - rows)
    return (distance >= -left) & (distance <= right)


def test_functions_attend_as_under_a_mask() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 20, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    window = 4, 2
    mask, grad = window_mask(20, 20, *window), torch.randn(2, 4, 20, 8, dtype=torch.float64)
    expected = attention(q, k, v, mask)
    (expected_grad,) = torch.autograd.grad(expected, qkv, grad, retain_graph=True)
    lengths = torch.tensor([0, 20, 40])
    flat = qkv.flatten(0, 1).unbind(1)
    for out in (
        attention(q, k, v, window_size=window),
        attention_with_stats(q, k, v, window_size=window).out,
        attention_qkvpacked(qkv, window_size=window).transpose(1, 2),
        attention_varlen(*flat, lengths, 20, window_size=window)
        .unflatten(0, (2, 20))
        .transpose(1, 2),
    ):
        torch.testing.assert_close(out, expected)
        (gradient,) = torch.autograd.grad(out, qkv, grad, retain_graph=True)
        torch.testing.assert_close(gradient, expected_grad)
