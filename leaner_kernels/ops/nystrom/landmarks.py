"""Triton kernels of the landmarks: their means, and the attention of those of q, K3 V.

Sizes: B batch, H heads, N tokens, M landmarks, D head dimension. Mapping: one program owns one tile
of landmarks of one head of one batch entry. It averages its segments of q and k, and walks over the
tokens for K3 V with the online softmax.

The backward is two launches, bitwise deterministic and without atomics. In the first, one program
owns one tile of landmarks and walks over the tokens for the gradient of q's landmarks through K3.
In the second, one program owns one tile of tokens and walks over the landmarks for dk and dv.

Landmarks and K3 V stay float32, and half-precision products split them into sums of half-precision
numbers: the pseudo-inverse magnifies earlier rounding errors. Their gradients are sums over many
tokens, and may exceed float16: products are of float32 numbers, rounded to TF32's ten bits if the
inputs are half precision.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch
from .._launch_cache import View
from .._tiles import Tiles, block_dim, rule
from .._triton import (
    SHIFT,
    add_product,
    exponential,
    head_of,
    load_rows,
    nats,
    parts_of,
    product_apart,
    product_of_parts,
    scaled,
    softmax_step,
    store_rows,
    units,
    visible_keys,
)

# Elements of q, and as many of k, that a program loads at once while it averages.
IN_FLIGHT = 2048


class Landmarks(NamedTuple):
    """The results of the forward, float32, contiguous; lse and largest are of K3's scores."""

    q_land: Tensor
    k_land: Tensor
    k3v: Tensor
    lse: Tensor
    largest: Tensor


# Few landmarks per program: there are few in all, and each walks over every token. By default,
# ptxas spills some registers to fit one more program. Rows that are not whole vectors (padded_dim)
# need one or two address registers for each element, and so do float32 elements.
TILES = Tiles(
    "nystrom_landmarks_forward",
    rule(dim=32, BLOCK_N=128, num_stages=3),
    rule(dim=64, BLOCK_N=64, num_stages=2),
    rule(dim=32, takes=("padded_dim",), BLOCK_N=64, num_stages=3),
    rule(dim=64, takes=("padded_dim",), BLOCK_N=32, num_stages=2),
    rule(dim=32, size=4, takes=("padded_dim",), BLOCK_N=32, num_stages=2),
    rule(dim=64, size=4, takes=("padded_dim",), BLOCK_N=16, num_stages=2),
    BLOCK_M=16,
    num_warps=4,
    maxnreg=255,
)


ROWS_TILES = Tiles(
    "nystrom_landmarks_backward_rows",
    rule(dim=64, BLOCK_N=64),
    rule(dim=64, takes=("padded_dim",), BLOCK_N=32),
    rule(dim=64, size=4, takes=("padded_dim",), BLOCK_N=16),
    BLOCK_M=16,
    num_warps=4,
    num_stages=2,
    maxnreg=255,
)
KEYS_TILES = Tiles(
    "nystrom_landmarks_backward_keys",
    rule(dim=32, BLOCK_M=32, BLOCK_N=64, num_warps=4, maxnreg=255),
    rule(dim=64, BLOCK_M=16, BLOCK_N=64, num_warps=4, maxnreg=255),
    rule(dim=32, takes=("padded_dim",), BLOCK_M=32, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=64, takes=("padded_dim",), BLOCK_M=16, BLOCK_N=32, num_warps=4, maxnreg=255),
    rule(dim=32, size=4, takes=("padded_dim",), BLOCK_M=16, BLOCK_N=16, num_warps=4, maxnreg=255),
    rule(dim=64, size=4, takes=("padded_dim",), BLOCK_M=16, BLOCK_N=16, num_warps=8),
    num_stages=2,
)


@triton.jit
def _segment_starts(first, segment, BLOCK_M: tl.constexpr):
    """Return the first tokens of the segments from ``first`` on, (BLOCK_M,).

    They are 64-bit: a segment past the last one starts past the last token, and its index must not
    wrap around to a valid one.
    """
    return (first + tl.arange(0, BLOCK_M)).to(tl.int64) * segment


