"""Arguments of a call that are refused are caught as ValueError and, as PyTorch's, RuntimeError."""

from collections.abc import Callable

import pytest
import torch

from leaner_kernels import (
    attention,
    condition_number,
    conditioning_penalty,
    head_report,
)
from leaner_kernels.nn import ManyHeadAttention
from leaner_kernels.ops import sharding
from leaner_kernels.ops._launch_cache import MAX_PROGRAMS, Launch, check_tile
from leaner_kernels.ops.transforms import DECLARATIONS

A = torch.randn(2, 5, 8)
CALLS: dict[str, Callable[[], object]] = {
    "more programs than a launch has": lambda: Launch(None, (MAX_PROGRAMS + 1,), {}).start(),
    "rows too far apart for a tile": lambda: check_tile("rows of out", 2**8, 2**24),
    "dropout of DTensors": lambda: sharding.acceptable(
        torch.ops.leaner_kernels.attention.default, DECLARATIONS["attention"], *[None] * 6, 0.5
    ),
    "a layer's input": lambda: ManyHeadAttention(12, num_heads=3, head_dim=4)(A),
    "a layer's skip": lambda: ManyHeadAttention(8, num_heads=2, head_dim=4)(A, skip=A[:1]),
    "matrices of one axis": lambda: condition_number(A[0, 0]),
    "matrices in half precision": lambda: condition_number(A.half()),
    "lengths of other matrices": lambda: condition_number(A, lengths=torch.ones(3).int()),
    "lengths on another device": lambda: condition_number(
        A, lengths=torch.ones(2, dtype=torch.int32, device="meta")
    ),
    "heads that do not divide": lambda: head_report(A, 3),
    "a penalty of half precision": lambda: conditioning_penalty(A.half()),
    "a penalty of nothing": lambda: conditioning_penalty(A[:0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_argument_is_caught_as_either_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"must|need") as caught:
        CALLS[name]()
    assert isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


Q = torch.randn(2, 9, 4, 8)
STARTS = torch.tensor([0, 9], dtype=torch.int32)


def test_tokens_in_the_place_of_heads_are_told_of() -> None:
    """Of flash-attention's layout, where keys and queries are not as many."""
    with pytest.raises(
        ValueError, match=r"key has 7 heads for 9 .*; \(B, N, H, D\), as flash"
    ) as no:
        attention(Q, Q[:, :7], Q[:, :7])
    assert "\n" not in str(no.value)
    q = Q.transpose(1, 2)
    attention(q, q[:, :, :7], q[:, :, :7])
    with pytest.raises(ValueError, match=r"key has 3 heads for 4 query heads.*=False\)$"):
        attention(q, q[:, :3], q[:, :3])
