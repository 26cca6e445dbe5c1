"""Triton kernels of softmax attention for short sequences: a program owns a head, K and V resident.

Sizes: B batch, H query heads, N query rows, M key columns, D head dimension. The keys of a head are
cut into segments whose sizes are powers of two, such as 197 = 128 + 64 + 16 (208), so that a row of
scores is a few tiles with little padding. Exponentials are in base 2, with the change of base
folded into the scale. In float32 that costs one bit of every probability (docs/kernels.md), so
these kernels are for half precision only.

Forward: one program owns one head, or, if heads are few, every PARTS-th tile of its rows. K and V
stay in shared memory. A whole row of scores is in registers at once, and the softmax is computed by
its definition, without a running maximum. The statistics of a head are complete in its program.

Backward: one program owns one head, in one launch. Q and dO stay on chip, and dQ accumulates in
registers. The program walks over tiles of keys, each of which completes its dK and dV. Every
element is written once, by one program, without atomics: the result is bitwise deterministic. If
one tile holds all keys, the softmax and delta = sum(P * dP) are recomputed, so that seven tensors
move. Otherwise the forward provides the maximum of each row and the log of its sum, and delta is
sum(dO * O). A loop over tiles of rows with K and V resident would need neither, but it keeps dK and
dV in registers, twice the accumulators, and compiles to twice the instructions (docs/kernels.md).
"""

import triton
import triton.language as tl
from torch import Tensor

from ... import _tiles
from ..._epilogue import (
    add_sums,
    no_sums,
    reduce_sums,
    store_reduced,
    store_statistics,
    sums_of_rows,
)
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LN_2, PRECISION, head_of, keep_tile, load_rows, store_rows, visible_keys
from ...route import Results
from ..call import Call, Gradients, backward_arguments, forward_arguments
from .scores import (
    Band,
    exponent_factor,
    load_row_statistics,
    mask_start,
    row_lse,
    score_tile,
    store_row_statistics,
)


def split_into_segments(keys: int, largest: int = 128) -> tuple[tuple[int, int], ...]:
    """Return the (start, size) of segments that cover the keys: powers of two, 16 to ``largest``.

    >>> split_into_segments(197)
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
def load_segment(
    ptr, start, stride_n, limit, SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load (SIZE, BLOCK_D) from row ``start`` on; Triton 3.6 needs SIZE as a constant argument."""
    return load_rows(ptr, start, stride_n, limit, D, [SIZE, BLOCK_D])


