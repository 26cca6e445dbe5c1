"""The backward of the middle stage: exact derivatives of the iteration, its start and the softmax.

Sizes, mapping and letters as in inverse.py. The forward keeps nothing: a program computes its
iterates again, holds all of them in scratch memory, and walks back over them. With G the gradient
of an iterate that came from V: dV = (13 G - G C^T) / 4 and dC = -V^T G / 4; dB = -A^T dC;
dA = 15 dC - dC B^T + 7 dB - dB A^T - A^T dB; dK2 += dA V^T and dV += K2^T dA.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import Launch, LaunchCache
from . import inverse
from .inverse import (
    MAX_FUSED,
    batched_iterates,
    batched_polynomial,
    batched_product,
    batched_softmax,
    combine,
    kind_of,
    load_tile,
    polynomial,
    shared_arguments,
    start_iterates,
    store_tile,
)

SLOTS = 8  # matrices in scratch memory, beside the iterates


@triton.jit(do_not_specialize=["heads", "iterations"])
def _inverse_bwd_kernel(
    q_ptr,
    k_ptr,
    k3v_ptr,
    dcore_ptr,
    dq_ptr,
    dk_ptr,
    dk3v_ptr,
    scratch_ptr,
    scale,
    heads,
    iterations,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    matrices = SLOTS + iterations + 1
    k2_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * matrices * M * M
    dk2_ptr = k2_ptr + M * M
    a_ptr = dk2_ptr + M * M
    b_ptr = a_ptr + M * M
    c_ptr = b_ptr + M * M
    g_ptr = c_ptr + M * M
    dv_ptr = g_ptr + M * M
    da_ptr = dv_ptr + M * M
    v_ptr = da_ptr + M * M
    for head in range(tl.program_id(0), heads, tl.num_programs(0)):
        rows = tl.cast(head, tl.int64) * M * D
        sums, largest, _ = start_iterates(
            q_ptr + rows, k_ptr + rows, k2_ptr, v_ptr, scale, M, D,
            BLOCK_M, BLOCK_R, BLOCK_K, PRODUCTS,
        )  # fmt: skip
        for _ in range(iterations):
            polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, BLOCK_M, BLOCK_R, BLOCK_K, PRODUCTS)
            combine(
                v_ptr + M * M, v_ptr, 3.25, None, 0, -0.25, v_ptr, c_ptr,
                M, M, M, False, False, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            v_ptr += M * M

        combine(  # (M, D)
            dk3v_ptr + rows, None, 0, None, 0, 1, v_ptr, dcore_ptr + rows,
            M, M, D, True, False, BLOCK_R, BLOCK_K, BLOCK_D, PRODUCTS,
        )  # fmt: skip
        combine(  # (M, M)
            g_ptr, None, 0, None, 0, 1, dcore_ptr + rows, k3v_ptr + rows,
            M, D, M, False, True, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
        )  # fmt: skip
        zeros = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for first in range(0, M, BLOCK_R):
            store_tile(dk2_ptr, zeros, first, M, M, BLOCK_R, BLOCK_M)
        tl.debug_barrier()
        for _ in range(iterations):
            v_ptr -= M * M
            polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, BLOCK_M, BLOCK_R, BLOCK_K, PRODUCTS)
            combine(
                dv_ptr, g_ptr, 3.25, None, 0, -0.25, g_ptr, c_ptr,
                M, M, M, False, True, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            dc_ptr = c_ptr  # C is done with
            combine(
                dc_ptr, None, 0, None, 0, -0.25, v_ptr, g_ptr,
                M, M, M, True, False, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            db_ptr = g_ptr  # G is done with
            combine(
                db_ptr, None, 0, None, 0, -1, a_ptr, dc_ptr,
                M, M, M, True, False, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            combine(
                da_ptr, dc_ptr, 15, db_ptr, 7, -1, dc_ptr, b_ptr,
                M, M, M, False, True, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            combine(
                da_ptr, da_ptr, 1, None, 0, -1, db_ptr, a_ptr,
                M, M, M, False, True, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            combine(
                da_ptr, da_ptr, 1, None, 0, -1, a_ptr, db_ptr,
                M, M, M, True, False, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            combine(
                dk2_ptr, dk2_ptr, 1, None, 0, 1, da_ptr, v_ptr,
                M, M, M, False, True, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip
            combine(
                g_ptr, dv_ptr, 1, None, 0, 1, k2_ptr, da_ptr,
                M, M, M, True, False, BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS,
            )  # fmt: skip

        # The start is K2^T / c with c the largest column sum: v_ptr points at it again. Columns
        # that share the maximum share its gradient, as they do in PyTorch's amax.
        along = tl.zeros([BLOCK_R], tl.float32)
        for first in range(0, M, BLOCK_R):
            g = load_tile(g_ptr, first, M, M, BLOCK_R, BLOCK_M)  # (BLOCK_R, BLOCK_M)
            v = load_tile(v_ptr, first, M, M, BLOCK_R, BLOCK_M)  # (BLOCK_R, BLOCK_M)
            along += tl.sum(g * v, axis=1)  # (BLOCK_R,)
        at_maximum = (sums == largest).to(tl.float32)  # (BLOCK_M,)
        to_columns = at_maximum * (tl.sum(along) / (largest * tl.sum(at_maximum)))  # (BLOCK_M,)
        ds_ptr = a_ptr  # A is done with
        cols = tl.arange(0, BLOCK_M)
        for first in range(0, M, BLOCK_R):
            k2 = load_tile(k2_ptr, first, M, M, BLOCK_R, BLOCK_M)  # (BLOCK_R, BLOCK_M)
            own = first + tl.arange(0, BLOCK_R)
            inside = (own < M)[:, None] & (cols < M)[None, :]
            g = tl.load(g_ptr + cols[None, :] * M + own[:, None], mask=inside, other=0.0)
            dk2 = load_tile(dk2_ptr, first, M, M, BLOCK_R, BLOCK_M) + g / largest
            dk2 -= to_columns[None, :]
            ds = scale * k2 * (dk2 - tl.sum(k2 * dk2, axis=1)[:, None])  # (BLOCK_R, BLOCK_M)
            store_tile(ds_ptr, ds, first, M, M, BLOCK_R, BLOCK_M)
        tl.debug_barrier()
        combine(  # (M, D)
            dq_ptr + rows, None, 0, None, 0, 1, ds_ptr, k_ptr + rows,
            M, M, D, False, False, BLOCK_R, BLOCK_K, BLOCK_D, PRODUCTS,
        )  # fmt: skip
        combine(  # (M, D)
            dk_ptr + rows, None, 0, None, 0, 1, ds_ptr, q_ptr + rows,
            M, M, D, True, False, BLOCK_R, BLOCK_K, BLOCK_D, PRODUCTS,
        )  # fmt: skip


_cache = LaunchCache(
    (
        *("q_ptr", "k_ptr", "k3v_ptr", "dcore_ptr"),
        *("dq_ptr", "dk_ptr", "dk3v_ptr", "scratch_ptr"),
    )
)


def invert_backward(
    dcore: Tensor,
    q_land: Tensor,
    k_land: Tensor,
    k3v: Tensor,
    scale: float,
    iterations: int,
    whole_batch: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_land, dk_land, dk3v) of ``invert_forward``: float32, contiguous, new.

    dq_land and dk_land are what comes through K2 alone.

    Args:
        dcore: (B, H, M, D) float32, contiguous, and so are the others.
        q_land: as in ``invert_forward``.
        k_land: as in ``invert_forward``.
        k3v: as in ``invert_forward``.
        scale: as in ``invert_forward``.
        iterations: as in ``invert_forward``.
        whole_batch: as in ``invert_forward``.
        dtype: as in ``invert_forward``.
    """
    batch, heads, landmarks, _ = q_land.shape
    if whole_batch or landmarks > MAX_FUSED:
        with inverse.as_written(q_land):
            return _batched_backward(dcore, q_land, k_land, k3v, scale, iterations, whole_batch)
    dq, dk, dk3v = (torch.empty_like(q_land) for _ in range(3))
    programs = min(batch * heads, inverse.MAX_PROGRAMS)
    scratch = q_land.new_empty(programs, SLOTS + iterations + 1, landmarks, landmarks)
    tensors = q_land, k_land, k3v, dcore, dq, dk, dk3v, scratch
    kind = kind_of(q_land, scale, iterations, dtype)
    if not _cache.run(kind, tensors):
        arguments = dict(
            **shared_arguments(q_land, k_land, k3v, scale, iterations, dtype),
            dcore_ptr=dcore,
            dq_ptr=dq,
            dk_ptr=dk,
            dk3v_ptr=dk3v,
            scratch_ptr=scratch,
            SLOTS=SLOTS,
        )
        launch = Launch(_inverse_bwd_kernel, (programs,), arguments)
        _cache.start(kind, launch, tensors)
    return dq, dk, dk3v


