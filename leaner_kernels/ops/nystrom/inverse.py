"""The middle stage of Nyström attention: K2, its iterated pseudo-inverse Z, Z (K3 V); the backward.

Sizes: B batch, H heads, M landmarks, D head dimension. Mapping: one program owns a head at a time,
so that a step of the iteration needs no launch. Its matrices are in scratch memory, which fits the
caches: a product walks over them in pieces, and only its result is in registers. Everything is
float32. For half-precision inputs and at most 64 landmarks, tensor cores multiply: each number is
the sum of three bfloat16 parts, and the six largest of their nine products are summed.

With A = K2 V a step V (13 - A (15 - A (7 - A))) / 4 is B = 7 A - A A, C = 15 A - A B and
(13 V - V C) / 4: four products.

The forward keeps nothing: a program of the backward recomputes the iterates, keeps all of them in
scratch memory, and walks back over them. With G the gradient of an iterate that came from V:
dV = (13 G - G C^T) / 4 and dC = -V^T G / 4; dB = -A^T dC;
dA = 15 dC - dC B^T + 7 dB - dB A^T - A^T dB; dK2 += dA V^T and dV += K2^T dA.

If the matrices are too large for a program, or their start is divided by a maximum over all of
them, PyTorch's batched products compute the same.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: constants, branches decided early.

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch
from .._tiles import Tiles, block_dim, rule
from .._triton import add_product, scaled

MAX_FUSED = 128  # landmarks
PART = 64  # landmarks per partial sum in PyTorch's products
SLOTS, BACKWARD_SLOTS = 5, 8  # matrices in scratch memory; the backward also keeps the iterates
# More programs would need memory, and evict each other's matrices from the caches. Each program
# computes several heads.
MAX_PROGRAMS = 264

# BLOCK_M is the side of a matrix; BLOCK_R and BLOCK_K are the rows and the depth of one step of a
# product. ``tokens`` are landmarks.
TILES = Tiles(
    "nystrom_inverse",
    rule(tokens=16, PRODUCTS="bf16x6", BLOCK_M=16, BLOCK_R=16, BLOCK_K=16, num_warps=4),
    rule(tokens=32, PRODUCTS="bf16x6", BLOCK_M=32, BLOCK_R=32, BLOCK_K=32, num_warps=4),
    rule(tokens=64, PRODUCTS="bf16x6", BLOCK_M=64, BLOCK_R=64, BLOCK_K=32, num_warps=4),
    rule(tokens=16, size=4, PRODUCTS="ieee", BLOCK_M=16, BLOCK_R=16, BLOCK_K=16, num_warps=4),
    rule(tokens=32, size=4, PRODUCTS="ieee", BLOCK_M=32, BLOCK_R=32, BLOCK_K=16, num_warps=4),
    rule(tokens=64, size=4, PRODUCTS="ieee", BLOCK_M=64, BLOCK_R=32, BLOCK_K=16, num_warps=8),
    rule(tokens=128, size=4, PRODUCTS="ieee", BLOCK_M=128, BLOCK_R=32, BLOCK_K=16, num_warps=8),
    num_stages=1,
    maxnreg=255,
)


@triton.jit
def _places(first, rows, cols, BLOCK_R: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return offsets of rows from ``first`` on in a contiguous (rows, cols), and which exist."""
    own, across = first + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_COLS)
    inside = (own < rows)[:, None] & (across < cols)[None, :]  # (BLOCK_R, BLOCK_COLS)
    return own[:, None] * cols + across[None, :], inside


