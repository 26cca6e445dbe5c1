"""What the forward and the backward kernels share: one tile of scores."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._triton import LOG2_E, PRECISION, head_of, units, visible_keys
from ..call import Call, sequence_arguments, shared_arguments

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
def extents(starts_ptr, key_starts_ptr, lengths_ptr, b, N, M, TOKENS, KEY_TOKENS):
    """Return of batch entry, or sequence, ``b``: where rows and columns start, and their numbers.

    Last comes how many columns are no padding. A start is an entry, or in a varlen batch a token.
    """
    row_b, col_b, num_rows, num_cols = b.to(tl.int64), b.to(tl.int64), N, M
    if starts_ptr is not None:
        row_b, num_rows = find_sequence(starts_ptr, b, TOKENS, N)
        col_b, num_cols = find_sequence(key_starts_ptr, b, KEY_TOKENS, M)
    return row_b, col_b, num_rows, num_cols, visible_keys(lengths_ptr, b, num_cols)


@triton.jit
def mask_start(mask_view, b, h, MASK: tl.constexpr):
    """Return where the mask of a head starts, if there is one."""
    ptr = mask_view.ptr
    if MASK != "none":
        ptr = head_of(mask_view, b, h)
    return ptr


@triton.jit
def fill_outside(
    ptr, value, starts_ptr, num_sequences, num_tokens, groups, width, program, num_programs, lanes
):
    """Write ``value`` to the tokens of (groups, num_tokens, width) that no sequence owns.

    ``num_programs`` programs share the work; where the sequences fill the batch there is none.
    ``lanes`` (FILL,) counts from 0; Gluon gives it a layout.
    """
    first = tl.minimum(tl.maximum(tl.load(starts_ptr), 0), num_tokens).to(tl.int64)
    last = tl.minimum(tl.maximum(tl.load(starts_ptr + num_sequences), first), num_tokens)
    owned = (last - first) * width
    outside = num_tokens.to(tl.int64) * width - owned
    for start in range(program.to(tl.int64) * FILL, groups * outside, num_programs * FILL):
        index = start + lanes  # (FILL,)
        group, local = index // outside, index % outside
        offset = group * (outside + owned) + local + tl.where(local < first * width, 0, owned)
        tl.store(ptr + offset, value, mask=index < groups * outside)


@triton.jit
def fill_gradients(
    dq_ptr, dk_ptr, dv_ptr, starts_ptr, key_starts_ptr, num_sequences, num_tokens, num_keys,
    width, key_width, program, num_programs, lanes,
):  # fmt: skip
    """Write zeros to the gradients of tokens that no sequence owns; see ``fill_outside``."""
    fill_outside(
        dq_ptr, 0.0, starts_ptr, num_sequences, num_tokens, 1, width, program, num_programs, lanes
    )
    fill_outside(
        dk_ptr, 0.0, key_starts_ptr, num_sequences, num_keys, 1, key_width, program,
        num_programs, lanes,
    )  # fmt: skip
    fill_outside(
        dv_ptr, 0.0, key_starts_ptr, num_sequences, num_keys, 1, key_width, program,
        num_programs, lanes,
    )  # fmt: skip


@triton.jit
def _fill_outside_kernel(ptr, starts_ptr, num_sequences, num_tokens, width):
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, FILL)
    fill_outside(
        ptr, 0.0, starts_ptr, num_sequences, num_tokens, 1, width, program, programs, lanes
    )


def launch_fill(starts: Tensor, t: Tensor) -> None:
    """Write zeros to the tokens of a contiguous t (T, H, D) that no sequence owns."""
    sizes = len(starts) - 1, len(t), t.shape[1] * t.shape[2]
    with torch.cuda.device_of(t):
        _fill_outside_kernel[(SPARE_PROGRAMS,)](t, starts, *sizes)


def online_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments by name of a kernel that walks over any length."""
    left, right = call.window
    return dict(
        **shared_arguments(call, call.sequences),
        **sequence_arguments(call.query, call.key, call.sequences),
        B=call.batch,
        softcap=call.softcap or None,
        window_left=None if left < 0 else left,
        window_right=None if right < 0 else right,
    )


