"""Gluon kernels of softmax attention for short sequences on Ampere.

A warp owns 16 rows of a tile, so that the result of a product becomes the left operand of the next
within registers. Left operands are loaded straight from global memory.

In the layout of a product, a thread holds two neighbouring elements of every eight: rows are loaded
and stored 4 bytes at a time, and half of each sector is unused. With PERMUTED, the dimensions of a
head are permuted on chip within groups of 32 (``element_at``), so that a thread holds 16 contiguous
bytes of a row. The order does not matter to products that sum over the dimensions; results are
stored in their natural order.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ..._gluon import barrier, commit_copies, copy_async, gl, gluon, mma, reinterpret, wait_copies
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, power_of_2, rule
from ..._triton import LOG2_E
from ...route import Results
from ..call import TILE, Call, Gradients, backward_arguments, forward_arguments, tiles_and_tail
from . import gluon_tiles as common
from .gluon_tiles import Dropout, Mask, RowState, Scoring


@gluon.constexpr_function
def copy_layout(D, WARPS, PERMUTED=False):
    """Return the layout of asynchronous copies: 16 bytes per thread, or 4 with PERMUTED."""
    # Two neighbours stay together in the permutation: 4 bytes are the widest possible copy.
    if PERMUTED:
        return gl.BlockedLayout([1, 2], [64 // D, D // 2], [WARPS, 1], [1, 0])
    # Each thread copies eight elements, 16 bytes; a warp copies 256 elements.
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(D):
    """Return a layout of shared memory that ldmatrix reads without conflicts, transposed or not."""
    return gl.SwizzledSharedLayout(8, 64 // D if D < 64 else 1, min(D // 8, 8), [1, 0])


@gluon.constexpr_function
def vector_layout(ROWS, D, WARPS):
    """Return the layout, in natural order, whose threads own the elements of a left operand."""
    # Register bases beyond the first 16 bytes: groups of 32 dimensions, row + 8, more tiles of
    # rows.
    groups = [[0, 32 << i] for i in range((D // 32).bit_length() - 1)]
    more = [[16 * WARPS << i, 0] for i in range((ROWS // (16 * WARPS)).bit_length() - 1)]
    warps = [[16 << i if 16 << i < ROWS else 0, 0] for i in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *groups, [8, 0], *more],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warps,
        [],
        [ROWS, D],
    )


@gluon.jit
def element_at(positions, PERMUTED: gl.constexpr):
    """Return the elements of a row that lie at these positions on chip."""
    if PERMUTED:
        # Within 32: bits 1 and 2 of a position, the lane, become bits 3 and 4 of the element, and
        # vice versa. A lane then holds eight neighbouring elements.
        positions = (positions & ~30) | ((positions & 6) << 2) | ((positions & 24) >> 2)
        # Bit 0 stays, which the compiler cannot see through the bits above.
        positions = gl.max_contiguous(gl.multiple_of(positions, 2), 2)
    return positions


@gluon.jit
def permute_dims(x, PERMUTED: gl.constexpr):
    """Permute (rows, D) from the order of memory to that on chip; the map is its own inverse."""
    ROWS: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if PERMUTED:
        x = x.reshape([ROWS, D // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, D])
    return x


class TailState(NamedTuple):
    """The softmax of the tail's rows, which are columns; sums are of a thread's keys, (64, T).

    Attributes:
        acc: (D, T), the sum of V^T P^T.
        total: the sum of P.
        centred: the sum of P times its exponent.
        square: the sum of P^2.
    """

    acc: Any
    total: Any
    centred: Any
    square: Any


class Rows(NamedTuple):
    """The rows of a head.

    Attributes:
        ptr: the first row.
        stride: elements from a row to the next.
    """

    ptr: Any
    stride: Any


@gluon.jit
def rows_of_head(view, b, h):
    """Return the ``Rows`` of head ``h`` of batch entry ``b``; both indices are 64-bit."""
    return Rows(head_ptr(view, b, h), view.stride_n)


@gluon.jit
def head_ptr(view, b, h):
    """Return a pointer to head ``h`` of batch entry ``b``; both indices are 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@gluon.jit
def load_in_layout(source, start, end, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Load rows from ``start`` on as (ROWS, D), zero from ``end`` on, in the order of memory."""
    rows = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))
    ptrs = source.ptr + start * source.stride
    ptrs = ptrs + (rows[:, None] * source.stride + dims[None, :])
    return gl.load(ptrs, mask=(start + rows < end)[:, None], other=0.0)  # (ROWS, D)


@gluon.jit
def copy_registers(x):
    """Copy ``x`` to other registers, once; otherwise ptxas would do so at each use."""
    # The grid has two axes: this index is always 0, which the compiler does not know.
    nothing = gl.program_id(2).to(gl.int16).to(x.dtype, bitcast=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $2;",
        "=r,r,r",
        [x, gl.full_like(x, nothing)],
        dtype=x.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_left(source, start, end, SHAPE: gl.constexpr, LEFT: gl.constexpr, PERMUTED: gl.constexpr):
    """Load rows as a left operand, in the order on chip."""
    if PERMUTED:
        OWN: gl.constexpr = vector_layout(SHAPE[0], SHAPE[1], gl.num_warps())
        # 16-byte loads of the elements that the thread owns as a left operand: the permutation and
        # the conversion rename registers.
        x = load_in_layout(source, start, end, SHAPE, OWN)
        x = gl.convert_layout(permute_dims(x, True), LEFT)
        x = copy_registers(x)
    else:
        x = load_in_layout(source, start, end, SHAPE, LEFT)
    return x


@gluon.jit
def load_columns(
    source, start, end, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, PERMUTED: gl.constexpr
):
    """Load rows from ``start`` on as the columns of (D, ROWS), zero from ``end`` on."""
    rows = gl.arange(0, SHAPE[0], gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, SHAPE[1], gl.SliceLayout(1, LAYOUT)), PERMUTED)  # (D,)
    ptrs = source.ptr + start * source.stride
    ptrs = ptrs + (rows[None, :] * source.stride + dims[:, None])
    return gl.load(ptrs, mask=(start + rows < end)[None, :], other=0.0)  # (D, ROWS)


@gluon.jit
def store_product_rows(target, x, start, end, PERMUTED: gl.constexpr):
    """Store rows before ``end`` of (rows, D), the result of a product."""
    x = x.to(target.ptr.dtype.element_ty)
    if PERMUTED:
        OWN: gl.constexpr = vector_layout(x.shape[0], x.shape[1], gl.num_warps())
        x = gl.convert_layout(permute_dims(x, True), OWN)
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = target.ptr + start * target.stride
    ptrs = ptrs + (rows[:, None] * target.stride + dims[None, :])
    gl.store(ptrs, x, mask=(start + rows < end)[:, None])


@gluon.jit
def store_columns(target, x, start, end, PERMUTED: gl.constexpr):
    """Store the columns of (D, rows), the result of a product, as rows before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)), PERMUTED)
    ptrs = target.ptr + start * target.stride
    ptrs = ptrs + (rows[None, :] * target.stride + dims[:, None])
    gl.store(ptrs, x.to(target.ptr.dtype.element_ty), mask=(start + rows < end)[None, :])