@triton.jit
def load_tile(ptr, first, rows, cols, BLOCK_R: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Load rows from ``first`` on of a contiguous (rows, cols), zero outside."""
    offsets, inside = _places(first, rows, cols, BLOCK_R, BLOCK_COLS)
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, tile, first, rows, cols, BLOCK_R: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Store rows from ``first`` on of a contiguous (rows, cols)."""
    offsets, inside = _places(first, rows, cols, BLOCK_R, BLOCK_COLS)
    tl.store(ptr + offsets, tile, mask=inside)


@triton.jit
def tile_product(
    a_ptr, b_ptr, first, rows, total, cols, TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, blocks
):
    """Return rows from ``first`` on of A B, float32 (rows, total) and (total, cols), zero outside.

    A and B are contiguous; with TRANS_A or TRANS_B, their transposes are. ``blocks`` are BLOCK_R,
    BLOCK_K, the block of columns and PRODUCTS.
    """
    BLOCK_R: tl.constexpr = blocks[0]
    BLOCK_K: tl.constexpr = blocks[1]
    BLOCK_COLS: tl.constexpr = blocks[2]
    PRODUCTS: tl.constexpr = blocks[3]
    own, across = first + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_COLS)
    result = tl.zeros([BLOCK_R, BLOCK_COLS], tl.float32)
    for start in range(0, total, BLOCK_K):
        along = start + tl.arange(0, BLOCK_K)
        if TRANS_A:
            a_ptrs = a_ptr + own[:, None] + along[None, :] * rows  # (BLOCK_R, BLOCK_K)
        else:
            a_ptrs = a_ptr + own[:, None] * total + along[None, :]  # (BLOCK_R, BLOCK_K)
        a = tl.load(a_ptrs, mask=(own < rows)[:, None] & (along < total)[None, :], other=0.0)
        if TRANS_B:
            b_ptrs = b_ptr + along[:, None] + across[None, :] * total  # (BLOCK_K, BLOCK_COLS)
        else:
            b_ptrs = b_ptr + along[:, None] * cols + across[None, :]  # (BLOCK_K, BLOCK_COLS)
        b = tl.load(b_ptrs, mask=(along < total)[:, None] & (across < cols)[None, :], other=0.0)
        result = add_product(result, a, b, PRODUCTS)  # (BLOCK_R, BLOCK_COLS)
    return result


@triton.jit
def combine(
    out_ptr, x_ptr, x_factor, y_ptr, y_factor, factor, a_ptr, b_ptr, rows, total, cols,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, blocks,
):  # fmt: skip
    """Write x_factor X + y_factor Y + factor A B, (rows, cols), visible to all threads.

    ``blocks`` are as in ``tile_product``. X and Y may be None. The result may overwrite X, Y, or an
    A that is not transposed.
    """
    BLOCK_R: tl.constexpr = blocks[0]
    BLOCK_COLS: tl.constexpr = blocks[2]
    for first in range(0, rows, BLOCK_R):
        tile = factor * tile_product(  # (BLOCK_R, BLOCK_COLS)
            a_ptr, b_ptr, first, rows, total, cols, TRANS_A, TRANS_B, blocks
        )
        if x_ptr is not None:
            tile += x_factor * load_tile(x_ptr, first, rows, cols, BLOCK_R, BLOCK_COLS)
        if y_ptr is not None:
            tile += y_factor * load_tile(y_ptr, first, rows, cols, BLOCK_R, BLOCK_COLS)
        # Other threads may still read these rows of A, which the store may overwrite.
        tl.debug_barrier()
        store_tile(out_ptr, tile, first, rows, cols, BLOCK_R, BLOCK_COLS)
    # The next product reads rows that other threads stored.
    tl.debug_barrier()


@triton.jit
def start_iterates(q_ptr, k_ptr, k2_ptr, v_ptr, scale, M, D, square):
    """Write K2 and V = K2^T / c; return K2's column sums, the largest one c, and max_logit."""
    BLOCK_R: tl.constexpr = square[0]
    BLOCK_M: tl.constexpr = square[2]
    cols = tl.arange(0, BLOCK_M)
    sums = tl.zeros([BLOCK_M], tl.float32)
    maxima = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for first in range(0, M, BLOCK_R):
        inside = first + tl.arange(0, BLOCK_R) < M
        s = tile_product(  # (BLOCK_R, BLOCK_M)
            q_ptr, k_ptr, first, M, D, M, False, True, square
        )
        s = scaled(s, scale)
        s = tl.where((cols < M)[None, :], s, float("-inf"))
        row_max = tl.max(s, axis=1)  # (BLOCK_R,)
        p = tl.exp(s - row_max[:, None])  # (BLOCK_R, BLOCK_M)
        p = tl.where(inside[:, None], p / tl.sum(p, axis=1)[:, None], 0.0)
        store_tile(k2_ptr, p, first, M, M, BLOCK_R, BLOCK_M)
        sums += tl.sum(p, axis=0)  # (BLOCK_M,)
        maxima = tl.maximum(maxima, tl.where(inside, row_max, float("-inf")))
    tl.debug_barrier()
    largest = tl.max(sums)
    for first in range(0, M, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        v = load_tile(k2_ptr, first, M, M, BLOCK_R, BLOCK_M) / largest  # (BLOCK_R, BLOCK_M)
        inside = (rows < M)[:, None] & (cols < M)[None, :]
        tl.store(v_ptr + cols[None, :] * M + rows[:, None], v, mask=inside)
    tl.debug_barrier()
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    total = tl.sum(sums)
    return sums, largest, tl.where(total == total, tl.max(maxima), float("nan"))


@triton.jit
def polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, square):
    """Write A = K2 V, B = 7 A - A A and C = 15 A - A B."""
    combine(a_ptr, None, 0, None, 0, 1, k2_ptr, v_ptr, M, M, M, False, False, square)
    combine(b_ptr, a_ptr, 7, None, 0, -1, a_ptr, a_ptr, M, M, M, False, False, square)
    combine(c_ptr, a_ptr, 15, None, 0, -1, a_ptr, b_ptr, M, M, M, False, False, square)


