"""The kernels of outlook attention in Triton, and their launches: no atomics, one launch each.

Sizes: B batch, Y by X map, H heads of dimension D, K kernel size, BLOCK cells per tile. A cell is
STRIDE x STRIDE pixels. Cell (i, j) starts where window (i, j) starts, so that the windows that
contain its pixels are (i - t_y, j - t_x) for t below ceil(K / STRIDE), and the place of a pixel in
each of them is a compile-time constant. Forward: one program owns a tile of cells of one head and
visits their windows. A row of a window's probabilities belongs to one pixel, so that each row is
read by one program. The value of a window at a place is read once for all pixels of the cell. If
windows extend beyond the map, so do cells: their rows count as rows, and their pixels are dropped.

Backward: the first programs of a head own a tile of windows each and write the gradient of their
logits. The others own a tile of cells each and write the gradient of the values there, a sum over
the windows that contain a pixel. Probabilities are recomputed: rows from their logits, columns with
the log-sum-exp of the forward. No sum crosses programs: the result is bitwise deterministic.

Products of 9 or 25 terms are too short for tensor cores: everything is float32.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# The bodies of kernels are Triton's language: tuples of tiles, constants, branches decided early.

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._epilogue import add_sums, no_sums, store_statistics, sums_of_rows, with_output
from .._launch_cache import LARGEST_OFFSET, Launch, MapView
from .._tiles import Tile, Tiles, power_of_2, rule
from .._triton import exponential, head_of, nats, scaled, units
from ..route import Results
from . import OutlookCall

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
# One stage: Triton copies ahead only what feeds products of tensor cores, and there are none. The
# other programs on the SM hide the loads.
FORWARD_TILES = Tiles("outlook_forward", *RULES, num_warps=4, num_stages=1)


@triton.jit
def load_pixels(
    ptr, view, y, x, place, visible, Y, X, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load one pixel of each window as (BLOCK, BLOCK_D) float32; zero unless visible.

    ``ptr`` points to a head of ``view``; (y, x) are the first pixels of the K x K windows.
    """
    dims = tl.arange(0, BLOCK_D)
    # The padding is not in memory: pixels outside the map are loaded as zeros.
    y, x = y + place // K, x + place % K  # (BLOCK,)
    inside = (visible & (y >= 0) & (y < Y) & (x >= 0) & (x < X))[:, None]
    if D < BLOCK_D:
        inside = inside & (dims < D)[None, :]
    # Offsets are 32-bit inside a batch entry: 64-bit ones would cost registers.
    offsets = (y * view.stride_y + x * view.stride_x)[:, None] + dims[None, :]  # (BLOCK, BLOCK_D)
    return tl.load(ptr + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_pixels(
    ptr,
    tiles,
    cells,
    cell_y,
    cell_x,
    H,
    Y,
    X,
    CELLS,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the pixels of cells inside the map, one (BLOCK, BLOCK_D) tile for each place in a cell.

    ``ptr`` points to one head of a contiguous (Y, X, H, D). Returns the sum of squares of the
    stored elements, (BLOCK,).
    """
    dims = tl.arange(0, BLOCK_D)
    square = tl.zeros(cells.shape, tl.float32)
    # Cells tile the plane: each pixel has one cell, and no program adds to the result of another.
    for r in tl.static_range(STRIDE * STRIDE):
        y = cell_y * STRIDE + (r // STRIDE - PADDING)
        x = cell_x * STRIDE + (r % STRIDE - PADDING)
        inside = (cells < CELLS) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)  # (BLOCK,)
        stored = inside[:, None]
        if D < BLOCK_D:
            stored = stored & (dims < D)[None, :]
        ptrs = ptr + ((y * X + x) * (H * D))[:, None] + dims[None, :]  # (BLOCK, BLOCK_D)
        tl.store(ptrs, tiles[r].to(ptr.dtype.element_ty), mask=stored)
        square += tl.where(inside, tl.sum(tiles[r] * tiles[r], axis=1), 0.0)
    return square


@triton.jit
def softmax_row(ptr, visible, factor, NUM: tl.constexpr, HELD: tl.constexpr):
    """Return the softmax of one row of NUM scores of each window, and its sums, (BLOCK,) each.

    The results are a tuple of probabilities, empty unless ``HELD``; the largest score, in
    ``units``; and the sums of the exponentials e^(s - largest), of these times their exponents, and
    of their squares.
    """
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    pivot = tl.full(visible.shape, float("-inf"), tl.float32)
    total = tl.zeros(visible.shape, tl.float32)
    centred = tl.zeros(visible.shape, tl.float32)
    square = tl.zeros(visible.shape, tl.float32)
    row = ()
    if HELD:
        # Every score and exponential has a register of its own: the loops unroll, since registers
        # cannot be indexed at run time.
        scores, exps = (), ()
        for place in tl.static_range(NUM):
            score = tl.load(ptr + place, mask=visible, other=0.0).to(tl.float32)  # (BLOCK,)
            scores += (scaled(score, factor),)
            pivot = tl.maximum(pivot, scores[place])
        for place in tl.static_range(NUM):
            exps += (exponential(scores[place] - pivot, DTYPE),)
            total += exps[place]
            # A score of -inf adds nothing: 0 * -inf would be nan.
            shift = tl.where(exps[place] > 0, scores[place] - pivot, 0.0)
            centred += exps[place] * shift
            square += exps[place] * exps[place]
        inverse = 1.0 / total  # (BLOCK,)
        for place in tl.static_range(NUM):
            row += (exps[place] * inverse,)
    else:
        # Scores are loaded a second time, from the cache, to free their registers.
        for place in range(NUM):
            score = tl.load(ptr + place, mask=visible, other=0.0).to(tl.float32)  # (BLOCK,)
            pivot = tl.maximum(pivot, scaled(score, factor))
        for place in range(NUM):
            score = tl.load(ptr + place, mask=visible, other=0.0).to(tl.float32)
            exponent = scaled(score, factor) - pivot  # (BLOCK,)
            e = exponential(exponent, DTYPE)
            total += e
            # As above, 0 * -inf would be nan.
            centred += e * tl.where(e > 0, exponent, 0.0)
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
    # Parts of a head are neighbours in the grid: windows overlap, and so do the pixels they read.
    part, head = program % PARTS, program // PARTS
    slot, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    b = slot
    # In a capture, slot s of the output is map sample[s].
    # A negative index leaves its slot unwritten.
    if sample_ptr is not None:
        b = tl.load(sample_ptr + slot).to(tl.int64)
        if (b < 0) | (b >= B):
            return
    v_ptr = head_of(v_view, b, h)
    logits_ptr = head_of(logits_view, b, h)
    out_ptr += (slot * Y * X * H + h) * D
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    # Scores are in units of the exponential: base 2 for half precision. ``nats`` converts back.
    factor = scale * units(DTYPE)
    if stats_ptr is not None:
        sums = no_sums(BLOCK)
        out_square = tl.zeros([BLOCK], tl.float32)

    # With statistics a program owns a whole head and walks over its cells. Otherwise it has one
    # block of cells, and this loop one step.
    for first in range(part * BLOCK, CELLS, PARTS * BLOCK):
        cells = first + tl.arange(0, BLOCK)
        cell_y, cell_x = cells // CELLS_X, cells % CELLS_X  # (BLOCK,)
        # One accumulator for each pixel of the cell. They live in registers over all its windows:
        # the sum over windows needs no atomics.
        accs = ()
        for _ in tl.static_range(STRIDE * STRIDE):
            accs += (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
        # Windows in a fixed order: the sum is bitwise deterministic.
        for t in tl.static_range(REACH * REACH):
            # The cell's own window, then those that start up to REACH - 1 cells before it.
            i, j = cell_y - t // REACH, cell_x - t % REACH
            # Cells at the rim have fewer windows. One that is not there has uniform probabilities
            # of values that are loaded as zeros: it adds nothing.
            visible = (cells < CELLS) & (i >= 0) & (i < WINDOWS_Y) & (j >= 0) & (j < WINDOWS_X)
            window_ptr = logits_ptr + (i * logits_view.stride_y + j * logits_view.stride_x)
            # First the softmax of the rows that belong to this cell's pixels, then their products
            # with the values: a row of probabilities is computed once.
            rows, pivots, inverses = (), (), ()
            for r in tl.static_range(STRIDE * STRIDE):
                if PLACES[t][r] < 0:
                    # Pixel r of a cell is outside this window: the tuples keep their order.
                    rows += ((),)
                    pivots += (0.0,)
                    inverses += (0.0,)
                else:
                    row, pivot, total, centred, row_square = softmax_row(
                        window_ptr + PLACES[t][r] * logits_view.stride_a,
                        visible,
                        factor,
                        K * K,
                        HELD,
                    )
                    if lse_ptr is not None:
                        window = (head.to(tl.int64) * WINDOWS_Y + i) * WINDOWS_X + j
                        lse = pivot * nats(DTYPE) + tl.log(total)  # (BLOCK,)
                        # Triton recomputes the row here in the layout of the store, one thread per
                        # window. This costs less than moving nine results between threads.
                        tl.store(lse_ptr + window * (K * K) + PLACES[t][r], lse, mask=visible)
                    if stats_ptr is not None:
                        row_sums = sums_of_rows(
                            row_max=pivot,
                            row_sum=total,
                            row_centred=centred,
                            row_square=row_square,
                            out_square=0.0,
                            inside=visible,
                            nats=nats(DTYPE),
                        )
                        sums = add_sums(sums, row_sums)
                    rows += (row,)
                    pivots += (pivot,)
                    inverses += (1.0 / total,)
            top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
            # Places are the outer loop: a value is loaded once for all pixels of the cell.
            if HELD:
                for place in tl.static_range(K * K):
                    v = load_pixels(
                        ptr=v_ptr,
                        view=v_view,
                        y=top,
                        x=left,
                        place=place,
                        visible=visible,
                        Y=Y,
                        X=X,
                        K=K,
                        D=D,
                        BLOCK_D=BLOCK_D,
                    )
                    new_accs = ()
                    for r in tl.static_range(STRIDE * STRIDE):
                        if PLACES[t][r] < 0:
                            new_accs += (accs[r],)
                        else:
                            new_accs += (accs[r] + rows[r][place][:, None] * v,)  # (BLOCK, BLOCK_D)
                    accs = new_accs
            else:
                # Rows of probabilities do not fit in registers: each is computed again where it is
                # needed, from a logit in the cache and the row's pivot and sum.
                for place in range(K * K):
                    v = load_pixels(
                        ptr=v_ptr,
                        view=v_view,
                        y=top,
                        x=left,
                        place=place,
                        visible=visible,
                        Y=Y,
                        X=X,
                        K=K,
                        D=D,
                        BLOCK_D=BLOCK_D,
                    )
                    new_accs = ()
                    for r in tl.static_range(STRIDE * STRIDE):
                        if PLACES[t][r] < 0:
                            new_accs += (accs[r],)
                        else:
                            ptrs = window_ptr + (PLACES[t][r] * logits_view.stride_a + place)
                            score = tl.load(ptrs, mask=visible, other=0.0).to(tl.float32)
                            exponent = scaled(score, factor) - pivots[r]  # (BLOCK,)
                            p = exponential(exponent, DTYPE) * inverses[r]
                            new_accs += (accs[r] + p[:, None] * v,)  # (BLOCK, BLOCK_D)
                    accs = new_accs
        square = store_pixels(  # (BLOCK,)
            ptr=out_ptr,
            tiles=accs,
            cells=cells,
            cell_y=cell_y,
            cell_x=cell_x,
            H=H,
            Y=Y,
            X=X,
            CELLS=CELLS,
            STRIDE=STRIDE,
            PADDING=PADDING,
            D=D,
            BLOCK_D=BLOCK_D,
        )
        if stats_ptr is not None:
            out_square += square
    if stats_ptr is not None:
        # Means are over every row of softmax of the head.
        num_rows = WINDOWS_Y * WINDOWS_X * (K * K)
        sums = with_output(sums, out_square)
        store_statistics(stats_ptr, sums, head, tl.num_programs(0), num_rows, nats(DTYPE))


BACKWARD_TILES = Tiles("outlook_backward", *RULES, num_warps=4, num_stages=1)


@triton.jit
def _logits_gradient(
    v_ptr,
    logits_ptr,
    do_ptr,
    dlogits_ptr,
    v_view,
    logits_view,
    do_view,
    first,
    H,
    Y,
    X,
    WINDOWS_Y,
    WINDOWS_X,
    scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """Write the gradients of the logits of windows ``first`` to ``first + BLOCK``."""
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    # A logit belongs to one window, and a window to one program: no sum crosses programs.
    windows, cols = first + tl.arange(0, BLOCK), tl.arange(0, BLOCK_COLS)
    visible = windows < WINDOWS_Y * WINDOWS_X
    i, j = windows // WINDOWS_X, windows % WINDOWS_X  # (BLOCK,)
    top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
    factor = scale * units(DTYPE)
    # The length of a tensor is a power of two in Triton: columns past K * K are padding.
    real = visible[:, None] & (cols < K * K)[None, :]  # (BLOCK, BLOCK_COLS)
    # With HELD the values of a window stay in registers for all its rows.
    values = ()
    if HELD:
        for place in tl.static_range(K * K):
            v = load_pixels(
                ptr=v_ptr,
                view=v_view,
                y=top,
                x=left,
                place=place,
                visible=visible,
                Y=Y,
                X=X,
                K=K,
                D=D,
                BLOCK_D=BLOCK_D,
            )
            values += (v,)
    # A row belongs to one pixel: its dO is read once, and meets every value of the window.
    for row in range(K * K):
        do = load_pixels(
            ptr=do_ptr,
            view=do_view,
            y=top,
            x=left,
            place=row,
            visible=visible,
            Y=Y,
            X=X,
            K=K,
            D=D,
            BLOCK_D=BLOCK_D,
        )
        # dP[row, place] = dO[row] . V[place], summed along the head dimension.
        dp = tl.zeros([BLOCK, BLOCK_COLS], tl.float32)
        if HELD:
            for place in tl.static_range(K * K):
                product = tl.sum(do * values[place], axis=1)  # (BLOCK,)
                # One column at a time: registers cannot be indexed at run time.
                dp = tl.where((cols == place)[None, :], product[:, None], dp)
        else:
            for place in range(K * K):
                v = load_pixels(
                    ptr=v_ptr,
                    view=v_view,
                    y=top,
                    x=left,
                    place=place,
                    visible=visible,
                    Y=Y,
                    X=X,
                    K=K,
                    D=D,
                    BLOCK_D=BLOCK_D,
                )
                product = tl.sum(do * v, axis=1)  # (BLOCK,)
                dp = tl.where((cols == place)[None, :], product[:, None], dp)
        offsets = i * logits_view.stride_y + j * logits_view.stride_x + row * logits_view.stride_a
        s = tl.load(logits_ptr + offsets[:, None] + cols[None, :], mask=real, other=0.0)
        s = scaled(s.to(tl.float32), factor)  # (BLOCK, BLOCK_COLS)
        s = tl.where((cols < K * K)[None, :], s, float("-inf"))
        # The row is complete here, so that its own maximum and sum serve; lse is for columns.
        e = exponential(s - tl.max(s, axis=1)[:, None], DTYPE)  # (BLOCK, BLOCK_COLS)
        p = e / tl.sum(e, axis=1)[:, None]  # (BLOCK, BLOCK_COLS)
        # delta = sum(P * dP) of the row: the output of the forward is not read.
        delta = tl.sum(p * dp, axis=1)  # (BLOCK,)
        ds = p * (dp - delta[:, None]) * scale  # (BLOCK, BLOCK_COLS)
        # dlogits is contiguous, whatever the strides of the logits are.
        rows = windows * (H * K * K * K * K) + row * (K * K)
        tl.store(dlogits_ptr + rows[:, None] + cols[None, :], ds.to(DTYPE), mask=real)


@triton.jit
def _value_gradient(
    logits_ptr,
    do_ptr,
    lse_ptr,
    dv_ptr,
    logits_view,
    do_view,
    first,
    H,
    Y,
    X,
    WINDOWS_Y,
    WINDOWS_X,
    CELLS_X,
    CELLS,
    scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    REACH: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of the values in cells ``first`` to ``first + BLOCK``."""
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    # dV of a pixel is a sum over the windows that hold it, in the order of the forward. The cell
    # owns its pixels, so that no program adds to the gradient of another.
    cells = first + tl.arange(0, BLOCK)
    cell_y, cell_x = cells // CELLS_X, cells % CELLS_X  # (BLOCK,)
    accs = ()
    for _ in tl.static_range(STRIDE * STRIDE):
        accs += (tl.zeros([BLOCK, BLOCK_D], tl.float32),)
    for t in tl.static_range(REACH * REACH):
        i, j = cell_y - t // REACH, cell_x - t % REACH
        visible = (
            (cells < CELLS) & (i >= 0) & (i < WINDOWS_Y) & (j >= 0) & (j < WINDOWS_X)
        )  # (BLOCK,)
        top, left = i * STRIDE - PADDING, j * STRIDE - PADDING
        # Row ``row`` of a window is the gradient at its pixel ``row``; this cell's value is one of
        # its columns.
        for row in tl.range(K * K, loop_unroll_factor=K):
            do = load_pixels(
                ptr=do_ptr,
                view=do_view,
                y=top,
                x=left,
                place=row,
                visible=visible,
                Y=Y,
                X=X,
                K=K,
                D=D,
                BLOCK_D=BLOCK_D,
            )
            lse_ptrs = lse_ptr + (i * WINDOWS_X + j) * (K * K) + row
            lse = tl.load(lse_ptrs, mask=visible, other=0.0)  # (BLOCK,)
            ptrs = logits_ptr + (
                i * logits_view.stride_y + j * logits_view.stride_x + row * logits_view.stride_a
            )
            new_accs = ()
            for r in tl.static_range(STRIDE * STRIDE):
                if PLACES[t][r] < 0:
                    new_accs += (accs[r],)
                else:
                    # One column of P: its rows belong to other pixels, which is why the log-sum-exp
                    # of the forward is read instead of summing each row again.
                    s = tl.load(ptrs + PLACES[t][r], mask=visible, other=0.0).to(tl.float32)
                    # lse is in nats: the difference is converted to the exponential's units.
                    p = exponential((s * scale - lse) * units(DTYPE), DTYPE)  # (BLOCK,)
                    new_accs += (accs[r] + p[:, None] * do,)  # (BLOCK, BLOCK_D)
            accs = new_accs
    store_pixels(
        ptr=dv_ptr,
        tiles=accs,
        cells=cells,
        cell_y=cell_y,
        cell_x=cell_x,
        H=H,
        Y=Y,
        X=X,
        CELLS=CELLS,
        STRIDE=STRIDE,
        PADDING=PADDING,
        D=D,
        BLOCK_D=BLOCK_D,
    )


@triton.jit(
    do_not_specialize=[
        *("B", "H", "Y", "X", "WINDOWS_Y", "WINDOWS_X", "CELLS_X", "CELLS"),
        *("WINDOW_PARTS", "PARTS"),
    ]
)
def _outlook_bwd_kernel(
    v_view,
    logits_view,
    do_view,
    lse_ptr,
    dv_ptr,
    dlogits_ptr,
    B,
    H,
    Y,
    X,
    WINDOWS_Y,
    WINDOWS_X,
    CELLS_X,
    CELLS,
    WINDOW_PARTS,
    PARTS,
    scale,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    REACH: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    program = tl.program_id(0)
    part, head = program % PARTS, (program // PARTS).to(tl.int64)
    b, h = head // H, head % H  # 64-bit
    v_ptr = head_of(v_view, b, h)
    logits_ptr = head_of(logits_view, b, h)
    do_ptr = head_of(do_view, b, h)
    # lse is contiguous, (B, H, y, x, K * K).
    lse_ptr += head * WINDOWS_Y * WINDOWS_X * (K * K)
    # The two kinds of programs share one launch, so that neither waits for the other to finish.
    if part < WINDOW_PARTS:
        dlogits_ptr += (b * WINDOWS_Y * WINDOWS_X * H + h) * (K * K * K * K)
        _logits_gradient(
            v_ptr=v_ptr,
            logits_ptr=logits_ptr,
            do_ptr=do_ptr,
            dlogits_ptr=dlogits_ptr,
            v_view=v_view,
            logits_view=logits_view,
            do_view=do_view,
            first=part * BLOCK,
            H=H,
            Y=Y,
            X=X,
            WINDOWS_Y=WINDOWS_Y,
            WINDOWS_X=WINDOWS_X,
            scale=scale,
            K=K,
            STRIDE=STRIDE,
            PADDING=PADDING,
            D=D,
            BLOCK_D=BLOCK_D,
            BLOCK_COLS=BLOCK_COLS,
            BLOCK=BLOCK,
            HELD=HELD,
        )
    else:
        dv_ptr += (b * Y * X * H + h) * D
        _value_gradient(
            logits_ptr=logits_ptr,
            do_ptr=do_ptr,
            lse_ptr=lse_ptr,
            dv_ptr=dv_ptr,
            logits_view=logits_view,
            do_view=do_view,
            first=(part - WINDOW_PARTS) * BLOCK,
            H=H,
            Y=Y,
            X=X,
            WINDOWS_Y=WINDOWS_Y,
            WINDOWS_X=WINDOWS_X,
            CELLS_X=CELLS_X,
            CELLS=CELLS,
            scale=scale,
            K=K,
            STRIDE=STRIDE,
            PADDING=PADDING,
            REACH=REACH,
            PLACES=PLACES,
            D=D,
            BLOCK_D=BLOCK_D,
            BLOCK=BLOCK,
        )


# --- Launches ------------------------------------------------------------------------------------


class LogitsView(NamedTuple):
    """Logits as kernels take them: strides of entry, window's row and column, head and place."""

    ptr: Tensor
    stride_b: int
    stride_y: int
    stride_x: int
    stride_h: int
    stride_a: int


def prepare_forward(call: OutlookCall, results: Results) -> Launch:
    """Return what fills the output, ``lse`` (B, H, y, x, K * K) and any statistics."""
    arguments = shared_arguments(call)
    arguments |= {"lse_ptr": results.lse, "stats_ptr": results.stats, "sample_ptr": None}
    # With statistics one program owns a head, so that its sums are complete, in one order.
    whole_heads = results.stats is not None
    return _forward(call, results.out, arguments, whole_heads)


def prepare_capture(call: OutlookCall, results: Results) -> Launch:
    """Return what fills the heads (S, Y * X, H * D) of sampled maps."""
    assert results.heads is not None
    arguments = shared_arguments(call)
    arguments |= {"lse_ptr": None, "stats_ptr": None, "sample_ptr": results.sample}
    return _forward(call, results.heads, arguments, whole_heads=False)


def _forward(
    call: OutlookCall, out: Tensor, arguments: dict[str, Any], whole_heads: bool
) -> Launch:
    tile = choose(FORWARD_TILES, arguments, call.value)
    parts = 1 if whole_heads else -(-arguments["CELLS"] // tile["BLOCK"])
    arguments |= {"out_ptr": out, "PARTS": parts, **tile.arguments}
    return Launch(_outlook_fwd_kernel, (len(out) * arguments["H"] * parts,), arguments)


def prepare_backward(grad: Tensor, call: OutlookCall, saved: Results, gradients: Any) -> Launch:
    """Return what fills dvalue (B, Y, X, H, D) and dlogits (B, y, x, H, K * K, K * K)."""
    # Inside a batch entry offsets are 32-bit: of a view of something larger they would not fit.
    _, *sizes = grad.shape
    stride_b, stride_y, stride_x, stride_h, stride_d = grad.stride()
    strides = stride_y, stride_x, stride_h, stride_d
    if sum((size - 1) * stride for size, stride in zip(sizes, strides)) > LARGEST_OFFSET:
        grad = grad.contiguous()
        stride_b, stride_y, stride_x, stride_h, _ = grad.stride()
    arguments = shared_arguments(call)
    tile = choose(BACKWARD_TILES, arguments, call.value, grad)
    windows = arguments["WINDOWS_Y"] * arguments["WINDOWS_X"]
    window_parts = -(-windows // tile["BLOCK"])
    parts = window_parts + -(-arguments["CELLS"] // tile["BLOCK"])
    arguments |= {
        "do_view": MapView(grad, stride_b, stride_y, stride_x, stride_h),
        "lse_ptr": saved.lse,
        "dv_ptr": gradients.dvalue,
        "dlogits_ptr": gradients.dlogits,
        "WINDOW_PARTS": window_parts,
        "PARTS": parts,
        "BLOCK_COLS": power_of_2(call.kernel_size**2),
        **tile.arguments,
    }
    return Launch(_outlook_bwd_kernel, (len(grad) * arguments["H"] * parts,), arguments)


def shared_arguments(call: OutlookCall) -> dict[str, Any]:
    """Return the arguments by name that both kernels take."""
    batch, y, x, heads, dim = call.value.shape
    _, windows_y, windows_x, *_ = call.logits.shape
    kernel_size, stride, padding = call.window
    # Cells start where the first window starts, and hold the map and all windows.
    cells_y, cells_x = (
        -(-(max(size, (count - 1) * stride - padding + kernel_size) + padding) // stride)
        for size, count in ((y, windows_y), (x, windows_x))
    )
    value_b, value_y, value_x, value_h, _ = call.value.stride()
    logits_b, logits_y, logits_x, logits_h, logits_a, _ = call.logits.stride()
    return {
        "v_view": MapView(call.value, value_b, value_y, value_x, value_h),
        "logits_view": LogitsView(call.logits, logits_b, logits_y, logits_x, logits_h, logits_a),
        "B": batch,
        "H": heads,
        "Y": y,
        "X": x,
        "WINDOWS_Y": windows_y,
        "WINDOWS_X": windows_x,
        "CELLS_X": cells_x,
        "CELLS": cells_y * cells_x,
        "scale": call.scale,
        "K": kernel_size,
        "STRIDE": stride,
        "PADDING": padding,
        "REACH": -(-kernel_size // stride),
        "PLACES": places(kernel_size, stride),
        "D": dim,
        "BLOCK_D": power_of_2(dim),
        # Triton 3.10 turns multiply-add fusion off by default.
        "enable_fp_fusion": True,
    }


@cache
def places(kernel_size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Return the place of each pixel of a cell, in rows, in each window that can hold it; -1: none.

    Windows come in the order of the kernels: the cell's own, then those that start before it.
    """
    reach = -(-kernel_size // stride)

    def place(a_y: int, a_x: int) -> int:
        return a_y * kernel_size + a_x if max(a_y, a_x) < kernel_size else -1

    cell = list(product(range(stride), repeat=2))
    return tuple(
        tuple(place(y + t_y * stride, x + t_x * stride) for y, x in cell)
        for t_y, t_x in product(range(reach), repeat=2)
    )


def choose(tiles: Tiles, arguments: dict[str, Any], *pixels: Tensor) -> Tile:
    """Return the tile for loads of ``pixels``; ``BLOCK`` is cells or windows of a program.

    A program has at most as many windows as threads. With more, Triton would move their values
    through shared memory.
    """
    present = {
        "padded_dim": arguments["D"] != arguments["BLOCK_D"],
        # Triton derives alignment from multiples of 16.
        "unaligned": any(stride % 16 for t in pixels for stride in t.stride()[:-1]),
        "wide": arguments["K"] > 3,
    }
    features = frozenset(name for name in present if present[name])
    first = pixels[0]
    tile = tiles.tile(first.device, size=first.element_size(), features=features)
    crowding = power_of_2(arguments["STRIDE"] ** 2) // 4 or 1
    block = tile["ELEMENTS"] // (arguments["BLOCK_D"] * crowding)
    return Tile({"BLOCK": max(1, min(64, block)), "HELD": tile["HELD"]}, tile.options)
