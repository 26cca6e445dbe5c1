"""What the forward and the backward kernels share: one tile of scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import LOG2_E, PRECISION, units

# Of a varlen batch: they fill what no sequence owns, and leave at once where there is nothing.
SPARE_PROGRAMS = 128
FILL = tl.constexpr(1024)  # elements at a time


@triton.jit
def find_sequence(starts_ptr, b, num_tokens, longest):
    """Return the first token of sequence ``b``, as int64, and the number of its tokens.

    Nobody has checked the values: clamped, they lead to no access outside the tensors.
    """
    start = tl.minimum(tl.maximum(tl.load(starts_ptr + b), 0), num_tokens)
    stop = tl.minimum(tl.maximum(tl.load(starts_ptr + b + 1), start), num_tokens)
    return start.to(tl.int64), tl.minimum(stop - start, longest)


@triton.jit
def fill_outside(
    ptr, value, starts_ptr, num_sequences, num_tokens, groups, width, program, num_programs
):
    """Write ``value`` to the tokens of (groups, num_tokens, width) that no sequence owns.

    ``num_programs`` programs share the work; where the sequences fill the batch there is none.
    """
    first = tl.minimum(tl.maximum(tl.load(starts_ptr), 0), num_tokens).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(starts_ptr + num_sequences), first), num_tokens)
    owned = (last - first) * width
    outside = num_tokens.to(tl.int64) * width - owned
    for start in range(program.to(tl.int64) * FILL, groups * outside, num_programs * FILL):
        index = start + tl.arange(0, FILL)  # (FILL,)
        group, local = index // outside, index % outside
        offset = group * (outside + owned) + local + tl.where(local < first * width, 0, owned)
        tl.store(ptr + offset, value, mask=index < groups * outside)


@triton.jit
def _fill_outside_kernel(ptr, starts_ptr, num_sequences, num_tokens, width):
    program, programs = tl.program_id(0), tl.num_programs(0)
    fill_outside(ptr, 0.0, starts_ptr, num_sequences, num_tokens, 1, width, program, programs)


def launch_fill(starts: Tensor, t: Tensor) -> None:
    """Write zeros to the tokens of a contiguous t (T, H, D) that no sequence owns."""
    sizes = len(starts) - 1, len(t), t.shape[1] * t.shape[2]
    with torch.cuda.device_of(t):
        _fill_outside_kernel[(SPARE_PROGRAMS,)](t, starts, *sizes)


@triton.jit
def product_tile(q, k, scale, softcap, MASK: tl.constexpr, SCALED: tl.constexpr):
    """Return (BLOCK_M, BLOCK_N) products, and what their gradient is of that of the scores.

    Scaled where ``SCALED``, unless a mask is yet to be added; without a ``softcap`` (None) the
    second is 1, and nobody reads it.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
    slope = 1.0
    if softcap is not None:
        # As in ``biased`` the order is written out.
        bounded, slope = tanh(tl.fma(s, scale, 0.0) * (1.0 / softcap))
        s = tl.fma(bounded, softcap, 0.0)
    elif SCALED and MASK != "additive":
        s = tl.fma(s, scale, 0.0)
    return s, slope


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, and its derivative, of float32.

    Relative error: 2e-7, 4e-7 with a GPU's exp2, which is off by 2^-22. Near 0 the quotient would
    cancel, so there it is an odd polynomial, whose largest relative error is least (1.5e-8).
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E))  # at most 1
    reciprocal = 1.0 / (1.0 + e)
    far = (1.0 - e) * reciprocal
    square = x * x
    p = tl.fma(square, 0.0172413936, -0.0530454532)
    p = tl.fma(tl.fma(p, square, 0.133258784), square, -0.333331439)
    near = tl.fma(p * square, x, x)
    return tl.where(size < 0.5, near, tl.where(x < 0, -far, far)), 4.0 * e * reciprocal * reciprocal


@triton.jit
def score_tile(
    s,
    row_start,
    col_start,
    limit,
    mask_ptr,
    stride_mask_n,
    stride_mask_m,
    N,
    M,
    scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return the scores of a ``product_tile``, -inf where something hides."""
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    seen = (col_start + cols < limit)[None, :]  # (1, BLOCK_N)
    if CAUSAL:
        seen = seen & (col_start + cols[None, :] <= row_start + rows[:, None])  # (BLOCK_M, BLOCK_N)
    if MASK != "none":
        mask_ptr += tl.cast(row_start, tl.int64) * stride_mask_n
        mask_ptr += tl.cast(col_start, tl.int64) * stride_mask_m
        ptrs = mask_ptr + rows[:, None] * stride_mask_n + cols[None, :] * stride_mask_m
        inside = (row_start + rows < N)[:, None] & (col_start + cols < M)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0)  # (BLOCK_M, BLOCK_N)
        if MASK == "boolean":
            seen = seen & (tile != 0)
        else:
            s = biased(s, scale if softcap is None else 1.0, tile)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def biased(s, scale, tile):
    """Return products, scaled, with a tile of an additive mask added in one rounding.

    The most negative finite number hides, as -inf does. Beside large numbers every bit counts: the
    backward must find again the scores whose maximum the forward wrote, so the order is written out
    and not left to a compiler.
    """
    bias = tile.to(tl.float32)
    return tl.fma(s, scale, tl.where(bias < -1e38, float("-inf"), bias))


@triton.jit
def exponents_of(scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Return the positive factor that makes exponents, for ``exponential``, of scores.

    Scores are scaled from the start (``SCALED``) where a mask is added to them, where a softcap
    bounds them, or where the scale does not keep their order. It multiplies what is left of a score
    when the maximum of its row is subtracted: that of the maximum itself is then 0 however a
    compiler fuses products and sums.
    """
    return units(DTYPE) if SCALED else scale * units(DTYPE)


@triton.jit
def row_lse(row_max, divisor, scale, SCALED: tl.constexpr):
    """Return the log-sum-exp of rows in nats, -inf where the maximum of the scores is."""
    return (row_max if SCALED else row_max * scale) + tl.log(divisor)


@triton.jit
def store_max_log_sum(ptr, start, rows, pivot, unseeing, divisor, inside):
    """Store what the backward subtracts from the scores of a row, and from their exponents.

    Their sum, the log-sum-exp, would lose the second beside a large first. A row that sees no key
    gets 0 and inf: exp(-inf - inf) = 0, so it contributes nothing.
    """
    ptrs = ptr + (start + rows) * 2  # (BLOCK_M,)
    tl.store(ptrs, pivot, mask=inside)
    tl.store(ptrs + 1, tl.where(unseeing, float("inf"), tl.log(divisor)), mask=inside)


@triton.jit
def load_max_log_sum(ptr, start, rows, inside, DTYPE: tl.constexpr):
    """Return the two as stored, the second in ``units``; 0 and inf where not ``inside``."""
    ptrs = ptr + (start + rows) * 2
    row_max = tl.load(ptrs, mask=inside, other=0.0)
    log_sum = tl.load(ptrs + 1, mask=inside, other=float("inf"))
    return row_max, log_sum * units(DTYPE)
