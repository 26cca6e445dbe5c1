"""What the kernels in Gluon for Ampere share: rows read and stored in the layouts of ``mma``.

A warp owns 16 rows of a tile, so that what a product gives becomes the left operand of the next
within registers. Left operands come straight from global memory.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
# The bodies of kernels are Gluon: layouts are constants, branches are decided early.

from leaner_kernels.ops._gluon import copy_async, gl, gluon


@gluon.constexpr_function
def copied(D, WARPS):
    """Return the layout in which threads copy rows, 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def in_memory(D):
    """Return the layout of rows in shared memory, which ldmatrix reads either way unhindered."""
    return gl.SwizzledSharedLayout(8, 64 // D if D < 64 else 1, min(D // 8, 8), [1, 0])


@gluon.jit
def head_of(view, b, h):
    """Return where head ``h`` of batch entry ``b`` starts, both 64-bit."""
    return view.ptr + (b * view.stride_b + h * view.stride_h)


@gluon.jit
def load_rows(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (ROWS, D) rows from ``start`` on, zero from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    return gl.load(ptrs, mask=(start + rows < end)[:, None], other=0.0)


@gluon.jit
def load_columns(
    ptr, STRIDE: gl.constexpr, start, end, ROWS: gl.constexpr, D: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return (D, ROWS): rows from ``start`` on as columns, zero from ``end`` on."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    dims = gl.arange(0, D, gl.SliceLayout(1, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    return gl.load(ptrs, mask=(start + rows < end)[None, :], other=0.0)


@gluon.jit
def store_rows(ptr, STRIDE: gl.constexpr, x, start, end):
    """Store (rows, D) in the layout of a product, those before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(start + rows < end)[:, None])


@gluon.jit
def store_columns(ptr, STRIDE: gl.constexpr, x, start, end):
    """Store (D, rows) in the layout of a product as rows, those before ``end``."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    dims = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[None, :] * STRIDE + dims[:, None])
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(start + rows < end)[None, :])


@gluon.jit
def copy_rows(shared, ptr, STRIDE: gl.constexpr, start, end, LAYOUT: gl.constexpr):
    """Start to copy rows into shared memory, zeros from ``end`` on."""
    rows = gl.arange(0, shared.shape[0], gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, shared.shape[1], gl.SliceLayout(0, LAYOUT))
    ptrs = ptr + start * STRIDE + (rows[:, None] * STRIDE + dims[None, :])
    copy_async(shared, ptrs, mask=(start + rows < end)[:, None])
