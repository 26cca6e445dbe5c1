"""The epilogue of the kernels in Triton: from rows of P to the statistics of a head.

A kernel gathers sums of rows in a tuple whose elements only this file knows, and stores them either
as the statistics of a head, where a program sees all of it, or as a tile's part, which ``join``
adds up. Another statistic is added here, in its likeness in Gluon (attention/kernels/
gluon_tiles.py), in the table (statistics.py) and in the references; no kernel changes.
"""

# pyright: reportArgumentType=false
# A launch passes plain numbers where a function declares constants.

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_SUMS = 5  # that a tile stores


@triton.jit
def no_sums(BLOCK: tl.constexpr):
    """Return the sums of no rows: largest score, entropy, squares of P, of the output, maxima."""
    zero = tl.zeros([BLOCK], tl.float32)
    return tl.full([BLOCK], float("-inf"), tl.float32), zero, zero, zero, zero


@triton.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside, nats):
    """Return the sums of rows, (BLOCK,) each, of which those not ``inside`` add nothing.

    Args:
        row_max: the largest score.
        row_sum: the sum of exponentials e, which P is divided by.
        row_centred: the sum of e times its exponent: the entropy cancels no two large numbers.
        row_square: the sum of e^2.
        out_square: the sum of squares of the output.
        inside: whether there is such a row.
        nats: how many nats make a unit of these exponents.
    """
    entropy = tl.log(row_sum) - nats * row_centred / row_sum
    square = tl.where(inside, row_square / (row_sum * row_sum), 0.0)
    return sums_of_entropies(row_max, entropy, square, tl.where(inside, out_square, 0.0), inside)


@triton.jit
def sums_of_entropies(row_max, entropy, square, out_square, inside):
    """Return the sums of rows whose entropies are known, and whose squares are masked already."""
    row_max = tl.where(inside, row_max, float("-inf"))
    # A row that sees no key counts as 0.
    maximum = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max, tl.where(inside, entropy, 0.0), square, out_square, maximum


@triton.jit
def with_output(sums, out_square):
    """Return sums of rows of P with the squares of the output, which were summed up apart."""
    return sums[0], sums[1], sums[2], out_square, sums[4]


@triton.jit
def add_sums(sums, others):
    """Return both together."""
    largest = tl.maximum(sums[0], others[0])
    square, out_square = sums[2] + others[2], sums[3] + others[3]
    return largest, sums[1] + others[1], square, out_square, sums[4] + others[4]


@triton.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale):
    """Store the statistics of a head, whose sums are complete, into (statistics, B, H).

    ``scale`` is what scores are still to be multiplied by.
    """
    _store(ptr + head, sums, tl.cast(num_heads, tl.int64), num_rows, scale, True)


@triton.jit
def store_part(ptr, sums, part, num_rows, scale):
    """Store part number ``part`` of what ``join`` adds up; the entropy is divided by num_rows."""
    _store(ptr + tl.cast(part, tl.int64) * 5, sums, 1, num_rows, scale, False)


@triton.jit
def _store(ptr, sums, step, num_rows, scale, COMPLETE: tl.constexpr):
    largest, entropy = tl.max(sums[0]) * scale, tl.sum(sums[1])
    square, out_square = tl.sum(sums[2]), tl.sum(sums[3])
    if COMPLETE:
        square, out_square = tl.sqrt(square), tl.sqrt(out_square)
    mean_row_max = tl.sum(sums[4]) * scale / num_rows
    # A maximum passes nan over; a sum does not, and a diverged model must show.
    diverged = entropy != entropy
    tl.store(ptr, tl.where(diverged, float("nan"), largest))
    tl.store(ptr + step, entropy / num_rows)
    tl.store(ptr + 2 * step, square)
    tl.store(ptr + 3 * step, out_square)
    tl.store(ptr + 4 * step, tl.where(diverged, float("nan"), mean_row_max))


def join(parts: Tensor, stats: Tensor, num_rows: int = 1) -> None:
    """Write the statistics (statistics, B, H) of heads whose parts are (B, H, T, NUM_SUMS).

    In a fixed order: deterministic, as atomics are not. Means are divided by ``num_rows``.
    """
    torch.amax(parts[..., 0], dim=-1, out=stats[0])
    stats[1:].copy_(parts[..., 1:].sum(dim=2).movedim(-1, 0))
    stats[2:4].sqrt_()
    if num_rows != 1:
        stats[1::3] /= num_rows  # entropy and mean_row_max