@triton.jit
def load_segments(
    ptr, stride_n, limit, SEGMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tuple of (size, BLOCK_D) tiles, zero at and past ``limit``."""
    tiles = ()
    for i in tl.static_range(len(SEGMENTS)):  # SEGMENTS[i] is (start, size)
        tile = load_segment(
            ptr=ptr,
            start=SEGMENTS[i][0],
            stride_n=stride_n,
            limit=limit,
            SIZE=SEGMENTS[i][1],
            D=D,
            BLOCK_D=BLOCK_D,
        )
        tiles = tiles + (tile,)  # noqa: RUF005 - Triton has no starred tuples
    return tiles


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return (ROWS, COLS) float32 zeros; Triton 3.6 rejects tuple elements in a shape."""
    return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def score_segments(
    q,
    ks,
    row_start,
    limit,
    mask_view,
    mask_ptr,
    N,
    M,
    scale,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Return the scores of a tile of rows as a tuple, -inf where hidden, and the row maxima.

    Scores are unscaled, unless an additive mask is added to them; see ``exponent_factor``. Without
    ``RAGGED``, only the last segment has columns past the last key.
    """
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # The maximum of a row is known before the first exponential: no running maximum is needed.
    scores = ()
    for i in tl.static_range(len(SEGMENTS)):  # ks[i]: (size, BLOCK_D)
        s, _ = score_tile(  # (BLOCK_M, size)
            q=q,
            k=ks[i],
            row_start=row_start,
            col_start=SEGMENTS[i][0],
            limit=limit,
            band=Band(None, None),
            mask_view=mask_view,
            mask_ptr=mask_ptr,
            N=N,
            M=M,
            scale=scale,
            softcap=None,
            CAUSAL=CAUSAL,
            MASK=MASK,
            SCALED=False,
            RESIDENT=True,
            RAGGED=RAGGED or i == len(SEGMENTS) - 1,
        )
        row_max = tl.maximum(row_max, tl.max(s, axis=1))  # (BLOCK_M,)
        scores = scores + (s,)  # noqa: RUF005
    return scores, row_max


# ``BLOCK`` is the rows of a tile. K and V are cut into segments, of at most 128 unless a rule says,
# for the most tokens of a rule: one compiled kernel serves every length of the rule. ``ONE_TILE``
# compiles no loop where one tile has all rows (in the backward, all keys).
_PADDED = "padded_dim", "unaligned"
_ALL = "dropout", "mask", *_PADDED
_AMPERE = 80, 86  # elsewhere, online.py is as fast for more tokens
_FEW = (
    rule(dim=16, tokens=16, takes=_ALL, BLOCK=16, num_warps=1),
    rule(dim=64, tokens=16, takes=_ALL, BLOCK=16, num_warps=2),
    rule(dim=64, tokens=32, BLOCK=32, num_warps=2),
    rule(dim=64, tokens=32, takes=_ALL, BLOCK=32, num_warps=4),
)
FORWARD_TILES = Tiles(
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
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    stats_ptr,
    H,
    GROUP,
    N,
    M,
    PARTS,
    scale,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    RAGGED: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
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
    first_row, stop, step = part * BLOCK_M, N, PARTS * BLOCK_M
    if ONE_TILE:
        first_row, stop, step = 0, BLOCK_M, BLOCK_M  # known to the compiler: there is no loop
    elif stats_ptr is not None:
        sums = no_sums(BLOCK_M)

    for first in range(first_row, stop, step):
        rows = first + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, first, q_view.stride_n, N, D, [BLOCK_M, BLOCK_D])  # (BLOCK_M, BLOCK_D)
        scores, row_max = score_segments(  # tuple of (BLOCK_M, size), and (BLOCK_M,)
            q=q,
            ks=ks,
            row_start=first,
            limit=limit,
            mask_view=mask_view,
            mask_ptr=mask_ptr,
            N=N,
            M=M,
            scale=scale,
            SEGMENTS=SEGMENTS,
            BLOCK_M=BLOCK_M,
            CAUSAL=CAUSAL,
            MASK=MASK,
            RAGGED=RAGGED,
        )
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
                if ONE_TILE:
                    centred = tl.maximum(exponent, -1e30)  # one instruction
                else:
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
        out = acc * (keep_scale / divisor)[:, None]  # (BLOCK_M, BLOCK_D)
        store_rows(out_ptr, out, first, out_view.stride_n, N, D)
        inside = rows < N
        row_stats = (b_64 * H + h) * N
        store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            start=row_stats,
            rows=rows,
            pivot=pivot,
            unseeing=row_sum == 0,
            divisor=divisor,
            scale=scale,
            inside=inside,
            SCALED=SCALED,
        )
        if stats_ptr is not None:
            lse = row_lse(row_max, divisor, scale, SCALED)  # (BLOCK_M,)
            tl.store(lse_ptr + row_stats + rows, lse, mask=inside)
            rows_sums = sums_of_rows(
                row_max=row_max,
                row_sum=divisor,
                row_centred=row_centred,
                row_square=row_square,
                out_square=tl.sum(out * out, axis=1),
                inside=inside,
                nats=LN_2,
            )
            max_scale = 1.0 if SCALED else scale
            if ONE_TILE:
                rows_sums = reduce_sums(rows_sums)
                store_reduced(stats_ptr, rows_sums, head, tl.num_programs(0), N, max_scale)
            else:
                sums = add_sums(sums, rows_sums)
    if stats_ptr is not None and not ONE_TILE:
        max_scale = 1.0 if SCALED else scale
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), N, max_scale)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    batch, heads, rows, _ = call.query.shape
    segments = split_into_segments(tile["tokens"], tile.constexprs.get("largest_segment", 128))
    parts = 1  # with statistics: one program then has all rows of a head
    if results.stats is None:
        parts = programs_per_head(batch * heads, triton.cdiv(rows, tile["BLOCK"]))
    arguments = forward_arguments(_short_fwd_kernel, call, results) | dict(
        **tile.options,
        PARTS=parts,
        BLOCK_M=tile["BLOCK"],
        SEGMENTS=segments,
        ONE_TILE=tile.constexprs.get("ONE_TILE", False) and tile["tokens"] <= tile["BLOCK"],
        # Otherwise only the last segment has columns past the last key.
        RAGGED=call.key_lengths is not None or call.key.shape[2] <= segments[-1][0],
    )
    return Launch(_short_fwd_kernel, (batch * heads * parts,), arguments)


def programs_per_head(heads: int, row_tiles: int) -> int:
    """Return how many programs share the row tiles of a head, enough of them to fill a GPU."""
    return min(row_tiles, max(1, _tiles.ENOUGH_PROGRAMS // heads))


# ``BLOCK`` is the keys of a tile. Q and dO are cut into segments as K and V in short.py.
BACKWARD_TILES = Tiles(
    "short_backward",
    rule(dim=16, tokens=16, takes=_ALL, BLOCK=16, num_warps=1),
    rule(dim=64, tokens=16, takes=_ALL, BLOCK=16, num_warps=2),
    rule(dim=64, tokens=32, BLOCK=32, num_warps=2),
    rule(dim=64, tokens=32, takes=_ALL, BLOCK=16, num_warps=4, maxnreg=255),
    rule(dim=32, tokens=64, gpus=(80, 86), BLOCK=64, num_warps=4),
    # Held to 168 registers, three programs fit on an SM with Triton 3.6 too.
    rule(dim=32, tokens=64, gpus=(90,), BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=64, tokens=64, gpus=(80,), BLOCK=64, num_warps=8),
    rule(dim=64, tokens=64, gpus=(86,), BLOCK=32, num_warps=4),
    rule(dim=64, tokens=64, gpus=(90,), BLOCK=64, num_warps=4),
    rule(dim=64, tokens=64, takes=("dropout",), gpus=(90,), BLOCK=64, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=("mask",), gpus=(90,), BLOCK=64, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=("dropout",), BLOCK=32, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=("mask",), BLOCK=32, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=("padded_dim",), gpus=(90,), BLOCK=64, num_warps=4),
    rule(dim=32, tokens=64, takes=_PADDED, BLOCK=32, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=("padded_dim",), BLOCK=32, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=64, takes=_ALL, BLOCK=16, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=64, BLOCK=32, num_warps=8),
    rule(
        dim=64, tokens=128, takes=("padded_dim",), gpus=(80, 86), BLOCK=32, num_warps=8, maxnreg=255
    ),
    rule(dim=64, tokens=208, takes=("padded_dim",), gpus=(80,), BLOCK=32, num_warps=8, maxnreg=255),
    num_stages=1,
)


@triton.jit(do_not_specialize=["H", "N", "M", "threshold"])
def _short_bwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    do_view,
    out_view,
    max_log_sum_ptr,
    lse_ptr,
    dq_view,
    dk_view,
    dv_view,
    ds_ptr,
    H,
    N,
    M,
    scale,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    ONE_TILE: tl.constexpr,
):
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    b_64, h_64 = b.to(tl.int64), h.to(tl.int64)
    limit = visible_keys(lengths_ptr, b, M)
    q_ptr = head_of(q_view, b_64, h_64)
    k_ptr = head_of(k_view, b_64, h_64)
    v_ptr = head_of(v_view, b_64, h_64)
    do_ptr = head_of(do_view, b_64, h_64)
    dq_ptr = head_of(dq_view, b_64, h_64)
    dk_ptr = head_of(dk_view, b_64, h_64)
    dv_ptr = head_of(dv_view, b_64, h_64)
    mask_ptr = mask_start(mask_view, b_64, h_64, MASK)
    factor = exponent_factor(scale, SCALED, q_ptr.dtype.element_ty)
    qs = load_segments(q_ptr, q_view.stride_n, N, SEGMENTS, D, BLOCK_D)
    dos = load_segments(do_ptr, do_view.stride_n, N, SEGMENTS, D, BLOCK_D)
    # Tuples with one element for each segment of rows.
    dqs = ()  # tuple of (size, BLOCK_D)
    new_dos = ()  # tuple of (size, BLOCK_D)
    pivots = ()  # tuple of (size,)
    deltas = ()  # tuple of (size,)
    for i in tl.static_range(len(SEGMENTS)):  # qs[i], dos[i]: (size, BLOCK_D)
        dqs = dqs + (zero_tile(SEGMENTS[i][1], BLOCK_D),)  # noqa: RUF005
        if not WHOLE:
            rows = SEGMENTS[i][0] + tl.arange(0, SEGMENTS[i][1])
            row_max, log_sum = load_row_statistics(  # (size,) each
                max_log_sum_ptr, lse_ptr, (b_64 * H + h) * N, rows, rows < N, q_ptr.dtype.element_ty
            )
            # One register per row holds the sum of the two. Its rounding error, which matters
            # with a huge maximum, is a factor of P, and is corrected in dO; otherwise it is 1.
            pivot = row_max + log_sum * (1.0 / factor)  # (size,)
            correction = tl.exp2((pivot - row_max) * factor - log_sum)
            # Rows past the last: P is 0, and their dO must not become nan.
            correction = tl.where(pivot == float("inf"), 1.0, correction)
            do = (dos[i].to(tl.float32) * correction[:, None]).to(do_ptr.dtype.element_ty)
            out_start = head_of(out_view, b_64, h_64)
            out = load_segment(
                ptr=out_start,
                start=SEGMENTS[i][0],
                stride_n=out_view.stride_n,
                limit=N,
                SIZE=SEGMENTS[i][1],
                D=D,
                BLOCK_D=BLOCK_D,
            )
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)  # (size,)
            new_dos = new_dos + (do,)  # noqa: RUF005
            pivots = pivots + (pivot,)  # noqa: RUF005
            deltas = deltas + (delta,)  # noqa: RUF005
    if not WHOLE:
        dos = new_dos

    stop = BLOCK_N if ONE_TILE else M
    for first in range(0, stop, BLOCK_N):  # k, v: (BLOCK_N, BLOCK_D)
        k = load_rows(k_ptr, first, k_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
        v = load_rows(v_ptr, first, v_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
        cols = first + tl.arange(0, BLOCK_N)
        # These sums are complete after one pass over the segments of rows.
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        new_dqs = ()
        for i in tl.static_range(len(SEGMENTS)):
            rows = SEGMENTS[i][0] + tl.arange(0, SEGMENTS[i][1])
            s, _ = score_tile(  # (size, BLOCK_N)
                q=qs[i],
                k=k,
                row_start=SEGMENTS[i][0],
                col_start=first,
                limit=limit,
                band=Band(None, None),
                mask_view=mask_view,
                mask_ptr=mask_ptr,
                N=N,
                M=M,
                scale=scale,
                softcap=None,
                CAUSAL=CAUSAL,
                MASK=MASK,
                SCALED=False,
                RESIDENT=True,
                RAGGED=True,
            )
            dp = tl.dot(dos[i], tl.trans(v), input_precision=PRECISION)  # (size, BLOCK_N)
            if seed_ptr is not None:
                keep = keep_tile(tl.load(seed_ptr), rows, cols, b * H + h, threshold)
                dp = tl.where(keep, dp * keep_scale, 0.0)
            if WHOLE:
                row_max = tl.max(s, axis=1)  # (size,)
                pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
                p = tl.exp2((s - pivot[:, None]) * factor)
                row_sum = tl.sum(p, axis=1)  # (size,)
                # A row without a visible key, or past the last, contributes nothing.
                divisor = tl.where((row_sum == 0) | (rows >= N), float("inf"), row_sum)
                p *= (1.0 / divisor)[:, None]
                # dP is already behind dropout: delta = sum(P dP) equals sum(dO O).
                delta = tl.sum(p * dp, axis=1)  # (size,)
            else:
                p = tl.exp2((s - pivots[i][:, None]) * factor)
                delta = deltas[i]
            ds = p * (dp - delta[:, None])  # (size, BLOCK_N)
            if ds_ptr is not None:
                inside = (rows < N)[:, None] & (cols < M)[None, :]
                ds_start = ds_ptr + (b_64 * H + h) * N * M
                tl.store(ds_start + rows[:, None] * M + cols[None, :], ds, mask=inside)
            if seed_ptr is not None:
                p = tl.where(keep, p * keep_scale, 0.0)
            dv = tl.dot(tl.trans(p.to(v.dtype)), dos[i], dv, input_precision=PRECISION)
            # As in the forward, products of half precision with float32 sums.
            ds = ds.to(k.dtype)
            dk = tl.dot(tl.trans(ds), qs[i], dk, input_precision=PRECISION)
            dq = tl.dot(ds, k, dqs[i], input_precision=PRECISION)  # (size, BLOCK_D)
            new_dqs = new_dqs + (dq,)  # noqa: RUF005
        dqs = new_dqs
        # ``scale`` multiplies the finished sum once.
        store_rows(dk_ptr, dk * scale, first, dk_view.stride_n, M, D)
        store_rows(dv_ptr, dv, first, dv_view.stride_n, M, D)
    for i in tl.static_range(len(SEGMENTS)):
        store_rows(dq_ptr, dqs[i] * scale, SEGMENTS[i][0], dq_view.stride_n, N, D)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, M) float32."""
    batch, heads, _, _ = call.query.shape
    arguments = backward_arguments(_short_bwd_kernel, grad, call, saved, gradients) | dict(
        **tile.options,
        BLOCK_N=tile["BLOCK"],
        SEGMENTS=split_into_segments(tile["tokens"]),
        WHOLE=tile["tokens"] <= tile["BLOCK"],
        ONE_TILE=tile.constexprs.get("ONE_TILE", False) and tile["tokens"] <= tile["BLOCK"],
    )
    return Launch(_short_bwd_kernel, (batch * heads,), arguments)
