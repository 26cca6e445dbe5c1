"""Triton forward of the last stage of Nyström attention: K1 core, its statistics and its capture.

Sizes: B batch, H heads, N tokens, M landmarks, D head dimension, S sampled entries, T row tiles.
Mapping: one program owns one tile of tokens of one head and walks over the landmarks with the
online softmax; up to 64 of them are one step. The scores take the landmarks as sums of two or three
numbers of half precision, because a mean of keys is none.

Capture is a specialisation of its own, launched over the S sampled entries beside the ordinary
launch: it computes in float32, since the core is no half-precision number either and a captured
row must show condition numbers up to 1e6 (docs/kappa.md).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._epilogue import NUM_SUMS, join, store_part, sums_of_rows
from .._launch_cache import Launch, LaunchCache, View, check_tile
from .._tiles import Tile, Tiles, block_dim, rule
from .._triton import (
    PRECISION,
    head_of,
    load_rows,
    narrow,
    nats,
    parts_of,
    product_apart,
    scaled,
    softmax_step,
    store_rows,
    units,
    visible_keys,
)

# BLOCK_M is cut to the landmarks. A capture computes in float32.
TILES = Tiles(
    "nystrom_output_forward",
    rule(dim=64, BLOCK_N=128, BLOCK_M=64, num_warps=8),
    rule(dim=32, size=4, BLOCK_N=32, BLOCK_M=32, num_warps=4),
    rule(dim=64, size=4, BLOCK_N=32, BLOCK_M=16, num_warps=8),
    num_stages=1,
    maxnreg=255,
)


@triton.jit
def landmark_scores(
    q, k, first, scale, M: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Return scores of tokens with landmarks ``first`` on, in ``units``; -inf past the last.

    Without ``WHOLE`` bfloat16 takes 16 bits of landmarks: for probabilities rounded to 8 of them.
    """
    high, middle, low = parts_of(tl.trans(k), q.dtype)  # (BLOCK_D, BLOCK_M)
    s = tl.zeros([q.shape[0], BLOCK_M], tl.float32)  # (BLOCK_N, BLOCK_M)
    if WHOLE and q.dtype == tl.bfloat16:
        s = tl.dot(q, low, s)
    if q.dtype != tl.float32:
        s = tl.dot(q, middle, s)
    s = scaled(tl.dot(q, high, s, input_precision=PRECISION), scale * units(q.dtype))
    if M % BLOCK_M != 0:
        s = tl.where((first + tl.arange(0, BLOCK_M) < M)[None, :], s, float("-inf"))
    return s