@triton.jit
def score_tile(
    q, k, row_start, col_start, limit, band, mask_view, mask_ptr, N, M, scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    SCALED: tl.constexpr, RESIDENT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Return (BLOCK_M, BLOCK_N) scores, masked, and what their gradient is of that of products.

    Scaled where ``SCALED`` or where a mask is added; see ``exponent_factor``. Without a ``softcap``
    (None) the second is 1, and nobody reads it. The rest is as ``mask_scores`` takes it.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
    slope, mask_scale = 1.0, scale
    if softcap is not None:
        # As in ``biased`` the order is written out.
        bounded, slope = tanh(tl.fma(s, scale, 0.0) * (1.0 / softcap))
        s, mask_scale = tl.fma(bounded, softcap, 0.0), 1.0
    elif SCALED and MASK != "additive":
        s = tl.fma(s, scale, 0.0)
    s = mask_scores(
        s, row_start, col_start, limit, band, mask_view, mask_ptr, N, M, mask_scale, BLOCK_M,
        BLOCK_N, CAUSAL, MASK, RESIDENT, RAGGED,
    )  # fmt: skip
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
def mask_scores(
    s, row_start, col_start, limit, band, mask_view, mask_ptr, N, M, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    RESIDENT: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Return a tile of scores (BLOCK_M, BLOCK_N), -inf where anything hides a key from a row.

    Every kind of mask is applied here and nowhere else. ``mask_ptr`` is where the mask of this head
    starts, ``scale`` multiplies scores before an additive mask. Keys from ``limit`` on are hidden,
    which a tile that is not ``RAGGED`` does not reach. ``band`` is (left, right, keys less rows): a
    window, aligned bottom right, whose sides may be None, as of ``RESIDENT`` tiles (segments.py).
    """
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if MASK != "none":
        mask_ptr += tl.cast(row_start, tl.int64) * mask_view.stride_n
        mask_ptr += tl.cast(col_start, tl.int64) * mask_view.stride_m
        ptrs = mask_ptr + rows[:, None] * mask_view.stride_n + cols[None, :] * mask_view.stride_m
        inside = (row_start + rows < N)[:, None] & (col_start + cols < M)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0)  # (BLOCK_M, BLOCK_N)
        s = tl.where(tile != 0, s, float("-inf")) if MASK == "boolean" else biased(s, scale, tile)
    if CAUSAL and RESIDENT:
        # Where all scores of a row are in registers, one bound for each row takes 83 registers
        # instead of 99; in a loop over tiles it takes 139 instead of 128 (sm_80).
        last = row_start - col_start + rows  # (BLOCK_M,), of this tile's columns
        last = tl.minimum(last, limit - col_start - 1) if RAGGED else last
        s = tl.where(cols[None, :] <= last[:, None], s, float("-inf"))
    elif CAUSAL or RAGGED:
        seen = (col_start + cols < limit)[None, :]  # (1, BLOCK_N)
        if CAUSAL:
            seen = seen & (col_start + cols[None, :] <= row_start + rows[:, None])
        if band[0] is not None:
            lowest = _inside_tile(row_start + (band[2] - band[0]) - col_start)
            seen = seen & (cols[None, :] >= lowest + rows[:, None])
        if band[1] is not None:
            highest = _inside_tile(row_start + (band[2] + band[1]) - col_start)
            seen = seen & (cols[None, :] <= highest + rows[:, None])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _inside_tile(distance):
    """Return a distance in 32 bits, cut off where it is longer than any tile."""
    return tl.minimum(tl.maximum(distance, -65536), 65536).to(tl.int32)


@triton.jit
def visible_cols(
    row_start, limit, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Return from and to where columns are seen by rows of a tile, from a tile's first on."""
    start, end = 0, limit
    if CAUSAL:
        end = tl.minimum(limit, row_start + BLOCK_M)
    if band[0] is not None:
        start = (tl.maximum(row_start + (band[2] - band[0]), 0) // BLOCK_N * BLOCK_N).to(tl.int32)
    if band[1] is not None:
        end = tl.maximum(tl.minimum(row_start + BLOCK_M + (band[2] + band[1]), end), 0).to(tl.int32)
    return start, end


@triton.jit
def visible_rows(
    col_start, num_rows, limit, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return from and to where rows see columns of a tile, from a tile's first on."""
    # Rows above the diagonal see none of these columns; nor does any row see a hidden tile.
    start = col_start // BLOCK_M * BLOCK_M if CAUSAL else 0
    end = tl.where(col_start < limit, num_rows, 0)
    if band[1] is not None:
        start = (tl.maximum(col_start - (band[2] + band[1]), start) // BLOCK_M * BLOCK_M).to(
            tl.int32
        )
    if band[0] is not None:
        end = tl.minimum(col_start + BLOCK_N - (band[2] - band[0]), end)
        end = tl.maximum(end, 0).to(tl.int32)
    return start, end


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
def exponent_factor(scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
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
