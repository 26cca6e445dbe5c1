"""Helpers of the forward and backward Triton kernels: one tile of scores, masks and extents."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import LOG2_E, PRECISION, head_of, units, visible_keys

# Extra programs of a varlen batch: they fill the tokens that no sequence owns, and return at once
# if there are none.
SPARE_PROGRAMS = 128
FILL_BLOCK = tl.constexpr(1024)  # elements that a program writes at a time


class Band(NamedTuple):
    """A window on the keys, aligned to the bottom right; a side without a bound is None.

    Row i sees the keys from i + shift - left to i + shift + right.
    """

    left: Any
    right: Any
    shift: Any = None  # keys less rows


@triton.jit
def find_sequence(starts_ptr, b, num_tokens, longest):
    """Return the first token of sequence ``b``, as int64, and the number of its tokens.

    The values are not checked on the host. Clamping keeps every access inside the tensors.
    """
    start = tl.minimum(tl.maximum(tl.load(starts_ptr + b), 0), num_tokens)
    stop = tl.minimum(tl.maximum(tl.load(starts_ptr + b + 1), start), num_tokens)
    return start.to(tl.int64), tl.minimum(stop - start, longest)


@triton.jit
def extents(starts_ptr, key_starts_ptr, lengths_ptr, b, N, M, TOKENS, KEY_TOKENS):
    """Return where the rows and columns of batch entry or sequence ``b`` start, and their numbers.

    The last result is the number of columns that are not padding. A start is the index of a batch
    entry, or, in a varlen batch, of a token.
    """
    row_b, col_b, num_rows, num_cols = b.to(tl.int64), b.to(tl.int64), N, M
    if starts_ptr is not None:
        row_b, num_rows = find_sequence(starts_ptr, b, TOKENS, N)
        col_b, num_cols = find_sequence(key_starts_ptr, b, KEY_TOKENS, M)
    return row_b, col_b, num_rows, num_cols, visible_keys(lengths_ptr, b, num_cols)


@triton.jit
def mask_start(mask_view, b, h, MASK: tl.constexpr):
    """Return a pointer to the mask of a head; without a mask, the pointer of the view."""
    ptr = mask_view.ptr
    if MASK != "none":
        ptr = head_of(mask_view, b, h)
    return ptr


@triton.jit
def fill_outside(
    ptr, value, starts_ptr, num_sequences, num_tokens, groups, width, program, num_programs, lanes
):
    """Write ``value`` to the tokens of (groups, num_tokens, width) that no sequence owns.

    ``num_programs`` programs share the work, which is empty if the sequences fill the batch.
    ``lanes`` is (FILL_BLOCK,), counting from 0; Gluon gives it a layout.
    """
    # tokens before the sequences
    first = tl.minimum(tl.maximum(tl.load(starts_ptr), 0), num_tokens).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(starts_ptr + num_sequences), first), num_tokens)
    owned = (last - first) * width
    outside = num_tokens.to(tl.int64) * width - owned
    # Sequences lie end to end, so that the tokens outside are before the first and after the last:
    # ``local`` skips the owned span between the two.
    for start in range(
        program.to(tl.int64) * FILL_BLOCK, groups * outside, num_programs * FILL_BLOCK
    ):
        index = start + lanes  # (FILL_BLOCK,)
        group, local = index // outside, index % outside
        offset = group * (outside + owned) + local + tl.where(local < first * width, 0, owned)
        tl.store(ptr + offset, value, mask=index < groups * outside)


@triton.jit
def fill_gradients(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    starts_ptr,
    key_starts_ptr,
    num_sequences,
    num_tokens,
    num_keys,
    width,
    key_width,
    program,
    num_programs,
    lanes,
):
    """Write zeros to the gradients of tokens that no sequence owns; see ``fill_outside``."""
    fill_outside(
        ptr=dq_ptr,
        value=0.0,
        starts_ptr=starts_ptr,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        groups=1,
        width=width,
        program=program,
        num_programs=num_programs,
        lanes=lanes,
    )
    fill_outside(
        ptr=dk_ptr,
        value=0.0,
        starts_ptr=key_starts_ptr,
        num_sequences=num_sequences,
        num_tokens=num_keys,
        groups=1,
        width=key_width,
        program=program,
        num_programs=num_programs,
        lanes=lanes,
    )
    fill_outside(
        ptr=dv_ptr,
        value=0.0,
        starts_ptr=key_starts_ptr,
        num_sequences=num_sequences,
        num_tokens=num_keys,
        groups=1,
        width=key_width,
        program=program,
        num_programs=num_programs,
        lanes=lanes,
    )


@triton.jit
def _fill_outside_kernel(ptr, starts_ptr, num_sequences, num_tokens, width):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, FILL_BLOCK)
    fill_outside(
        ptr=ptr,
        value=0.0,
        starts_ptr=starts_ptr,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        groups=1,
        width=width,
        program=program,
        num_programs=programs,
        lanes=lanes,
    )


def launch_fill(starts: Tensor, t: Tensor) -> None:
    """Write zeros to the tokens of a contiguous t (T, H, D) that no sequence owns."""
    sizes = len(starts) - 1, len(t), t.shape[1] * t.shape[2]
    with torch.cuda.device_of(t):
        _fill_outside_kernel[(SPARE_PROGRAMS,)](t, starts, *sizes)


@triton.jit
def score_tile(
    q,
    k,
    row_start,
    col_start,
    limit,
    band,
    mask_view,
    mask_ptr,
    N,
    M,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDENT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Return masked scores (rows of q, rows of k), and their derivative by the products.

    Scores are scaled with ``SCALED`` or an additive mask; see ``exponent_factor``. Without a
    ``softcap`` (None) the derivative is 1 and unused. The other arguments are those of
    ``mask_scores``.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
    slope, mask_scale = 1.0, scale
    if softcap is not None:
        # Each rounding is explicit, as in ``biased``: the backward must recompute the same bits.
        bounded, slope = tanh(tl.fma(s, scale, 0.0) * (1.0 / softcap))
        s = tl.fma(bounded, softcap, 0.0)
        mask_scale = 1.0
    elif SCALED and MASK != "additive":
        s = tl.fma(s, scale, 0.0)  # rounded here, not fused with a later subtraction
    s = mask_scores(
        s=s,
        row_start=row_start,
        col_start=col_start,
        limit=limit,
        band=band,
        mask_view=mask_view,
        mask_ptr=mask_ptr,
        N=N,
        M=M,
        scale=mask_scale,
        CAUSAL=CAUSAL,
        MASK=MASK,
        RESIDENT=RESIDENT,
        RAGGED=RAGGED,
    )
    return s, slope


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32, and its derivative.

    The relative error is at most 2e-7, or 4e-7 with a GPU's exp2, which is off by 2^-22. Near 0,
    where the quotient would cancel, a minimax odd polynomial is used (relative error 1.5e-8).
    """
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2_E))  # at most 1
    reciprocal = 1.0 / (1.0 + e)  # between 1/2 and 1: no overflow
    # With e = exp(-2 |x|): tanh |x| = (1 - e) / (1 + e), and its derivative 4 e / (1 + e)^2.
    far = (1.0 - e) * reciprocal
    square = x * x
    p = tl.fma(square, 0.0172413936, -0.0530454532)
    p = tl.fma(tl.fma(p, square, 0.133258784), square, -0.333331439)
    near = tl.fma(p * square, x, x)
    value = tl.where(size < 0.5, near, tl.where(x < 0, -far, far))
    return value, 4.0 * e * reciprocal * reciprocal


