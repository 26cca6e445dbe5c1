"""Triton kernel of the landmarks: their means, and what those of q attend to.

Sizes: B batch, H heads, N tokens, M landmarks, D head dimension. Mapping: one program owns one tile
of landmarks of one head of one batch entry: it averages its segments of q and k, and walks over the
tokens for K3 V, with the softmax online.

Landmarks and K3 V stay float32, and half-precision products are of sums of numbers of that
precision: the pseudo-inverse magnifies what is rounded before it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import Launch, LaunchCache, View, layout
from .._tiles import Tiles, block_dim, rule
from .._triton import (
    SHIFT,
    head_of,
    load_rows,
    nats,
    parts_of,
    product_of_parts,
    scaled,
    softmax_step,
    store_rows,
    units,
    visible_keys,
)

# Elements of q, and as many of k, that a program has in flight while it averages.
IN_FLIGHT = 2048


class Landmarks(NamedTuple):
    """What the forward makes, float32 and contiguous.

    Attributes:
        q_land: (B, H, M, D), means of the queries of each segment.
        k_land: (B, H, M, D), of the keys.
        k3v: (B, H, M, D), K3 V.
        lse: (B, H, M), log-sum-exp of the rows of K3's scores, in nats.
        largest: (B, H, M), the largest visible score of each row.
    """

    q_land: Tensor
    k_land: Tensor
    k3v: Tensor
    lse: Tensor
    largest: Tensor


# Few landmarks a program: there are few in all, and each walks over every token. Left to itself
# ptxas spills some registers to fit one more program. Rows that are no whole vectors (padded_dim)
# take a register or two of address for each element, and so do float32 elements.
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


@triton.jit
def _segment_starts(first, segment, BLOCK_M: tl.constexpr):
    """Return the first token of segments ``first`` on, (BLOCK_M,).

    In 64 bits: one past the last segment starts past the last token, and must not wrap to one
    before the first.
    """
    return (first + tl.arange(0, BLOCK_M)).to(tl.int64) * segment


@triton.jit
def _segment_means(
    ptr, first, stride_n, segment, length,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return (BLOCK_M, BLOCK_D) means of segments, of which tokens past ``length`` are zeros."""
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    # A landmark past the last starts past the last token, and so past the length.
    starts = _segment_starts(first, segment, BLOCK_M)  # (BLOCK_M,)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The first segment reaches furthest into what is visible.
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
    # The tiles of a head are neighbours, so that they find its keys in the cache.
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
        high, middle, low = parts_of(p * SHIFT, DTYPE)
        acc = acc * shrink[:, None] + product_of_parts(high, middle, low, v)  # (BLOCK_M, BLOCK_D)
    k3v = acc * (1.0 / SHIFT) / row_sum[:, None]  # (BLOCK_M, BLOCK_D)
    store_rows(k3v_ptr + offset, k3v, first, D, M, BLOCK_M, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * M + rows
    lse = row_max * nats(DTYPE) + tl.log(row_sum)  # (BLOCK_M,)
    tl.store(lse_ptr + at, lse, mask=rows < M)
    # A maximum passes nan over; a sum does not, and a diverged model must show.
    largest = tl.where(lse == lse, row_max * nats(DTYPE), float("nan"))  # (BLOCK_M,)
    tl.store(largest_ptr + at, largest, mask=rows < M)


_forward_cache = LaunchCache(
    (
        *("q_view", "k_view", "v_view", "lengths_ptr"),
        *("q_land_ptr", "k_land_ptr", "k3v_ptr", "lse_ptr", "largest_ptr"),
    )
)


def landmarks_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    num_landmarks: int,
    scale: float,
) -> Landmarks:
    """Return the landmarks and what they attend to.

    Args:
        query: (B, H, N, D), float32, float16 or bfloat16, any strides with a contiguous last axis.
        key: as ``query``.
        value: as ``query``.
        key_lengths: (B,) int32, contiguous, or None.
        num_landmarks: M, a divisor of N.
        scale: multiplies the scores.
    """
    batch, heads, _, dim = query.shape
    shape = batch, heads, num_landmarks
    made = Landmarks(
        *(_float32(query, (*shape, dim)) for _ in range(3)),
        *(_float32(query, shape) for _ in range(2)),
    )
    tensors = query, key, value, key_lengths, *made
    kind = kind_of(query, key, value, key_lengths, num_landmarks, scale)
    if not _forward_cache.run(kind, tensors):
        shared = shared_arguments(TILES, key, value, key_lengths, num_landmarks, scale)
        segment = query.shape[2] // num_landmarks
        arguments = dict(
            **shared,
            q_view=View(query, *query.stride()[:3]),
            **{f"{name}_ptr": t for name, t in made._asdict().items()},
            segment=segment,
            CHUNK=_chunk(segment, shared["BLOCK_M"] * shared["BLOCK_D"]),
        )
        launch = Launch(_landmarks_fwd_kernel, grid_of_landmarks(shared, batch * heads), arguments)
        _forward_cache.start(kind, launch, tensors)
    return made


def shared_arguments(
    tiles: Tiles,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    num_landmarks: int,
    scale: float,
) -> dict[str, Any]:
    """Return the arguments that every kernel here takes."""
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
        lengths_ptr=key_lengths,
        H=heads,
        N=tokens,
        M=num_landmarks,
        scale=scale,
        D=dim,
        BLOCK_D=block_d,
    )


def grid_of_landmarks(arguments: dict[str, Any], heads: int) -> tuple[int]:
    """Return the grid of a kernel whose programs own a tile of landmarks of one of ``heads``."""
    return (heads * triton.cdiv(arguments["M"], arguments["BLOCK_M"]),)


def _chunk(segment: int, elements: int) -> int:
    """Return how many tokens of a segment to load at once: a power of two."""
    return max(1, min(IN_FLIGHT // elements, triton.next_power_of_2(segment)))


def kind_of(*arguments: Any) -> Any:
    """Return what sets calls apart beside the addresses of their tensors."""
    first = arguments[0]
    return first.device.index, *(
        layout(a) if a is None or isinstance(a, Tensor) else a for a in arguments
    )


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