@triton.jit(do_not_specialize=["heads", "iterations"])
def _inverse_fwd_kernel(
    q_ptr,
    k_ptr,
    k3v_ptr,
    core_ptr,
    max_ptr,
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
    square: tl.constexpr = (BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS)
    wide: tl.constexpr = (BLOCK_R, BLOCK_K, BLOCK_D, PRODUCTS)
    # Scratch memory belongs to the program, which uses it again for each of its heads.
    k2_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * SLOTS * M * M
    v_ptr = k2_ptr + M * M
    a_ptr = v_ptr + M * M
    b_ptr = a_ptr + M * M
    c_ptr = b_ptr + M * M
    for head in range(tl.program_id(0), heads, tl.num_programs(0)):
        rows = tl.cast(head, tl.int64) * M * D
        _, _, largest = start_iterates(
            q_ptr + rows, k_ptr + rows, k2_ptr, v_ptr, scale, M, D, square
        )
        tl.store(max_ptr + head, largest)
        # V (13 - C) / 4 in place of V: ``combine`` may overwrite an A that is not transposed.
        for _ in range(iterations):
            polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, square)
            combine(v_ptr, v_ptr, 3.25, None, 0, -0.25, v_ptr, c_ptr, M, M, M, False, False, square)
        combine(
            core_ptr + rows, None, 0, None, 0, 1, v_ptr, k3v_ptr + rows, M, M, D, False, False, wide
        )  # (M, D)


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
    square: tl.constexpr = (BLOCK_R, BLOCK_K, BLOCK_M, PRODUCTS)
    wide: tl.constexpr = (BLOCK_R, BLOCK_K, BLOCK_D, PRODUCTS)
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
            q_ptr + rows, k_ptr + rows, k2_ptr, v_ptr, scale, M, D, square
        )
        for _ in range(iterations):
            polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, square)
            combine(
                v_ptr + M * M, v_ptr, 3.25, None, 0, -0.25, v_ptr, c_ptr,
                M, M, M, False, False, square,
            )  # fmt: skip
            v_ptr += M * M

        # d(K3 V) = Z^T dcore, and G = dcore (K3 V)^T, the gradient of Z.
        combine(  # (M, D)
            dk3v_ptr + rows, None, 0, None, 0, 1, v_ptr, dcore_ptr + rows,
            M, M, D, True, False, wide,
        )  # fmt: skip
        combine(  # (M, M)
            g_ptr, None, 0, None, 0, 1, dcore_ptr + rows, k3v_ptr + rows,
            M, D, M, False, True, square,
        )  # fmt: skip
        zeros = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
        for first in range(0, M, BLOCK_R):
            store_tile(dk2_ptr, zeros, first, M, M, BLOCK_R, BLOCK_M)
        tl.debug_barrier()
        for _ in range(iterations):
            # A, B and C of this iterate again; the equations are those of the module's docstring.
            v_ptr -= M * M
            polynomial(k2_ptr, v_ptr, a_ptr, b_ptr, c_ptr, M, square)
            combine(dv_ptr, g_ptr, 3.25, None, 0, -0.25, g_ptr, c_ptr, M, M, M, False, True, square)
            dc_ptr = c_ptr  # C is no longer needed
            combine(dc_ptr, None, 0, None, 0, -0.25, v_ptr, g_ptr, M, M, M, True, False, square)
            db_ptr = g_ptr  # G is no longer needed
            combine(db_ptr, None, 0, None, 0, -1, a_ptr, dc_ptr, M, M, M, True, False, square)
            combine(da_ptr, dc_ptr, 15, db_ptr, 7, -1, dc_ptr, b_ptr, M, M, M, False, True, square)
            combine(da_ptr, da_ptr, 1, None, 0, -1, db_ptr, a_ptr, M, M, M, False, True, square)
            combine(da_ptr, da_ptr, 1, None, 0, -1, a_ptr, db_ptr, M, M, M, True, False, square)
            combine(dk2_ptr, dk2_ptr, 1, None, 0, 1, da_ptr, v_ptr, M, M, M, False, True, square)
            combine(g_ptr, dv_ptr, 1, None, 0, 1, k2_ptr, da_ptr, M, M, M, True, False, square)

        # The start is K2^T / c with c the largest column sum, and v_ptr points to it again. Columns
        # that share the maximum share its gradient, as in PyTorch's amax.
        along = tl.zeros([BLOCK_R], tl.float32)
        for first in range(0, M, BLOCK_R):
            g = load_tile(g_ptr, first, M, M, BLOCK_R, BLOCK_M)  # (BLOCK_R, BLOCK_M)
            v = load_tile(v_ptr, first, M, M, BLOCK_R, BLOCK_M)  # (BLOCK_R, BLOCK_M)
            along += tl.sum(g * v, axis=1)  # (BLOCK_R,)
        at_maximum = (sums == largest).to(tl.float32)  # (BLOCK_M,)
        to_columns = at_maximum * (tl.sum(along) / (largest * tl.sum(at_maximum)))  # (BLOCK_M,)
        ds_ptr = a_ptr  # A is no longer needed
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
        combine(
            dq_ptr + rows, None, 0, None, 0, 1, ds_ptr, k_ptr + rows, M, M, D, False, False, wide
        )  # (M, D)
        combine(
            dk_ptr + rows, None, 0, None, 0, 1, ds_ptr, q_ptr + rows, M, M, D, True, False, wide
        )  # (M, D)


