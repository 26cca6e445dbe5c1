"""The epilogue of the Triton kernels: from rows of P to the statistics of a head.

A kernel gathers the ``Sums`` of rows, whose fields only this file knows. It stores them as the
statistics of a head, if one program has all of its rows, or as the part of a tile, which ``join``
adds up. To add a statistic, change this file, its Gluon counterpart (attention/kernels/
gluon_tiles.py), the table (statistics.py) and the references; no kernel changes.
"""

# pyright: reportArgumentType=false
# A launch passes plain numbers for parameters that a function declares as constants.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sums(NamedTuple):
    """The sums of rows, in the order in which a tile stores them: that of ``STATISTICS``.

    Attributes:
        largest: the largest score.
        entropy: the entropies of the rows of P, in nats.
        square: the squares of P.
        out_square: the squares of the output.
        row_max: the largest scores of the rows.
    """

    largest: Any
    entropy: Any
    square: Any
    out_square: Any
    row_max: Any


NUM_SUMS = len(Sums._fields)  # stored by a tile
PART = tl.constexpr(NUM_SUMS)
# Views of several sums at once, so that ``join`` launches one kernel for all of them.
_ORDER = Sums._fields
_SUMMED = slice(_ORDER.index("entropy"), None)  # all but the maximum, which comes first
_SQUARES = slice(_ORDER.index("square"), _ORDER.index("out_square") + 1)
_MEANS = slice(_ORDER.index("entropy"), None, _ORDER.index("row_max") - _ORDER.index("entropy"))


@triton.jit
def no_sums(BLOCK: tl.constexpr):
    """Return ``Sums`` of zero rows."""
    zero = tl.zeros([BLOCK], tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    return Sums(largest, zero, zero, zero, zero)


@triton.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside, nats):
    """Return the ``Sums`` of rows, (BLOCK,) each, with zeros for rows not ``inside``.

    Args:
        row_max: the largest score.
        row_sum: the sum of exponentials e, the divisor of P.
        row_centred: the sum of e times its exponent, so that no large numbers cancel in the
            entropy.
        row_square: the sum of e^2.
        out_square: the sum of squares of the output.
        inside: whether the row exists.
        nats: nats per unit of these exponents.
    """
    # H = log(sum e) - sum(e log e) / sum(e), with the maximum as pivot of all exponents.
    entropy = tl.log(row_sum) - nats * row_centred / row_sum
    square = tl.where(inside, row_square / (row_sum * row_sum), 0.0)
    return sums_of_entropies(row_max, entropy, square, tl.where(inside, out_square, 0.0), inside)


@triton.jit
def sums_of_entropies(row_max, entropy, square, out_square, inside):
    """Return the ``Sums`` of rows from entropies, and from squares that are masked already."""
    row_max = tl.where(inside, row_max, float("-inf"))
    # A row without a visible key counts as 0.
    maximum = tl.where(row_max == float("-inf"), 0.0, row_max)
    entropy = tl.where(inside, entropy, 0.0)
    return Sums(row_max, entropy, square, out_square, maximum)


@triton.jit
def with_output(sums, out_square):
    """Return the ``Sums`` of P with ``out_square``, which was summed separately."""
    return Sums(sums.largest, sums.entropy, sums.square, out_square, sums.row_max)


@triton.jit
def add_sums(sums, others):
    """Combine two ``Sums``."""
    return Sums(
        largest=tl.maximum(sums.largest, others.largest),
        square=sums.square + others.square,
        out_square=sums.out_square + others.out_square,
        entropy=sums.entropy + others.entropy,
        row_max=sums.row_max + others.row_max,
    )


@triton.jit
def _combine(
    largest, entropy, square, out_square, row_max, largest_2, entropy_2, square_2, out_2, row_max_2
):
    return (
        tl.maximum(largest, largest_2),
        entropy + entropy_2,
        square + square_2,
        out_square + out_2,
        row_max + row_max_2,
    )


@triton.jit
def reduce_sums(sums):
    """Reduce the ``Sums`` of rows, all five at once: warps then meet once, not five times."""
    largest, entropy, square, out_square, row_max = tl.reduce(
        (sums.largest, sums.entropy, sums.square, sums.out_square, sums.row_max), 0, _combine
    )
    return Sums(largest, entropy, square, out_square, row_max)


@triton.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale):
    """Store the statistics of a head with complete sums into (statistics, B, H).

    ``scale`` multiplies the maxima of the scores.
    """
    _store(ptr + head, sums, tl.cast(num_heads, tl.int64), num_rows, scale, True)


@triton.jit
def store_part(ptr, sums, part, num_rows, scale):
    """Store part ``part`` of the sums that ``join`` adds up; means are divided by ``num_rows``."""
    _store(ptr + tl.cast(part, tl.int64) * PART, sums, 1, num_rows, scale, False)


@triton.jit
def _store(ptr, sums, step, num_rows, scale, COMPLETE: tl.constexpr):
    largest = tl.max(sums.largest) * scale
    entropy = tl.sum(sums.entropy)
    square = tl.sum(sums.square)
    out_square = tl.sum(sums.out_square)
    # Roots do not add: parts keep the squares.
    if COMPLETE:
        square = tl.sqrt(square)
        out_square = tl.sqrt(out_square)
    mean_row_max = tl.sum(sums.row_max) * scale / num_rows
    _store_reduced(ptr, largest, entropy, square, out_square, mean_row_max, step, num_rows)


@triton.jit
def store_reduced(ptr, sums, head, num_heads, num_rows, scale):
    """Store the statistics of a head as ``store_statistics`` does, from scalars."""
    _store_reduced(
        ptr=ptr + head,
        largest=sums.largest * scale,
        entropy=sums.entropy,
        square=tl.sqrt(sums.square),
        out_square=tl.sqrt(sums.out_square),
        mean_row_max=sums.row_max * scale / num_rows,
        step=tl.cast(num_heads, tl.int64),
        num_rows=num_rows,
    )


@triton.jit
def _store_reduced(ptr, largest, entropy, square, out_square, mean_row_max, step, num_rows):
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    diverged = entropy != entropy
    tl.store(ptr, tl.where(diverged, float("nan"), largest))
    tl.store(ptr + step, entropy / num_rows)
    tl.store(ptr + 2 * step, square)
    tl.store(ptr + 3 * step, out_square)
    tl.store(ptr + 4 * step, tl.where(diverged, float("nan"), mean_row_max))


def join(parts: Tensor, stats: Tensor, num_rows: int = 1) -> None:
    """Write the statistics (statistics, B, H) of heads from their parts (B, H, T, NUM_SUMS).

    The parts are added in a fixed order, so that the result is deterministic, unlike with atomics.
    Means are divided by ``num_rows``.
    """
    torch.amax(parts[..., _ORDER.index("largest")], dim=-1, out=stats[_ORDER.index("largest")])
    stats[_SUMMED].copy_(parts[..., _SUMMED].sum(dim=2).movedim(-1, 0))
    stats[_SQUARES].sqrt_()
    if num_rows != 1:
        stats[_MEANS] /= num_rows
