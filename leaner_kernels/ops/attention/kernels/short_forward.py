"""Triton forward of softmax attention for short sequences: a program owns a head, K and V resident.

Sizes: B batch, H query heads, N query rows, M key columns, D head dimension. Mapping: one program
owns one head, or, if heads are few, every PARTS-th tile of its rows. K and V stay in shared memory.
A whole row of scores is in registers at once (segments.py), and the softmax is computed by its
definition, without a running maximum. The statistics of a head are complete in its program.
"""

import triton
import triton.language as tl

from ... import _tiles
from ..._epilogue import add_sums, no_sums, store_statistics, sums_of_rows
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LN_2, PRECISION, head_of, keep_tile, load_rows, store_rows, visible_keys
from ..call import Call, Results, forward_arguments
from .scores import exponent_factor, mask_start, row_lse, store_max_log_sum
from .segments import cut, load_segments, score_segments

# ``BLOCK`` is the rows of a tile. K and V are cut into segments, of at most 128 unless a rule says,
# for the most tokens of a rule: one compiled kernel serves every length of the rule.
_PADDED = "padded_dim", "unaligned"
_ALL = "dropout", "mask", *_PADDED
_AMPERE = 80, 86  # elsewhere, online_forward.py is as fast for more tokens
_FEW = (
    rule(dim=16, tokens=16, takes=_ALL, BLOCK=16, num_warps=1),
    rule(dim=64, tokens=16, takes=_ALL, BLOCK=16, num_warps=2),
    rule(dim=64, tokens=32, BLOCK=32, num_warps=2),
    rule(dim=64, tokens=32, takes=_ALL, BLOCK=32, num_warps=4),
)
TILES = Tiles(
    "short_forward",
    *_FEW,
    rule(dim=32, tokens=64, BLOCK=64, largest_segment=32, num_warps=4),
    rule(dim=64, tokens=64, takes=("dropout",), BLOCK=64, num_warps=4),
    rule(dim=32, tokens=64, takes=_PADDED, BLOCK=64, num_warps=4),
    rule(dim=64, tokens=64, takes=("padded_dim",), BLOCK=64, num_warps=4),
    rule(dim=64, tokens=64, takes=_ALL, BLOCK=32, num_warps=4, maxnreg=255),
    rule(dim=128, tokens=64, BLOCK=64, num_warps=4),
    rule(dim=64, tokens=208, takes=("padded_dim",), gpus=_AMPERE, BLOCK=64, num_warps=4),
    num_stages=1,
)
STATISTICS_TILES = Tiles(
    "short_forward_statistics",
    *_FEW,
    rule(dim=64, tokens=64, takes=("dropout",), BLOCK=64, num_warps=4),
    rule(dim=64, tokens=64, takes=_ALL, BLOCK=32, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=64, BLOCK=64, num_warps=8),
    num_stages=1,
)


