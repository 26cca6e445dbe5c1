"""Triton backward of the landmarks: two launches, no atomics, bitwise deterministic.

Sizes as in landmarks.py. Mapping: first one program owns one tile of landmarks and walks over the
tokens for what K3 passes on to the landmarks of q; then one program owns one tile of tokens and
walks over the landmarks for dk and dv. Each element is written by one program.

Gradients of landmarks sum over many tokens, and may be no float16: products are of float32 numbers,
which half-precision inputs round to TF32's ten bits.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import Launch, LaunchCache
from .._tiles import Tiles, rule
from .._triton import (
    add_product,
    exponential,
    head_of,
    load_rows,
    product_apart,
    store_rows,
    units,
    visible_keys,
)
from .landmarks import (
    Landmarks,
    grid_of_landmarks,
    kind_of,
    shared_arguments,
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
    """Add to dq_land what passes through K3; write delta, the sums over a row of K3 dK3."""
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
        # Past the length k is zero, but e^(0 - lse) may be infinite, and that times zero nan.
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
        # e^(s - inf) = 0: no landmark there.
        lse = tl.load(lse_ptr + at + cols, mask=cols < M, other=float("inf")) * units(DTYPE)
        delta = tl.load(delta_ptr + at + cols, mask=cols < M, other=0.0)  # (BLOCK_M,)
        s = tl.dot(k, tl.trans(q_land), input_precision=PRODUCTS) * in_units  # (BLOCK_N, BLOCK_M)
        p = exponential(s - lse[None, :], DTYPE)  # (BLOCK_N, BLOCK_M)
        dv = add_product(dv, p, dk3v, PRODUCTS)  # (BLOCK_N, BLOCK_D)
        dp = tl.dot(v, tl.trans(dk3v), input_precision=PRODUCTS)  # (BLOCK_N, BLOCK_M)
        dk = add_product(dk, p * (dp - delta[None, :]), q_land, PRODUCTS)
    tokens = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = (tokens < length)[:, None] & (dims < D)[None, :]
    ptrs = dk_land_ptr + offset + (tokens // segment)[:, None] * D + dims[None, :]
    dk = dk * scale + tl.load(ptrs, mask=inside, other=0.0) / segment
    out = head.to(tl.int64) * N * D
    dk, dv = tl.where(inside, dk, 0.0), tl.where(inside, dv, 0.0)
    store_rows(dk_ptr + out, dk, start, D, N, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr + out, dv, start, D, N, BLOCK_N, D, BLOCK_D)


_rows_cache = LaunchCache(
    (
        *("k_view", "v_view", "lengths_ptr", "q_land_ptr", "k3v_ptr", "lse_ptr"),
        *("dk3v_ptr", "dq_land_ptr", "delta_ptr"),
    )
)
_keys_cache = LaunchCache(
    (
        *("k_view", "v_view", "lengths_ptr", "q_land_ptr", "lse_ptr", "dk3v_ptr"),
        *("delta_ptr", "dk_land_ptr", "dk_ptr", "dv_ptr"),
    )
)


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
    """Write dk and dv, and add to ``dq_land`` what passes through K3.

    Args:
        key: as in ``landmarks_forward``.
        value: as in ``landmarks_forward``.
        key_lengths: as in ``landmarks_forward``.
        made: what the forward returned.
        dk3v: (B, H, M, D) float32, contiguous.
        dq_land: as ``dk3v``; what passes through K2, and then through K3 too.
        dk_land: as ``dk3v``; what passes through K1 and K2.
        scale: as in ``landmarks_forward``.
        dk: (B, H, N, D), contiguous, in the dtype of ``key``; zero past a length.
        dv: as ``dk``.
    """
    num_landmarks = made.lse.shape[2]
    heads = made.lse.shape[0] * made.lse.shape[1]
    delta = torch.empty_like(made.lse)
    operands = key, value, key_lengths
    kind = kind_of(*operands, num_landmarks, scale)
    products = {"PRODUCTS": "ieee" if key.dtype == torch.float32 else "tf32"}

    tensors = *operands, made.q_land, made.k3v, made.lse, dk3v, dq_land, delta
    if not _rows_cache.run(kind, tensors):
        arguments = dict(
            **shared_arguments(ROWS_TILES, *operands, num_landmarks, scale),
            **products,
            q_land_ptr=made.q_land,
            k3v_ptr=made.k3v,
            lse_ptr=made.lse,
            dk3v_ptr=dk3v,
            dq_land_ptr=dq_land,
            delta_ptr=delta,
        )
        launch = Launch(_landmark_rows_bwd_kernel, grid_of_landmarks(arguments, heads), arguments)
        _rows_cache.start(kind, launch, tensors)

    tensors = *operands, made.q_land, made.lse, dk3v, delta, dk_land, dk, dv
    if not _keys_cache.run(kind, tensors):
        arguments = dict(
            **shared_arguments(KEYS_TILES, *operands, num_landmarks, scale),
            **products,
            q_land_ptr=made.q_land,
            lse_ptr=made.lse,
            dk3v_ptr=dk3v,
            delta_ptr=delta,
            dk_land_ptr=dk_land,
            dk_ptr=dk,
            dv_ptr=dv,
            segment=key.shape[2] // num_landmarks,
        )
        grid = (heads * triton.cdiv(key.shape[2], arguments["BLOCK_N"]),)
        _keys_cache.start(kind, Launch(_landmark_keys_bwd_kernel, grid, arguments), tensors)