@triton.jit
def mask_scores(
    s,
    row_start,
    col_start,
    limit,
    band,
    mask_view,
    mask_ptr,
    N,
    M,
    scale,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    RESIDENT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Return a tile of scores (BLOCK_M, BLOCK_N) with -inf wherever a key is hidden from a row.

    Every kind of mask is applied here and nowhere else. ``mask_ptr`` points to the mask of this
    head; ``scale`` multiplies scores before an additive mask. Keys from ``limit`` on are hidden; a
    tile that is not ``RAGGED`` ends before ``limit``. ``band`` is a ``Band``, without bounds for
    ``RESIDENT`` tiles (short.py).
    """
    rows = tl.arange(0, s.shape[0])  # (BLOCK_M,)
    cols = tl.arange(0, s.shape[1])  # (BLOCK_N,)
    if MASK != "none":
        # Only the start of the tile is a 64-bit offset.
        mask_ptr += tl.cast(row_start, tl.int64) * mask_view.stride_n
        mask_ptr += tl.cast(col_start, tl.int64) * mask_view.stride_m
        ptrs = mask_ptr + rows[:, None] * mask_view.stride_n + cols[None, :] * mask_view.stride_m
        inside = (row_start + rows < N)[:, None] & (col_start + cols < M)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0)  # (BLOCK_M, BLOCK_N)
        s = tl.where(tile != 0, s, float("-inf")) if MASK == "boolean" else biased(s, scale, tile)
    if CAUSAL and RESIDENT:
        # One bound per row replaces two comparisons. With all scores of a row in registers this
        # takes 83 registers instead of 99; in a loop over tiles, 139 instead of 128 (sm_80).
        last = row_start - col_start + rows  # (BLOCK_M,), of this tile's columns
        last = tl.minimum(last, limit - col_start - 1) if RAGGED else last
        s = tl.where(cols[None, :] <= last[:, None], s, float("-inf"))
    elif CAUSAL or RAGGED:
        seen = (col_start + cols < limit)[None, :]  # (1, BLOCK_N)
        if CAUSAL:
            seen = seen & (col_start + cols[None, :] <= row_start + rows[:, None])
        if band.left is not None:
            # the first visible column of row 0 of the tile, from its first column
            lowest = _inside_tile(row_start + (band.shift - band.left) - col_start)
            seen = seen & (cols[None, :] >= lowest + rows[:, None])
        if band.right is not None:
            highest = _inside_tile(row_start + (band.shift + band.right) - col_start)
            seen = seen & (cols[None, :] <= highest + rows[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _inside_tile(distance):
    """Return a distance in 32 bits, clamped to values beyond any tile."""
    return tl.minimum(tl.maximum(distance, -65536), 65536).to(tl.int32)


@triton.jit
def visible_cols(
    row_start, limit, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return the range of columns that rows of a tile may see, starting at a tile of columns."""
    start, end = 0, limit
    if CAUSAL:
        end = tl.minimum(limit, row_start + BLOCK_M)  # the last row sees the most
    if band.left is not None:
        # The first row reaches furthest left, and the last row, below, furthest right.
        start = (tl.maximum(row_start + (band.shift - band.left), 0) // BLOCK_N * BLOCK_N).to(
            tl.int32
        )
    if band.right is not None:
        end = tl.maximum(tl.minimum(row_start + BLOCK_M + (band.shift + band.right), end), 0).to(
            tl.int32
        )
    return start, end


@triton.jit
def visible_rows(
    col_start,
    num_rows,
    limit,
    band,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return the range of rows that may see columns of a tile, starting at a tile of rows."""
    # Rows above the diagonal see none of these columns, and no row sees a tile of padding.
    start = col_start // BLOCK_M * BLOCK_M if CAUSAL else 0
    end = tl.where(col_start < limit, num_rows, 0)
    if band.right is not None:
        # Rows of a window that see these columns: the bounds of ``visible_cols`` solved for the
        # row.
        start = tl.maximum(col_start - (band.shift + band.right), start)
        start = (start // BLOCK_M * BLOCK_M).to(tl.int32)
    if band.left is not None:
        end = tl.minimum(col_start + BLOCK_N - (band.shift - band.left), end)
        end = tl.maximum(end, 0).to(tl.int32)
    return start, end


@triton.jit
def biased(s, scale, tile):
    """Scale products and add a tile of an additive mask, with a single rounding.

    The most negative finite number hides a key, as -inf does. The backward must recompute exactly
    the scores whose maximum the forward stored: among large numbers every bit counts. The rounding
    is therefore explicit and not left to the compiler.
    """
    bias = tile.to(tl.float32)
    return tl.fma(s, scale, tl.where(bias < -1e38, float("-inf"), bias))


@triton.jit
def exponent_factor(scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Return the positive factor from differences of scores to exponents of ``exponential``.

    Scores are already scaled (``SCALED``) if a mask is added to them, a softcap bounds them, or the
    scale does not preserve their order. The factor multiplies a score less the
    maximum of its row, so that the exponent of the maximum is 0 however a compiler fuses products
    and sums.
    """
    return units(DTYPE) if SCALED else scale * units(DTYPE)


@triton.jit
def row_lse(row_max, divisor, scale, SCALED: tl.constexpr):
    """Return the log-sum-exp of rows in nats; -inf where the maximum is -inf."""
    return (row_max if SCALED else row_max * scale) + tl.log(divisor)


@triton.jit
def store_row_statistics(
    max_log_sum_ptr,
    lse_ptr,
    start,
    rows,
    pivot,
    unseeing,
    divisor,
    scale,
    inside,
    SCALED: tl.constexpr,
):
    """Store the maximum of each row and the log of its sum, for the backward.

    Their sum, the log-sum-exp, would round away the second if the first is large. A row without a
    visible key gets 0 and inf: exp(-inf - inf) = 0, so that it contributes nothing. If
    ``max_log_sum_ptr`` is None, the function stores the log-sum-exp, which is inf for such a row.
    """
    if max_log_sum_ptr is None:
        lse = tl.where(unseeing, float("inf"), row_lse(pivot, divisor, scale, SCALED))
        tl.store(lse_ptr + start + rows, lse, mask=inside)
    else:
        both = tl.join(pivot, tl.where(unseeing, float("inf"), tl.log(divisor)))  # (BLOCK_M, 2)
        ptrs = max_log_sum_ptr + ((start + rows)[:, None] * 2 + tl.arange(0, 2)[None, :])
        tl.store(ptrs, both, mask=inside[:, None])


@triton.jit
def load_row_statistics(max_log_sum_ptr, lse_ptr, start, rows, inside, DTYPE: tl.constexpr):
    """Load what ``store_row_statistics`` stored, the sum in ``units``; 0 and inf if not ``inside``.

    A log-sum-exp is the log of the sum relative to a maximum of 0.
    """
    if max_log_sum_ptr is None:
        log_sum = tl.load(lse_ptr + start + rows, mask=inside, other=float("inf"))  # (BLOCK_M,)
        row_max = tl.zeros_like(log_sum)
    else:
        ptrs = max_log_sum_ptr + (start + rows) * 2
        row_max = tl.load(ptrs, mask=inside, other=0.0)  # (BLOCK_M,)
        log_sum = tl.load(ptrs + 1, mask=inside, other=float("inf"))
    return row_max, log_sum * units(DTYPE)
