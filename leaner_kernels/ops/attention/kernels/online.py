"""Triton kernels of softmax attention for any length: output, statistics, capture, gradients.

Sizes: B batch, H query heads, N query rows, M key columns, D head dimension, S sampled entries,
T row tiles. In a varlen batch, B counts the sequences, N and M are the largest lengths, and a
program works on its sequence alone.

Forward: one program owns one tile of query rows of one head and walks over the keys with the online
softmax. Capture is a separate specialisation, launched over the S sampled entries in addition to
the ordinary launch: as a branch it would cost registers in every program.

Backward, in one launch: the first programs own one tile of key columns each, and walk over the
query rows of every head of their group (dK, dV). The others own one tile of query rows each, and
walk over the keys (dQ, and dS if an additive mask requires its gradient). Each element is written
by exactly one program, without atomics: the result is bitwise deterministic. delta = sum(dO * O) is
recomputed from loaded tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..._epilogue import NUM_SUMS, store_part, sums_of_rows
from ..._launch_cache import Launch, check_tile
from ..._tiles import Tile, Tiles, rule
from ..._triton import (
    PRECISION,
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
from ...gpus import TUNED_GPUS
from ...route import Results
from ..call import Call, Gradients, backward_arguments, forward_arguments, kernel_arguments
from .scores import (
    FILL_BLOCK,
    SPARE_PROGRAMS,
    Band,
    exponent_factor,
    extents,
    fill_gradients,
    fill_outside,
    load_row_statistics,
    mask_start,
    row_lse,
    score_tile,
    store_row_statistics,
    visible_cols,
    visible_rows,
)

# Features that cost no registers, so that no rule lists them.
FREE = frozenset({"shared", "window"})
# A mask, dropout, a scale that is not positive, a head dimension that does not fill its tile and
# the capture of sampled entries need registers, so that these calls get smaller tiles. A varlen
# batch needs a few more for addresses.
_SIMPLE = "softcap", "unaligned", "varlen"
_CAPTURE = "capture", "padded_dim", "varlen"
_ALL = "capture", "dropout", "mask", "padded_dim", "scale", *_SIMPLE
FORWARD_TILES = Tiles(
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
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    sample_ptr,
    starts_ptr,
    key_starts_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    parts_ptr,
    B,
    H,
    GROUP,
    N,
    M,
    TOKENS,
    KEY_TOKENS,
    scale,
    softcap,
    window_left,
    window_right,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
    STATS: tl.constexpr,
    CAPTURE: tl.constexpr,
):
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
            num_spare, lanes = tl.num_programs(0) - B * H * num_tiles, tl.arange(0, FILL_BLOCK)
            fill_outside(
                ptr=out_view.ptr,
                value=0.0,
                starts_ptr=starts_ptr,
                num_sequences=B,
                num_tokens=TOKENS,
                groups=1,
                width=H * D,
                program=spare,
                num_programs=num_spare,
                lanes=lanes,
            )
            if lse_ptr is not None:
                empty = float("-inf") if STATS else float("inf")
                fill_outside(
                    ptr=lse_ptr,
                    value=empty,
                    starts_ptr=starts_ptr,
                    num_sequences=B,
                    num_tokens=TOKENS,
                    groups=H,
                    width=1,
                    program=spare,
                    num_programs=num_spare,
                    lanes=lanes,
                )
            return
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    b_64, h_64, kv_64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
    row_b, col_b, num_rows, num_cols, limit = extents(
        starts_ptr=starts_ptr,
        key_starts_ptr=key_starts_ptr,
        lengths_ptr=lengths_ptr,
        b=b,
        N=N,
        M=M,
        TOKENS=TOKENS,
        KEY_TOKENS=KEY_TOKENS,
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
    band = Band(window_left, window_right, tl.cast(num_cols, tl.int64) - num_rows)
    begin, end = visible_cols(first, limit, band, BLOCK_M, BLOCK_N, CAUSAL)
    if starts_ptr is not None:
        end = tl.where(first < num_rows, end, 0)

    factor = exponent_factor(scale, SCALED, q_view.ptr.dtype.element_ty)
    q_start = head_of(q_view, row_b, h_64)
    q = load_rows(q_start, first, q_view.stride_n, num_rows, D, [BLOCK_M, BLOCK_D])
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # The sums below are relative to the running maximum.
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_centred = tl.zeros([BLOCK_M], tl.float32)  # sum of p * exponent: no large terms cancel
    row_square = tl.zeros([BLOCK_M], tl.float32)  # sum of p^2

    for start in range(begin, end, BLOCK_N):  # q: (BLOCK_M, BLOCK_D); k, v: (BLOCK_N, BLOCK_D)
        k = load_rows(k_ptr, start, k_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
        s, _ = score_tile(  # (BLOCK_M, BLOCK_N)
            q=q,
            k=k,
            row_start=first,
            col_start=start,
            limit=limit,
            band=band,
            mask_view=mask_view,
            mask_ptr=mask_ptr,
            N=N,
            M=M,
            scale=scale,
            softcap=softcap,
            CAUSAL=CAUSAL,
            MASK=MASK,
            SCALED=SCALED,
            RESIDENT=False,
            RAGGED=True,
        )
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
        v = load_rows(v_ptr, start, v_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
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
    out = acc * normaliser[:, None]  # (BLOCK_M, BLOCK_D)
    if CAPTURE:
        if starts_ptr is not None:
            # Every slot has the length of the longest sequence: zeros follow the others.
            out = tl.where((rows < num_rows)[:, None], out, 0.0)
        out_start = head_of(out_view, out_b.to(tl.int64), h_64)
        store_rows(out_start, out, first, out_view.stride_n, N, D)
    else:
        out_start = head_of(out_view, row_b, h_64)
        store_rows(out_start, out, first, out_view.stride_n, num_rows, D)
        inside = rows < num_rows
        unseeing = row_max == float("-inf")
        pivot = tl.where(unseeing, 0.0, row_max)
        store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            start=lse_start,
            rows=rows,
            pivot=pivot,
            unseeing=unseeing,
            divisor=divisor,
            scale=scale,
            inside=inside,
            SCALED=SCALED,
        )
    if STATS:
        lse = row_lse(row_max, divisor, scale, SCALED)  # (BLOCK_M,)
        tl.store(lse_ptr + lse_start + rows, lse, mask=inside)
        # A row without a visible key has p = 0 everywhere, and adds no entropy and no norm.
        sums = sums_of_rows(
            row_max=row_max,
            row_sum=divisor,
            row_centred=row_centred,
            row_square=row_square,
            out_square=tl.sum(out * out, axis=1),
            inside=inside,
            nats=nats(q.dtype),
        )
        # Maxima of unscaled scores are scaled as they are stored.
        max_scale = 1.0 if SCALED else scale
        store_part(parts_ptr, sums, tl.program_id(0), tl.maximum(num_rows, 1), max_scale)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

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


# The same features need registers as in the forward.
_EVERY = "dropout", "mask", "padded_dim", "scale", *_SIMPLE
BACKWARD_TILES = Tiles(
    "online_backward",
    rule(dim=16, takes=_SIMPLE[:2], BLOCK_M=64, BLOCK_N=64, num_warps=4),
    rule(
        dim=32, takes=("varlen",), gpus=TUNED_GPUS, BLOCK_M=64, BLOCK_N=64, num_warps=4, maxnreg=255
    ),
    rule(dim=64, gpus=(80,), BLOCK_M=64, BLOCK_N=64, num_warps=4, maxnreg=255),
    rule(dim=64, takes=("varlen",), gpus=(90,), BLOCK_M=64, BLOCK_N=64, num_warps=4, maxnreg=255),
    rule(dim=64, takes=_SIMPLE, BLOCK_M=64, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=16, takes=_EVERY, BLOCK_M=32, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=64, takes=_EVERY, BLOCK_M=32, BLOCK_N=32, num_warps=8, maxnreg=255),
    rule(
        dim=128, takes=("padded_dim",), gpus=(80,), BLOCK_M=64, BLOCK_N=32, num_warps=4, maxnreg=255
    ),
    rule(
        dim=128, takes=("padded_dim",), gpus=(86,), BLOCK_M=64, BLOCK_N=64, num_warps=8, maxnreg=255
    ),
    rule(dim=128, takes=_SIMPLE, BLOCK_M=32, BLOCK_N=64, num_warps=8),
    rule(dim=128, takes=_EVERY, BLOCK_M=32, BLOCK_N=64, num_warps=8, maxnreg=255),
    rule(dim=16, size=4, takes=_SIMPLE, BLOCK_M=32, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=64, size=4, takes=_SIMPLE, BLOCK_M=32, BLOCK_N=32, num_warps=8, maxnreg=255),
    rule(dim=32, size=4, takes=_EVERY, BLOCK_M=16, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=64, size=4, takes=_EVERY, BLOCK_M=16, BLOCK_N=32, num_warps=8, maxnreg=255),
    rule(dim=128, size=4, takes=_EVERY, BLOCK_M=16, BLOCK_N=16, num_warps=8, maxnreg=255),
    num_stages=1,
)


@triton.jit
def _load_do(
    do_ptr, out_ptr, start, stride_do_n, stride_out_n, N, D: tl.constexpr, SHAPE: tl.constexpr
):
    """Load dO of a tile of query rows; return it with delta = sum(dO * O)."""
    do = load_rows(do_ptr, start, stride_do_n, N, D, SHAPE)  # (BLOCK_M, BLOCK_D)
    out = load_rows(out_ptr, start, stride_out_n, N, D, SHAPE)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)  # (BLOCK_M,)
    return do, delta


@triton.jit
def _gradient_tile(
    exponent, v, do, delta, seed_ptr, row_start, col_start, batch_head, threshold, keep_scale
):
    """Compute P after dropout, and dS, from one tile of exponents, both float32."""
    p = exponential(exponent, do.dtype)  # (BLOCK_M, BLOCK_N)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
    # With Z the mask of dropout over 1 - p: O = (P Z) V, dP = (dO V^T) Z, and dS = P (dP - delta),
    # where P has no dropout.
    dropped = p
    if seed_ptr is not None:
        rows = row_start + tl.arange(0, p.shape[0])
        cols = col_start + tl.arange(0, p.shape[1])
        keep = keep_tile(tl.load(seed_ptr), rows, cols, batch_head, threshold)
        dropped = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return dropped, p * (dp - delta[:, None])


@triton.jit(do_not_specialize=["TOKENS", "KEY_TOKENS", "window_left", "window_right", "threshold"])
def _attention_bwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    starts_ptr,
    key_starts_ptr,
    do_view,
    out_view,
    max_log_sum_ptr,
    lse_ptr,
    dq_view,
    dk_view,
    dv_view,
    ds_ptr,
    B,
    H,
    GROUP,
    N,
    M,
    TOKENS,
    KEY_TOKENS,
    scale,
    softcap,
    window_left,
    window_right,
    keep_scale,
    threshold,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    SCALED: tl.constexpr,
):
    factor = exponent_factor(scale, SCALED, q_view.ptr.dtype.element_ty)
    num_col_tiles = tl.cdiv(M, BLOCK_N)
    num_row_tiles = tl.cdiv(N, BLOCK_M)
    num_kv_heads = H // GROUP
    pid = tl.program_id(0)
    # The two kinds of programs share one launch, so that neither waits for the other to finish.
    num_col_programs = B * num_kv_heads * num_col_tiles
    if starts_ptr is not None:
        # The programs past the last sequence zero the gradients of tokens that no sequence owns.
        num_owners = num_col_programs + B * H * num_row_tiles
        spare, num_spare = pid - num_owners, tl.num_programs(0) - num_owners
        if spare >= 0:
            fill_gradients(
                dq_ptr=dq_view.ptr,
                dk_ptr=dk_view.ptr,
                dv_ptr=dv_view.ptr,
                starts_ptr=starts_ptr,
                key_starts_ptr=key_starts_ptr,
                num_sequences=B,
                num_tokens=TOKENS,
                num_keys=KEY_TOKENS,
                width=H * D,
                key_width=num_kv_heads * D,
                program=spare,
                num_programs=num_spare,
                lanes=tl.arange(0, FILL_BLOCK),
            )
            return
    if pid < num_col_programs:
        # dK and dV of BLOCK_N columns of a key head, summed over its GROUP query heads: no atomics.
        tile = pid % num_col_tiles
        kv = pid // num_col_tiles % num_kv_heads  # the key head; ``h`` below is a query head
        b = pid // num_col_tiles // num_kv_heads
        b_64, kv_64 = b.to(tl.int64), kv.to(tl.int64)
        row_b, col_b, num_rows, num_cols, limit = extents(
            starts_ptr=starts_ptr,
            key_starts_ptr=key_starts_ptr,
            lengths_ptr=lengths_ptr,
            b=b,
            N=N,
            M=M,
            TOKENS=TOKENS,
            KEY_TOKENS=KEY_TOKENS,
        )
        col_start = tile * BLOCK_N
        k_start = head_of(k_view, col_b, kv_64)
        v_start = head_of(v_view, col_b, kv_64)
        # Rows at and past ``limit`` are zeros: padded keys may hold nan.
        k = load_rows(k_start, col_start, k_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
        v = load_rows(v_start, col_start, v_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        band = Band(window_left, window_right, tl.cast(num_cols, tl.int64) - num_rows)
        first, last = visible_rows(
            col_start=col_start,
            num_rows=num_rows,
            limit=limit,
            band=band,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            CAUSAL=CAUSAL,
        )
        for member in range(GROUP):  # k, v: (BLOCK_N, BLOCK_D)
            h = kv * GROUP + member
            h_64 = h.to(tl.int64)
            q_start = head_of(q_view, row_b, h_64)
            row_stats = (b_64 * H + h) * N
            if starts_ptr is not None:
                row_stats = h_64 * TOKENS + row_b
            mask_ptr = mask_start(mask_view, b_64, h_64, MASK)
            for row_start in range(first, last, BLOCK_M):  # q: (BLOCK_M, BLOCK_D)
                q = load_rows(q_start, row_start, q_view.stride_n, num_rows, D, [BLOCK_M, BLOCK_D])
                do, delta = _load_do(  # (BLOCK_M, BLOCK_D), (BLOCK_M,)
                    do_ptr=head_of(do_view, row_b, h_64),
                    out_ptr=head_of(out_view, row_b, h_64),
                    start=row_start,
                    stride_do_n=do_view.stride_n,
                    stride_out_n=out_view.stride_n,
                    N=num_rows,
                    D=D,
                    SHAPE=[BLOCK_M, BLOCK_D],
                )
                s, slope = score_tile(  # s: (BLOCK_M, BLOCK_N)
                    q=q,
                    k=k,
                    row_start=row_start,
                    col_start=col_start,
                    limit=limit,
                    band=band,
                    mask_view=mask_view,
                    mask_ptr=mask_ptr,
                    N=N,
                    M=M,
                    scale=scale,
                    softcap=softcap,
                    CAUSAL=CAUSAL,
                    MASK=MASK,
                    SCALED=SCALED,
                    RESIDENT=False,
                    RAGGED=True,
                )
                # Rows past the last have a log-sum of inf, so that P = 0.
                rows = row_start + tl.arange(0, BLOCK_M)
                row_max, log_sum = load_row_statistics(  # (BLOCK_M,) each
                    max_log_sum_ptr, lse_ptr, row_stats, rows, rows < num_rows, q.dtype
                )
                exponent = (s - row_max[:, None]) * factor - log_sum[:, None]  # (BLOCK_M, BLOCK_N)
                p, ds = _gradient_tile(  # (BLOCK_M, BLOCK_N) each
                    exponent=exponent,
                    v=v,
                    do=do,
                    delta=delta,
                    seed_ptr=seed_ptr,
                    row_start=row_start,
                    col_start=col_start,
                    batch_head=b * H + h,
                    threshold=threshold,
                    keep_scale=keep_scale,
                )
                # P is rounded to the dtype of the inputs, as in the forward, and so is dS.
                dv = add_product(dv, tl.trans(p.to(do.dtype)), do)
                ds = ds if softcap is None else ds * slope
                dk = add_product(dk, tl.trans(ds.to(q.dtype)), q)
        # ``scale`` multiplies the finished sum once; dS itself is of the scores after scaling.
        dk_start = head_of(dk_view, col_b, kv_64)
        dv_start = head_of(dv_view, col_b, kv_64)
        store_rows(dk_start, dk * scale, col_start, dk_view.stride_n, num_cols, D)
        store_rows(dv_start, dv, col_start, dv_view.stride_n, num_cols, D)
    else:
        # dQ of BLOCK_M rows of a query head.
        tile = (pid - num_col_programs) % num_row_tiles
        h = (pid - num_col_programs) // num_row_tiles % H
        b = (pid - num_col_programs) // num_row_tiles // H
        b_64, h_64, kv_64 = b.to(tl.int64), h.to(tl.int64), (h // GROUP).to(tl.int64)
        row_b, col_b, num_rows, num_cols, limit = extents(
            starts_ptr=starts_ptr,
            key_starts_ptr=key_starts_ptr,
            lengths_ptr=lengths_ptr,
            b=b,
            N=N,
            M=M,
            TOKENS=TOKENS,
            KEY_TOKENS=KEY_TOKENS,
        )
        row_stats = (b_64 * H + h) * N
        if starts_ptr is not None:
            row_stats = h_64 * TOKENS + row_b
        row_start = tile * BLOCK_M
        k_start = head_of(k_view, col_b, kv_64)
        v_start = head_of(v_view, col_b, kv_64)
        q_start = head_of(q_view, row_b, h_64)
        mask_ptr = mask_start(mask_view, b_64, h_64, MASK)
        q = load_rows(q_start, row_start, q_view.stride_n, num_rows, D, [BLOCK_M, BLOCK_D])
        do, delta = _load_do(  # (BLOCK_M, BLOCK_D), (BLOCK_M,)
            do_ptr=head_of(do_view, row_b, h_64),
            out_ptr=head_of(out_view, row_b, h_64),
            start=row_start,
            stride_do_n=do_view.stride_n,
            stride_out_n=out_view.stride_n,
            N=num_rows,
            D=D,
            SHAPE=[BLOCK_M, BLOCK_D],
        )
        rows = row_start + tl.arange(0, BLOCK_M)
        row_max, log_sum = load_row_statistics(  # (BLOCK_M,) each
            max_log_sum_ptr, lse_ptr, row_stats, rows, rows < num_rows, q.dtype
        )
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        band = Band(window_left, window_right, tl.cast(num_cols, tl.int64) - num_rows)
        begin, end = visible_cols(row_start, limit, band, BLOCK_M, BLOCK_N, CAUSAL)
        # A tile past the end of its sequence visits no key, and stores nothing.
        if starts_ptr is not None:
            end = tl.where(row_start < num_rows, end, 0)
        # q: (BLOCK_M, BLOCK_D); k, v: (BLOCK_N, BLOCK_D)
        for col_start in range(begin, end, BLOCK_N):
            k = load_rows(k_start, col_start, k_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
            v = load_rows(v_start, col_start, v_view.stride_n, limit, D, [BLOCK_N, BLOCK_D])
            s, slope = score_tile(  # s: (BLOCK_M, BLOCK_N)
                q=q,
                k=k,
                row_start=row_start,
                col_start=col_start,
                limit=limit,
                band=band,
                mask_view=mask_view,
                mask_ptr=mask_ptr,
                N=N,
                M=M,
                scale=scale,
                softcap=softcap,
                CAUSAL=CAUSAL,
                MASK=MASK,
                SCALED=SCALED,
                RESIDENT=False,
                RAGGED=True,
            )
            exponent = (s - row_max[:, None]) * factor - log_sum[:, None]  # (BLOCK_M, BLOCK_N)
            _, ds = _gradient_tile(  # (BLOCK_M, BLOCK_N)
                exponent=exponent,
                v=v,
                do=do,
                delta=delta,
                seed_ptr=seed_ptr,
                row_start=row_start,
                col_start=col_start,
                batch_head=b * H + h,
                threshold=threshold,
                keep_scale=keep_scale,
            )
            # An additive mask comes after the softcap: its gradient is dS without the slope.
            unbounded = ds if softcap is None else ds * slope
            dq = add_product(dq, unbounded.to(k.dtype), k)
            if ds_ptr is not None:
                rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
                inside = (row_start + rows < N)[:, None] & (col_start + cols < M)[None, :]
                ds_start = ds_ptr + ((b_64 * H + h) * N + row_start) * M + col_start
                tl.store(ds_start + rows[:, None] * M + cols[None, :], ds, mask=inside)
        dq_start = head_of(dq_view, row_b, h_64)
        store_rows(dq_start, dq * scale, row_start, dq_view.stride_n, num_rows, D)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq (B, H, N, D), dk and dv (B, Hkv, M, D) and any ds.

    ds (B, H, N, M) is float32 and must be zero on entry: tiles that are hidden from every row are
    never visited. In a varlen batch the tensors are (T, H, D) and (Tk, Hkv, D), and the gradients
    are contiguous.
    """
    arguments = backward_arguments(_attention_bwd_kernel, grad, call, saved, gradients)
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    rows, cols = arguments["N"], arguments["M"]
    if gradients.ds is not None:
        check_tile("rows of the mask's gradient", min(rows, tile["BLOCK_M"]), cols)
    num_col_programs = call.batch * kv_heads * triton.cdiv(cols, tile["BLOCK_N"])
    num_row_programs = call.batch * heads * triton.cdiv(rows, tile["BLOCK_M"])
    spare = 0 if call.sequences is None else SPARE_PROGRAMS
    grid = (num_col_programs + num_row_programs + spare,)
    return Launch(_attention_bwd_kernel, grid, arguments | tile.arguments)