class Inversion(NamedTuple):
    """Parameters of K2 and of its inversion.

    Attributes:
        scale: multiplies the scores.
        iterations: steps of the pseudo-inverse.
        whole_batch: divide the first iterate by the largest column sum over all matrices, instead
            of that of each matrix.
        dtype: of the operator's inputs.
    """

    scale: float
    iterations: int
    whole_batch: bool
    dtype: torch.dtype = torch.float32


def invert_forward(land: tuple[Tensor, ...], inversion: Inversion) -> tuple[Tensor, Tensor]:
    """Return (core, max2): Z (K3 V), (B, H, M, D), and the largest scaled score of K2, (B, H).

    ``land`` is q_land, k_land and k3v, (B, H, M, D) float32, contiguous.
    """
    q_land, k_land, k3v = land
    batch, heads, landmarks, _ = q_land.shape
    if inversion.whole_batch or landmarks > MAX_FUSED:
        with _as_written(q_land):
            k2, largest = _batched_softmax(q_land, k_land, inversion.scale)
            # Keep one iterate at a time: only the backward needs them all.
            (z,) = deque(_batched_iterates(k2, inversion), maxlen=1)
            return _batched_product(z, k3v), largest
    core, largest = torch.empty_like(q_land), q_land.new_empty(batch, heads)
    _launch(_inverse_fwd_kernel, land, {"core_ptr": core, "max_ptr": largest}, SLOTS, 0, inversion)
    return core, largest


