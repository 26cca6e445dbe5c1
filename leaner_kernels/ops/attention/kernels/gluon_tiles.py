"""Helpers of the Gluon kernels: tiles of 64 rows, row statistics, masks, dropout, backward steps.

The Hopper kernels are written in Gluon because Triton's language unrolls a tuple of resident tiles.
The addresses and wgmma descriptors of all products then stay live in registers, and spill. For the
same reason the trip counts of loops over tiles are run-time values, row strides are constants, and
addresses are recomputed where they are used.

A tail is the tokens after the last whole tile, where they are few: they are the T columns of a
transposed product, which costs less than another tile of 64 rows.
"""

from typing import Any, NamedTuple

from ..._epilogue import Sums
from ..._gluon import copy_async, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..._triton import LN_2, LOG2_E
from ..call import GluonView

# --- What travels together between device functions -----------------------------------------------


class Mask(NamedTuple):
    """The mask of the scores.

    Attributes:
        ptr: the mask of a head, or None; in the Hopper kernels, of the first (``mask_ptr``).
        stride_n: between rows; None if all rows share them.
        stride_m: between keys.
        scale: multiplies scores before an additive mask is added.
        ds_ptr: where the gradient of the scores goes, or None.
        stride_b: between batch entries, if ``ptr`` points to the first head.
        stride_h: between heads, likewise.
    """

    ptr: Any
    stride_n: Any
    stride_m: Any
    scale: Any
    ds_ptr: Any = None
    stride_b: Any = None
    stride_h: Any = None


class Dropout(NamedTuple):
    """The dropout of the probabilities; nothing is dropped if ``seed_ptr`` is None.

    Attributes:
        seed_ptr: (1,) int64.
        threshold: the probability of dropping, times 2^31.
        head: the index of the head, counted over all batch entries.
        keep_scale: 1 / (1 - p).
        keep_words: shared memory for ``pack_keep_mask``, a buffer for each pair of tiles, or None.
        num_tiles: the tiles of keys in a row of ``keep_words``.
    """

    seed_ptr: Any = None
    threshold: Any = None
    head: Any = None
    keep_scale: Any = None
    keep_words: Any = None
    num_tiles: Any = None


class SavedRows(NamedTuple):
    """The row statistics that a forward saved; one of the two pointers is None.

    Attributes:
        max_log_sum_ptr: (rows, 2), the largest score and the log of the sum.
        lse_ptr: (rows,), the log-sum-exp.
    """

    max_log_sum_ptr: Any
    lse_ptr: Any


class Scoring(NamedTuple):
    """What turns products of queries and keys into probabilities.

    Attributes:
        N: the number of rows, and of keys.
        limit: keys from it on are padding.
        factor: from scores to base-2 exponents.
        mask: a ``Mask``.
        dropout: a ``Dropout``.
    """

    N: Any
    limit: Any
    factor: Any
    mask: Any
    dropout: Any


class RowState(NamedTuple):
    """The online softmax of a tile of rows; the sums are partial, (rows, 4) (``thread_sums``).

    Attributes:
        acc: (rows, D), the sum of P V.
        row_max: (rows,), the largest score so far, to which the sums are relative.
        row_sum: the sum of P.
        centred: the sum of P times its exponent.
        square: the sum of P^2.
    """

    acc: Any
    row_max: Any
    row_sum: Any
    centred: Any
    square: Any


# --- Rows in global memory ------------------------------------------------------------------------


