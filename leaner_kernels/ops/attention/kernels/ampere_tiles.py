"""What the kernels in Gluon for Ampere share: rows read and stored in the layouts of ``mma``.

A warp owns 16 rows of a tile, so that what a product gives becomes the left operand of the next
within registers. Left operands come straight from global memory.

In the layout of a product a thread holds two neighbouring elements of every eight, so that rows are
read and stored 4 bytes at a time, half a sector of each. Where ORDERED, the dimensions of a head
stand in another order on chip, within 32 (``element_at``): what a thread holds of a row is then 16
bytes side by side. Products sum over them in any order; results are stored in their own.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# The bodies of kernels are Gluon: layouts are constants, branches are decided early.

from ..._gluon import copy_async, gl, gluon


@gluon.constexpr_function
def copied(D, WARPS, ORDERED=False):
    """Return the layout in which threads copy rows, 16 bytes each, or 4 in another order."""
    if ORDERED:
        return gl.BlockedLayout([1, 2], [64 // D, D // 2], [WARPS, 1], [1, 0])
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def in_memory(D):
    """Return the layout of rows in shared memory, which ldmatrix reads either way unhindered."""
    return gl.SwizzledSharedLayout(8, 64 // D if D < 64 else 1, min(D // 8, 8), [1, 0])


@gluon.constexpr_function
def sixteen_bytes(ROWS, D, WARPS):
    """Return the layout of rows in their own order that holds what a left operand holds."""
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
    """Return which elements of a row stand at places on chip."""
    if ORDERED:
        places = (places & ~30) | ((places & 6) << 2) | ((places & 24) >> 2)
        places = gl.max_contiguous(gl.multiple_of(places, 2), 2)
    return places


@gluon.jit
def placed(x, ORDERED: gl.constexpr):
    """Return (rows, D) in the order on chip, from that of memory, or the other way."""
    ROWS: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if ORDERED:
        x = x.reshape([ROWS, D // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, D])
    return x


@gluon.jit
def head_start(view, b, h):
    """Return where head ``h`` of batch entry ``b`` starts, both 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@gluon.jit
def load_in_layout(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (ROWS, D) rows from ``start`` on, zero from ``end`` on, in the order of memory."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    return gl.load(ptrs, mask=(start + rows < end)[:, None], other=0.0)


@gluon.jit
def moved(x):
    """Return ``x`` in other registers: ptxas would move what 16 bytes brought at each use."""
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
    """Return rows as a left operand, in the order on chip."""
    if ORDERED:
        OWN: gl.constexpr = sixteen_bytes(ROWS, D, WARPS)
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
    """Return (D, ROWS): rows from ``start`` on as columns, zero from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, D, gl.SliceLayout(1, LAYOUT)), ORDERED)
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    return gl.load(ptrs, mask=(start + rows < end)[None, :], other=0.0)


@gluon.jit
def store_product_rows(
    ptr, STRIDE: gl.constexpr, x, start, end, WARPS: gl.constexpr, ORDERED: gl.constexpr
):
    """Store (rows, D) in the layout of a product, those before ``end``."""
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
    """Store (D, rows) in the layout of a product as rows, those before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    dims = element_at(gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT)), ORDERED)
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(start + rows < end)[None, :])


@gluon.jit
def copy_rows(
    shared, ptr, STRIDE: gl.constexpr, start, end, LAYOUT: gl.constexpr, ORDERED: gl.constexpr
):
    """Start to copy rows into shared memory, zeros from ``end`` on."""
    rows = gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = element_at(gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT)), ORDERED)
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    copy_async(shared, ptrs, mask=(start + rows < end)[:, None])
