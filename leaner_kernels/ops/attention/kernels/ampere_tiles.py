"""Helpers of the Gluon kernels for Ampere: rows loaded and stored in the layouts of ``mma``.

A warp owns 16 rows of a tile, so that the result of a product becomes the left operand of the next
within registers. Left operands are loaded straight from global memory.

In the layout of a product, a thread holds two neighbouring elements of every eight: rows are loaded
and stored 4 bytes at a time, and half of each sector is unused. With ORDERED, the dimensions of a
head are permuted on chip within groups of 32 (``element_at``), so that a thread holds 16 contiguous
bytes of a row. The order does not matter to products that sum over the dimensions; results are
stored in their natural order.
"""

from ..._gluon import copy_async, gl, gluon


@gluon.constexpr_function
def copied(D, WARPS, ORDERED=False):
    """Return the layout of asynchronous copies: 16 bytes per thread, or 4 with ORDERED."""
    # Two neighbours stay together in the permutation: 4 bytes are the widest possible copy.
    if ORDERED:
        return gl.BlockedLayout([1, 2], [64 // D, D // 2], [WARPS, 1], [1, 0])
    # Each thread copies eight elements, 16 bytes; a warp copies 256 elements.
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def in_memory(D):
    """Return a layout of shared memory that ldmatrix reads without conflicts, transposed or not."""
    return gl.SwizzledSharedLayout(8, 64 // D if D < 64 else 1, min(D // 8, 8), [1, 0])


@gluon.constexpr_function
def sixteen_bytes(ROWS, D, WARPS):
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
def element_at(places, ORDERED: gl.constexpr):
    """Return the elements of a row that lie at the given places on chip."""
    if ORDERED:
        # Within 32: bits 1 and 2 of a place, the lane, become bits 3 and 4 of the element, and vice
        # versa. A lane then holds eight neighbouring elements.
        places = (places & ~30) | ((places & 6) << 2) | ((places & 24) >> 2)
        # Bit 0 stays, which the compiler cannot see through the bits above.
        places = gl.max_contiguous(gl.multiple_of(places, 2), 2)
    return places


@gluon.jit
def placed(x, ORDERED: gl.constexpr):
    """Permute (rows, D) from the order of memory to that on chip; the map is its own inverse."""
    ROWS: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if ORDERED:
        x = x.reshape([ROWS, D // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, D])
    return x


@gluon.jit
def head_start(view, b, h):
    """Return a pointer to head ``h`` of batch entry ``b``; both indices are 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@gluon.jit
def load_in_layout(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load rows from ``start`` on as (ROWS, D), zero from ``end`` on, in the order of memory."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    return gl.load(ptrs, mask=(start + rows < end)[:, None], other=0.0)  # (ROWS, D)


@gluon.jit
def moved(x):
    """Copy ``x`` to other registers, once; otherwise ptxas would do so at each use."""
    # The grid has two axes: this index is always 0, which the compiler does not know.
    nothing = gl.program_id(2).to(gl.int16).to(x.dtype, bitcast=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $2;", "=r,r,r", [x, gl.full_like(x, nothing)], dtype=x.dtype, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def load_left(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LEFT: gl.constexpr, WARPS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Load rows as a left operand, in the order on chip."""
    if ORDERED:
        OWN: gl.constexpr = sixteen_bytes(ROWS, D, WARPS)
        # 16-byte loads of the elements that the thread owns as a left operand: the permutation and
        # the conversion rename registers.
        x = load_in_layout(ptr, STRIDE, start, end, ROWS, D, OWN)
        x = moved(gl.convert_layout(placed(x, True), LEFT))
    else:
        x = load_in_layout(ptr, STRIDE, start, end, ROWS, D, LEFT)
    return x


@gluon.jit
def load_columns(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Load rows from ``start`` on as the columns of (D, ROWS), zero from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, D, gl.SliceLayout(1, LAYOUT)), ORDERED)  # (D,)
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    return gl.load(ptrs, mask=(start + rows < end)[None, :], other=0.0)  # (D, ROWS)


@gluon.jit
def store_product_rows(
    ptr, STRIDE: gl.constexpr, x, start, end, WARPS: gl.constexpr, ORDERED: gl.constexpr
):
    """Store rows before ``end`` of (rows, D), the result of a product."""
    x = x.to(ptr.dtype.element_ty)
    if ORDERED:
        OWN: gl.constexpr = sixteen_bytes(x.shape[0], x.shape[1], WARPS)
        x = gl.convert_layout(placed(x, True), OWN)
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    gl.store(ptrs, x, mask=(start + rows < end)[:, None])


@gluon.jit
def store_columns(ptr, STRIDE: gl.constexpr, x, start, end, ORDERED: gl.constexpr):
    """Store the columns of (D, rows), the result of a product, as rows before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)), ORDERED)
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(start + rows < end)[None, :])


@gluon.jit
def copy_rows(
    shared, ptr, STRIDE: gl.constexpr, start, end, LAYOUT: gl.constexpr, ORDERED: gl.constexpr
):
    """Start an asynchronous copy of rows into shared memory; write zeros from ``end`` on."""
    rows = gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = element_at(gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT)), ORDERED)
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    copy_async(shared, ptrs, mask=(start + rows < end)[:, None])