@gluon.jit
def prevent_hoisting(x):
    """Return ``x`` unchanged; stop the compiler from hoisting it out of a loop."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def head_ptr(view, GROUP: gl.constexpr = 1):
    """Return a pointer to this program's head, which GROUP query heads share.

    It points into this program's batch entry, or to token ``view.first`` of a varlen batch. The
    address is recomputed at each use: kept live, the addresses of all tensors would fill registers.
    """
    # Impure inline assembly: the compiler cannot merge these reads of the program's index, nor
    # hoist them out of a loop.
    h = gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    if view.first is None:
        b = gl.inline_asm_elementwise(
            "mov.u32 $0, %ctaid.y;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        b = prevent_hoisting(view.first)
    if GROUP > 1:
        h = h // GROUP
    # Offsets between heads are 64-bit, offsets within one head 32-bit (``_fits_gluon``).
    return view.ptr + (b.to(gl.int64) * view.stride_b + h.to(gl.int64) * view.stride_h)


@gluon.constexpr_function
def copy_layout(block_dim):
    """Return the layout of copies: 16 bytes of a row per thread, of four warps."""
    lanes = block_dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def fetch_rows(
    shared, view, start, end, D: gl.constexpr, MASK: gl.constexpr, GROUP: gl.constexpr = 1
):
    """Start an asynchronous copy of rows from ``start`` on; with MASK, write zeros from ``end`` on.

    The copy is not sliced: Triton 3.6 puts a barrier between the slices of a copy.
    """
    WIDTH: gl.constexpr = shared.shape[1]
    LAYOUT: gl.constexpr = copy_layout(WIDTH)
    rows = prevent_hoisting(gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = head_ptr(view, GROUP) + start * view.stride_n
    ptrs = ptrs + (rows[:, None] * view.stride_n + dims[None, :])  # (rows, WIDTH)
    # Masked elements are written as zeros: products read whole tiles.
    if MASK or D < WIDTH:
        inside = (start + rows < end)[:, None] & (dims < D)[None, :]
        copy_async(shared, ptrs, mask=inside)
    else:
        copy_async(shared, ptrs)


@gluon.jit
def load_rows(
    view,
    start,
    end,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
    ROWS: gl.constexpr = 64,
    GROUP: gl.constexpr = 1,
):
    """Load rows into registers, such as those of a left operand; zeros from ``end`` on."""
    rows = prevent_hoisting(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (start + rows < end)[:, None]  # (ROWS, 1)
    if D < WIDTH:
        inside = inside & (dims < D)[None, :]
    ptrs = head_ptr(view, GROUP) + start * view.stride_n
    ptrs = ptrs + (rows[:, None] * view.stride_n + dims[None, :])  # (ROWS, WIDTH)
    return gl.load(ptrs, mask=inside, other=0.0)  # (ROWS, WIDTH)


@gluon.jit
def fetch_tiles(tiles, view, end, D: gl.constexpr, MASK: gl.constexpr, GROUP: gl.constexpr = 1):
    """Start asynchronous copies of all whole tiles of a head."""
    COUNT: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    for i in gl.static_range(COUNT):
        fetch_rows(
            shared=tiles.index(i), view=view, start=i * ROWS, end=end, D=D, MASK=MASK, GROUP=GROUP
        )


@gluon.jit
def store_staged_rows(view, x, stage, start, end, D: gl.constexpr, MASK: gl.constexpr):
    """Store a tile of rows through shared memory; with MASK, only the rows before ``end``."""
    WIDTH: gl.constexpr = stage.shape[1]
    LAYOUT: gl.constexpr = copy_layout(WIDTH)
    # 128 threads store 8 elements, 16 bytes, each.
    STEP: gl.constexpr = 1024 // WIDTH
    # In the layout of a product a thread holds two neighbouring elements. Shared memory regroups
    # them into 16-byte vectors.
    stage.store(x.to(stage.dtype))
    rows = prevent_hoisting(gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    ptrs = head_ptr(view) + start * view.stride_n
    ptrs = ptrs + (rows[:, None] * view.stride_n + dims[None, :])  # (STEP, WIDTH)
    for i in gl.static_range(stage.shape[0] // STEP):
        part = stage.slice(i * STEP, STEP).load(LAYOUT)  # (STEP, WIDTH)
        target = ptrs + i * STEP * view.stride_n
        inside = (start + i * STEP + rows < end)[:, None]
        if D < WIDTH:
            gl.store(target, part, mask=inside & (dims < D)[None, :])
        elif MASK:
            gl.store(target, part, mask=inside)
        else:
            gl.store(target, part)


@gluon.jit
def convert_staged(x, stage, LAYOUT: gl.constexpr):
    """Convert a tile of rows to the layout of its store through shared memory."""
    stage.store(x.to(stage.dtype))
    return stage.load(LAYOUT)


@gluon.jit
def store_rows(view, x, start, end, D: gl.constexpr, MASK: gl.constexpr):
    """Store a tile of rows in its own layout; with MASK, only the rows before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = prevent_hoisting(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = head_ptr(view) + start * view.stride_n
    ptrs = ptrs + (rows[:, None] * view.stride_n + dims[None, :])
    x = x.to(view.ptr.dtype.element_ty)
    inside = (start + rows < end)[:, None]
    if x.shape[1] > D:
        gl.store(ptrs, x, mask=inside & (dims < D)[None, :])
    elif MASK:
        gl.store(ptrs, x, mask=inside)
    else:
        gl.store(ptrs, x)


@gluon.constexpr_function
def vector_layout(block_dim):
    """Return a layout of 64 rows in which a thread holds 16 contiguous bytes of a row.

    A warp owns the same 16 rows as in the layout of a product, so that a conversion between the two
    moves data only within a warp.
    """
    # The register bases: eight neighbouring elements, 16 bytes of half precision.
    eight = [[0, 1], [0, 2], [0, 4]]
    if block_dim == 16:
        held, lanes = eight, [[0, 8], [1, 0], [2, 0], [4, 0], [8, 0]]
    else:
        # The lanes of a row cover 32 elements; the other registers are row + 8 and wider heads.
        held = [*eight, [8, 0], *([0, n] for n in (32, 64) if n < block_dim)]
        lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, block_dim])


