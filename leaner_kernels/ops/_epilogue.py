"""The epilogue of the Triton kernels: from rows of P to the statistics of a head.

A kernel gathers sums of rows in a tuple whose elements only this file knows. It stores them as the
statistics of a head, if one program has all of its rows, or as the part of a tile, which ``join``
adds up. To add a statistic, change this file, its Gluon counterpart (attention/kernels/
gluon_tiles.py), the table (statistics.py) and the references; no kernel changes.
"""

# pyright: reportArgumentType=false
# A launch passes plain numbers where a function declares constants.

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_SUMS = 5  # stored by a tile


@triton.jit
def no_sums(BLOCK: tl.constexpr):
    """Return sums of zero rows: largest score, entropy, squares of P and of the output, maxima."""
    zero = tl.zeros([BLOCK], tl.float32)
    return tl.full([BLOCK], float("-inf"), tl.float32), zero, zero, zero, zero


@triton.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside, nats):
    """Return the sums of rows, (BLOCK,) each, with zeros for rows not ``inside``.

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
    """Return the sums of rows from their entropies, and from squares that are masked already."""
    row_max = tl.where(inside, row_max, float("-inf"))
    # A row without a visible key counts as 0.
    maximum = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max, tl.where(inside, entropy, 0.0), square, out_square, maximum


@triton.jit
def with_output(sums, out_square):
    """Return the sums of P with ``out_square``, which was summed separately."""
    return sums[0], sums[1], sums[2], out_square, sums[4]


@triton.jit
def add_sums(sums, others):
    """Combine two tuples of sums."""
    largest = tl.maximum(sums[0], others[0])
    square, out_square = sums[2] + others[2], sums[3] + others[3]
    return largest, sums[1] + others[1], square, out_square, sums[4] + others[4]


@triton.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale):
    """Store the statistics of a head with complete sums into (statistics, B, H).

    ``scale`` multiplies the maxima of the scores.
    """
    _store(ptr + head, sums, tl.cast(num_heads, tl.int64), num_rows, scale, True)


@triton.jit
def store_part(ptr, sums, part, num_rows, scale):
    """Store part ``part`` of the sums that ``join`` adds up; means are divided by ``num_rows``."""
    _store(ptr + tl.cast(part, tl.int64) * 5, sums, 1, num_rows, scale, False)


@triton.jit
def _store(ptr, sums, step, num_rows, scale, COMPLETE: tl.constexpr):
    largest, entropy = tl.max(sums[0]) * scale, tl.sum(sums[1])
    square, out_square = tl.sum(sums[2]), tl.sum(sums[3])
    # Roots do not add: parts keep the squares.
    if COMPLETE:
        square, out_square = tl.sqrt(square), tl.sqrt(out_square)
    mean_row_max = tl.sum(sums[4]) * scale / num_rows
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
    torch.amax(parts[..., 0], dim=-1, out=stats[0])
    stats[1:].copy_(parts[..., 1:].sum(dim=2).movedim(-1, 0))
    stats[2:4].sqrt_()
    if num_rows != 1:
        stats[1::3] /= num_rows  # entropy and mean_row_max