@triton.jit
def _segment_means(
    ptr, first, stride_n, segment, length,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the means of segments, (BLOCK_M, BLOCK_D), with zeros for tokens past ``length``."""
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    # A landmark past the last starts past the last token, and so past the length.
    starts = _segment_starts(first, segment, BLOCK_M)  # (BLOCK_M,)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The first segment of the tile has the most visible tokens, which bounds the loop.
    for offset in range(0, tl.minimum(segment, length - first * segment), CHUNK):
        places = offset + tl.arange(0, CHUNK)
        tokens = starts[:, None] + places[None, :]  # (BLOCK_M, CHUNK)
        inside = ((tokens < length) & (places < segment)[None, :])[:, :, None]
        if D < BLOCK_D:
            inside = inside & (dims < D)
        ptrs = ptr + tokens[:, :, None] * stride_n + dims  # (BLOCK_M, CHUNK, BLOCK_D)
        total += tl.sum(tl.load(ptrs, mask=inside, other=0.0).to(tl.float32), axis=1)
    return total / segment


@triton.jit(do_not_specialize=["H", "N", "M", "segment"])
def _landmarks_fwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    q_land_ptr,
    k_land_ptr,
    k3v_ptr,
    lse_ptr,
    largest_ptr,
    H,
    N,
    M,
    segment,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # Tiles of one head are neighbours in the grid, so that they read its keys from the cache.
    tiles = tl.cdiv(M, BLOCK_M)
    head, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    length = visible_keys(lengths_ptr, b, N)
    q_ptr = head_of(q_view, b, h)
    k_ptr = head_of(k_view, b, h)
    v_ptr = head_of(v_view, b, h)
    q_land = _segment_means(  # (BLOCK_M, BLOCK_D)
        q_ptr, first, q_view.stride_n, segment, length, BLOCK_M, CHUNK, D, BLOCK_D
    )
    k_land = _segment_means(  # (BLOCK_M, BLOCK_D)
        k_ptr, first, k_view.stride_n, segment, length, BLOCK_M, CHUNK, D, BLOCK_D
    )
    offset = head.to(tl.int64) * M * D
    store_rows(q_land_ptr + offset, q_land, first, D, M, BLOCK_M, D, BLOCK_D)
    store_rows(k_land_ptr + offset, k_land, first, D, M, BLOCK_M, D, BLOCK_D)

    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    in_units = scale * units(DTYPE)
    high_land, middle_land, low_land = parts_of(q_land, DTYPE)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        k = load_rows(k_ptr, start, k_view.stride_n, length, BLOCK_N, D, BLOCK_D)
        s = scaled(product_of_parts(high_land, middle_land, low_land, tl.trans(k)), in_units)
        # Column 0 is visible (lengths are >= 1), so the first maximum is finite.
        s = tl.where((start + tl.arange(0, BLOCK_N) < length)[None, :], s, float("-inf"))
        p, shrink, row_max, row_sum, _, _ = softmax_step(
            s, row_max, row_sum, row_sum, row_sum, DTYPE, False
        )
        v = load_rows(v_ptr, start, v_view.stride_n, length, BLOCK_N, D, BLOCK_D)
        # P is split too: rounding it once would be magnified by the pseudo-inverse.
        high, middle, low = parts_of(p * SHIFT, DTYPE)
        acc = acc * shrink[:, None] + product_of_parts(high, middle, low, v)  # (BLOCK_M, BLOCK_D)
    k3v = acc * (1.0 / SHIFT) / row_sum[:, None]  # (BLOCK_M, BLOCK_D)
    store_rows(k3v_ptr + offset, k3v, first, D, M, BLOCK_M, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * M + rows
    lse = row_max * nats(DTYPE) + tl.log(row_sum)  # (BLOCK_M,)
    tl.store(lse_ptr + at, lse, mask=rows < M)
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    largest = tl.where(lse == lse, row_max * nats(DTYPE), float("nan"))  # (BLOCK_M,)
    tl.store(largest_ptr + at, largest, mask=rows < M)


@triton.jit(do_not_specialize=["H", "N", "M"])
def _landmark_rows_bwd_kernel(
    k_view,
    v_view,
    lengths_ptr,
    q_land_ptr,
    k3v_ptr,
    lse_ptr,
    dk3v_ptr,
    dq_land_ptr,
    delta_ptr,
    H,
    N,
    M,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Add the gradient through K3 to dq_land; write delta, the sums of K3 dK3 over rows."""
    tiles = tl.cdiv(M, BLOCK_M)
    head, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    length = visible_keys(lengths_ptr, b, N)
    k_ptr = head_of(k_view, b, h)
    v_ptr = head_of(v_view, b, h)
    offset = head.to(tl.int64) * M * D
    q_land = load_rows(q_land_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    k3v = load_rows(k3v_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    dk3v = load_rows(dk3v_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    # sum(K3 dK3) = sum((K3 V) d(K3 V)): no pass over the keys.
    delta = tl.sum(k3v * dk3v, axis=1)  # (BLOCK_M,)
    rows = first + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * M + rows
    tl.store(delta_ptr + at, delta, mask=rows < M)

    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    lse = tl.load(lse_ptr + at, mask=rows < M, other=float("inf")) * units(DTYPE)  # (BLOCK_M,)
    in_units = scale * units(DTYPE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        k = load_rows(k_ptr, start, k_view.stride_n, length, BLOCK_N, D, BLOCK_D).to(tl.float32)
        v = load_rows(v_ptr, start, v_view.stride_n, length, BLOCK_N, D, BLOCK_D).to(tl.float32)
        s = tl.dot(q_land, tl.trans(k), input_precision=PRODUCTS) * in_units  # (BLOCK_M, BLOCK_N)
        # Past the length k is zero, but e^(0 - lse) may be infinite, and inf * 0 is nan.
        s = tl.where((start + tl.arange(0, BLOCK_N) < length)[None, :], s, float("-inf"))
        p = exponential(s - lse[:, None], DTYPE)  # (BLOCK_M, BLOCK_N)
        dp = tl.dot(dk3v, tl.trans(v), input_precision=PRODUCTS)  # (BLOCK_M, BLOCK_N)
        acc += product_apart(p * (dp - delta[:, None]), k, PRODUCTS)  # (BLOCK_M, BLOCK_D)
    before = load_rows(dq_land_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    total = before + scale * acc
    store_rows(dq_land_ptr + offset, total, first, D, M, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=["H", "N", "M", "segment"])
def _landmark_keys_bwd_kernel(
    k_view,
    v_view,
    lengths_ptr,
    q_land_ptr,
    lse_ptr,
    dk3v_ptr,
    delta_ptr,
    dk_land_ptr,
    dk_ptr,
    dv_ptr,
    H,
    N,
    M,
    segment,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Write dk, through K3 and through the means, and dv."""
    tiles = tl.cdiv(N, BLOCK_N)
    head, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_N
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    length = visible_keys(lengths_ptr, b, N)
    k_ptr = head_of(k_view, b, h)
    v_ptr = head_of(v_view, b, h)
    k = load_rows(k_ptr, start, k_view.stride_n, length, BLOCK_N, D, BLOCK_D).to(tl.float32)
    v = load_rows(v_ptr, start, v_view.stride_n, length, BLOCK_N, D, BLOCK_D).to(tl.float32)

    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    in_units = scale * units(DTYPE)
    offset, at = head.to(tl.int64) * M * D, head.to(tl.int64) * M
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first in range(0, M, BLOCK_M):
        q_land = load_rows(q_land_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)
        dk3v = load_rows(dk3v_ptr + offset, first, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        cols = first + tl.arange(0, BLOCK_M)
        # Past the last landmark e^(s - inf) = 0.
        lse = tl.load(lse_ptr + at + cols, mask=cols < M, other=float("inf")) * units(DTYPE)
        delta = tl.load(delta_ptr + at + cols, mask=cols < M, other=0.0)  # (BLOCK_M,)
        s = tl.dot(k, tl.trans(q_land), input_precision=PRODUCTS) * in_units  # (BLOCK_N, BLOCK_M)
        p = exponential(s - lse[None, :], DTYPE)  # (BLOCK_N, BLOCK_M)
        dv = add_product(dv, p, dk3v, PRODUCTS)  # (BLOCK_N, BLOCK_D)
        dp = tl.dot(v, tl.trans(dk3v), input_precision=PRODUCTS)  # (BLOCK_N, BLOCK_M)
        dk = add_product(dk, p * (dp - delta[None, :]), q_land, PRODUCTS)
    tokens = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # A landmark is the mean of a segment of keys: each gets an equal share of its gradient.
    inside = (tokens < length)[:, None] & (dims < D)[None, :]
    ptrs = dk_land_ptr + offset + (tokens // segment)[:, None] * D + dims[None, :]
    dk = dk * scale + tl.load(ptrs, mask=inside, other=0.0) / segment
    out = head.to(tl.int64) * N * D
    dk, dv = tl.where(inside, dk, 0.0), tl.where(inside, dv, 0.0)
    store_rows(dk_ptr + out, dk, start, D, N, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr + out, dv, start, D, N, BLOCK_N, D, BLOCK_D)


def landmarks_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    num_landmarks: int,
    scale: float,
) -> Landmarks:
    """Compute M = ``num_landmarks`` landmarks and their attention, K3 V.

    ``query``, ``key`` and ``value`` are (B, H, N, D) with a contiguous last axis, ``key_lengths``
    (B,) int32, contiguous.
    """
    batch, heads, tokens, dim = query.shape
    shape = batch, heads, num_landmarks
    made = Landmarks(
        *(query.new_empty(*shape, dim, dtype=torch.float32) for _ in range(3)),
        *(query.new_empty(shape, dtype=torch.float32) for _ in range(2)),
    )
    segment = tokens // num_landmarks

    def prepare() -> Any:
        arguments = _shared(TILES, key, value, num_landmarks, scale)
        chunk = IN_FLIGHT // (arguments["BLOCK_M"] * arguments["BLOCK_D"])
        arguments |= {
            "q_view": View(query, *query.stride()[:3]),
            "segment": segment,
            "CHUNK": max(1, min(chunk, triton.next_power_of_2(segment))),
        }
        return (batch * heads * triton.cdiv(num_landmarks, arguments["BLOCK_M"]),), arguments

    tensors = {"q_view": query, "k_view": key, "v_view": value, "lengths_ptr": key_lengths}
    tensors |= {f"{name}_ptr": t for name, t in made._asdict().items()}
    launch(_landmarks_fwd_kernel, tensors, (scale,), prepare)
    return made


def landmarks_backward(
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    made: Landmarks,
    dk3v: Tensor,
    dq_land: Tensor,
    dk_land: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write dk and dv, zero past a length, and add the gradient through K3 to ``dq_land``.

    ``made`` is the result of the forward. The gradients of landmarks are (B, H, M, D) float32:
    ``dq_land`` is that through K2, and ``dk_land`` that through K1 and K2.
    """
    batch, heads, tokens, _ = key.shape
    num_landmarks = made.lse.shape[2]

    def prepare(tiles: Tiles) -> Any:
        arguments = _shared(tiles, key, value, num_landmarks, scale)
        arguments["PRODUCTS"] = "ieee" if key.dtype == torch.float32 else "tf32"
        if tiles is ROWS_TILES:
            programs = triton.cdiv(num_landmarks, arguments["BLOCK_M"])
        else:
            programs = triton.cdiv(tokens, arguments["BLOCK_N"])
            arguments["segment"] = tokens // num_landmarks
        return (batch * heads * programs,), arguments

    shared = {"k_view": key, "v_view": value, "lengths_ptr": key_lengths, "lse_ptr": made.lse}
    shared |= {"q_land_ptr": made.q_land, "dk3v_ptr": dk3v, "delta_ptr": torch.empty_like(made.lse)}
    tensors = shared | {"k3v_ptr": made.k3v, "dq_land_ptr": dq_land}
    launch(_landmark_rows_bwd_kernel, tensors, (scale,), lambda: prepare(ROWS_TILES))
    tensors = shared | {"dk_land_ptr": dk_land, "dk_ptr": dk, "dv_ptr": dv}
    launch(_landmark_keys_bwd_kernel, tensors, (scale,), lambda: prepare(KEYS_TILES))


def _shared(
    tiles: Tiles, key: Tensor, value: Tensor, num_landmarks: int, scale: float
) -> dict[str, Any]:
    """Return the arguments that all kernels here share."""
    _, heads, tokens, dim = key.shape
    block_d = block_dim(dim)
    tile = tiles.tile(
        key.device,
        size=key.element_size(),
        dim=block_d,
        features=frozenset(["padded_dim"] if dim < block_d else []),
    )
    return dict(
        **tile.arguments,
        k_view=View(key, *key.stride()[:3]),
        v_view=View(value, *value.stride()[:3]),
        H=heads,
        N=tokens,
        M=num_landmarks,
        scale=scale,
        D=dim,
        BLOCK_D=block_d,
    )