@gluon.jit
def store_product_rows(view, x, start, end, D: gl.constexpr, MASK: gl.constexpr):
    """Store a tile of rows in ``vector_layout``; with MASK, only the rows before ``end``."""
    x = x.to(view.ptr.dtype.element_ty)
    x = gl.convert_layout(x, vector_layout(x.shape[1]))
    store_rows(view, x, start, end, D, MASK)


@gluon.constexpr_function
def transposed_vector_layout(block_dim, columns):
    """Return a layout (dims, rows) like ``vector_layout``, of a transposed product."""
    held, lanes = [[1, 0], [2, 0], [4, 0]], [[8, 0]]
    for n in (1, 2, 4, 8, 16):
        if n < columns:
            (lanes if len(lanes) < 5 else held).append([0, n])
    lanes += [[0, 0]] * (5 - len(lanes))
    if block_dim > 64:
        held.append([64, 0])
    warps = [[n, 0] if n < block_dim else [0, 0] for n in (16, 32)]
    return gl.DistributedLinearLayout(held, lanes, warps, [], [block_dim, columns])


@gluon.jit
def store_columns(view, x, start, end, D: gl.constexpr):
    """Store a transposed tile (dims, rows) as rows from ``start`` on; skip rows from ``end`` on."""
    LAYOUT: gl.constexpr = transposed_vector_layout(x.shape[0], x.shape[1])
    x = gl.convert_layout(x.to(view.ptr.dtype.element_ty), LAYOUT)
    dims = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    rows = start + prevent_hoisting(gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT)))
    ptrs = head_ptr(view) + (rows[None, :] * view.stride_n + dims[:, None])
    inside = (rows < end)[None, :]
    if x.shape[0] > D:
        inside = inside & (dims < D)[:, None]
    gl.store(ptrs, x, mask=inside)


@gluon.jit
def from_token(view, first):
    """Return a view of the sequence of a varlen batch that starts at token ``first``."""
    return GluonView(view.ptr, view.stride_b, view.stride_h, view.stride_n, first.to(gl.int32))


@gluon.jit
def visible_keys(lengths_ptr, M):
    """Return the number of keys that are visible in this program's batch entry, from 1 to M."""
    limit = M
    if lengths_ptr is not None:
        # Lengths are not checked on the host: clamping keeps accesses inside the tensor.
        limit = gl.minimum(gl.maximum(gl.load(lengths_ptr + gl.program_id(1)), 1), M)
    return limit


@gluon.jit
def _pair_ptrs(ptr, rows, inside, LAYOUT: gl.constexpr):
    """Return pointers to the pair of each row, (rows, 2), and the mask for them."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    which = gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))[None, :]
    ptrs = ptr + (gl.convert_layout(rows, ROWS)[:, None] * 2 + which)
    return ptrs, gl.convert_layout(inside, ROWS)[:, None] & (which >= 0)


@gluon.jit
def load_row_statistics(saved, rows, inside, factor, SCALED: gl.constexpr = False):
    """Return the log-sum-exp of rows in base 2, and the factor that its rounding leaves in P.

    ``saved`` is a ``SavedRows``. The log-sum-exp is inf
    where not ``inside``, so that P = 0. With SCALED it is in units of the scores, as
    ``exponents_of`` subtracts it. If the maximum is large, the log of the sum is rounded away. P is
    then off by a factor, which the caller applies to dO, and through dO to delta. If only the
    log-sum-exp was saved, the factor is 1.
    """
    if saved.max_log_sum_ptr is None:
        lse = gl.load(saved.lse_ptr + rows, mask=inside, other=float("inf")) * LOG2_E  # (rows,)
        lse = lse * (1.0 / factor) if SCALED else lse
        correction = gl.zeros_like(lse)
    else:
        # Pairs (maximum, log of the sum); the second is in nats.
        LAYOUT: gl.constexpr = gl.join(rows, rows).type.layout
        ptrs, pairs_inside = _pair_ptrs(saved.max_log_sum_ptr, rows, inside, LAYOUT)
        row_max, log_sum = gl.load(ptrs, mask=pairs_inside, other=0.0).split()
        row_max = gl.convert_layout(row_max, rows.type.layout)  # (rows,)
        log_sum = gl.convert_layout(log_sum, rows.type.layout)
        log_sum = gl.where(inside, log_sum, float("inf")) * LOG2_E
        if SCALED:
            lse = row_max + log_sum * (1.0 / factor)
            correction = gl.where(lse == float("inf"), 0.0, (lse - row_max) * factor - log_sum)
        else:
            lse = row_max * factor + log_sum
            correction = gl.where(lse == float("inf"), 0.0, (lse - row_max * factor) - log_sum)
    return lse, gl.exp2(correction)


@gluon.jit
def thread_sums(x):
    """Sum each row over the elements of a thread: (rows, 4) partial sums of four threads."""
    # A row of a product lies with four threads, each with two of every eight columns. Summing
    # within threads alone needs no shuffles in the loop over keys; ``sum_threads`` adds the four
    # later.
    COLS: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(x.reshape([x.shape[0], COLS // 8, 4, 2]), 3), 1)


@gluon.jit
def thread_columns(x):
    """Split rows into tensors (rows, 4), each with one element of each of a row's four threads."""
    ROWS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1] // 8
    # Halve the columns of a thread until each tensor holds one: splits move no data between
    # threads.
    even, odd = x.reshape([ROWS, COUNT, 4, 2]).split()
    parts = (even, odd)
    for n in gl.static_range(3):
        if COUNT >> n > 1:
            halves = ()
            for i in gl.static_range(2 << n):
                half = parts[i].reshape([ROWS, 2, COUNT >> n + 1, 4]).permute((0, 2, 3, 1))
                low, high = half.split()
                halves = halves + (low, high)  # noqa: RUF005
            parts = halves
    return parts