@triton.jit(do_not_specialize=["B", "H", "N"])
def _output_fwd_kernel(
    q_view,
    k_ptr,
    core_ptr,
    lengths_ptr,
    sample_ptr,
    out_view,
    lse_ptr,
    parts_ptr,
    B,
    H,
    N,
    scale,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STATS: tl.constexpr,
    CAPTURE: tl.constexpr,
):
    num_tiles = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    out_b = tl.program_id(0) // num_tiles // H
    h = tl.program_id(0) // num_tiles % H
    b = out_b
    if CAPTURE:
        b = tl.load(sample_ptr + out_b)
        if (b < 0) | (b >= B):
            return
    b_64, h_64 = b.to(tl.int64), h.to(tl.int64)
    limit = visible_keys(lengths_ptr, b, N)
    # Padded tokens are zeros, whatever lies there.
    q_start = head_of(q_view, b_64, h_64)
    q = load_rows(q_start, first, q_view.stride_n, limit, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
    if CAPTURE:
        q = q.to(tl.float32)
    k_ptr += (b_64 * H + h) * M * D
    core_ptr += (b_64 * H + h) * M * D

    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_N], tl.float32)
    row_centred = tl.zeros([BLOCK_N], tl.float32)  # sum of p (s - row_max): the entropy without
    row_square = tl.zeros([BLOCK_N], tl.float32)  # cancelling two large numbers; and sum of p^2
    for start in range(0, M, BLOCK_M):
        k = load_rows(k_ptr, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        s = landmark_scores(q, k, start, scale, M, BLOCK_M, WHOLE=True)  # (BLOCK_N, BLOCK_M)
        p, alpha, row_max, row_sum, row_centred, row_square = softmax_step(
            s, row_max, row_sum, row_centred, row_square, q.dtype, STATS
        )
        core = load_rows(core_ptr, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        core, divisor = narrow(core, q.dtype)
        product = product_apart(p.to(q.dtype), core)  # (BLOCK_N, BLOCK_D)
        acc = acc * alpha[:, None] + product * divisor

    a = acc / row_sum[:, None]  # (BLOCK_N, BLOCK_D)
    out_ptr = head_of(out_view, out_b.to(tl.int64), h_64)
    store_rows(out_ptr, a, first, out_view.stride_n, N, BLOCK_N, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < N
    if not CAPTURE:
        lse = row_max * nats(q.dtype) + tl.log(row_sum)  # (BLOCK_N,)
        tl.store(lse_ptr + (b_64 * H + h) * N + rows, lse, mask=inside)
    if STATS:
        sums = sums_of_rows(
            row_max, row_sum, row_centred, row_square, tl.sum(a * a, axis=1), inside, nats(q.dtype)
        )
        store_part(parts_ptr, sums, tl.program_id(0), N, nats(q.dtype))


_cache = LaunchCache(
    ("q_view", "k_ptr", "core_ptr", "lengths_ptr", "out_view", "lse_ptr", "parts_ptr"),
)
_capture_cache = LaunchCache(
    ("q_view", "k_ptr", "core_ptr", "lengths_ptr", "sample_ptr", "out_view")
)


def output_forward(
    query: Tensor,
    k_land: Tensor,
    core: Tensor,
    out: Tensor,
    lse: Tensor,
    key_lengths: Tensor | None,
    scale: float,
    stats: Tensor | None = None,
) -> None:
    """Write ``out = K1 core`` and the log-sum-exp of K1's rows.

    Args:
        query: (B, H, N, D), float32, float16 or bfloat16, any strides with a contiguous last axis.
        k_land: (B, H, M, D) float32, contiguous.
        core: (B, H, M, D) float32, contiguous: Z (K3 V).
        out: (B, H, N, D) in the dtype of query, any strides with a contiguous last axis, written.
        lse: (B, H, N) float32, contiguous, written.
        key_lengths: (B,) int32, contiguous, or None; queries at or past a length count as zeros.
        scale: multiplies the scores.
        stats: (statistics, B, H) float32, written; the largest score is of K1's alone: the caller
            takes the maximum with the other two softmaxes.
    """
    tile = tile_of(TILES, query, k_land.shape[2])
    batch, heads, tokens, _ = query.shape
    num_tiles = triton.cdiv(tokens, tile["BLOCK_N"])
    parts = None if stats is None else lse.new_empty(batch, heads, num_tiles, NUM_SUMS)
    tensors = query, k_land, core, key_lengths, out, lse, parts
    kind = kind_of(query, k_land, key_lengths, scale, out.stride(), stats is None)
    if not _cache.run(kind, tensors):
        arguments = shared_arguments(query, k_land, core, key_lengths, scale)
        launch = _prepare(arguments, tile, out, lse_ptr=lse, parts_ptr=parts)
        _cache.start(kind, launch, tensors)
    if stats is not None and parts is not None:
        join(parts, stats)


def output_capture(
    query: Tensor,
    k_land: Tensor,
    core: Tensor,
    heads: Tensor,
    sample: Tensor,
    key_lengths: Tensor | None,
    scale: float,
) -> None:
    """Write heads (S, N, H * D) float32, contiguous, of the entries in ``sample`` (S,) int32.

    A negative index leaves its slot unwritten. Otherwise as ``output_forward``.
    """
    _, num_heads, tokens, dim = query.shape
    slots = sample.shape[0]
    if slots == 0:
        return
    sample = sample.contiguous()
    tensors = query, k_land, core, key_lengths, sample, heads
    kind = kind_of(query, k_land, key_lengths, scale, slots)
    if _capture_cache.run(kind, tensors):
        return
    tile = tile_of(TILES, query, k_land.shape[2], size=4)
    arguments = shared_arguments(query, k_land, core, key_lengths, scale)
    out = heads.view(slots, tokens, num_heads, dim).transpose(1, 2)
    _capture_cache.start(kind, _prepare(arguments, tile, out, sample_ptr=sample), tensors)


def _prepare(
    arguments: dict[str, Any],
    tile: Tile,
    out: Tensor,
    lse_ptr: Tensor | None = None,
    parts_ptr: Tensor | None = None,
    sample_ptr: Tensor | None = None,
) -> Launch:
    slots, heads, tokens, _ = out.shape
    arguments |= dict(
        **tile.arguments,
        out_view=view_of("out", out),
        B=arguments["q_view"].ptr.shape[0],
        sample_ptr=sample_ptr,
        lse_ptr=lse_ptr,
        parts_ptr=parts_ptr,
        STATS=parts_ptr is not None,
        CAPTURE=sample_ptr is not None,
    )
    grid = (slots * heads * triton.cdiv(tokens, tile["BLOCK_N"]),)
    return Launch(_output_fwd_kernel, grid, arguments)


def tile_of(tiles: Tiles, query: Tensor, landmarks: int, size: int | None = None) -> Tile:
    """Return the tile for a call, no wider than its landmarks."""
    tile = tiles.tile(
        query.device,
        size=size or query.element_size(),
        dim=block_dim(query.shape[-1]),
        tokens=landmarks,
    )
    return tile.at_most(BLOCK_M=block_dim(landmarks))


def shared_arguments(
    query: Tensor, k_land: Tensor, core: Tensor, key_lengths: Tensor | None, scale: float
) -> dict[str, Any]:
    """Return the arguments that all kernels of this stage have in common."""
    _, heads, tokens, dim = query.shape
    return {
        "q_view": view_of("q", query),
        "k_ptr": k_land,
        "core_ptr": core,
        "lengths_ptr": key_lengths,
        "H": heads,
        "N": tokens,
        "scale": scale,
        "M": k_land.shape[2],
        "D": dim,
        "BLOCK_D": block_dim(dim),
    }


def view_of(name: str, t: Tensor) -> View:
    """Return (B, H, N, D) as kernels take it."""
    view = View(t, *t.stride()[:3])
    # Those of the output lie as far apart as all heads are wide.
    check_tile(f"rows of {name}", t.shape[2], view.stride_n)
    return view


def kind_of(
    query: Tensor, k_land: Tensor, key_lengths: Tensor | None, scale: float, *others: Any
) -> Any:
    """Return what sets calls apart beside the addresses of their tensors."""
    return (
        query.device.index,
        query.dtype,
        query.shape,
        query.stride(),
        k_land.shape[2],
        key_lengths is None,
        scale,
        *others,
    )
