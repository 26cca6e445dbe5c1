"""Triton kernels of the last stage of Nyström attention: K1 core, statistics, capture, backward.

Sizes: B batch, H heads, N tokens, M landmarks, D head dimension, S sampled entries, T row tiles.
Mapping: one program owns one tile of tokens of one head and walks over the landmarks with the
online softmax; up to 64 of them are one step. For the scores, landmarks are split into sums of two
or three half-precision numbers, because a mean of keys has more bits than one.

Capture is a separate specialisation, launched over the S sampled entries in addition to the
ordinary launch. It computes in float32, since the core has more bits than half precision too, and a
captured row must show condition numbers up to 1e6 (docs/kappa.md).

The backward has no atomics. For the landmarks, one program owns one tile of them and a stretch of
the tokens of one head, and the sums of the stretches are added in a fixed order. For the queries,
one program owns one tile of tokens. If one tile does not hold all landmarks, an additional first
launch sums P * dP over each row.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._epilogue import NUM_SUMS, join, store_part, sums_of_rows
from .._launch import launch
from .._launch_cache import View, check_tile
from .._tiles import Tile, Tiles, block_dim, rule
from .._triton import (
    PRECISION,
    add_product,
    exponential,
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


class LastStage(NamedTuple):
    """The operands of the last stage, forward and backward.

    Attributes:
        query: (B, H, N, D), last axis contiguous; rows at or past a length count as zero.
        k_land: (B, H, M, D) float32, contiguous.
        core: as ``k_land``: Z (K3 V).
        lengths: (B,) int32, contiguous.
        scale: multiplies the scores.
    """

    query: Tensor
    k_land: Tensor
    core: Tensor
    lengths: Tensor | None
    scale: float

    def tile(self, tiles: Tiles, size: int | None = None) -> Tile:
        """Return the tile of a call, with blocks no larger than its number of landmarks."""
        query, landmarks = self.query, self.k_land.shape[2]
        size = size or query.element_size()
        dim = block_dim(query.shape[-1])
        tile = tiles.tile(query.device, size=size, dim=dim, tokens=landmarks)
        return tile.at_most(BLOCK_M=block_dim(landmarks))

    def launch(
        self, kernel: Any, tile: Tile, tensors: dict[str, Any], programs: int, **others: Any
    ) -> None:
        """Launch a kernel on ``programs`` programs; names ending in ``_view`` are (B, H, N, D)."""

        def prepare() -> Any:
            _, heads, tokens, dim = self.query.shape
            arguments = {
                **tile.arguments,
                "H": heads,
                "N": tokens,
                "scale": self.scale,
                "M": self.k_land.shape[2],
                "D": dim,
                "BLOCK_D": block_dim(dim),
            }
            for name, t in given.items():
                if name.endswith("_view"):
                    arguments[name] = View(t, *t.stride()[:3])
                    # Rows of the output are as far apart as all heads together are wide.
                    check_tile(f"rows of {name.removesuffix('_view')}", t.shape[2], t.stride(2))
            return (programs,), arguments | others

        given: dict[str, Any] = {"q_view": self.query, "k_ptr": self.k_land, "core_ptr": self.core}
        given |= {"lengths_ptr": self.lengths, **tensors}
        launch(kernel, given, (self.scale,), prepare)


# BLOCK_M is reduced to the number of landmarks. A capture uses the float32 tiles.
TILES = Tiles(
    "nystrom_output_forward",
    rule(dim=64, BLOCK_N=128, BLOCK_M=64, num_warps=8),
    rule(dim=32, size=4, BLOCK_N=32, BLOCK_M=32, num_warps=4),
    rule(dim=64, size=4, BLOCK_N=32, BLOCK_M=16, num_warps=8),
    num_stages=1,
    maxnreg=255,
)


STRETCH = 512  # tokens per program that owns landmarks

LANDMARKS_TILES = Tiles(
    "nystrom_output_backward_landmarks",
    rule(dim=32, BLOCK_N=64, BLOCK_M=64, num_warps=4),
    rule(dim=64, BLOCK_N=64, BLOCK_M=32, num_warps=4),
    rule(dim=32, size=4, BLOCK_N=16, BLOCK_M=32, num_warps=4),
    rule(dim=64, size=4, BLOCK_N=16, BLOCK_M=32, num_warps=8),
    num_stages=1,
    maxnreg=255,
)
# With more landmarks than a tile, the loop over them has smaller tiles.
QUERY_TILES = Tiles(
    "nystrom_output_backward_query",
    rule(dim=32, tokens=64, BLOCK_N=64, BLOCK_M=64, num_warps=4),
    rule(dim=32, BLOCK_N=64, BLOCK_M=32, num_warps=4),
    rule(dim=64, tokens=64, BLOCK_N=32, BLOCK_M=64, num_warps=4),
    rule(dim=64, BLOCK_N=32, BLOCK_M=32, num_warps=4),
    rule(dim=32, size=4, BLOCK_N=32, BLOCK_M=32, num_warps=4),
    rule(dim=64, size=4, BLOCK_N=32, BLOCK_M=16, num_warps=8),
    num_stages=1,
    maxnreg=255,
)


@triton.jit
def landmark_scores(
    q, k, first, scale, M: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Return scores of tokens with landmarks from ``first`` on, in ``units``; -inf past the last.

    Without ``WHOLE``, bfloat16 uses 16 bits of the landmarks, which is enough for probabilities
    that are rounded to 8 bits.
    """
    high, middle, low = parts_of(tl.trans(k), q.dtype)  # (BLOCK_D, BLOCK_M)
    # The smallest part first: its bits survive only in a small sum.
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
    # Padded tokens are read as zeros, whatever they hold.
    q_start = head_of(q_view, b_64, h_64)
    q = load_rows(q_start, first, q_view.stride_n, limit, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
    if CAPTURE:
        q = q.to(tl.float32)
    k_ptr += (b_64 * H + h) * M * D
    core_ptr += (b_64 * H + h) * M * D

    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_N], tl.float32)
    row_centred = tl.zeros([BLOCK_N], tl.float32)  # sum of p (s - row_max): no large terms cancel
    row_square = tl.zeros([BLOCK_N], tl.float32)  # sum of p^2
    for start in range(0, M, BLOCK_M):
        k = load_rows(k_ptr, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        s = landmark_scores(q, k, start, scale, M, BLOCK_M, WHOLE=True)  # (BLOCK_N, BLOCK_M)
        p, alpha, row_max, row_sum, row_centred, row_square = softmax_step(
            s, row_max, row_sum, row_centred, row_square, q.dtype, STATS
        )
        core = load_rows(core_ptr, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        # The pseudo-inverse may exceed the range of float16.
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


@triton.jit
def _probabilities(
    q, do, k, core, lse, start, scale, M: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return P and dP of a tile of tokens and the landmarks from ``start`` on, both float32."""
    s = landmark_scores(q, k, start, scale, M, BLOCK_M, WHOLE=False)
    p = exponential(s - lse[:, None], q.dtype)  # (BLOCK_N, BLOCK_M)
    core, divisor = narrow(core, q.dtype)
    dp = tl.dot(do, tl.trans(core), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
    return p, dp * divisor


@triton.jit
def _mean(products, row_sum):
    """Return the mean of dP over each row of P, (BLOCK_N,), from the sums of P * dP and of P.

    The log-sum-exp is rounded, so that rows of P do not sum to exactly 1. Without the quotient,
    dP - delta would keep that fraction of a dP that it should cancel. Past the last row P is zero.
    """
    return products / tl.maximum(row_sum, 1e-30)


@triton.jit
def _load_lse(lse_ptr, rows, N, DTYPE: tl.constexpr):
    """Load the log-sum-exp of rows in ``units``; inf past the last, so that P is zero."""
    return tl.load(lse_ptr + rows, mask=rows < N, other=float("inf")) * units(DTYPE)


@triton.jit(do_not_specialize=["H", "N"])
def _output_bwd_delta_kernel(
    q_view,
    k_ptr,
    core_ptr,
    lengths_ptr,
    do_view,
    lse_ptr,
    delta_ptr,
    H,
    N,
    scale,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    num_tiles = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = head // H, head % H
    limit = visible_keys(lengths_ptr, b, N)
    q_ptr = head_of(q_view, b, h)
    do_ptr = head_of(do_view, b, h)
    q = load_rows(q_ptr, first, q_view.stride_n, limit, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
    do = load_rows(do_ptr, first, do_view.stride_n, N, BLOCK_N, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_N)
    lse = _load_lse(lse_ptr + head * N, rows, N, q.dtype)  # (BLOCK_N,)
    # One pass over all landmarks: the two kernels after this one have tiles of them.
    delta = tl.zeros([BLOCK_N], tl.float32)
    row_sum = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, M, BLOCK_M):
        k = load_rows(k_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        core = load_rows(core_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)
        p, dp = _probabilities(q, do, k, core, lse, start, scale, M, BLOCK_M)
        delta += tl.sum(p * dp, axis=1)  # (BLOCK_N,)
        row_sum += tl.sum(p, axis=1)  # (BLOCK_N,)
    tl.store(delta_ptr + head * N + rows, _mean(delta, row_sum), mask=rows < N)


@triton.jit(do_not_specialize=["H", "N"])
def _output_bwd_landmark_kernel(
    q_view,
    k_ptr,
    core_ptr,
    lengths_ptr,
    do_view,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dcore_ptr,
    H,
    N,
    scale,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STRETCH: tl.constexpr,
):
    num_tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    start = tl.program_id(0) % num_tiles * BLOCK_M
    num_stretches = tl.cdiv(N, STRETCH)
    stretch = tl.program_id(0) // num_tiles % num_stretches
    head = (tl.program_id(0) // num_tiles // num_stretches).to(tl.int64)
    b, h = head // H, head % H
    limit = visible_keys(lengths_ptr, b, N)
    q_ptr = head_of(q_view, b, h)
    do_ptr = head_of(do_view, b, h)
    k = load_rows(k_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
    core = load_rows(core_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dcore = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Each stretch writes sums of its own, which the host adds: no atomics.
    last = tl.minimum((stretch + 1) * STRETCH, N)
    for first in range(stretch * STRETCH, last, BLOCK_N):
        q = load_rows(q_ptr, first, q_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
        do = load_rows(do_ptr, first, do_view.stride_n, N, BLOCK_N, D, BLOCK_D)
        rows = first + tl.arange(0, BLOCK_N)
        lse = _load_lse(lse_ptr + head * N, rows, N, q.dtype)  # (BLOCK_N,)
        p, dp = _probabilities(q, do, k, core, lse, start, scale, M, BLOCK_M)
        if delta_ptr is None:
            delta = _mean(tl.sum(p * dp, axis=1), tl.sum(p, axis=1))
        else:
            delta = tl.load(delta_ptr + head * N + rows, mask=rows < N, other=0.0)
        ds = p * (dp - delta[:, None])  # (BLOCK_N, BLOCK_M)
        dcore = add_product(dcore, tl.trans(p.to(q.dtype)), do)
        dk = add_product(dk, tl.trans(ds.to(q.dtype)), q)
    part = (head * num_stretches + stretch) * M * D
    store_rows(dk_ptr + part, dk * scale, start, D, M, BLOCK_M, D, BLOCK_D)
    store_rows(dcore_ptr + part, dcore, start, D, M, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=["H", "N", "SEGMENT"])
def _output_bwd_query_kernel(
    q_view,
    k_ptr,
    core_ptr,
    lengths_ptr,
    do_view,
    lse_ptr,
    delta_ptr,
    dq_land_ptr,
    dq_view,
    H,
    N,
    SEGMENT,
    scale,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    num_tiles = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = head // H, head % H
    limit = visible_keys(lengths_ptr, b, N)
    q_ptr = head_of(q_view, b, h)
    do_ptr = head_of(do_view, b, h)
    q = load_rows(q_ptr, first, q_view.stride_n, limit, BLOCK_N, D, BLOCK_D)  # (BLOCK_N, BLOCK_D)
    do = load_rows(do_ptr, first, do_view.stride_n, limit, BLOCK_N, D, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_N)
    lse = _load_lse(lse_ptr + head * N, rows, N, q.dtype)  # (BLOCK_N,)
    dq = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, M, BLOCK_M):
        k = load_rows(k_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)  # (BLOCK_M, BLOCK_D)
        core = load_rows(core_ptr + head * M * D, start, D, M, BLOCK_M, D, BLOCK_D)
        p, dp = _probabilities(q, do, k, core, lse, start, scale, M, BLOCK_M)
        if delta_ptr is None:
            delta = _mean(tl.sum(p * dp, axis=1), tl.sum(p, axis=1))
        else:
            delta = tl.load(delta_ptr + head * N + rows, mask=rows < N, other=0.0)
        ds = p * (dp - delta[:, None])  # (BLOCK_N, BLOCK_M)
        dq = add_product(dq, ds.to(q.dtype), k.to(q.dtype))
    # A landmark is the mean of SEGMENT queries: each gets an equal share of its gradient. Padded
    # queries count as zeros and have no gradient.
    dims = tl.arange(0, BLOCK_D)
    own = (rows < limit)[:, None] & (dims < D)[None, :]
    shares = dq_land_ptr + head * M * D + (rows // SEGMENT)[:, None] * D + dims[None, :]
    share = tl.load(shares, mask=own, other=0.0)
    dq = tl.where(own, dq * scale + share / SEGMENT, 0.0)  # (BLOCK_N, BLOCK_D)
    dq_ptr = head_of(dq_view, b, h)
    store_rows(dq_ptr, dq, first, dq_view.stride_n, N, BLOCK_N, D, BLOCK_D)


def output_forward(stage: LastStage, out: Tensor, lse: Tensor, stats: Tensor | None = None) -> None:
    """Write ``out = K1 core`` (B, H, N, D) and the log-sum-exp of K1's rows, (B, H, N) float32.

    The largest score in ``stats`` (statistics, B, H) is that of K1 alone: the caller combines it
    with those of the other two softmaxes.
    """
    tile, (batch, heads, tokens, _) = stage.tile(TILES), stage.query.shape
    num_tiles = triton.cdiv(tokens, tile["BLOCK_N"])
    parts = None if stats is None else lse.new_empty(batch, heads, num_tiles, NUM_SUMS)
    tensors = {"out_view": out, "lse_ptr": lse, "parts_ptr": parts, "sample_ptr": None}
    modes = {"B": batch, "STATS": parts is not None, "CAPTURE": False}
    stage.launch(_output_fwd_kernel, tile, tensors, batch * heads * num_tiles, **modes)
    if parts is not None and stats is not None:
        join(parts, stats)


def output_capture(stage: LastStage, heads: Tensor, sample: Tensor) -> None:
    """Write heads (S, N, H * D) float32, contiguous, of the entries in ``sample`` (S,) int32.

    A negative index leaves its slot unwritten.
    """
    batch, num_heads, tokens, dim = stage.query.shape
    out = heads.view(len(sample), tokens, num_heads, dim).transpose(1, 2)
    tensors = {"out_view": out, "lse_ptr": None, "parts_ptr": None, "sample_ptr": sample}
    tile = stage.tile(TILES, size=4)
    programs = len(sample) * num_heads * triton.cdiv(tokens, tile["BLOCK_N"])
    modes = {"B": batch, "STATS": False, "CAPTURE": True}
    stage.launch(_output_fwd_kernel, tile, tensors, programs, **modes)


def output_backward_landmarks(
    stage: LastStage, grad: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (dk_land, dcore, delta), the gradients through K1; the first launch of the backward.

    dk_land and dcore are (B, H, M, D) float32, contiguous. delta is (B, H, N) float32, the sums of
    P * dP over rows, for ``output_backward_query``; it is None if one tile holds all landmarks.
    """
    batch, heads, tokens, dim = stage.query.shape
    landmarks = stage.k_land.shape[2]
    stretches = triton.cdiv(tokens, STRETCH)
    tile, query_tile = stage.tile(LANDMARKS_TILES), stage.tile(QUERY_TILES)
    many = landmarks > min(tile["BLOCK_M"], query_tile["BLOCK_M"])
    # Sums per stretch of tokens, added below in a fixed order: deterministic, unlike atomics.
    partial = stage.core.new_empty(2, batch, heads, stretches, landmarks, dim)
    delta = torch.empty_like(lse) if many else None
    tensors = {"do_view": grad, "lse_ptr": lse, "delta_ptr": delta}
    if many:
        programs = batch * heads * triton.cdiv(tokens, query_tile["BLOCK_N"])
        stage.launch(_output_bwd_delta_kernel, query_tile, tensors, programs)
    tensors |= {"dk_ptr": partial[0], "dcore_ptr": partial[1]}
    programs = batch * heads * stretches * triton.cdiv(landmarks, tile["BLOCK_M"])
    stage.launch(_output_bwd_landmark_kernel, tile, tensors, programs, STRETCH=STRETCH)
    dk_land, dcore = partial.sum(dim=3)
    return dk_land, dcore, delta


def output_backward_query(
    stage: LastStage, grad: Tensor, lse: Tensor, delta: Tensor | None, dq_land: Tensor, dq: Tensor
) -> None:
    """Write dq, through K1 and through the landmarks of queries; the last launch of the backward.

    A query past a length gets zero. Any other query gets M / N of its landmark's ``dq_land``,
    (B, H, M, D) float32, the gradient through K2 and K3. ``delta`` is the result of
    ``output_backward_landmarks``; the other arguments are as there.
    """
    tile, (batch, heads, tokens, _) = stage.tile(QUERY_TILES), stage.query.shape
    tensors = {"do_view": grad, "lse_ptr": lse, "delta_ptr": delta}
    tensors |= {"dq_land_ptr": dq_land, "dq_view": dq}
    programs = batch * heads * triton.cdiv(tokens, tile["BLOCK_N"])
    segment = tokens // stage.k_land.shape[2]
    stage.launch(_output_bwd_query_kernel, tile, tensors, programs, SEGMENT=segment)