@gluon.jit
def add_thread_products(total, x, y):
    """Add ``own_sum(x * y)`` to (rows, 4) with one multiply-add per element."""
    x_parts, y_parts = thread_columns(x), thread_columns(y)
    for i in gl.static_range(x.shape[1] // 4):
        total = gl.fma(
            gl.convert_layout(x_parts[i].reshape(total.shape), total.type.layout),
            gl.convert_layout(y_parts[i].reshape(total.shape), total.type.layout),
            total,
        )
    return total


@gluon.jit
def sum_threads(x, LAYOUT: gl.constexpr):
    """Sum the four partial sums of ``thread_sums`` for each row: (rows,)."""
    return gl.convert_layout(gl.sum(x, 1), LAYOUT)


@gluon.jit
def correct(do_tile, saved, start, scoring, SCALED: gl.constexpr, LAYOUT: gl.constexpr):
    """Multiply rows of dO in shared memory by the factor that ``load_row_statistics`` returns."""
    rows = start + gl.arange(0, do_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    do = do_tile.load(LAYOUT)  # (rows, D)
    inside = rows < scoring.N
    _, correction = load_row_statistics(saved, rows, inside, scoring.factor, SCALED)
    do_tile.store((do.to(gl.float32) * correction[:, None]).to(do.dtype))


@gluon.jit
def visible_tiles(
    full, limit, first, BLOCK: gl.constexpr, HIDES: gl.constexpr, CAUSAL: gl.constexpr
):
    """Return how many tiles of keys every row sees in full, and how many at least one row sees."""
    # Tiles before the first number need no mask; those from there to the second are masked.
    seen, last = full, full
    if HIDES:
        seen, last = gl.minimum(limit // 64, full), gl.minimum((limit + 63) // 64, full)
    if CAUSAL:
        # The diagonal crosses the tiles of keys from the first of these rows to the last.
        seen, last = gl.minimum(seen, first // 64), gl.minimum(last, (first + BLOCK) // 64)
    return seen, last


# --- The epilogue: statistics of a head, as ``ops/_epilogue.py`` has it for Triton ----------------


@gluon.jit
def no_sums(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return ``Sums`` of zero rows."""
    zero = gl.zeros([ROWS], gl.float32, LAYOUT)
    largest = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    return Sums(largest, zero, zero, zero, zero)


@gluon.jit
def sums_of_rows(row_max, row_sum, row_centred, row_square, out_square, inside):
    """Return the ``Sums`` of rows, with zeros for rows not ``inside``; exponents are in base 2.

    ``sums_of_rows`` of ``ops/_epilogue.py`` describes the arguments.
    """
    # H = log(sum e) - sum(e log e) / sum(e), with the maximum as pivot of all exponents.
    entropy = gl.log(row_sum) - LN_2 * row_centred / row_sum
    square = row_square / (row_sum * row_sum)
    return sums_of_entropies(row_max, entropy, square, out_square, inside)


@gluon.jit
def sums_of_entropies(row_max, entropy, square, out_square, inside):
    """Return the ``Sums`` of rows from their entropies and squares."""
    row_max = gl.where(inside, row_max, float("-inf"))
    entropy = gl.where(inside, entropy, 0.0)
    square = gl.where(inside, square, 0.0)
    out_square = gl.where(inside, out_square, 0.0)
    # A row without a visible key counts as 0.
    maximum = gl.where(row_max == float("-inf"), 0.0, row_max)
    return Sums(row_max, entropy, square, out_square, maximum)


@gluon.jit
def with_output(sums, out_square):
    """Return the ``Sums`` of P with ``out_square``, which was summed separately."""
    # By order: Triton 3.6 forgets the fields' names in a tuple of tuples, as of a warp's heads.
    largest, entropy, square, _, row_max = sums
    return Sums(largest, entropy, square, out_square, row_max)


@gluon.jit
def add_sums(sums, others):
    """Combine two ``Sums``."""
    return Sums(
        largest=gl.maximum(sums.largest, others.largest),
        square=sums.square + others.square,
        out_square=sums.out_square + others.out_square,
        entropy=sums.entropy + others.entropy,
        row_max=sums.row_max + others.row_max,
    )


@gluon.jit
def reduce_sums(sums, AXIS: gl.constexpr = 0):
    """Reduce the ``Sums`` over rows."""
    return Sums(
        largest=gl.max(sums.largest, AXIS),
        entropy=gl.sum(sums.entropy, AXIS),
        square=gl.sum(sums.square, AXIS),
        out_square=gl.sum(sums.out_square, AXIS),
        row_max=gl.sum(sums.row_max, AXIS),
    )


@gluon.jit
def no_partial_sums(LAYOUT: gl.constexpr):
    """Return ``Sums`` of zero rows, (64, 4): partial sums of each row's four threads."""
    zero = gl.zeros([64, 4], gl.float32, LAYOUT)
    return Sums(gl.full([64, 4], float("-inf"), gl.float32, LAYOUT), zero, zero, zero, zero)


@gluon.jit
def add_partial_sums(sums, acc, row_max, divisor, centred, square, inside, MASKED: gl.constexpr):
    """Add rows to ``Sums`` (64, 4) without moving data between threads.

    Args:
        sums: sums of earlier rows.
        acc: (64, D), the output in float32.
        row_max: (64,), as ``divisor``, which is complete.
        divisor: the sum of P before it is divided.
        centred: (64, 4), as in ``RowState``, and ``square`` likewise.
        square: see ``centred``.
        inside: (64,), whether a row exists; None if all do.
        MASKED: whether a row may see no key.
    """
    LAYOUT: gl.constexpr = square.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    inverse = gl.convert_layout(1.0 / divisor, ROWS)[:, None]
    log_sum = gl.convert_layout(gl.log(divisor), ROWS)[:, None]
    # Each of the four threads adds a quarter of what belongs to the whole row.
    entropy = 0.25 * log_sum - (LN_2 * inverse) * centred
    square = square * (inverse * inverse)
    row_max = gl.convert_layout(row_max, ROWS)[:, None]
    maximum = row_max
    if MASKED:
        # A row without a visible key counts as 0.
        maximum = gl.where(row_max == float("-inf"), 0.0, row_max)
    if inside is None and acc.shape[1] <= 64:
        out_square = add_thread_products(sums.out_square, acc, acc)
    else:  # wider rows have more columns than ``thread_columns`` splits
        out_square = gl.convert_layout(thread_sums(acc * acc), LAYOUT)
        if inside is not None:
            out_square = gl.where(gl.convert_layout(inside, ROWS)[:, None], out_square, 0.0)
        out_square = sums.out_square + out_square
    if inside is not None:
        inside = gl.convert_layout(inside, ROWS)[:, None]
        entropy = gl.where(inside, entropy, 0.0)
        square = gl.where(inside, square, 0.0)
        maximum = gl.where(inside, maximum, 0.0)
        row_max = gl.where(inside, row_max, float("-inf"))
    return Sums(
        largest=gl.maximum(sums.largest, row_max),
        entropy=sums.entropy + entropy,
        square=sums.square + square,
        out_square=out_square,
        row_max=sums.row_max + 0.25 * maximum,
    )


@gluon.jit
def _combine(
    largest, entropy, square, out_square, row_max, largest_2, entropy_2, square_2, out_2, row_max_2
):
    return (
        gl.maximum(largest, largest_2),
        entropy + entropy_2,
        square + square_2,
        out_square + out_2,
        row_max + row_max_2,
    )


@gluon.jit
def reduce_partial_sums(sums):
    """Reduce ``Sums`` (64, 4) to scalars, all five at once: warps meet once, not five times."""
    largest, entropy, square, out_square, row_max = gl.reduce(
        (
            sums.largest.reshape([256]),
            sums.entropy.reshape([256]),
            sums.square.reshape([256]),
            sums.out_square.reshape([256]),
            sums.row_max.reshape([256]),
        ),
        0,
        _combine,
    )
    return Sums(largest, entropy, square, out_square, row_max)


@gluon.jit
def _add_three(a, b, c, a_2, b_2, c_2):
    return a + a_2, b + b_2, c + c_2


@gluon.jit
def sum_three(a, b, c):
    """Sum three tensors over their first axis at once, where this crosses warps."""
    return gl.reduce((a, b, c), 0, _add_three)


@gluon.jit
def store_statistics(ptr, sums, head, num_heads, num_rows, scale, inside):
    """Store the statistics of a head with complete sums into (statistics, B, H).

    ``scale`` multiplies the maxima of the scores; ``inside`` may be None.
    """
    # The caller passes a pointer to the first statistic; each is (B, H).
    ptr += head
    step = num_heads.to(gl.int64)
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    diverged = sums.entropy != sums.entropy
    gl.store(ptr, gl.where(diverged, float("nan"), sums.largest * scale), mask=inside)
    gl.store(ptr + step, sums.entropy / num_rows, mask=inside)
    gl.store(ptr + 2 * step, gl.sqrt(sums.square), mask=inside)
    gl.store(ptr + 3 * step, gl.sqrt(sums.out_square), mask=inside)
    mean_row_max = gl.where(diverged, float("nan"), sums.row_max * scale / num_rows)
    gl.store(ptr + 4 * step, mean_row_max, mask=inside)


# --- Masks and dropout, for scores in any layout --------------------------------------------------
# ``rows`` and ``cols`` are the indices of the scores, and broadcast against each other: (R, 1) and
# (1, C), or, in a transposed product, (1, R) and (C, 1).


@gluon.jit
def mask_ptr(mask):
    """Return a pointer to the mask of this program's head; see ``head_ptr``."""
    view = GluonView(mask.ptr, mask.stride_b, mask.stride_h, mask.stride_n, None)
    return head_ptr(view)


@gluon.jit
def load_mask(ptr, mask, rows, cols, N):
    """Load the mask of a head, at ``ptr``, for a tile of scores, 0 outside.

    A row stride of None stands for 0, as in a mask over keys: each key is then loaded once, and the
    tile broadcasts to the scores.
    """
    ptrs = ptr + cols * mask.stride_m
    inside = cols < N
    if mask.stride_n is not None:
        ptrs = ptrs + rows * mask.stride_n
        inside = inside & (rows < N)
    return gl.load(ptrs, mask=inside, other=0)


@gluon.jit
def mask_scores(
    s, rows, cols, limit, CAUSAL: gl.constexpr, HIDDEN: gl.constexpr, tile=None, scale=None
):
    """Replace scores of hidden keys by ``HIDDEN``: -inf for scores, 0 for P or dS.

    Every kind of mask is applied here and nowhere else. Keys from ``limit`` on are hidden; None
    hides none. ``tile`` is the mask of these scores, or None. A boolean mask hides keys. An
    additive mask is added to ``scale`` times the scores with a single rounding; its most negative
    number hides a key, as -inf does (see ``biased``).
    """
    if tile is not None:
        if tile.dtype == gl.uint8:
            s = gl.where(tile != 0, s, HIDDEN)
        else:
            bias = tile.to(gl.float32)
            # One multiply-add, so that the backward recomputes exactly the scores whose maximum the
            # forward stored.
            s = gl.fma(s, scale, gl.where(bias < -1e38, HIDDEN, bias))  # (rows, cols)
    if limit is not None:
        s = gl.where(cols < limit, s, HIDDEN)
    if CAUSAL:
        s = gl.where(cols <= rows, s, HIDDEN)
    return s


@gluon.jit
def wait_for_scores(s, PENDING: gl.constexpr, scoring, rows, cols):
    """Wait for scores of wgmma and return them under the mask, which is loaded meanwhile.

    The ``PENDING`` products that were started after the scores may stay in flight. Padding and
    causality are left to the caller.
    """
    mask = scoring.mask
    tile = None
    if mask.ptr is not None:
        tile = load_mask(mask_ptr(mask), mask, rows, cols, scoring.N)
    # wgmma groups complete in order: with at most PENDING left, the scores are done.
    s = warpgroup_mma_wait(PENDING, [s])
    return mask_scores(
        s=s,
        rows=rows,
        cols=cols,
        limit=None,
        CAUSAL=False,
        HIDDEN=float("-inf"),
        tile=tile,
        scale=mask.scale,
    )


@gluon.jit
def keep_mask(dropout, rows, cols):
    """Return which scores ``dropout`` keeps, as ``keep_tile`` does in Triton."""
    seed = gl.load(dropout.seed_ptr)
    k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
    zero = (rows * 0 + cols * 0).to(gl.uint32)
    c0, c1 = zero + cols.to(gl.uint32), zero + rows.to(gl.uint32)
    c2, c3 = zero + dropout.head.to(gl.uint32), zero
    # Philox 4x32 with ten rounds, as tl.philox computes it, and the same counter as ``keep_tile``:
    # (column, row, head, 0). The mask depends on no tile size.
    for _ in gl.static_range(10):
        high, low = gl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c2, c3 = gl.umulhi(c0, 0xD2511F53) ^ c3 ^ k1, c0 * 0xD2511F53
        c0, c1 = high ^ c1 ^ k0, low
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return (c0 >> 1).to(gl.int32) >= dropout.threshold


@gluon.jit
def apply_dropout(dp, p, dropout, rows, cols, SCALE_P: gl.constexpr):
    """Apply ``dropout`` to dP and to P; without SCALE_P, P lacks the factor 1 / (1 - p)."""
    if dropout.seed_ptr is not None:
        keep = keep_mask(dropout, rows, cols)
        dp = gl.where(keep, dp * dropout.keep_scale, 0.0)
        if SCALE_P:
            p = p * dropout.keep_scale
        p = gl.where(keep, p, 0.0)
    return dp, p


@gluon.jit
def pack_keep_mask(words, keep):
    """Pack which of 64 x 64 scores are kept into shared memory: (2, rows) words of 32 keys."""
    bits = keep.to(gl.int32).reshape([64, 2, 32])  # (rows, 2, 32)
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, bits.type.layout))
    bits = bits << gl.arange(0, 32, INNER)[None, None, :]  # key i of a word is bit i
    words.store(gl.sum(bits, 2).permute((1, 0)))  # (2, rows)


@gluon.jit
def unpack_keep_mask(words, LAYOUT: gl.constexpr):
    """Unpack ``pack_keep_mask`` as (keys, rows); a tenth of the cost of running Philox again."""
    APART: gl.constexpr = gl.zeros([64, 64], gl.int32, LAYOUT).reshape([2, 32, 64]).type.layout
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, APART))
    bits = words.load(gl.SliceLayout(1, APART))[:, None, :]  # (2, 1, 64): words, then rows
    bits = bits >> gl.arange(0, 32, INNER)[None, :, None]  # (2, 32, 64)
    return gl.convert_layout((bits & 1).reshape([64, 64]), LAYOUT) != 0


@gluon.jit
def pivot_of(row_max, factor, MASKED: gl.constexpr, SCALED: gl.constexpr = False):
    """Return the pivot that ``exponents_of`` subtracts; 0 for a row without a visible key so far.

    Without a mask every row sees the first key, so that every maximum is finite.
    """
    pivot = row_max
    if not SCALED:
        # An explicit fma rounds the product here: the compiler cannot fuse it into the subtraction.
        pivot = gl.fma(row_max, factor, 0.0)
    if MASKED:
        # -inf - (-inf) would be nan.
        pivot = gl.where(row_max == float("-inf"), 0.0, pivot)
    return pivot


@gluon.jit
def exponents_of(s, pivot, factor, SCALED: gl.constexpr):
    """Return the base-2 exponents of scores less ``pivot``: one multiply-add, unless SCALED.

    With an additive mask, scores may be so large that the rounded product of a maximum is off by
    many exponents. The difference is then taken first, and is exact at the maximum.
    """
    exponent = s * factor - pivot
    if SCALED:
        exponent = (s - pivot) * factor
    return exponent


@gluon.jit
def shift_of(row_max, pivot, factor, SCALED: gl.constexpr):
    """Return the change of exponents from one row maximum to the next; 0 if it stayed the same."""
    shift = gl.fma(row_max, factor, 0.0) - pivot
    if SCALED:
        shift = (row_max - pivot) * factor
    return shift


@gluon.jit
def divisor_of(row_sum, MASKED: gl.constexpr):
    """Return the divisor of rows: their sums, or 1 for a row without a visible key."""
    if MASKED:
        row_sum = gl.where(row_sum == 0, 1.0, row_sum)
    return row_sum


@gluon.jit
def store_row_statistics(
    max_log_sum_ptr,
    lse_ptr,
    rows,
    row_max,
    divisor,
    factor,
    unit,
    inside,
    MASKED: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Store the maximum of each row and the log of its sum, for the backward; return the latter.

    For a row without a visible key, 0 and inf are stored, and 0 is returned. If ``max_log_sum_ptr``
    is None, the function stores the log-sum-exp, which is inf for such a row. ``unit`` scales the
    maxima.
    """
    unseeing = row_max == float("-inf")
    if MASKED:
        row_max = gl.where(unseeing, 0.0, row_max)
    log_sum = gl.log(divisor)
    if not SCALED:
        # The sum takes up the rounding error of the pivot, which the second fma gives exactly.
        log_sum -= gl.fma(row_max, factor, -gl.fma(row_max, factor, 0.0)) * LN_2
    stored = log_sum
    if MASKED:
        stored = gl.where(unseeing, float("inf"), log_sum)
    if max_log_sum_ptr is None:
        gl.store(lse_ptr + rows, row_max * unit + stored, mask=inside)
    else:
        both = gl.join(row_max, stored)  # (rows, 2): one store of 8 bytes
        LAYOUT: gl.constexpr = both.type.layout
        ptrs, inside = _pair_ptrs(max_log_sum_ptr, rows, inside, LAYOUT)
        gl.store(ptrs, both, mask=inside)
    return log_sum


@gluon.jit
def recompute_p(s, lse, scoring, rows, cols, SCALED: gl.constexpr):
    """Compute probabilities from products under the mask of a head."""
    mask = scoring.mask
    tile = load_mask(mask.ptr, mask, rows, cols, scoring.N)
    s = mask_scores(
        s=s,
        rows=rows,
        cols=cols,
        limit=None,
        CAUSAL=False,
        HIDDEN=float("-inf"),
        tile=tile,
        scale=mask.scale,
    )
    return gl.exp2(exponents_of(s, lse, scoring.factor, SCALED))


@gluon.jit
def store_ds(scoring, ds, rows, cols):
    """Store dS of a head, if an additive mask requires its gradient."""
    ds_ptr, N = scoring.mask.ds_ptr, scoring.N
    if ds_ptr is not None:
        gl.store(ds_ptr + (rows * N + cols), ds, mask=(rows < N) & (cols < N))


# --- Steps of the backward on Hopper --------------------------------------------------------------


@gluon.jit
def start_products(left, dp_left, right, dp_right, zero):
    """Start the products left right^T and dp_left dp_right^T: scores and dP.

    The operands are queries and keys, or, for transposed scores, keys and queries.
    """
    # ``zero`` lends its layout alone: use_acc=False writes the accumulator without reading it.
    s = warpgroup_mma(left, right.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(dp_left, dp_right.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def rows_step(
    dq,
    q,
    do,
    k,
    v,
    zero,
    lse,
    delta,
    first,
    start,
    scoring,
    SCALED: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Add the contribution of a tile of keys to dQ of a tile of rows."""
    SCORES: gl.constexpr = zero.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    dropout = scoring.dropout
    s, dp = start_products(q, do, k, v, zero)  # both (64, 64): rows by keys
    keys = (start + gl.arange(0, 64, gl.SliceLayout(0, SCORES)))[None, :]
    queries = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    # dP is still in flight: P is computed under it.
    s = wait_for_scores(s, 1, scoring, queries, keys)
    p = gl.exp2(exponents_of(s, lse, scoring.factor, SCALED))  # (64, 64)
    dp = warpgroup_mma_wait(0, [dp])
    if dropout.seed_ptr is not None:
        keep = keep_mask(dropout, queries, keys)
        # The second pass needs the same bits.
        pack_keep_mask(dropout.keep_words.index((first * dropout.num_tiles + start) // 64), keep)
        dp = gl.where(keep, dp * dropout.keep_scale, 0.0)
    ds = p * (dp - delta)
    # Masking dS instead of P is enough here: dQ needs no other product of P.
    ds = mask_scores(ds, queries, keys, scoring.limit if HIDES else None, CAUSAL, 0.0)
    store_ds(scoring, ds, queries, keys)
    # dS goes from the accumulator to the left operand within registers.
    dq = warpgroup_mma(gl.convert_layout(ds.to(k.dtype), LEFT), k, dq, is_async=True)
    return warpgroup_mma_wait(0, [dq])


@gluon.jit
def keys_step(
    dk,
    dv,
    k,
    v,
    q,
    do,
    zero,
    lse,
    delta,
    first,
    start,
    scoring,
    SCALED: gl.constexpr,
    CAUSAL: gl.constexpr,
    limit=None,
):
    """Add what a tile or tail of rows contributes to dK and dV of a tile; return dS (keys, rows).

    Keys from ``limit`` on are hidden. If ``limit`` is None, the caller hides them.
    """
    SCORES: gl.constexpr = zero.type.layout
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    dropout = scoring.dropout
    s, dp = start_products(k, v, q, do, zero)  # both (64, rows): keys by rows
    keys = (first + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))[:, None]
    queries = (start + gl.arange(0, q.shape[0], COLS))[None, :]
    s = wait_for_scores(s, 1, scoring, queries, keys)
    p = gl.exp2(exponents_of(s, lse.load(COLS)[None, :], scoring.factor, SCALED))
    p = mask_scores(p, queries, keys, limit, CAUSAL, 0.0)
    weight = p
    if dropout.seed_ptr is not None:
        # The first pass kept the bits of whole tiles; those of a tail are drawn again.
        if q.shape[0] == 64:
            words = dropout.keep_words.index((start * dropout.num_tiles + first) // 64)
            keep = unpack_keep_mask(words, SCORES)
        else:
            keep = keep_mask(dropout, queries, keys)
        weight = gl.where(keep, p, 0.0)
    # dV needs only P, so its product starts while dP is still in flight.
    dv = warpgroup_mma(gl.convert_layout(weight.to(do.dtype), LEFT), do, dv, is_async=True)
    # dP is older than dV: with one group left, dP is done and dV still runs.
    dp = warpgroup_mma_wait(1, [dp])
    if dropout.seed_ptr is not None:
        dp = gl.where(keep, dp * dropout.keep_scale, 0.0)
    ds = p * (dp - delta.load(COLS)[None, :])
    dk = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), LEFT), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv, ds