def _batched_backward(
    dcore: Tensor,
    q_land: Tensor,
    k_land: Tensor,
    k3v: Tensor,
    scale: float,
    iterations: int,
    whole_batch: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    k2, _ = batched_softmax(q_land, k_land, scale)
    found = list(batched_iterates(k2, iterations, whole_batch))
    dk3v = batched_product(found[-1].mT, dcore)
    g, dk2 = dcore @ k3v.mT, torch.zeros_like(k2)
    for v in reversed(found[:-1]):
        a = batched_product(k2, v)
        b, c = batched_polynomial(a)
        dc = batched_product(v.mT, g) / -4
        db = -batched_product(a.mT, dc)
        da = 15 * dc - batched_product(dc, b.mT) + 7 * db
        da -= batched_product(db, a.mT) + batched_product(a.mT, db)
        g = (13 * g - batched_product(g, c.mT)) / 4 + batched_product(k2.mT, da)
        dk2 += batched_product(da, v.mT)
    # The start is K2^T / c with c the largest column sum. Columns that share the maximum share its
    # gradient, as they do in PyTorch's amax.
    sums = k2.sum(dim=-2, keepdim=True)
    over = (0, 1, 2, 3) if whole_batch else (2, 3)
    largest = sums.amax(dim=over, keepdim=True)
    at_maximum = (sums == largest).to(k2.dtype)
    g = g.mT / largest
    along = (g * k2).sum(dim=over, keepdim=True) / largest
    dk2 += g - along * at_maximum / at_maximum.sum(dim=over, keepdim=True)
    ds = scale * k2 * (dk2 - (k2 * dk2).sum(dim=-1, keepdim=True))
    return batched_product(ds, k_land), batched_product(ds.mT, q_land), dk3v
