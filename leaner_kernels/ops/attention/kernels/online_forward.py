"""Triton forward of softmax attention: output, statistics and the capture of sampled entries.

Sizes: B batch, H query heads, N query rows, M key columns, D head dimension, S sampled entries,
T row tiles. Mapping: one program owns one tile of query rows of one head and walks over the keys
with the online softmax, so that N and M may have any size. In a varlen batch, B counts the
sequences, N and M are the largest lengths, and a program works on its sequence alone.

Capture is a separate specialisation, launched over the S sampled entries in addition to the
ordinary launch: as a branch it would cost registers in every program.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..._epilogue import NUM_SUMS, store_part, sums_of_rows
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import (
    add_product,
    exponential,
    head_of,
    keep_tile,
    load_rows,
    nats,
    parts_of,
    product_of_parts,
    store_rows,
)
from ..call import Call, Results, forward_arguments, kernel_arguments
from .scores import (
    FILL,
    SPARE_PROGRAMS,
    exponent_factor,
    extents,
    fill_outside,
    mask_start,
    row_lse,
    score_tile,
    store_max_log_sum,
    visible_cols,
)

# A mask, dropout, a scale that is not positive, a head dimension that does not fill its tile and
# the capture of sampled entries need registers, so that these calls get smaller tiles. A varlen
# batch needs a few more for addresses.
_SIMPLE = "softcap", "unaligned", "varlen"
_CAPTURE = "capture", "padded_dim", "varlen"
_ALL = "capture", "dropout", "mask", "padded_dim", "scale", *_SIMPLE
TILES = Tiles(
    "online_forward",
    rule(dim=16, takes=_SIMPLE, BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(dim=32, takes=_SIMPLE, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    rule(dim=64, takes=_SIMPLE, BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
    rule(
        dim=128, takes=_SIMPLE[:2], BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, maxnreg=255
    ),
    rule(dim=128, takes=_SIMPLE, BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2, maxnreg=255),
    rule(dim=64, takes=_CAPTURE, BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=1, maxnreg=255),
    rule(
        dim=128,
        takes=_CAPTURE[:2],
        gpus=(90,),
        BLOCK_M=64,
        BLOCK_N=32,
        num_warps=4,
        num_stages=1,
        maxnreg=255,
    ),
    rule(dim=128, takes=_CAPTURE, BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1, maxnreg=255),
    rule(dim=32, takes=_ALL, BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=1, maxnreg=255),
    rule(dim=128, takes=_ALL, BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=1, maxnreg=255),
    rule(
        dim=16,
        size=4,
        takes=_SIMPLE,
        BLOCK_M=32,
        BLOCK_N=32,
        num_warps=4,
        num_stages=1,
        maxnreg=255,
    ),
    rule(
        dim=64,
        size=4,
        takes=_SIMPLE,
        BLOCK_M=32,
        BLOCK_N=16,
        num_warps=4,
        num_stages=1,
        maxnreg=255,
    ),
    rule(
        dim=32, size=4, takes=_ALL, BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=1, maxnreg=255
    ),
    rule(
        dim=64, size=4, takes=_ALL, BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1, maxnreg=255
    ),
    rule(
        dim=128, size=4, takes=_ALL, BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1, maxnreg=255
    ),
)


@triton.jit(do_not_specialize=["TOKENS", "KEY_TOKENS", "window_left", "window_right", "threshold"])
def _attention_fwd_kernel(
    q_view, k_view, v_view, mask_view, lengths_ptr, seed_ptr, sample_ptr, starts_ptr,
    key_starts_ptr, out_view, lse_ptr, max_log_sum_ptr, parts_ptr, B, H, GROUP, N, M, TOKENS,
    KEY_TOKENS, scale, softcap, window_left, window_right, keep_scale, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, STATS: tl.constexpr,
    CAPTURE: tl.constexpr,
):  # fmt: skip
    # Tiles of one head are neighbours in the grid: they read the same K and V from the cache.
    num_tiles = tl.cdiv(N, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    out_b = tl.program_id(0) // num_tiles // H
    h = tl.program_id(0) // num_tiles % H
    b = out_b
    if CAPTURE:
        # Slot ``out_b`` holds entry ``b``; an index outside the batch leaves its slot unwritten.
        b = tl.load(sample_ptr + out_b)
        if (b < 0) | (b >= B):
            return
    elif starts_ptr is not None:
        # The programs past the last sequence fill the tokens that no sequence owns.
        spare = tl.program_id(0) - B * H * num_tiles
        if spare >= 0:
            num_spare, lanes = tl.num_programs(0) - B * H * num_tiles, tl.arange(0, FILL)
            fill_outside(
                out_view.ptr, 0.0, starts_ptr, B, TOKENS, 1, H * D, spare, num_spare, lanes
            )
            if lse_ptr is not None:
                fill_outside(
                    lse_ptr, float("-inf"), starts_ptr, B, TOKENS, H, 1, spare, num_spare, lanes
                )
            return
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    b_64, h_64, kv_64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    row_b, col_b, num_rows, num_cols, limit = extents(
        starts_ptr, key_starts_ptr, lengths_ptr, b, N, M, TOKENS, KEY_TOKENS
    )
    # Row statistics are (B, H, N), or (H, T) in a varlen batch.
    lse_start = (b_64 * H + h) * N
    if starts_ptr is not None:
        lse_start = h_64 * TOKENS + row_b
        # A grid for the longest sequence: other tiles are past the end. With statistics a tile
        # still writes its part, of no rows.
        if not STATS and not CAPTURE and first >= num_rows:
            return
    k_ptr = head_of(k_view, col_b, kv_64)
    v_ptr = head_of(v_view, col_b, kv_64)
    mask_ptr = mask_start(mask_view, b_64, h_64, MASK)
    band = window_left, window_right, tl.cast(num_cols, tl.int64) - num_rows
    begin, end = visible_cols(first, limit, band, BLOCK_M, BLOCK_N, CAUSAL)
    if starts_ptr is not None:
        end = tl.where(first < num_rows, end, 0)

    factor = exponent_factor(scale, SCALED, q_view.ptr.dtype.element_ty)
    q_start = head_of(q_view, row_b, h_64)
    q = load_rows(q_start, first, q_view.stride_n, num_rows, BLOCK_M, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # The sums below are relative to the running maximum.
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_centred = tl.zeros([BLOCK_M], tl.float32)  # sum of p * exponent: no large terms cancel
    row_square = tl.zeros([BLOCK_M], tl.float32)  # sum of p^2

    for start in range(begin, end, BLOCK_N):  # q: (BLOCK_M, BLOCK_D); k, v: (BLOCK_N, BLOCK_D)
        k = load_rows(k_ptr, start, k_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
        s, _ = score_tile(  # (BLOCK_M, BLOCK_N)
            q, k, first, start, limit, band, mask_view, mask_ptr, N, M, scale, softcap, BLOCK_M,
            BLOCK_N, CAUSAL, MASK, SCALED, False, True,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(s, axis=1))  # (BLOCK_M,)
        # A row without a visible key so far has a maximum of -inf, and -inf - (-inf) is nan.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        shift = (row_max - pivot) * factor
        exponent = (s - pivot[:, None]) * factor  # (BLOCK_M, BLOCK_N)
        if CAPTURE and q.dtype == tl.float16:
            # P is up to 2^15 instead of 1, so that the remainder in its second part stays normal.
            exponent += 15.0
        alpha = exponential(shift, q.dtype)  # (BLOCK_M,)
        p = exponential(exponent, q.dtype)  # (BLOCK_M, BLOCK_N)
        if STATS:
            # No 0 * inf: row_sum is 0 before the first visible key, and p is 0 where s is -inf.
            shift = tl.where(row_max == float("-inf"), 0.0, shift)
            centred = tl.where(s == float("-inf"), 0.0, exponent)
            # With a new maximum, every exponent moves by ``shift``, every p by ``alpha``.
            row_centred = alpha * (row_centred + row_sum * shift) + tl.sum(p * centred, axis=1)
            row_square = alpha * alpha * row_square + tl.sum(p * p, axis=1)
        row_sum = alpha * row_sum + tl.sum(p, axis=1)
        row_max = new_max
        # Dropout comes after the sums: statistics and the divisor are of P itself.
        if seed_ptr is not None:
            cols = start + tl.arange(0, BLOCK_N)
            p = tl.where(keep_tile(tl.load(seed_ptr), rows, cols, b * H + h, threshold), p, 0.0)
        v = load_rows(v_ptr, start, v_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
        if CAPTURE:
            # P rounded once changes a condition number of 1e5 by a tenth or more (docs/kappa.md).
            high, middle, low = parts_of(p, v.dtype)  # (BLOCK_M, BLOCK_N) each
            acc = acc * alpha[:, None] + product_of_parts(high, middle, low, v)
        else:
            acc = add_product(acc * alpha[:, None], p.to(v.dtype), v)

    # A row without a visible key gets an output of 0.
    divisor = tl.where(row_sum == 0, 1.0, row_sum)
    if q.dtype == tl.float32:
        # The backward computes delta from the output, and subtracts it from dP. The error of a fast
        # division, two units in the last place, would remain where the two should cancel.
        normaliser = tl.div_rn(tl.zeros_like(divisor) + keep_scale, divisor)  # (BLOCK_M,)
    else:
        normaliser = keep_scale / divisor
    a = acc * normaliser[:, None]  # (BLOCK_M, BLOCK_D)
    if CAPTURE:
        if starts_ptr is not None:
            # Every slot has the length of the longest sequence: zeros follow the others.
            a = tl.where((rows < num_rows)[:, None], a, 0.0)
        out_start = head_of(out_view, out_b.to(tl.int64), h_64)
        store_rows(out_start, a, first, out_view.stride_n, N, BLOCK_M, D, BLOCK_D)
    else:
        out_start = head_of(out_view, row_b, h_64)
        store_rows(out_start, a, first, out_view.stride_n, num_rows, BLOCK_M, D, BLOCK_D)
        inside = rows < num_rows
        unseeing = row_max == float("-inf")
        pivot = tl.where(unseeing, 0.0, row_max)
        store_max_log_sum(max_log_sum_ptr, lse_start, rows, pivot, unseeing, divisor, inside)
    if STATS:
        lse = row_lse(row_max, divisor, scale, SCALED)  # (BLOCK_M,)
        tl.store(lse_ptr + lse_start + rows, lse, mask=inside)
        # A row without a visible key has p = 0 everywhere, and adds no entropy and no norm.
        sums = sums_of_rows(
            row_max, divisor, row_centred, row_square, tl.sum(a * a, axis=1), inside, nats(q.dtype)
        )
        # Maxima of unscaled scores are scaled as they are stored.
        rest = 1.0 if SCALED else scale
        store_part(parts_ptr, sums, tl.program_id(0), tl.maximum(num_rows, 1), rest)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2).

    With ``lse`` (B, H, N) and ``stats`` (statistics, B, H), it also writes lse and the parts of the
    statistics, (B, H, T, NUM_SUMS) for T row tiles. In a varlen batch the tensors are (T, H, D),
    max_log_sum is (H, T, 2) and lse (H, T), and all are contiguous.
    """
    arguments, stats = forward_arguments(_attention_fwd_kernel, call, results), results.stats
    num_tiles = triton.cdiv(arguments["N"], tile["BLOCK_M"])
    spare = 0 if call.sequences is None else SPARE_PROGRAMS
    arguments |= dict(
        **tile.arguments,
        sample_ptr=None,
        parts_ptr=None if stats is None else stats.new_empty(*stats.shape[1:], num_tiles, NUM_SUMS),
        STATS=stats is not None,
        CAPTURE=False,
    )
    grid = (call.batch * arguments["H"] * num_tiles + spare,)
    return Launch(_attention_fwd_kernel, grid, arguments)


def prepare_capture(tile: Tile, call: Call, sample: Tensor, heads_out: Tensor) -> Launch:
    """Return the launch that writes heads (S, N, H * D) float32 of the entries in ``sample``.

    ``sample`` is contiguous. In a varlen batch N is the longest sequence; shorter ones are padded
    with zeros.
    """
    (slots, rows, _), heads, dim = heads_out.shape, call.query.shape[1], call.query.shape[-1]
    out = heads_out.view(slots, rows, heads, dim).transpose(1, 2)
    arguments = kernel_arguments(_attention_fwd_kernel, call, {"out": out}) | dict(
        **tile.arguments,
        sample_ptr=sample,
        lse_ptr=None,
        max_log_sum_ptr=None,
        parts_ptr=None,
        STATS=False,
        CAPTURE=True,
    )
    grid = (slots * heads * triton.cdiv(rows, tile["BLOCK_M"]),)
    return Launch(_attention_fwd_kernel, grid, arguments)