@triton.jit(do_not_specialize=["H", "GROUP", "N", "M", "PARTS", "threshold"])
def _short_fwd_kernel(
    q_view, k_view, v_view, mask_view, lengths_ptr, seed_ptr, out_view, lse_ptr, max_log_sum_ptr,
    stats_ptr, H, GROUP, N, M, PARTS, scale, keep_scale, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    # Programs of one head are neighbours: they read the same K and V from the cache.
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    b, h = head // H, head % H
    b_64, h_64, kv_64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    q_ptr = head_of(q_view, b_64, h_64)
    out_ptr = head_of(out_view, b_64, h_64)
    mask_ptr = mask_start(mask_view, b_64, h_64, MASK)
    limit = visible_keys(lengths_ptr, b, M)
    k_start = head_of(k_view, b_64, kv_64)
    v_start = head_of(v_view, b_64, kv_64)
    # Loaded once; the loop over tiles of rows reads them again and again. Keys past ``limit`` are
    # zeros.
    ks = load_segments(k_start, k_view.stride_n, limit, SEGMENTS, D, BLOCK_D)
    vs = load_segments(v_start, v_view.stride_n, limit, SEGMENTS, D, BLOCK_D)
    factor = exponent_factor(scale, SCALED, q_ptr.dtype.element_ty)
    if stats_ptr is not None:
        sums = no_sums(BLOCK_M)

    for first in range(part * BLOCK_M, N, PARTS * BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, first, q_view.stride_n, N, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        scores, row_max = score_segments(  # tuple of (BLOCK_M, size), and (BLOCK_M,)
            q, ks, first, limit, mask_view, mask_ptr, N, M, scale, SEGMENTS, BLOCK_M, CAUSAL, MASK,
            RAGGED,
        )  # fmt: skip
        # A row without a visible key has a maximum of -inf, and -inf - (-inf) is nan.
        pivot = tl.where(row_max == float("-inf"), 0.0, row_max)  # (BLOCK_M,)
        # The maximum is final: no sum below is ever rescaled.
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_centred = tl.zeros([BLOCK_M], tl.float32)
        row_square = tl.zeros([BLOCK_M], tl.float32)
        for i in tl.static_range(len(SEGMENTS)):  # vs[i]: (size, BLOCK_D)
            exponent = (scores[i] - pivot[:, None]) * factor  # (BLOCK_M, size)
            p = tl.exp2(exponent)
            row_sum += tl.sum(p, axis=1)  # (BLOCK_M,)
            if stats_ptr is not None:
                # 0 * -inf would be nan.
                centred = tl.where(exponent == float("-inf"), 0.0, exponent)
                row_centred += tl.sum(p * centred, axis=1)
                row_square += tl.sum(p * p, axis=1)
            # Dropout comes after the sums: statistics and the divisor are of P itself.
            if seed_ptr is not None:
                cols = SEGMENTS[i][0] + tl.arange(0, SEGMENTS[i][1])
                keep = keep_tile(tl.load(seed_ptr), rows, cols, b * H + h, threshold)
                p = tl.where(keep, p, 0.0)
            acc = tl.dot(p.to(vs[i].dtype), vs[i], acc, input_precision=PRECISION)
        # A row without a visible key gets an output of 0.
        divisor = tl.where(row_sum == 0, 1.0, row_sum)
        a = acc * (keep_scale / divisor)[:, None]  # (BLOCK_M, BLOCK_D)
        store_rows(out_ptr, a, first, out_view.stride_n, N, BLOCK_M, D, BLOCK_D)
        inside = rows < N
        row_stats = (b_64 * H + h) * N
        store_max_log_sum(max_log_sum_ptr, row_stats, rows, pivot, row_sum == 0, divisor, inside)
        if stats_ptr is not None:
            lse = row_lse(row_max, divisor, scale, SCALED)  # (BLOCK_M,)
            tl.store(lse_ptr + row_stats + rows, lse, mask=inside)
            rows_sums = sums_of_rows(
                row_max, divisor, row_centred, row_square, tl.sum(a * a, axis=1), inside, LN_2
            )
            sums = add_sums(sums, rows_sums)
    if stats_ptr is not None:
        rest = 1.0 if SCALED else scale
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), N, rest)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2).

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    batch, heads, rows, _ = call.query.shape
    segments = cut(tile["tokens"], tile.constexprs.get("largest_segment", 128))
    parts = 1  # with statistics: one program then has all rows of a head
    if results.stats is None:
        parts = split(batch * heads, triton.cdiv(rows, tile["BLOCK"]))
    arguments = forward_arguments(_short_fwd_kernel, call, results) | dict(
        **tile.options,
        PARTS=parts,
        BLOCK_M=tile["BLOCK"],
        SEGMENTS=segments,
        # Otherwise only the last segment has columns past the last key.
        RAGGED=call.key_lengths is not None or call.key.shape[2] <= segments[-1][0],
    )
    return Launch(_short_fwd_kernel, (batch * heads * parts,), arguments)


def split(heads: int, row_tiles: int) -> int:
    """Return how many programs share the row tiles of a head, enough of them to fill a GPU."""
    return min(row_tiles, max(1, _tiles.ENOUGH_PROGRAMS // heads))
