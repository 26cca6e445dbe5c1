"""Triton forward of outlook attention: pixels gather from the windows that hold them, no atomics.

Sizes: B batch, Y by X map, H heads of dimension D, K kernel size, BLOCK cells per tile. A cell is
STRIDE x STRIDE pixels. Cell (i, j) starts where window (i, j) starts, so that the windows that
contain its pixels are (i - t_y, j - t_x) for t below ceil(K / STRIDE), and the place of a pixel in
each of them is a compile-time constant. Mapping: one program owns a tile of cells of one head and
visits their windows. A row of a window's probabilities belongs to one pixel, so that each row is
read by one program. The value of a window at a place is read once for all pixels of the cell. If
windows extend beyond the map, so do cells: their rows count as rows, and their pixels are dropped.

Products of 9 or 25 terms are too short for tensor cores: everything is float32.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: tuples of tiles, constants, branches decided early.

import triton
import triton.language as tl

from .._epilogue import add_sums, no_sums, store_statistics, sums_of_rows, with_output
from .._tiles import Tiles, rule
from .._triton import exponential, head_of, nats, scaled, units

# ELEMENTS counts those of one pixel of each cell, or window, of a program: one vector per thread,
# so that a thread needs the probabilities of one window only. HELD keeps rows of probabilities, and
# in the backward the values of a window, in registers, which is faster if they fit. Features of a
# call are padded_dim (a head dimension that does not fill its tile), unaligned (a stride that is
# not a multiple of 16) and wide (windows of more than 3 x 3 pixels).
RULES = (
    rule(ELEMENTS=1024, HELD=True),
    rule(takes=("wide",), ELEMENTS=1024, HELD=False),
    rule(takes=("padded_dim", "wide"), ELEMENTS=1024, HELD=False, maxnreg=255),
    rule(size=4, takes=("padded_dim", "wide"), ELEMENTS=512, HELD=False, maxnreg=255),
    rule(size=4, takes=("padded_dim", "unaligned", "wide"), ELEMENTS=128, HELD=False, maxnreg=255),
)
TILES = Tiles("outlook_forward", *RULES, num_warps=4, num_stages=1)


@triton.jit
def load_pixels(
    ptr, view, y, x, place, seen, Y, X, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load one pixel of each window as (BLOCK, BLOCK_D) float32; zero unless seen.

    ``ptr`` points to a head of ``view``; (y, x) are the first pixels of the K x K windows.
    """
    dims = tl.arange(0, BLOCK_D)
    y, x = y + place // K, x + place % K  # (BLOCK,)
    inside = (seen & (y >= 0) & (y < Y) & (x >= 0) & (x < X))[:, None]
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    offsets = (y * view.stride_y + x * view.stride_x)[:, None] + dims[None, :]  # (BLOCK, BLOCK_D)
    return tl.load(ptr + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pixels(
    ptr, sums, cells, cell_y, cell_x, H, Y, X, CELLS,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the pixels of cells inside the map, one (BLOCK, BLOCK_D) tile for each place in a cell.

    ``ptr`` points to one head of a contiguous (Y, X, H, D). Returns the sum of squares of the
    stored elements, (BLOCK,).
    """
    dims = tl.arange(0, BLOCK_D)
    square = tl.zeros(cells.shape, tl.float32)
    for r in tl.static_range(STRIDE * STRIDE):
        y = cell_y * STRIDE + (r // STRIDE - PADDING)
        x = cell_x * STRIDE + (r % STRIDE - PADDING)
        inside = (cells < CELLS) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)  # (BLOCK,)
        stored = inside[:, None]
        if D < BLOCK_D:
            stored = stored & (dims < D)[None, :]
        ptrs = ptr + ((y * X + x) * (H * D))[:, None] + dims[None, :]  # (BLOCK, BLOCK_D)
        tl.store(ptrs, sums[r].to(ptr.dtype.element_ty), mask=stored)
        square += tl.where(inside, tl.sum(sums[r] * sums[r], axis=1), 0.0)
    return square


@triton.jit
def softmax_row(ptr, seen, factor, NUM: tl.constexpr, HELD: tl.constexpr):
    """Return the softmax of one row of NUM scores of each window, and its sums, (BLOCK,) each.

    The results are a tuple of probabilities, empty unless ``HELD``; the largest score, in
    ``units``; and the sums of the exponentials e^(s - largest), of these times their exponents, and
    of their squares.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    pivot = tl.full(seen.shape, float("-inf"), tl.float32)
    total = tl.zeros(seen.shape, tl.float32)
    centred = tl.zeros(seen.shape, tl.float32)
    square = tl.zeros(seen.shape, tl.float32)
    row = ()
    if HELD:
        scores, raised = (), ()
        for place in tl.static_range(NUM):
            score = tl.load(ptr + place, mask=seen, other=0.0).to(tl.float32)  # (BLOCK,)
            scores += (scaled(score, factor),)
            pivot = tl.maximum(pivot, scores[place])
        for place in tl.static_range(NUM):
            raised += (exponential(scores[place] - pivot, DTYPE),)
            total += raised[place]
            # A score of -inf adds nothing: 0 * -inf would be nan.
            shift = tl.where(raised[place] > 0, scores[place] - pivot, 0.0)
            centred += raised[place] * shift
            square += raised[place] * raised[place]
        inverse = 1.0 / total  # (BLOCK,)
        for place in tl.static_range(NUM):
            row += (raised[place] * inverse,)
    else:
        # Scores are loaded a second time, from the cache, to free their registers.
        for place in range(NUM):
            score = scaled(tl.load(ptr + place, mask=seen, other=0.0).to(tl.float32), factor)
            pivot = tl.maximum(pivot, score)
        for place in range(NUM):
            score = scaled(tl.load(ptr + place, mask=seen, other=0.0).to(tl.float32), factor)
            e = exponential(score - pivot, DTYPE)  # (BLOCK,)
            total += e
            centred += e * tl.where(e > 0, score - pivot, 0.0)
            square += e * e
    return row, pivot, total, centred, square


@triton.jit(
    do_not_specialize=["B", "H", "Y", "X", "WINDOWS_Y", "WINDOWS_X", "CELLS_X", "CELLS", "PARTS"]
)
def _outlook_fwd_kernel(
    v_view,
    logits_view,
    sample_ptr,
    out_ptr,
    lse_ptr,
    stats_ptr,
    B,
    H,
    Y,
    X,
    WINDOWS_Y,
    WINDOWS_X,
    CELLS_X,
    CELLS,
    PARTS,
    scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    REACH: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    program = tl.program_id(0)
    part, head = program % PARTS, program // PARTS
    slot, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    b = slot
    if sample_ptr is not None:
        b = tl.load(sample_ptr + slot).to(tl.int64)
        if (b < 0) | (b >= B):
            return
    v_ptr = head_of(v_view, b, h)
    logits_ptr = head_of(logits_view, b, h)
    out_ptr += (slot * Y * X * H + h) * D
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    factor = scale * units(DTYPE)
    if stats_ptr is not None:
        sums = no_sums(BLOCK)
        out_square = tl.zeros([BLOCK], tl.float32)

    for first in range(part * BLOCK, CELLS, PARTS * BLOCK):
        cells = first + tl.arange(0, BLOCK)
        cell_y, cell_x = cells // CELLS_X, cells % CELLS_X  # (BLOCK,)
        accs = ()
        for _ in tl.static_range(STRIDE * STRIDE):
            accs += (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
        for t in tl.static_range(REACH * REACH):
            i, j = cell_y - t // REACH, cell_x - t % REACH
            seen = (cells < CELLS) & (i >= 0) & (i < WINDOWS_Y) & (j >= 0) & (j < WINDOWS_X)
            window_ptr = logits_ptr + (i * logits_view.stride_y + j * logits_view.stride_x)
            rows, pivots, inverses = (), (), ()
            for r in tl.static_range(STRIDE * STRIDE):
                if PLACES[t][r] < 0:
                    rows += ((),)
                    pivots += (0.0,)
                    inverses += (0.0,)
                else:
                    row, pivot, total, centred, row_square = softmax_row(
                        window_ptr + PLACES[t][r] * logits_view.stride_a, seen, factor, K * K, HELD
                    )
                    if lse_ptr is not None:
                        window = (head.to(tl.int64) * WINDOWS_Y + i) * WINDOWS_X + j
                        lse = pivot * nats(DTYPE) + tl.log(total)  # (BLOCK,)
                        # Triton recomputes the row here in the layout of the store, one thread per
                        # window. This costs less than moving nine results between threads.
                        tl.store(lse_ptr + window * (K * K) + PLACES[t][r], lse, mask=seen)
                    if stats_ptr is not None:
                        of_row = sums_of_rows(
                            pivot, total, centred, row_square, 0.0, seen, nats(DTYPE)
                        )
                        sums = add_sums(sums, of_row)
                    rows += (row,)
                    pivots += (pivot,)
                    inverses += (1.0 / total,)
            top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
            if HELD:
                for place in tl.static_range(K * K):
                    v = load_pixels(v_ptr, v_view, top, left, place, seen, Y, X, K, D, BLOCK_D)
                    mixed = ()
                    for r in tl.static_range(STRIDE * STRIDE):
                        if PLACES[t][r] < 0:
                            mixed += (accs[r],)
                        else:
                            mixed += (accs[r] + rows[r][place][:, None] * v,)  # (BLOCK, BLOCK_D)
                    accs = mixed
            else:
                for place in range(K * K):
                    v = load_pixels(v_ptr, v_view, top, left, place, seen, Y, X, K, D, BLOCK_D)
                    mixed = ()
                    for r in tl.static_range(STRIDE * STRIDE):
                        if PLACES[t][r] < 0:
                            mixed += (accs[r],)
                        else:
                            ptrs = window_ptr + (PLACES[t][r] * logits_view.stride_a + place)
                            score = tl.load(ptrs, mask=seen, other=0.0).to(tl.float32)  # (BLOCK,)
                            p = exponential(scaled(score, factor) - pivots[r], DTYPE) * inverses[r]
                            mixed += (accs[r] + p[:, None] * v,)  # (BLOCK, BLOCK_D)
                    accs = mixed
        square = store_pixels(  # (BLOCK,)
            out_ptr, accs, cells, cell_y, cell_x, H, Y, X, CELLS, STRIDE, PADDING, D, BLOCK_D
        )
        if stats_ptr is not None:
            out_square += square
    if stats_ptr is not None:
        num_rows = WINDOWS_Y * WINDOWS_X * (K * K)
        sums = with_output(sums, out_square)
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), num_rows, nats(DTYPE))
