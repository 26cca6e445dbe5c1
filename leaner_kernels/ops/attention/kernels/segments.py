"""Whole rows of scores in registers, for the Triton kernels whose program owns a head.

The keys of a head are cut into segments whose sizes are powers of two, such as 197 = 128 + 64 + 16
(208), so that a row of scores is a few tiles with little padding. K and V are loaded once and stay
in shared memory; every tile of rows of the head passes over them. Exponentials are in base 2, with
the change of base folded into the scale. In float32 that costs one bit of every probability
(docs/kernels.md), so these kernels are for half precision only.
"""

import triton
import triton.language as tl

from ..._triton import load_rows
from .scores import score_tile


def cut(keys: int, largest: int = 128) -> tuple[tuple[int, int], ...]:
    """Return the (start, size) of segments that cover the keys: powers of two, 16 to ``largest``.

    >>> cut(197)
    ((0, 128), (128, 64), (192, 16))
    """
    segments, start = [], 0
    while start < keys:
        left = keys - start
        size = 16
        while size * 2 <= min(left, largest):
            size *= 2
        # One segment half empty beats two: each costs its own products and reductions.
        if size < left and size * 2 <= largest and left > size + size // 2:
            size *= 2
        segments.append((start, size))
        start += size
    return tuple(segments)


@triton.jit
def load_segments(
    ptr, stride_n, limit, SEGMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tuple of (size, BLOCK_D) tiles, zero at and past ``limit``."""
    tiles = ()
    for i in tl.static_range(len(SEGMENTS)):  # SEGMENTS[i] is (start, size)
        tile = load_rows(ptr, SEGMENTS[i][0], stride_n, limit, SEGMENTS[i][1], D, BLOCK_D)
        tiles = tiles + (tile,)  # noqa: RUF005 - Triton has no starred tuples
    return tiles


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return (ROWS, COLS) float32 zeros; Triton 3.6 rejects tuple elements in a shape."""
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def score_segments(
    q, ks, row_start, limit, mask_view, mask_ptr, N, M, scale, SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile of rows as a tuple, -inf where hidden, and the row maxima.

    Scores are unscaled, unless an additive mask is added to them; see ``exponent_factor``. Without
    ``RAGGED``, only the last segment has columns past the last key.
    """
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # The maximum of a row is known before the first exponential: no running maximum is needed.
    scores = ()
    for i in tl.static_range(len(SEGMENTS)):  # ks[i]: (size, BLOCK_D)
        s, _ = score_tile(  # (BLOCK_M, size)
            q, ks[i], row_start, SEGMENTS[i][0], limit, (None, None), mask_view, mask_ptr, N, M,
            scale, None, BLOCK_M, SEGMENTS[i][1], CAUSAL, MASK, False, True,
            RAGGED or i == len(SEGMENTS) - 1,
        )  # fmt: skip
        row_max = tl.maximum(row_max, tl.max(s, axis=1))  # (BLOCK_M,)
        scores = scores + (s,)  # noqa: RUF005
    return scores, row_max