def invert_backward(
    dcore: Tensor, land: tuple[Tensor, ...], inversion: Inversion
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_land, dk_land, dk3v) of ``invert_forward``: float32, contiguous, new.

    dq_land and dk_land are the gradients through K2 alone.
    """
    if inversion.whole_batch or dcore.shape[2] > MAX_FUSED:
        with _as_written(dcore):
            return _batched_backward(dcore, land, inversion)
    dq, dk, dk3v = (torch.empty_like(dcore) for _ in range(3))
    tensors = {"dcore_ptr": dcore, "dq_ptr": dq, "dk_ptr": dk, "dk3v_ptr": dk3v}
    iterates = inversion.iterations + 1
    _launch(_inverse_bwd_kernel, land, tensors, BACKWARD_SLOTS, iterates, inversion)
    return dq, dk, dk3v


def _launch(
    kernel: Any,
    land: tuple[Tensor, ...],
    tensors: dict[str, Tensor],
    slots: int,
    iterates: int,
    inversion: Inversion,
) -> None:
    """Launch either kernel, with scratch memory for ``slots`` matrices and the iterates."""
    q_land = land[0]
    batch, heads, landmarks, dim = q_land.shape
    programs = min(batch * heads, MAX_PROGRAMS)
    scale, iterations, _, dtype = inversion

    def prepare() -> Any:
        # Triton's interpreter does not support bf16x6 products.
        size = 4 if triton.knobs.runtime.interpret else dtype.itemsize
        tile = TILES.tile(q_land.device, size=size, tokens=landmarks)
        return (programs,), dict(
            **tile.arguments,
            scale=scale,
            heads=batch * heads,
            iterations=iterations,
            M=landmarks,
            D=dim,
            BLOCK_D=block_dim(dim),
            SLOTS=slots,
        )

    scratch = q_land.new_empty(programs, slots + iterates, landmarks, landmarks)
    tensors = {**dict(zip(("q_ptr", "k_ptr", "k3v_ptr"), land)), **tensors, "scratch_ptr": scratch}
    launch(kernel, tensors, (scale, iterations, dtype), prepare)


def _as_written(t: Tensor) -> torch.autocast:
    """Return a context that disables autocast, which would round the products of libraries."""
    # PyTorch has no autocast on meta.
    return torch.autocast("cpu" if t.is_meta else t.device.type, enabled=False)


def _batched_softmax(q_land: Tensor, k_land: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return K2 (B, H, M, M) and its largest score (B, H)."""
    s = scale * (q_land @ k_land.mT)
    return torch.softmax(s, dim=-1), s.amax(dim=(-2, -1))


def _batched_iterates(k2: Tensor, inversion: Inversion) -> Iterator[Tensor]:
    """Yield the start and the iterates of each matrix's pseudo-inverse; the last is the result."""
    sums = k2.sum(dim=-2, keepdim=True)
    v = k2.mT / (sums.amax() if inversion.whole_batch else sums.amax(dim=-1, keepdim=True))
    yield v
    for _ in range(inversion.iterations):
        c = _batched_polynomial(_batched_product(k2, v))[1]
        v = (13 * v - _batched_product(v, c)) / 4
        yield v


def _batched_polynomial(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return B = 7 A - A A and C = 15 A - A B."""
    b = 7 * a - _batched_product(a, a)
    return b, 15 * a - _batched_product(a, b)


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    """Return A B of (B, H, M, K) and (B, H, K, N) as a sum of products of depth at most ``PART``.

    Libraries add float32 products one after another and round each sum. The iteration magnifies
    that error.
    """
    pairs = [
        (x.flatten(0, 1), y.flatten(0, 1))
        for x, y in zip(a.split(PART, dim=-1), b.split(PART, dim=-2))
    ]
    total = torch.bmm(*pairs[0])
    for x, y in pairs[1:]:
        total = torch.baddbmm(total, x, y)
    return total.unflatten(0, a.shape[:2])


def _batched_backward(
    dcore: Tensor, land: tuple[Tensor, ...], inversion: Inversion
) -> tuple[Tensor, Tensor, Tensor]:
    q_land, k_land, k3v = land
    scale = inversion.scale
    k2, _ = _batched_softmax(q_land, k_land, scale)
    found = list(_batched_iterates(k2, inversion))
    dk3v = _batched_product(found[-1].mT, dcore)
    g, dk2 = dcore @ k3v.mT, torch.zeros_like(k2)
    for v in reversed(found[:-1]):
        a = _batched_product(k2, v)
        b, c = _batched_polynomial(a)
        dc = _batched_product(v.mT, g) / -4
        db = -_batched_product(a.mT, dc)
        da = 15 * dc - _batched_product(dc, b.mT) + 7 * db
        da -= _batched_product(db, a.mT) + _batched_product(a.mT, db)
        g = (13 * g - _batched_product(g, c.mT)) / 4 + _batched_product(k2.mT, da)
        dk2 += _batched_product(da, v.mT)
    # The start is K2^T / c with c the largest column sum. Columns that share the maximum share its
    # gradient, as in PyTorch's amax.
    sums = k2.sum(dim=-2, keepdim=True)
    over = (0, 1, 2, 3) if inversion.whole_batch else (2, 3)
    largest = sums.amax(dim=over, keepdim=True)
    at_maximum = (sums == largest).to(k2.dtype)
    g = g.mT / largest
    along = (g * k2).sum(dim=over, keepdim=True) / largest
    dk2 += g - along * at_maximum / at_maximum.sum(dim=over, keepdim=True)
    ds = scale * k2 * (dk2 - (k2 * dk2).sum(dim=-1, keepdim=True))
    return _batched_product(ds, k_land), _batched_product(ds.mT, q_land), dk3v