@gluon.jit
def copy_rows(shared, source, start, end, LAYOUT: gl.constexpr, PERMUTED: gl.constexpr):
    """Start an asynchronous copy of rows into shared memory; write zeros from ``end`` on."""
    rows = gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = element_at(gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT)), PERMUTED)
    ptrs = source.ptr + start * source.stride
    ptrs = ptrs + (rows[:, None] * source.stride + dims[None, :])
    copy_async(shared, ptrs, mask=(start + rows < end)[:, None])


# --- Forward: a program owns a head ---------------------------------------------------------------
# Gluon forward of softmax attention for short sequences on Ampere: a program owns a head.
#
# Sizes: B batch, H query heads, N tokens, D head dimension, T columns of a tail (gluon_tiles.py). K
# and V stay in shared memory. Tiles of query rows, with 16 or 32 rows per warp, pass over them one
# after the other with the online softmax. A tail of up to 16 rows becomes columns of transposed
# products, of which 8 cost an eighth of a tile. Each thread keeps its own partial sums of a row,
# which are added at the end. The statistics of a head are complete in its program.

# For calls with as many rows as keys and at least 264 heads over all batch entries. ``BLOCK`` is
# the rows of a tile, 16 or 32 per warp; ``STEP`` is the keys of one step.
_SHARED, _MASKED, _DROPPED = ("shared",), ("mask", "shared"), ("dropout", "shared")
_ALL = "dropout", *_MASKED
FORWARD_TILES = Tiles(
    "ampere_forward",
    rule(dim=16, tokens=256, STEP=64, BLOCK=64, num_warps=4),
    rule(
        dim=32, tokens=256, takes=_MASKED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=128
    ),
    rule(
        dim=32, tokens=256, takes=_DROPPED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(
        dim=32, tokens=224, takes=_MASKED, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(
        dim=32, tokens=224, takes=_DROPPED, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(dim=16, tokens=512, gpus=(86,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=512, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=16, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=1024, gpus=(80,), STEP=64, BLOCK=256, num_warps=16, maxnreg=128),
    rule(
        dim=64, tokens=224, takes=_SHARED, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=168
    ),
    rule(dim=64, tokens=224, takes=_ALL, gpus=(80,), STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=320, gpus=(80,), STEP=32, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=64, tokens=640, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=224, takes=_ALL, gpus=(86,), STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=256, gpus=(86,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=128, STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=128, tokens=224, gpus=(80,), STEP=32, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=128, tokens=256, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
)
STATISTICS_TILES = Tiles(
    "ampere_forward_statistics",
    rule(dim=16, tokens=256, STEP=64, BLOCK=64, num_warps=4, maxnreg=128),
    rule(dim=16, tokens=512, STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=16, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=128),
    rule(dim=32, tokens=224, takes=_MASKED, STEP=64, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=32, tokens=224, takes=_DROPPED, STEP=64, BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=32, tokens=1024, gpus=(80,), STEP=64, BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=224, takes=_MASKED, STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=224, takes=_DROPPED, STEP=64, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=256, gpus=(86,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=64, tokens=640, gpus=(80,), STEP=32, BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=128, tokens=224, gpus=(80,), STEP=16, BLOCK=64, num_warps=4, maxnreg=255),
)


@gluon.jit
def _step(
    state,
    q,
    k,
    v,
    first,
    start,
    scoring,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STATS: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Update the online softmax of a tile of rows with a few keys."""
    acc, row_max, row_sum, centred, square = state
    factor, mask, dropout = scoring.factor, scoring.mask, scoring.dropout
    MMA: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OWN: gl.constexpr = row_sum.type.layout
    KEYS: gl.constexpr = k.shape[0]
    MASKED: gl.constexpr = mask.ptr is not None
    zero = gl.zeros([q.shape[0], KEYS], gl.float32, MMA)
    s = mma(q, k.permute((1, 0)).load(RIGHT), zero)  # (rows, KEYS)
    cols = (start + gl.arange(0, KEYS, gl.SliceLayout(0, MMA)))[None, :]
    rows = (first + gl.arange(0, q.shape[0], gl.SliceLayout(1, MMA)))[:, None]
    tile = None
    if MASKED:
        tile = common.load_mask(mask.ptr, mask, rows, cols, scoring.N)
    s = common.mask_scores(
        s=s,
        rows=rows,
        cols=cols,
        limit=scoring.limit if HIDES else None,
        CAUSAL=CAUSAL,
        HIDDEN=float("-inf"),
        tile=tile,
        scale=mask.scale,
    )
    new_max = gl.maximum(row_max, gl.max(s, 1))
    # Explicit fmas round these products here: the compiler cannot fuse them into the subtractions.
    pivot = gl.fma(new_max, factor, 0.0)
    shift = gl.fma(row_max, factor, 0.0) - pivot
    if MASKED:
        pivot = common.pivot_of(new_max, factor, MASKED, SCALED)
        shift = common.shift_of(row_max, pivot, factor, SCALED)
    # Exponents are in base 2, with log2 e in ``factor``: exp2 is one instruction.
    alpha = gl.exp2(shift)
    exponent = s * factor - pivot[:, None]  # one multiply-add
    if SCALED:
        # With large masks the difference comes first (``exponents_of``).
        exponent = (s - pivot[:, None]) * factor
    p = gl.exp2(exponent)
    # The sums so far were relative to the old maximum.
    acc = acc * alpha[:, None]
    weight = p
    if dropout.seed_ptr is not None:
        weight = gl.where(common.keep_mask(dropout, rows, cols), p, 0.0)
    # P goes from the accumulator to the left operand within registers. Dropout affects this product
    # only: the sums below are of P itself.
    acc = mma(gl.convert_layout(weight.to(q.dtype), LEFT), v.load(RIGHT), acc)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, OWN))[:, None]
    if STATS:
        shift = gl.convert_layout(shift, gl.SliceLayout(1, OWN))[:, None]
        # 0 * -inf would be nan: row_sum is 0 before the first key, and p is 0 where a key is
        # hidden.
        shift = gl.where(shift == float("-inf"), 0.0, shift)
        if HIDES or CAUSAL or MASKED:
            exponent = gl.where(exponent == float("-inf"), 0.0, exponent)
        # With a new maximum, every exponent moves by ``shift``.
        centred = alpha * (centred + row_sum * shift)
        centred += gl.convert_layout(common.thread_sums(p * exponent), OWN)
        square = alpha * alpha * square + gl.convert_layout(common.thread_sums(p * p), OWN)
    row_sum = row_sum * alpha + gl.convert_layout(common.thread_sums(p), OWN)
    return RowState(acc, new_max, row_sum, centred, square)


@gluon.jit
def _segment(
    state,
    q,
    k,
    v,
    first,
    start,
    scoring,
    STEP: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STATS: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Update the online softmax with the keys of a buffer, STEP at a time."""
    STEPS: gl.constexpr = k.shape[0] // STEP
    # Fewer keys at a time need fewer registers for scores.
    for n in gl.static_range(STEPS):
        state = _step(
            state=state,
            q=q,
            k=k.slice(n * STEP, STEP),
            v=v.slice(n * STEP, STEP),
            first=first,
            start=start + n * STEP,
            scoring=scoring,
            HIDES=HIDES,
            CAUSAL=CAUSAL,
            STATS=STATS,
            SCALED=SCALED,
        )
    return state


@gluon.jit
def _transposed_scores(k, q, first, start, limit, scoring, CAUSAL: gl.constexpr):
    """Return transposed scores (keys, rows) of the tail's rows, -inf where hidden.

    Keys from ``limit`` on are hidden; None hides none.
    """
    MMA: gl.constexpr = k.type.layout.parent
    s = mma(k, q, gl.zeros([64, q.shape[1]], gl.float32, MMA))
    keys = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
    rows = (first + gl.arange(0, q.shape[1], gl.SliceLayout(0, MMA)))[None, :]
    tile = None
    mask = scoring.mask
    if mask.ptr is not None:
        tile = common.load_mask(mask.ptr, mask, rows, keys, scoring.N)
    return common.mask_scores(
        s=s,
        rows=rows,
        cols=keys,
        limit=limit,
        CAUSAL=CAUSAL,
        HIDDEN=float("-inf"),
        tile=tile,
        scale=mask.scale,
    )


@gluon.jit
def _transposed_step(
    state, s, v, p_buffer, pivot, first, start, scoring, SCALED: gl.constexpr, STATS: gl.constexpr
):
    """Add the keys of ``s`` to the output of the tail's rows; P passes through shared memory."""
    acc, total, centred, square = state
    dropout = scoring.dropout
    MMA: gl.constexpr = acc.type.layout
    KEYS: gl.constexpr = v.shape[0]
    exponent = common.exponents_of(s, pivot[None, :], scoring.factor, SCALED)
    p = gl.exp2(exponent)
    total += p
    if STATS:
        centred += p * gl.where(exponent == float("-inf"), 0.0, exponent)
        square += p * p
    if dropout.seed_ptr is not None:
        keys = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
        rows = (first + gl.arange(0, s.shape[1], gl.SliceLayout(0, MMA)))[None, :]
        p = gl.where(common.keep_mask(dropout, rows, keys), p, 0.0)
    p_buffer.store(p.to(v.dtype))
    # All warps have stored their keys of P^T, which each reads as the right operand. The caller
    # alternates two buffers, so that one barrier is enough.
    barrier()
    left = v.permute((1, 0)).load(gl.DotOperandLayout(0, MMA, 2))
    acc = mma(left, p_buffer.slice(0, KEYS).load(gl.DotOperandLayout(1, MMA, 2)), acc)
    return TailState(acc, total, centred, square)


@gluon.jit(do_not_specialize=["H", "N", "full", "threshold"])
def _ampere_fwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    stats_ptr,
    H,
    N,
    full,
    scale,
    keep_scale,
    threshold,
    D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    TAIL_KEYS: gl.constexpr,
    RAGGED: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
    GROUP: gl.constexpr,
    PERMUTED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COPY: gl.constexpr = copy_layout(D, WARPS, PERMUTED)
    SHARED: gl.constexpr = shared_layout(D)
    HIDES: gl.constexpr = RAGGED or lengths_ptr is not None
    STATS: gl.constexpr = stats_ptr is not None
    TAIL: gl.constexpr = FULL * 64
    h_64, b_64 = gl.program_id(0).to(gl.int64), gl.program_id(1).to(gl.int64)
    q_rows = rows_of_head(q_view, b_64, h_64)
    kv_64 = (gl.program_id(0) // GROUP).to(gl.int64)
    k_rows = rows_of_head(k_view, b_64, kv_64)
    v_rows = rows_of_head(v_view, b_64, kv_64)
    out_rows = rows_of_head(out_view, b_64, h_64)
    head = b_64 * H + h_64
    limit = common.visible_keys(lengths_ptr, N)
    MASKED: gl.constexpr = mask_view.ptr is not None
    mask = Mask(mask_view.ptr, mask_view.stride_n, mask_view.stride_m, scale)
    if MASKED:
        mask_ptr = head_ptr(mask_view, b_64, h_64)
        mask = Mask(mask_ptr, mask_view.stride_n, mask_view.stride_m, scale)
    dropout = Dropout(seed_ptr, threshold, gl.program_id(1) * H + gl.program_id(0))
    # An additive mask is added to scaled scores. All others are scaled in their exponents.
    unit = 1.0 if SCALED else scale
    out_scale = 1.0 if seed_ptr is None else keep_scale
    factor = unit * LOG2_E
    scoring = Scoring(N, limit, factor, mask, dropout)
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)  # whole tiles of the head
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    for n in gl.static_range(FULL):
        copy_rows(ks.index(n), k_rows, n * 64, limit, COPY, PERMUTED)
        copy_rows(vs.index(n), v_rows, n * 64, limit, COPY, PERMUTED)
    if T > 0:
        k_tail = gl.allocate_shared_memory(DTYPE, [TAIL_KEYS, D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [TAIL_KEYS, D], SHARED)
        copy_rows(k_tail, k_rows, TAIL, limit, COPY, PERMUTED)
        copy_rows(v_tail, v_rows, TAIL, limit, COPY, PERMUTED)
    commit_copies()
    # Wait for K and V of all threads. The loops over tiles only read them, without barriers.
    wait_copies(0)
    barrier()
    # Partial sums of rows, one for each of a row's four threads.
    OWN: gl.constexpr = common.thread_sums(gl.zeros([BLOCK, 64], gl.float32, MMA)).type.layout
    zero_partials = gl.zeros([BLOCK, 4], gl.float32, OWN)
    if STATS:
        sums = common.no_sums(BLOCK, ROWS)
    # With a tail, this loop ends at the last whole tile; without one, at the last row.
    end = gl.minimum(N, full * 64)
    for first in range(0, end, BLOCK):
        # straight from global memory to registers
        q = load_left(q_rows, first, end, [BLOCK, D], LEFT, PERMUTED)
        acc = gl.zeros([BLOCK, D], gl.float32, MMA)
        row_max = gl.full([BLOCK], float("-inf"), gl.float32, ROWS)
        # Statistics of P before dropout, relative to the running maximum.
        state = RowState(acc, row_max, zero_partials, zero_partials, zero_partials)
        # The first ``num_unmasked`` tiles need no mask: the hot loop compares nothing.
        num_unmasked, num_visible = common.visible_tiles(full, limit, first, BLOCK, HIDES, CAUSAL)
        for i in range(num_unmasked):
            state = _segment(
                state=state,
                q=q,
                k=ks.index(i),
                v=vs.index(i),
                first=first,
                start=i * 64,
                scoring=scoring,
                STEP=STEP,
                HIDES=False,
                CAUSAL=False,
                STATS=STATS,
                SCALED=SCALED,
            )
        if HIDES or CAUSAL:
            for i in range(num_unmasked, num_visible):
                state = _segment(
                    state=state,
                    q=q,
                    k=ks.index(i),
                    v=vs.index(i),
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    STEP=STEP,
                    HIDES=HIDES,
                    CAUSAL=CAUSAL,
                    STATS=STATS,
                    SCALED=SCALED,
                )
        # Under a causal mask no row of a whole tile sees the keys of the tail, which come later.
        if T > 0 and not CAUSAL:
            state = _segment(
                state=state,
                q=q,
                k=k_tail,
                v=v_tail,
                first=first,
                start=full * 64,
                scoring=scoring,
                STEP=TAIL_KEYS,
                HIDES=True,
                CAUSAL=False,
                STATS=STATS,
                SCALED=SCALED,
            )
        acc, row_max, row_sum, centred, square = state
        # Only now do the four threads of a row add their partial sums.
        divisor = common.divisor_of(common.sum_threads(row_sum, ROWS), MASKED)
        acc = acc * (out_scale / divisor)[:, None]
        store_product_rows(out_rows, acc, first, end, PERMUTED)
        rows = first + gl.arange(0, BLOCK, ROWS)
        inside = rows < end
        log_sum = common.store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            rows=head * N + rows,
            row_max=row_max,
            divisor=divisor,
            factor=factor,
            unit=unit,
            inside=inside,
            MASKED=MASKED,
            SCALED=SCALED,
        )
        if STATS:
            gl.store(lse_ptr + head * N + rows, row_max * unit + log_sum, mask=inside)
            rows_sums = common.sums_of_rows(
                row_max,
                divisor,
                common.sum_threads(centred, ROWS),
                common.sum_threads(square, ROWS),
                gl.sum(acc * acc, 1),
                inside,
            )
            sums = common.add_sums(sums, rows_sums)
    if STATS:
        sums = common.reduce_sums(sums)
    if T > 0:
        # The tail's rows as columns: S^T = K Q^T (64 keys, T) of all tiles is held in registers, so
        # that the maxima are known before the first exponential.
        q_tail = load_columns(  # (D, T), the right operand
            q_rows, TAIL, N, [T, D], gl.DotOperandLayout(1, MMA, 2), PERMUTED
        )
        scores = ()
        top_t = gl.full([64, T], float("-inf"), gl.float32, MMA)
        for i in gl.static_range(FULL):
            s_t = _transposed_scores(
                k=ks.index(i).load(LEFT),
                q=q_tail,
                first=TAIL,
                start=i * 64,
                limit=limit if HIDES else None,
                scoring=scoring,
                CAUSAL=False,
            )
            top_t = gl.maximum(top_t, s_t)
            scores = scores + (s_t,)  # noqa: RUF005
        # The tail's own keys, zeros past the last: a left operand has 64 rows, the buffer fewer.
        k_left = load_left(k_rows, TAIL, limit, [64, D], LEFT, PERMUTED)
        s_t = _transposed_scores(
            k=k_left, q=q_tail, first=TAIL, start=TAIL, limit=limit, scoring=scoring, CAUSAL=CAUSAL
        )
        scores = scores + (s_t,)  # noqa: RUF005
        max_t = gl.max(gl.maximum(top_t, s_t), 0)  # (T,): this reduction crosses warps
        pivot_t = common.pivot_of(max_t, factor, MASKED, SCALED)
        p_buffers = gl.allocate_shared_memory(  # P^T of two tiles, used alternately
            DTYPE, [2, 64, T], gl.SwizzledSharedLayout(8, 64 // T, T // 8, [1, 0])
        )
        acc_t = gl.zeros([D, T], gl.float32, MMA)  # out^T = V^T P^T
        zero_t = gl.zeros([64, T], gl.float32, MMA)
        # Sums within a thread, (64, T): they are added over the keys at the end.
        state_t = TailState(acc_t, zero_t, zero_t, zero_t)
        for i in gl.static_range(FULL):
            state_t = _transposed_step(
                state=state_t,
                s=scores[i],
                v=vs.index(i),
                p_buffer=p_buffers.index(i % 2),
                pivot=pivot_t,
                first=TAIL,
                start=i * 64,
                scoring=scoring,
                SCALED=SCALED,
                STATS=STATS,
            )
        state_t = _transposed_step(
            state=state_t,
            s=scores[FULL],
            v=v_tail,
            p_buffer=p_buffers.index(FULL % 2),
            pivot=pivot_t,
            first=TAIL,
            start=TAIL,
            scoring=scoring,
            SCALED=SCALED,
            STATS=STATS,
        )
        acc_t, total_t, centred_t, square_t = state_t
        divisor_t = common.divisor_of(gl.sum(total_t, 0), MASKED)
        acc_t = acc_t * (out_scale / divisor_t)[None, :]  # (D, T)
        store_columns(out_rows, acc_t, TAIL, N, PERMUTED)
        rows_t = TAIL + gl.arange(0, T, gl.SliceLayout(0, MMA))
        inside_t = rows_t < N
        log_sum_t = common.store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            rows=head * N + rows_t,
            row_max=max_t,
            divisor=divisor_t,
            factor=factor,
            unit=unit,
            inside=inside_t,
            MASKED=MASKED,
            SCALED=SCALED,
        )
        if STATS:
            gl.store(lse_ptr + head * N + rows_t, max_t * unit + log_sum_t, mask=inside_t)
            rows_sums = common.sums_of_rows(
                max_t,
                divisor_t,
                gl.sum(centred_t, 0),
                gl.sum(square_t, 0),
                gl.sum(acc_t * acc_t, 0),
                inside_t,
            )
            sums = common.add_sums(sums, common.reduce_sums(rows_sums))
    if STATS:
        common.store_statistics(
            ptr=stats_ptr,
            sums=sums,
            head=head,
            num_heads=H * gl.num_programs(1),
            num_rows=N,
            scale=unit,
            inside=None,
        )


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    batch, heads, tokens, _ = call.query.shape
    # A thread keeps T / 2 scores of each tile: 64 registers are affordable.
    tails = tuple(size for size in (8, 16) if size * (tokens // 64 + 1) <= 128)
    full, tail = tiles_and_tail(tokens, tails)
    arguments = forward_arguments(_ampere_fwd_kernel, call, results)
    arguments |= dict(
        **tile.arguments,
        full=full,
        FULL=full,
        T=tail,
        TAIL_KEYS=max(16, tail),
        RAGGED=tail == 0 and tokens % 64 != 0,
        WARPS=tile.options["num_warps"],
        # Predicted: up to 256 tokens, 4-byte copies cost more than wide loads and stores save.
        PERMUTED=full > 4 and arguments["D"] in (32, 64),
    )
    return Launch(_ampere_fwd_kernel, (heads, batch), arguments)


# --- Backward: two programs own a head ------------------------------------------------------------
# Gluon backward of softmax attention for short sequences on Ampere: two programs own a head.
#
# Sizes: B batch, H heads, N tokens, D head dimension, T rows of a buffer for the tokens after the
# last whole tile of 64. Both programs belong to one launch. The first keeps K and V in shared
# memory: tiles of rows give dQ. The second keeps Q and dO: tiles of keys give dK and dV. A warp
# owns 16 or 32 rows of a tile, so that P and dS go from accumulators to the left operand of the
# next product within registers; left operands are loaded straight from global memory. Up to 16
# tokens after the last whole tile are the COLS columns of transposed products, of which 8 cost an
# eighth of a tile. P and dS then pass through buffers that are no longer read. Every element is
# written once, without atomics: the result is bitwise deterministic.
#
# The kernel is written in Gluon because Triton's language stores K twice if its transpose is an
# operand, and splits a product between warps by columns.

# For calls with as many rows as keys; beyond 256 tokens with at least 264 heads over all entries.
# ``BLOCK`` is the rows, or keys, of a tile, 16 or 32 per warp; ``STEP`` is the keys, or rows, of
# one step.
BACKWARD_TILES = Tiles(
    "ampere_backward",
    rule(dim=16, tokens=256, BLOCK=64, num_warps=2, maxnreg=168),
    rule(dim=32, tokens=208, gpus=(80,), BLOCK=64, num_warps=2, maxnreg=168),
    rule(dim=32, tokens=256, takes=("mask",), BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=32, tokens=256, takes=("dropout",), BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=32, tokens=768, gpus=(80,), BLOCK=128, num_warps=4, maxnreg=255),
    rule(dim=32, tokens=1024, gpus=(80,), BLOCK=256, num_warps=8, maxnreg=255),
    rule(dim=32, tokens=512, gpus=(86,), BLOCK=128, num_warps=8, maxnreg=255),
    rule(dim=16, tokens=1024, gpus=(86,), BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=256, takes=("mask",), gpus=(80,), BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=64, tokens=128, gpus=(86,), BLOCK=64, num_warps=4, maxnreg=168),
    rule(dim=64, tokens=224, takes=("mask",), gpus=(86,), BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=224, takes=("dropout",), BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=320, BLOCK=64, num_warps=4, maxnreg=255),
    rule(dim=64, tokens=608, gpus=(80,), BLOCK=128, num_warps=8, maxnreg=168),
    rule(dim=64, tokens=384, gpus=(86,), BLOCK=128, num_warps=8, maxnreg=255),
    STEP=16,
)


@gluon.jit
def _rows_segment(
    dq,
    q,
    do,
    k,
    v,
    lse,
    delta,
    first,
    start,
    scoring,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Add the contribution of STEPS * STEP keys in a buffer to dQ of a tile of rows."""
    MMA: gl.constexpr = dq.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for n in gl.static_range(STEPS):
        k_step, v_step = k.slice(n * STEP, STEP), v.slice(n * STEP, STEP)
        zero = gl.zeros([q.shape[0], STEP], gl.float32, MMA)
        s = mma(q, k_step.permute((1, 0)).load(RIGHT), zero)  # (rows, STEP)
        dp = mma(do, v_step.permute((1, 0)).load(RIGHT), zero)  # (rows, STEP)
        cols = (start + n * STEP + gl.arange(0, STEP, gl.SliceLayout(0, MMA)))[None, :]
        rows = (first + gl.arange(0, q.shape[0], gl.SliceLayout(1, MMA)))[:, None]
        dp, _ = common.apply_dropout(dp, dp, scoring.dropout, rows, cols, True)
        if scoring.mask.ptr is not None:
            p = common.recompute_p(s, lse, scoring, rows, cols, SCALED)
        else:
            p = gl.exp2(s * scoring.factor - lse)
        ds = p * (dp - delta)
        # Masking dS instead of P is enough: dQ needs no other product of P.
        ds = common.mask_scores(ds, rows, cols, scoring.limit if HIDES else None, CAUSAL, 0.0)
        common.store_ds(scoring, ds, rows, cols)
        # dS goes from the accumulator to the left operand within registers.
        dq = mma(gl.convert_layout(ds.to(q.dtype), LEFT), k_step.load(RIGHT), dq)
    return dq


@gluon.jit
def _keys_segment(
    dk,
    dv,
    k,
    v,
    q,
    do,
    lses,
    deltas,
    first,
    start,
    scoring,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Add the contribution of STEPS * STEP rows in a buffer to dK and dV of a tile of keys."""
    MMA: gl.constexpr = dk.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    for n in gl.static_range(STEPS):
        q_step, do_step = q.slice(n * STEP, STEP), do.slice(n * STEP, STEP)
        lse_step, delta_step = lses.slice(n * STEP, STEP), deltas.slice(n * STEP, STEP)
        zero = gl.zeros([k.shape[0], STEP], gl.float32, MMA)
        s = mma(k, q_step.permute((1, 0)).load(RIGHT), zero)  # (keys, STEP): S^T
        dp = mma(v, do_step.permute((1, 0)).load(RIGHT), zero)  # (keys, STEP): dP^T
        keys = (first + gl.arange(0, k.shape[0], gl.SliceLayout(1, MMA)))[:, None]  # (keys, 1)
        rows = (start + n * STEP + gl.arange(0, STEP, COLS))[None, :]
        lse = lse_step.load(COLS)[None, :]
        if scoring.mask.ptr is not None:
            p = common.recompute_p(s, lse, scoring, rows, keys, SCALED)
        else:
            p = gl.exp2(s * scoring.factor - lse)
        # Keys at and past ``limit`` are not masked here: the caller discards their dK and dV.
        p = common.mask_scores(p, rows, keys, None, CAUSAL, 0.0)
        dp, weight = common.apply_dropout(dp, p, scoring.dropout, rows, keys, True)
        ds = p * (dp - delta_step.load(COLS)[None, :])
        dv = mma(gl.convert_layout(weight.to(k.dtype), LEFT), do_step.load(RIGHT), dv)
        dk = mma(gl.convert_layout(ds.to(k.dtype), LEFT), q_step.load(RIGHT), dk)
    return dk, dv


@gluon.jit
def _describe_rows(
    do_tile,
    lses,
    deltas,
    do_rows,
    out_rows,
    saved,
    start,
    scoring,
    SCALED: gl.constexpr,
    LAYOUT: gl.constexpr,
    PERMUTED: gl.constexpr,
):
    """Store dO, the log-sum-exp and delta = sum(dO O) of rows in shared memory."""
    N = scoring.N
    ROWS: gl.constexpr = do_tile.shape[0]
    D: gl.constexpr = do_tile.shape[1]
    rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lse, correction = common.load_row_statistics(saved, rows, rows < N, scoring.factor, SCALED)
    do = load_in_layout(do_rows, start, N, [ROWS, D], LAYOUT).to(gl.float32)
    # dO takes up the rounding error of the log-sum-exp (``load_row_statistics``), and with it
    # delta.
    do = do * correction[:, None]
    out = load_in_layout(out_rows, start, N, [ROWS, D], LAYOUT).to(gl.float32)
    do_tile.store(permute_dims(do.to(do_tile.dtype), PERMUTED))
    lses.store(lse)
    deltas.store(gl.sum(do * out, 1))


@gluon.jit
def _load_row_operands(
    q_rows,
    do_rows,
    out_rows,
    saved,
    first,
    end,
    factor,
    SCALED: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    LEFT: gl.constexpr,
    PERMUTED: gl.constexpr,
):
    """Load Q and dO of rows as left operands; return them with the log-sum-exp and delta."""
    OWN: gl.constexpr = gl.SliceLayout(1, LEFT.parent)
    rows = first + gl.arange(0, ROWS, OWN)
    lse, correction = common.load_row_statistics(saved, rows, rows < end, factor, SCALED)
    q = load_left(q_rows, first, end, [ROWS, D], LEFT, PERMUTED)
    do = load_left(do_rows, first, end, [ROWS, D], LEFT, PERMUTED)
    out = load_left(out_rows, first, end, [ROWS, D], LEFT, PERMUTED)
    # As in ``_describe_rows``; the sum over dimensions is within the four threads of a row.
    wide = do.to(gl.float32) * gl.convert_layout(correction, gl.SliceLayout(1, LEFT))[:, None]
    delta = gl.convert_layout(gl.sum(wide * out.to(gl.float32), 1), OWN)
    return q, wide.to(do.dtype), lse, delta


@gluon.jit
def _store_over(tile, x):
    """Store (64, COLS) over a tile that is no longer read; return the view of it."""
    COLS: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // COLS, COLS // 8, [1, 0])
    view = reinterpret(tile, [64 * tile.shape[1] // COLS, COLS], LAYOUT).slice(0, 64)
    view.store(x.to(tile.dtype))
    return view


@gluon.jit
def _rows_in_columns(
    dq,
    q,
    do,
    k,
    v,
    k_tile,
    tile,
    lse,
    delta,
    first,
    start,
    scoring,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Add the contribution of up to 64 keys to dQ^T (D, COLS) of the rows in columns.

    ``k`` and ``v`` are those keys as left operands, ``k_tile`` is their buffer, and ``tile`` is a
    buffer that may be overwritten.
    """
    MMA: gl.constexpr = dq.type.layout
    COLS: gl.constexpr = q.shape[1]
    zero = gl.zeros([64, COLS], gl.float32, MMA)  # keys by rows
    cols = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
    rows = (first + gl.arange(0, COLS, gl.SliceLayout(0, MMA)))[None, :]
    s = mma(k, q, zero)
    if scoring.mask.ptr is not None:
        p = common.recompute_p(s, lse[None, :], scoring, rows, cols, SCALED)
    else:
        p = gl.exp2(s * scoring.factor - lse[None, :])
    dp = mma(v, do, zero)
    dp, _ = common.apply_dropout(dp, dp, scoring.dropout, rows, cols, True)
    ds = p * (dp - delta[None, :])  # (64, COLS)
    ds = common.mask_scores(ds, rows, cols, scoring.limit if HIDES else None, CAUSAL, 0.0)
    common.store_ds(scoring, ds, rows, cols)
    # K^T (D, keys) goes to registers first: dS may be stored over the buffer of K.
    left = k_tile.permute((1, 0)).load(gl.DotOperandLayout(0, MMA, 2))
    barrier()  # all warps have loaded K^T
    ds = _store_over(tile, ds)
    barrier()  # dS of all warps is stored
    return mma(left, ds.slice(0, k_tile.shape[0]).load(gl.DotOperandLayout(1, MMA, 2)), dq)


@gluon.jit
def _keys_in_columns(
    dk,
    dv,
    k,
    v,
    q,
    do,
    q_tile,
    do_tile,
    p_tile,
    ds_tile,
    lse,
    delta,
    first,
    start,
    scoring,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Add the contribution of up to 64 rows to dK^T and dV^T (D, COLS) of the keys in columns.

    ``q`` and ``do`` are those rows as left operands, ``q_tile`` and ``do_tile`` are their buffers,
    and ``p_tile`` and ``ds_tile`` are buffers that may be overwritten.
    """
    MMA: gl.constexpr = dk.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COLS: gl.constexpr = k.shape[1]
    ROWS: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([64, COLS], gl.float32, MMA)
    rows = (start + gl.arange(0, 64, gl.SliceLayout(1, MMA)))[:, None]
    cols = (first + gl.arange(0, COLS, gl.SliceLayout(0, MMA)))[None, :]
    s = mma(q, k, zero)
    if scoring.mask.ptr is not None:
        p = common.recompute_p(s, lse[:, None], scoring, rows, cols, SCALED)
    else:
        p = gl.exp2(s * scoring.factor - lse[:, None])
    p = common.mask_scores(p, rows, cols, None, CAUSAL, 0.0)
    dp = mma(do, v, zero)
    dp, weight = common.apply_dropout(dp, p, scoring.dropout, rows, cols, True)
    ds = p * (dp - delta[:, None])  # (64, COLS)
    # Q^T and dO^T, (D, rows), go to registers first: P and dS may be stored over their buffers.
    left_q = q_tile.permute((1, 0)).load(LEFT)
    left_do = do_tile.permute((1, 0)).load(LEFT)
    barrier()  # all warps have loaded Q^T and dO^T
    p = _store_over(p_tile, weight)
    ds = _store_over(ds_tile, ds)
    barrier()  # P and dS of all warps are stored
    dv = mma(left_do, p.slice(0, ROWS).load(RIGHT), dv)
    dk = mma(left_q, ds.slice(0, ROWS).load(RIGHT), dk)
    return dk, dv


@gluon.jit(do_not_specialize=["H", "N", "full", "threshold"])
def _ampere_bwd_kernel(
    q_view,
    k_view,
    v_view,
    mask_view,
    lengths_ptr,
    seed_ptr,
    do_view,
    out_view,
    max_log_sum_ptr,
    lse_ptr,
    dq_view,
    dk_view,
    dv_view,
    ds_ptr,
    H,
    N,
    full,
    scale,
    keep_scale,
    threshold,
    D: gl.constexpr,
    FULL: gl.constexpr,
    T: gl.constexpr,
    TAIL_STEPS: gl.constexpr,
    COLS: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALED: gl.constexpr,
    PERMUTED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OWN: gl.constexpr = gl.SliceLayout(1, MMA)
    BLOCKED: gl.constexpr = copy_layout(D, WARPS)
    COPY: gl.constexpr = copy_layout(D, WARPS, PERMUTED)
    SHARED: gl.constexpr = shared_layout(D)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HIDES: gl.constexpr = lengths_ptr is not None
    TAIL: gl.constexpr = FULL * 64
    # Programs 2 h and 2 h + 1 own head h.
    h = gl.program_id(0) // 2
    h_64, b_64 = h.to(gl.int64), gl.program_id(1).to(gl.int64)
    q_rows = rows_of_head(q_view, b_64, h_64)
    k_rows = rows_of_head(k_view, b_64, h_64)
    v_rows = rows_of_head(v_view, b_64, h_64)
    do_rows = rows_of_head(do_view, b_64, h_64)
    out_rows = rows_of_head(out_view, b_64, h_64)
    # Here, as a function of Triton 3.6 cannot return None: one of the two is None.
    if max_log_sum_ptr is None:
        lse_ptr += (b_64 * H + h_64) * N
    else:
        max_log_sum_ptr += (b_64 * H + h_64) * N * 2
    saved = common.SavedRows(max_log_sum_ptr, lse_ptr)
    limit = common.visible_keys(lengths_ptr, N)
    factor = (1.0 if SCALED else scale) * LOG2_E
    if ds_ptr is not None:
        ds_ptr += (b_64 * H + h_64) * N * N
    mask = Mask(mask_view.ptr, mask_view.stride_n, mask_view.stride_m, scale, ds_ptr)
    if mask_view.ptr is not None:
        mask_ptr = head_ptr(mask_view, b_64, h_64)
        mask = Mask(mask_ptr, mask_view.stride_n, mask_view.stride_m, scale, ds_ptr)
    dropout = Dropout(seed_ptr, threshold, gl.program_id(1) * H + h, keep_scale)
    scoring = Scoring(N, limit, factor, mask, dropout)
    end = N
    if COLS > 0:
        end = full * 64
    # The first program of a head keeps K and V in these buffers, the second Q and dO.
    ks = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    vs = gl.allocate_shared_memory(DTYPE, [FULL, 64, D], SHARED)
    qs, dos = ks, vs
    if T > 0:
        k_tail = gl.allocate_shared_memory(DTYPE, [T, D], SHARED)
        v_tail = gl.allocate_shared_memory(DTYPE, [T, D], SHARED)
        q_tail, do_tail = k_tail, v_tail
    if gl.program_id(0) % 2 == 0:
        # First program: dQ.
        for n in gl.static_range(FULL):
            copy_rows(ks.index(n), k_rows, n * 64, limit, COPY, PERMUTED)
            copy_rows(vs.index(n), v_rows, n * 64, limit, COPY, PERMUTED)
        if T > 0:
            copy_rows(k_tail, k_rows, TAIL, limit, COPY, PERMUTED)
            copy_rows(v_tail, v_rows, TAIL, limit, COPY, PERMUTED)
        commit_copies()
        dq_rows = rows_of_head(dq_view, b_64, h_64)
        # Wait for K and V of all threads. The loop over tiles only reads them, without barriers.
        wait_copies(0)
        barrier()
        for first in range(0, end, BLOCK):
            q, do, lse, delta = _load_row_operands(
                q_rows=q_rows,
                do_rows=do_rows,
                out_rows=out_rows,
                saved=saved,
                first=first,
                end=end,
                factor=factor,
                SCALED=SCALED,
                ROWS=BLOCK,
                D=D,
                LEFT=LEFT,
                PERMUTED=PERMUTED,
            )
            dq = gl.zeros([BLOCK, D], gl.float32, MMA)
            # The first ``num_unmasked`` tiles need no mask: the hot loop compares nothing.
            num_unmasked, num_visible = common.visible_tiles(
                full, limit, first, BLOCK, HIDES, CAUSAL
            )
            for i in range(num_unmasked):
                dq = _rows_segment(
                    dq=dq,
                    q=q,
                    do=do,
                    k=ks.index(i),
                    v=vs.index(i),
                    lse=lse[:, None],
                    delta=delta[:, None],
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    STEP=STEP,
                    STEPS=64 // STEP,
                    HIDES=False,
                    CAUSAL=False,
                    SCALED=SCALED,
                )
            if HIDES or CAUSAL:
                for i in range(num_unmasked, num_visible):
                    dq = _rows_segment(
                        dq=dq,
                        q=q,
                        do=do,
                        k=ks.index(i),
                        v=vs.index(i),
                        lse=lse[:, None],
                        delta=delta[:, None],
                        first=first,
                        start=i * 64,
                        scoring=scoring,
                        STEP=STEP,
                        STEPS=64 // STEP,
                        HIDES=HIDES,
                        CAUSAL=CAUSAL,
                        SCALED=SCALED,
                    )
            if T > 0:
                dq = _rows_segment(
                    dq=dq,
                    q=q,
                    do=do,
                    k=k_tail,
                    v=v_tail,
                    lse=lse[:, None],
                    delta=delta[:, None],
                    first=first,
                    start=full * 64,
                    scoring=scoring,
                    STEP=16,
                    STEPS=TAIL_STEPS,
                    HIDES=True,
                    CAUSAL=CAUSAL,
                    SCALED=SCALED,
                )
            store_product_rows(dq_rows, dq * scale, first, end, PERMUTED)
        if COLS > 0:
            # The last rows as columns: S^T and dP^T (64, COLS), and dQ^T (D, COLS).
            rows_t = TAIL + gl.arange(0, COLS, gl.SliceLayout(0, MMA))
            lse_t, lost_t = common.load_row_statistics(saved, rows_t, rows_t < N, factor, SCALED)
            q_t = load_columns(q_rows, TAIL, N, [COLS, D], RIGHT, PERMUTED)
            do_t = load_columns(do_rows, TAIL, N, [COLS, D], RIGHT, PERMUTED).to(gl.float32)
            out_t = load_columns(out_rows, TAIL, N, [COLS, D], RIGHT, PERMUTED).to(gl.float32)
            do_t = do_t * gl.convert_layout(lost_t, gl.SliceLayout(0, RIGHT))[None, :]
            delta_t = gl.convert_layout(gl.sum(do_t * out_t, 0), gl.SliceLayout(0, MMA))  # (COLS,)
            do_t = do_t.to(DTYPE)
            dq_t = gl.zeros([D, COLS], gl.float32, MMA)
            for i in range(full):
                # These are the last reads of K: dS is stored over its tile.
                k, v = ks.index(i), vs.index(i)
                dq_t = _rows_in_columns(
                    dq=dq_t,
                    q=q_t,
                    do=do_t,
                    k=k.load(LEFT),
                    v=v.load(LEFT),
                    k_tile=k,
                    tile=k,
                    lse=lse_t,
                    delta=delta_t,
                    first=TAIL,
                    start=i * 64,
                    scoring=scoring,
                    HIDES=HIDES,
                    CAUSAL=False,
                    SCALED=SCALED,
                )
            # The last keys have a buffer of T rows, but a left operand has 64: it is loaded again.
            k_left = load_left(k_rows, TAIL, limit, [64, D], LEFT, PERMUTED)
            v_left = load_left(v_rows, TAIL, limit, [64, D], LEFT, PERMUTED)
            dq_t = _rows_in_columns(
                dq=dq_t,
                q=q_t,
                do=do_t,
                k=k_left,
                v=v_left,
                k_tile=k_tail,
                tile=ks.index(0),
                lse=lse_t,
                delta=delta_t,
                first=TAIL,
                start=TAIL,
                scoring=scoring,
                HIDES=True,
                CAUSAL=CAUSAL,
                SCALED=SCALED,
            )
            store_columns(dq_rows, dq_t * scale, TAIL, N, PERMUTED)
    else:
        # Second program: dK and dV.
        lses = gl.allocate_shared_memory(gl.float32, [FULL, 64], VECTOR)
        deltas = gl.allocate_shared_memory(gl.float32, [FULL, 64], VECTOR)
        for n in gl.static_range(FULL):
            copy_rows(qs.index(n), q_rows, n * 64, N, COPY, PERMUTED)
        if T > 0:
            copy_rows(q_tail, q_rows, TAIL, N, COPY, PERMUTED)
            lse_tail = gl.allocate_shared_memory(gl.float32, [T], VECTOR)
            delta_tail = gl.allocate_shared_memory(gl.float32, [T], VECTOR)
        commit_copies()
        for n in range(full):
            # dO is not copied but loaded, since delta needs it in registers; Q is in flight
            # meanwhile.
            _describe_rows(
                do_tile=dos.index(n),
                lses=lses.index(n),
                deltas=deltas.index(n),
                do_rows=do_rows,
                out_rows=out_rows,
                saved=saved,
                start=n * 64,
                scoring=scoring,
                SCALED=SCALED,
                LAYOUT=BLOCKED,
                PERMUTED=PERMUTED,
            )
        if T > 0:
            _describe_rows(
                do_tile=do_tail,
                lses=lse_tail,
                deltas=delta_tail,
                do_rows=do_rows,
                out_rows=out_rows,
                saved=saved,
                start=full * 64,
                scoring=scoring,
                SCALED=SCALED,
                LAYOUT=BLOCKED,
                PERMUTED=PERMUTED,
            )
        dk_rows = rows_of_head(dk_view, b_64, h_64)
        dv_rows = rows_of_head(dv_view, b_64, h_64)
        # Wait for Q, dO, the log-sum-exp and delta of all threads.
        wait_copies(0)
        barrier()
        for first in range(0, end, BLOCK):
            k = load_left(k_rows, first, limit, [BLOCK, D], LEFT, PERMUTED)
            v = load_left(v_rows, first, limit, [BLOCK, D], LEFT, PERMUTED)
            dk = gl.zeros([BLOCK, D], gl.float32, MMA)
            dv = gl.zeros([BLOCK, D], gl.float32, MMA)
            start, diagonal_end = 0, 0
            if CAUSAL:
                # Under a causal mask the loop starts at the diagonal, whose tiles are masked; later
                # tiles of rows see all of these keys.
                start, diagonal_end = first // 64, gl.minimum((first + BLOCK) // 64, full)
                for i in range(start, diagonal_end):
                    dk, dv = _keys_segment(
                        dk=dk,
                        dv=dv,
                        k=k,
                        v=v,
                        q=qs.index(i),
                        do=dos.index(i),
                        lses=lses.index(i),
                        deltas=deltas.index(i),
                        first=first,
                        start=i * 64,
                        scoring=scoring,
                        STEP=STEP,
                        STEPS=64 // STEP,
                        CAUSAL=True,
                        SCALED=SCALED,
                    )
            for i in range(diagonal_end, full):
                dk, dv = _keys_segment(
                    dk=dk,
                    dv=dv,
                    k=k,
                    v=v,
                    q=qs.index(i),
                    do=dos.index(i),
                    lses=lses.index(i),
                    deltas=deltas.index(i),
                    first=first,
                    start=i * 64,
                    scoring=scoring,
                    STEP=STEP,
                    STEPS=64 // STEP,
                    CAUSAL=False,
                    SCALED=SCALED,
                )
            if T > 0:
                dk, dv = _keys_segment(
                    dk=dk,
                    dv=dv,
                    k=k,
                    v=v,
                    q=q_tail,
                    do=do_tail,
                    lses=lse_tail,
                    deltas=delta_tail,
                    first=first,
                    start=full * 64,
                    scoring=scoring,
                    STEP=16,
                    STEPS=TAIL_STEPS,
                    CAUSAL=CAUSAL,
                    SCALED=SCALED,
                )
            if HIDES:
                # Hidden keys were loaded as zeros, and P of a zero score may overflow: discard
                # their rows.
                inside = (first + gl.arange(0, BLOCK, OWN) < limit)[:, None]
                dk, dv = gl.where(inside, dk, 0.0), gl.where(inside, dv, 0.0)
            store_product_rows(dk_rows, dk * scale, first, end, PERMUTED)
            store_product_rows(dv_rows, dv, first, end, PERMUTED)
        if COLS > 0:
            # The last keys as columns: S and dP (64, COLS), and dK^T and dV^T (D, COLS).
            k_t = load_columns(k_rows, TAIL, limit, [COLS, D], RIGHT, PERMUTED)
            v_t = load_columns(v_rows, TAIL, limit, [COLS, D], RIGHT, PERMUTED)
            dk_t = gl.zeros([D, COLS], gl.float32, MMA)
            dv_t = gl.zeros([D, COLS], gl.float32, MMA)
            # Under a causal mask no row of a whole tile sees the last keys.
            if not CAUSAL:
                for i in range(full):
                    q, do = qs.index(i), dos.index(i)
                    dk_t, dv_t = _keys_in_columns(
                        dk=dk_t,
                        dv=dv_t,
                        k=k_t,
                        v=v_t,
                        q=q.load(LEFT),
                        do=do.load(LEFT),
                        q_tile=q,
                        do_tile=do,
                        p_tile=q,
                        ds_tile=do,
                        lse=lses.index(i).load(OWN),
                        delta=deltas.index(i).load(OWN),
                        first=TAIL,
                        start=i * 64,
                        scoring=scoring,
                        CAUSAL=False,
                        SCALED=SCALED,
                    )
            q, do, lse, delta = _load_row_operands(
                q_rows=q_rows,
                do_rows=do_rows,
                out_rows=out_rows,
                saved=saved,
                first=TAIL,
                end=N,
                factor=factor,
                SCALED=SCALED,
                ROWS=64,
                D=D,
                LEFT=LEFT,
                PERMUTED=PERMUTED,
            )
            dk_t, dv_t = _keys_in_columns(
                dk=dk_t,
                dv=dv_t,
                k=k_t,
                v=v_t,
                q=q,
                do=do,
                q_tile=q_tail,
                do_tile=do_tail,
                p_tile=qs.index(0),
                ds_tile=dos.index(0),
                lse=lse,
                delta=delta,
                first=TAIL,
                start=TAIL,
                scoring=scoring,
                CAUSAL=CAUSAL,
                SCALED=SCALED,
            )
            if HIDES:
                visible_t = (TAIL + gl.arange(0, COLS, gl.SliceLayout(0, MMA)) < limit)[None, :]
                dk_t, dv_t = gl.where(visible_t, dk_t, 0.0), gl.where(visible_t, dv_t, 0.0)
            store_columns(dk_rows, dk_t * scale, TAIL, N, PERMUTED)
            store_columns(dv_rows, dv_t, TAIL, N, PERMUTED)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D) and any ds (B, H, N, N) float32."""
    batch, heads, tokens, _ = call.query.shape
    full, left = divmod(tokens, TILE)
    steps = -(-left // 16)
    arguments = backward_arguments(_ampere_bwd_kernel, grad, call, saved, gradients)
    arguments |= dict(
        **tile.arguments,
        full=full,
        FULL=full,
        T=16 * power_of_2(steps) if steps else 0,
        TAIL_STEPS=steps,
        COLS=next((size for size in (8, 16) if 0 < left <= size), 0),
        WARPS=tile.options["num_warps"],
        # Predicted: up to 256 tokens with 32 dimensions, 4-byte copies cost more than wide loads
        # and stores save.
        PERMUTED=arguments["D"] == 64 or (arguments["D"] == 32 and full > 4),
    )
    return Launch(_ampere_bwd_kernel, (2 * heads, batch), arguments)
