"""Triton backward of softmax attention for short sequences: a program owns a head, one launch.

Sizes as in short_forward.py. Mapping: one program owns one head. Q and dO stay on chip, and dQ
accumulates in registers. The program walks over tiles of keys, each of which completes its dK and
dV. Every element is written once, by one program, without atomics: the result is bitwise
deterministic.

If one tile holds all keys, the softmax and delta = sum(P * dP) are recomputed, so that seven
tensors move. Otherwise the forward provides the maximum of each row and the log of its sum, and
delta is sum(dO * O). A loop over tiles of rows with K and V resident would need neither, but it
keeps dK and dV in registers, twice the accumulators, and compiles to twice the instructions
(docs/kernels.md).
"""

import triton
import triton.language as tl
from torch import Tensor

from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import PRECISION, head_of, keep_tile, load_rows, store_rows, visible_keys
from ..call import Call, Gradients, Results, backward_arguments
from .scores import exponent_factor, load_max_log_sum, mask_start, score_tile
from .segments import cut, load_segments, zero_tile

# ``BLOCK`` is the keys of a tile. Q and dO are cut into segments as K and V in short_forward.py.
_PADDED = "padded_dim", "unaligned"
_ALL = "dropout", "mask", *_PADDED
TILES = Tiles(
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
    q_view, k_view, v_view, mask_view, lengths_ptr, seed_ptr, do_view, out_view, max_log_sum_ptr,
    dq_view, dk_view, dv_view, ds_ptr, H, N, M, scale, keep_scale, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
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
            row_max, log_sum = load_max_log_sum(  # (size,) each
                max_log_sum_ptr, (b_64 * H + h) * N, rows, rows < N, q_ptr.dtype.element_ty
            )
            # One register per row holds the sum of the two. Its rounding error, which matters
            # beside a huge maximum, is a factor of P, and is corrected in dO; elsewhere it is 1.
            pivot = row_max + log_sum * (1.0 / factor)  # (size,)
            rest = tl.exp2((pivot - row_max) * factor - log_sum)
            # Rows past the last: P is 0, and their dO must not become nan.
            rest = tl.where(pivot == float("inf"), 1.0, rest)
            do = (dos[i].to(tl.float32) * rest[:, None]).to(do_ptr.dtype.element_ty)
            out_start = head_of(out_view, b_64, h_64)
            out = load_rows(  # (size, BLOCK_D)
                out_start, SEGMENTS[i][0], out_view.stride_n, N, SEGMENTS[i][1], D, BLOCK_D
            )
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)  # (size,)
            new_dos = new_dos + (do,)  # noqa: RUF005
            pivots = pivots + (pivot,)  # noqa: RUF005
            deltas = deltas + (delta,)  # noqa: RUF005
    if not WHOLE:
        dos = new_dos

    for first in range(0, M, BLOCK_N):  # k, v: (BLOCK_N, BLOCK_D)
        k = load_rows(k_ptr, first, k_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
        v = load_rows(v_ptr, first, v_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
        cols = first + tl.arange(0, BLOCK_N)
        # These sums are complete after one pass over the segments of rows.
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        new_dqs = ()
        for i in tl.static_range(len(SEGMENTS)):
            rows = SEGMENTS[i][0] + tl.arange(0, SEGMENTS[i][1])
            s, _ = score_tile(  # (size, BLOCK_N)
                qs[i], k, SEGMENTS[i][0], first, limit, (None, None), mask_view, mask_ptr, N, M,
                scale, None, SEGMENTS[i][1], BLOCK_N, CAUSAL, MASK, False, True, True,
            )  # fmt: skip
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
            narrow = ds.to(k.dtype)
            dk = tl.dot(tl.trans(narrow), qs[i], dk, input_precision=PRECISION)
            dq = tl.dot(narrow, k, dqs[i], input_precision=PRECISION)  # (size, BLOCK_D)
            new_dqs = new_dqs + (dq,)  # noqa: RUF005
        dqs = new_dqs
        # ``scale`` multiplies the finished sum once.
        store_rows(dk_ptr, dk * scale, first, dk_view.stride_n, M, BLOCK_N, D, BLOCK_D)
        store_rows(dv_ptr, dv, first, dv_view.stride_n, M, BLOCK_N, D, BLOCK_D)
    for i in tl.static_range(len(SEGMENTS)):
        store_rows(
            dq_ptr, dqs[i] * scale, SEGMENTS[i][0], dq_view.stride_n, N, SEGMENTS[i][1], D, BLOCK_D
        )


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, M) float32."""
    batch, heads, _, _ = call.query.shape
    arguments = backward_arguments(_short_bwd_kernel, grad, call, saved, gradients) | dict(
        **tile.options,
        BLOCK_N=tile["BLOCK"],
        SEGMENTS=cut(tile["tokens"]),
        WHOLE=tile["tokens"] <= tile["BLOCK"],
    )
    return Launch(_short_bwd_kernel, (batch * heads,), arguments)
