"""Triton backward of the last stage of Nyström attention: no atomics, bitwise deterministic.

Sizes as in output.py. Mapping: for the landmarks, one program owns one tile of them and a stretch
of the tokens of one head, and the sums of the stretches are joined in a fixed order; for the
queries, one program owns one tile of tokens. Where one tile does not hold all landmarks, a launch
before these sums each row of P * dP.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import Launch, LaunchCache
from .._tiles import Tiles, rule
from .._triton import (
    PRECISION,
    add_product,
    exponential,
    head_of,
    load_rows,
    narrow,
    store_rows,
    units,
    visible_keys,
)
from .output import (
    kind_of,
    landmark_scores,
    shared_arguments,
    tile_of,
    view_of,
)

STRETCH = 512  # tokens of a program that owns landmarks

LANDMARKS_TILES = Tiles(
    "nystrom_output_backward_landmarks",
    rule(dim=32, BLOCK_N=64, BLOCK_M=64, num_warps=4),
    rule(dim=64, BLOCK_N=64, BLOCK_M=32, num_warps=4),
    rule(dim=32, size=4, BLOCK_N=16, BLOCK_M=32, num_warps=4),
    rule(dim=64, size=4, BLOCK_N=16, BLOCK_M=32, num_warps=8),
    num_stages=1,
    maxnreg=255,
)
# A loop over landmarks takes smaller tiles of them.
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
def _probabilities(
    q, do, k, core, lse, start, scale, M: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return P and dP of a tile of tokens with the landmarks from ``start`` on, both float32."""
    s = landmark_scores(q, k, start, scale, M, BLOCK_M, WHOLE=False)
    p = exponential(s - lse[:, None], q.dtype)  # (BLOCK_N, BLOCK_M)
    core, divisor = narrow(core, q.dtype)
    dp = tl.dot(do, tl.trans(core), input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
    return p, dp * divisor


@triton.jit
def _mean(products, row_sum):
    """Return the mean of dP over each row of P, from the sums of P * dP and of P, (BLOCK_N,).

    The log-sum-exp is rounded, so rows of P miss 1 by its last bit: without the quotient
    dP - delta would keep as much of a dP that it should cancel. Past the last row P is zero.
    """
    return products / tl.maximum(row_sum, 1e-30)


@triton.jit
def _load_lse(lse_ptr, rows, N, DTYPE: tl.constexpr):
    """Return the log-sum-exp of rows in ``units``; past the last, one that makes P zero."""
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
    # A query's share of its landmark; padded ones count as zeros and have no gradient.
    dims = tl.arange(0, BLOCK_D)
    own = (rows < limit)[:, None] & (dims < D)[None, :]
    shares = dq_land_ptr + head * M * D + (rows // SEGMENT)[:, None] * D + dims[None, :]
    share = tl.load(shares, mask=own, other=0.0)
    dq = tl.where(own, dq * scale + share / SEGMENT, 0.0)  # (BLOCK_N, BLOCK_D)
    dq_ptr = head_of(dq_view, b, h)
    store_rows(dq_ptr, dq, first, dq_view.stride_n, N, BLOCK_N, D, BLOCK_D)


_POINTERS = "q_view", "k_ptr", "core_ptr", "lengths_ptr", "do_view", "lse_ptr", "delta_ptr"
_delta_cache = LaunchCache(_POINTERS)
_landmark_cache = LaunchCache((*_POINTERS, "dk_ptr", "dcore_ptr"))
_query_cache = LaunchCache((*_POINTERS, "dq_land_ptr", "dq_view"))


def output_backward_landmarks(
    grad: Tensor,
    query: Tensor,
    k_land: Tensor,
    core: Tensor,
    lse: Tensor,
    key_lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (dk_land, dcore, delta): what comes through K1. The first launch of the backward.

    Args:
        grad: (B, H, N, D), dtype of query, any strides with a contiguous last axis.
        query: as in ``output_forward``, and so are the others.
        k_land: (B, H, M, D) float32.
        core: (B, H, M, D) float32.
        lse: (B, H, N) float32, as ``output_forward`` wrote it.
        key_lengths: (B,) int32, or None.
        scale: multiplies the scores.

    Returns:
        dk_land (B, H, M, D) float32 contiguous, through K1 only; dcore (B, H, M, D) float32
        contiguous; delta (B, H, N) float32, the sums over a row of P * dP, or None where one tile
        holds all landmarks: ``output_backward_query`` takes it.
    """
    batch, heads, tokens, dim = query.shape
    landmarks = k_land.shape[2]
    arguments = dict(
        **shared_arguments(query, k_land, core, key_lengths, scale),
        do_view=view_of("grad", grad),
        lse_ptr=lse,
    )
    kind = kind_of(query, k_land, key_lengths, scale, grad.stride(), grad.dtype)
    inputs = query, k_land, core, key_lengths, grad, lse
    tile = tile_of(LANDMARKS_TILES, query, landmarks)
    query_tile = tile_of(QUERY_TILES, query, landmarks)
    delta = None
    if landmarks > min(tile["BLOCK_M"], query_tile["BLOCK_M"]):
        delta = torch.empty_like(lse)
        if not _delta_cache.run(kind, (*inputs, delta)):
            own = arguments | query_tile.arguments | {"delta_ptr": delta}
            grid = (batch * heads * triton.cdiv(tokens, query_tile["BLOCK_N"]),)
            launch = Launch(_output_bwd_delta_kernel, grid, own)
            _delta_cache.start(kind, launch, (*inputs, delta))
    stretches = triton.cdiv(tokens, STRETCH)
    # Sums per stretch of tokens, joined below in a fixed order: deterministic, as atomics are not.
    partial = core.new_empty(2, batch, heads, stretches, landmarks, dim)
    tensors = *inputs, delta, *partial.unbind()
    if not _landmark_cache.run(kind, tensors):
        own = dict(
            **arguments,
            **tile.arguments,
            delta_ptr=delta,
            dk_ptr=partial[0],
            dcore_ptr=partial[1],
            STRETCH=STRETCH,
        )
        grid = (batch * heads * stretches * triton.cdiv(landmarks, tile["BLOCK_M"]),)
        _landmark_cache.start(kind, Launch(_output_bwd_landmark_kernel, grid, own), tensors)
    dk_land, dcore = partial.sum(dim=3)
    return dk_land, dcore, delta


def output_backward_query(
    grad: Tensor,
    query: Tensor,
    k_land: Tensor,
    core: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    dq_land: Tensor,
    dq: Tensor,
    key_lengths: Tensor | None,
    scale: float,
) -> None:
    """Write dq, through K1 and through the landmarks of queries. The last launch of the backward.

    A query past a length gets zero.

    Args:
        grad: as in ``output_backward_landmarks``, and so are the others.
        query: (B, H, N, D).
        k_land: (B, H, M, D) float32.
        core: (B, H, M, D) float32.
        lse: (B, H, N) float32.
        delta: what ``output_backward_landmarks`` returned.
        dq_land: (B, H, M, D) float32, contiguous: the sum of what comes through K2 and K3. A query
            gets M / N of its landmark's.
        dq: (B, H, N, D) in the dtype of query, any strides with a contiguous last axis, written.
        key_lengths: (B,) int32, or None.
        scale: multiplies the scores.
    """
    batch, heads, tokens, _ = query.shape
    strides_and_dtype = grad.stride(), grad.dtype, dq.stride()
    kind = kind_of(query, k_land, key_lengths, scale, *strides_and_dtype)
    tensors = query, k_land, core, key_lengths, grad, lse, delta, dq_land, dq
    if _query_cache.run(kind, tensors):
        return
    tile = tile_of(QUERY_TILES, query, k_land.shape[2])
    arguments = dict(
        **shared_arguments(query, k_land, core, key_lengths, scale),
        do_view=view_of("grad", grad),
        dq_view=view_of("dq", dq),
        **tile.arguments,
        lse_ptr=lse,
        delta_ptr=delta,
        dq_land_ptr=dq_land,
        SEGMENT=tokens // k_land.shape[2],
    )
    grid = (batch * heads * triton.cdiv(tokens, tile["BLOCK_N"]),)
    _query_cache.start(kind, Launch(_output_bwd_query_kernel, grid, arguments), tensors)
