"""Gluon kernels of softmax attention for up to 16 tokens: a warp owns neighbouring heads.

Sizes: B batch, H heads, N tokens, D head dimension. Mapping: a warp owns HEADS heads of one
sequence, which are WIDTH = HEADS * D neighbouring columns in memory. If heads are not neighbours,
as in a contiguous (B, H, N, D), it owns one. The columns are loaded once, as pairs in 32-bit words
and in the layout of a product, in tiles of 16 rows by 16 columns. Heads may share a tile: the
scores of a head use every tile that it touches, with zeros in the columns of other heads, and its
results are written to its own columns. Transposed operands are exchanged between lanes. Nothing
passes through shared memory, no warp waits for another, and the backward recomputes softmax and
delta = sum(P * dP) from Q, K, V and dO alone.

Every tile has a leading axis for the warps of a program; ``owners`` is the number of warps, over
all programs, that own heads. The order of columns within a tile does not matter to a sum over them,
nor to a result that is stored in the same order.
"""

from typing import Any

import triton
from torch import Tensor

from ..._gluon import gl, gluon, mma
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LN_2, LOG2_E
from ...route import Results
from ..call import Call, Gradients, backward_arguments, forward_arguments
from .gluon_tiles import mask_scores, reduce_sums, store_statistics, sums_of_entropies, with_output

# HEADS is the largest number of heads per warp.
_RULES = (
    rule(dim=16, tokens=16, takes=("padded_dim", "unaligned"), HEADS=4, num_warps=4),
    rule(dim=32, tokens=16, takes=("padded_dim", "unaligned"), HEADS=2, num_warps=4),
    rule(dim=64, tokens=16, takes=("padded_dim", "unaligned"), HEADS=1, num_warps=4),
)
FORWARD_TILES = Tiles("warp_multihead_forward", *_RULES)
STATISTICS_TILES = Tiles("warp_multihead_forward_statistics", *_RULES)
BACKWARD_TILES = Tiles("warp_multihead_backward", *_RULES)


@gluon.jit
def _axes(LAYOUT: gl.constexpr, COLS: gl.constexpr):
    """Return this program's warps, counted over all programs, and a tile's rows and columns."""
    WARPS: gl.constexpr = gl.num_warps()
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    rows = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.program_id(0) * WARPS + warps, rows, cols


@gluon.jit
def _number_of_keys(lengths_ptr, warp, owners, N: gl.constexpr, GROUPS: gl.constexpr):
    """Return the number of visible keys per warp: N, or a tensor of the shape of ``warp``."""
    limit = N
    if lengths_ptr is not None:
        limit = gl.load(lengths_ptr + warp // GROUPS, mask=warp < owners, other=1)
        limit = gl.minimum(gl.maximum(limit, 1), N)
    return limit


@gluon.jit
def _load(
    view,
    lengths_ptr,
    owners,
    N: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Load tiles of 32-bit words (WARPS, 16, 8), two elements each; zero outside."""
    WIDTH: gl.constexpr = HEADS * D
    warp, rows, cols = _axes(LAYOUT, 8)
    entry, group = (warp // GROUPS).to(gl.int64), (warp % GROUPS).to(gl.int64)
    # Rows start at even elements (``_pairs_elements``), so that strides are halved exactly.
    words = view.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words += entry * (view.stride_b // 2) + group * (HEADS * view.stride_h // 2)
    inside = warp < owners  # (WARPS, 1, 1)
    if lengths_ptr is not None or N < 16:
        inside = inside & (rows < _number_of_keys(lengths_ptr, warp, owners, N, GROUPS))
    tiles = ()
    for start in gl.static_range(0, WIDTH // 2, 8):
        within = inside
        # The last tile may be wider than the heads.
        if start + 8 > WIDTH // 2:
            within = within & (cols < WIDTH // 2 - start)
        tile = gl.load(words + (rows * (view.stride_n // 2) + (start + cols)), mask=within, other=0)
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@gluon.jit
def _store(
    view,
    tiles,
    scale,
    owners,
    N: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Scale and store tiles whose columns are in the order of ``_row_sum_operands``."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = HEADS * D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    warp, rows, cols = _axes(LAYOUT, 16)
    entry, group = (warp // GROUPS).to(gl.int64), (warp % GROUPS).to(gl.int64)
    ptrs = view.ptr + entry * view.stride_b + group * (HEADS * view.stride_h)
    ptrs += rows * view.stride_n + cols
    inside = warp < owners
    if N < 16:
        inside = inside & (rows < N)
    for c in gl.static_range(len(tiles)):
        # Columns come as eight even ones, then eight odd ones: interleave them again.
        x = (tiles[c] * scale).to(view.ptr.dtype.element_ty).reshape([WARPS, 16, 2, 8])
        x = gl.convert_layout(x.permute((0, 1, 3, 2)).reshape([WARPS, 16, 16]), LAYOUT)
        within = inside
        if c * 16 + 16 > WIDTH:
            within = within & (cols < WIDTH - c * 16)
        gl.store(ptrs + c * 16, x, mask=within)


@gluon.jit
def _pairs(words, DTYPE: gl.constexpr):
    """Split words into both of their elements: (WARPS, 16, 8, 2)."""
    low = words.to(gl.int16).to(DTYPE, bitcast=True)  # (WARPS, 16, 8)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _columns_of_head(
    words,
    TILE: gl.constexpr,
    HEAD: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Return an operand (WARPS, 16, 16) of a sum over columns, zero outside of a head.

    Neighbouring words belong to one thread, so that the permutation moves no data.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = words.type.layout
    _, _, cols = _axes(LAYOUT, 8)
    # The head's first word in this tile; negative if the head starts in an earlier one.
    FIRST: gl.constexpr = HEAD * D // 2 - TILE * 8
    if FIRST > 0:
        words = gl.where(cols >= FIRST, words, 0)
    if FIRST + D // 2 < 8 and HEAD + 1 < HEADS:
        words = gl.where(cols < FIRST + D // 2, words, 0)
    # A permutation of the columns: the same for both operands, so that the sum is unchanged.
    pairs = _pairs(words, DTYPE).reshape([WARPS, 16, 4, 2, 2]).permute((0, 1, 3, 2, 4))
    return pairs.reshape([WARPS, 16, 16])


@gluon.jit
def _scores(
    lefts,
    rights,
    HEAD: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    DTYPE: gl.constexpr,
    MMA: gl.constexpr,
):
    """Return x y^T of a head, (WARPS, 16, 16), from tiles of words."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    s = gl.zeros([gl.num_warps(), 16, 16], gl.float32, MMA)
    # Only the tiles that this head touches.
    for c in gl.static_range(HEAD * D // 16, (HEAD * D + D + 15) // 16):
        x = gl.convert_layout(_columns_of_head(lefts[c], c, HEAD, D, HEADS, DTYPE), LEFT)
        y = _columns_of_head(rights[c], c, HEAD, D, HEADS, DTYPE).permute((0, 2, 1))
        s = mma(x, gl.convert_layout(y, RIGHT), s)
    return s


@gluon.jit
def _row_sum_operands(tiles, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """Return tiles of words as right operands of a sum over rows: even columns, then odd ones.

    Lanes exchange the words of tiles that were loaded in another layout.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    operands = ()
    for c in gl.static_range(len(tiles)):
        pairs = _pairs(gl.convert_layout(tiles[c], LAYOUT), DTYPE).permute((0, 1, 3, 2))
        operands = operands + (gl.convert_layout(pairs.reshape([WARPS, 16, 16]), RIGHT),)  # noqa: RUF005
    return operands


@gluon.jit
def _insert_product(sums, a, lefts, HEAD: gl.constexpr, D: gl.constexpr, MMA: gl.constexpr):
    """Write the product a x to the tiles that a head touches, from its first column on.

    Columns of later heads are overwritten by those heads in turn, so that no head adds to the
    results of another.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    _, _, cols = _axes(MMA, 16)
    a = gl.convert_layout(a, LEFT)
    totals = ()
    for c in gl.static_range(len(sums)):
        total = sums[c]
        if c >= HEAD * D // 16 and c * 16 < HEAD * D + D:
            total = mma(a, lefts[c], gl.zeros([gl.num_warps(), 16, 16], gl.float32, MMA))
            # Keep the columns of earlier heads. Column j of the product is element j % 8 * 2, or
            # one more.
            if c * 16 < HEAD * D:
                total = gl.where(cols % 8 * 2 >= HEAD * D - c * 16, total, sums[c])
        totals = totals + (total,)  # noqa: RUF005
    return totals


@gluon.jit
def _zeros(TILES: gl.constexpr, MMA: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(TILES):
        zeros = zeros + (gl.zeros([gl.num_warps(), 16, 16], gl.float32, MMA),)  # noqa: RUF005
    return zeros


@gluon.jit
def _store_pairs(
    ptr, row_max, log_sum, owners, HEAD: gl.constexpr, N: gl.constexpr, HEADS: gl.constexpr
):
    both = gl.join(row_max, log_sum)  # (WARPS, 16, 2)
    LAYOUT: gl.constexpr = both.type.layout
    warp, rows, which = _axes(LAYOUT, 2)
    head = warp.to(gl.int64) * HEADS + HEAD
    inside = warp < owners
    if N < 16:
        inside = inside & (rows < N)
    gl.store(ptr + (head * (2 * N) + (rows * 2 + which)), both, mask=inside)


@gluon.jit
def _owned_heads(LAYOUT: gl.constexpr, owners, HEAD: gl.constexpr, HEADS: gl.constexpr):
    """Return the index of head HEAD of each warp, and whether it exists, (WARPS,) each."""
    WARPS: gl.constexpr = gl.num_warps()
    warp = gl.program_id(0) * WARPS + gl.arange(0, WARPS, LAYOUT)
    return warp.to(gl.int64) * HEADS + HEAD, warp < owners


@gluon.jit
def _store_lse(lse_ptr, lse, owners, HEAD: gl.constexpr, N: gl.constexpr, HEADS: gl.constexpr):
    """Store the log-sum-exp of a head's rows (WARPS, 16)."""
    LAYOUT: gl.constexpr = lse.type.layout
    rows = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]  # (1, 16)
    head, exists = _owned_heads(gl.SliceLayout(1, LAYOUT), owners, HEAD, HEADS)
    inside = (rows < N) & exists[:, None]
    gl.store(lse_ptr + (head[:, None] * N + rows), lse, mask=inside)


@gluon.jit
def _sums_of_head(row_max, entropies, squares, N: gl.constexpr):
    """Return the sums of a head's rows (WARPS, 16), (WARPS,) each."""
    rows = gl.arange(0, 16, gl.SliceLayout(0, row_max.type.layout))[None, :]  # (1, 16)
    return reduce_sums(sums_of_entropies(row_max, entropies, squares, 0.0, rows < N), 1)


@gluon.jit
def _square_of_head(tiles, HEAD: gl.constexpr, N: gl.constexpr, D: gl.constexpr, MMA: gl.constexpr):
    """Return the sum of squares of a head in the tiles of ``_insert_product``, (WARPS,)."""
    _, rows, cols = _axes(MMA, 16)
    squares = gl.zeros([gl.num_warps(), 16, 16], gl.float32, MMA)
    for c in gl.static_range(HEAD * D // 16, (HEAD * D + D + 15) // 16):
        dims = cols % 8 * 2 + c * 16
        inside = (dims >= HEAD * D) & (dims < HEAD * D + D) & (rows < N)
        squares += gl.where(inside, tiles[c] * tiles[c], 0.0)
    return gl.sum(gl.sum(squares, 2), 1)


@gluon.jit
def _store_sums(
    stats_ptr, sums, square, owners, scale, HEAD: gl.constexpr, N: gl.constexpr, HEADS: gl.constexpr
):
    """Store the statistics of one head of each warp."""
    LAYOUT: gl.constexpr = square.type.layout
    head, exists = _owned_heads(LAYOUT, owners, HEAD, HEADS)
    sums = with_output(sums, square)
    store_statistics(
        ptr=stats_ptr,
        sums=sums,
        head=head,
        num_heads=owners * HEADS,
        num_rows=N,
        scale=scale,
        inside=exists,
    )


@gluon.jit(do_not_specialize=["owners"])
def _warp_multihead_fwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    stats_ptr,
    owners,
    scale,
    N: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    HIDES: gl.constexpr = lengths_ptr is not None or N < 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    BY_COLS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    BY_ROWS: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 4, 8], [WARPS, 1, 1], [1, 2, 0])
    # Padding is zeroed in keys and values alone. Rows past N are zeros in all three.
    qs = _load(
        view=q_view,
        lengths_ptr=None,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )  # words: tuple of (WARPS, 16, 8)
    ks = _load(
        view=k_view,
        lengths_ptr=lengths_ptr,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )
    vs = _load(
        view=v_view,
        lengths_ptr=lengths_ptr,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_ROWS,
    )
    vs = _row_sum_operands(vs, DTYPE, MMA)  # tuple of (WARPS, 16, 16)
    outs = _zeros(len(qs), MMA)  # tuple of (WARPS, 16, 16)
    warp, rows, cols = _axes(MMA, 16)  # (WARPS, 1, 1), (1, 16, 1), (1, 1, 16)
    limit = _number_of_keys(lengths_ptr, warp, owners, N, GROUPS)
    factor = scale * LOG2_E
    head_sums = ()
    # Every row sees the first key, so that each maximum is finite and each sum positive.
    for h in gl.static_range(HEADS):
        s = _scores(
            lefts=qs, rights=ks, HEAD=h, D=D, HEADS=HEADS, DTYPE=DTYPE, MMA=MMA
        )  # (WARPS, 16, 16)
        s = mask_scores(s, rows, cols, limit if HIDES else None, CAUSAL, float("-inf"))
        row_max = gl.max(s, 2)  # (WARPS, 16)
        # An explicit fma rounds the product here, not where it is subtracted.
        pivot = gl.fma(row_max, factor, 0.0)
        p = gl.exp2(s * factor - pivot[:, :, None])
        row_sum = gl.sum(p, 2)  # (WARPS, 16)
        p *= (1.0 / row_sum)[:, :, None]
        outs = _insert_product(outs, p.to(DTYPE), vs, h, D, MMA)
        # The sum takes up the rounding error of the pivot, which the second fma gives exactly.
        log_sum = gl.log(row_sum) - gl.fma(row_max, factor, -pivot) * LN_2  # (WARPS, 16)
        if max_log_sum_ptr is not None:
            _store_pairs(
                ptr=max_log_sum_ptr,
                row_max=row_max,
                log_sum=log_sum,
                owners=owners,
                HEAD=h,
                N=N,
                HEADS=HEADS,
            )
        if stats_ptr is not None:
            # 0 * -inf would be nan.
            exponents = gl.where(p == 0, 0.0, s * factor - pivot[:, :, None])
            entropies = gl.log(row_sum) - LN_2 * gl.sum(p * exponents, 2)  # (WARPS, 16)
            squares = gl.sum(p * p, 2)  # (WARPS, 16)
        if lse_ptr is not None:
            _store_lse(lse_ptr, row_max * scale + log_sum, owners, h, N, HEADS)
        if stats_ptr is not None:
            head_sums = head_sums + (_sums_of_head(row_max, entropies, squares, N),)  # noqa: RUF005
    # One store for all heads of the warp: whole rows of WIDTH columns.
    _store(
        view=out_view, tiles=outs, scale=1.0, owners=owners, N=N, D=D, HEADS=HEADS, GROUPS=GROUPS
    )
    if stats_ptr is not None:
        for h in gl.static_range(HEADS):
            square = _square_of_head(outs, h, N, D, MMA)  # (WARPS,)
            _store_sums(
                stats_ptr=stats_ptr,
                sums=head_sums[h],
                square=square,
                owners=owners,
                scale=scale,
                HEAD=h,
                N=N,
                HEADS=HEADS,
            )


@gluon.jit(do_not_specialize=["owners"])
def _warp_multihead_bwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    do_view,
    dq_view,
    dk_view,
    dv_view,
    owners,
    scale,
    N: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    HIDES: gl.constexpr = lengths_ptr is not None or N < 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    BY_COLS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    qs = _load(
        view=q_view,
        lengths_ptr=None,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )  # words: tuple of (WARPS, 16, 8)
    ks = _load(
        view=k_view,
        lengths_ptr=lengths_ptr,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )
    dos = _load(
        view=do_view,
        lengths_ptr=None,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )
    vs = _load(
        view=v_view,
        lengths_ptr=lengths_ptr,
        owners=owners,
        N=N,
        D=D,
        HEADS=HEADS,
        GROUPS=GROUPS,
        LAYOUT=BY_COLS,
    )
    # dQ = dS K, dK = dS^T Q and dV = P^T dO sum over rows of these operands.
    q_rows = _row_sum_operands(qs, DTYPE, MMA)  # tuple of (WARPS, 16, 16)
    k_rows = _row_sum_operands(ks, DTYPE, MMA)
    do_rows = _row_sum_operands(dos, DTYPE, MMA)
    dqs, dks, dvs = _zeros(len(qs), MMA), _zeros(len(qs), MMA), _zeros(len(qs), MMA)
    warp, rows, cols = _axes(MMA, 16)  # (WARPS, 1, 1), (1, 16, 1), (1, 1, 16)
    limit = _number_of_keys(lengths_ptr, warp, owners, N, GROUPS)
    factor = scale * LOG2_E
    for h in gl.static_range(HEADS):
        # P again, by the arithmetic of the forward.
        s = _scores(
            lefts=qs, rights=ks, HEAD=h, D=D, HEADS=HEADS, DTYPE=DTYPE, MMA=MMA
        )  # (WARPS, 16, 16)
        s = mask_scores(s, rows, cols, limit if HIDES else None, CAUSAL, float("-inf"))
        pivot = gl.fma(gl.max(s, 2), factor, 0.0)  # (WARPS, 16)
        p = gl.exp2(s * factor - pivot[:, :, None])
        p *= (1.0 / gl.sum(p, 2))[:, :, None]
        dp = _scores(
            lefts=dos, rights=vs, HEAD=h, D=D, HEADS=HEADS, DTYPE=DTYPE, MMA=MMA
        )  # (WARPS, 16, 16)
        # delta = sum(P dP): the output need not be read.
        ds = (p * (dp - gl.sum(p * dp, 2)[:, :, None])).to(DTYPE)  # (WARPS, 16, 16)
        dvs = _insert_product(dvs, p.to(DTYPE).permute((0, 2, 1)), do_rows, h, D, MMA)
        dks = _insert_product(dks, ds.permute((0, 2, 1)), q_rows, h, D, MMA)
        dqs = _insert_product(dqs, ds, k_rows, h, D, MMA)  # tuple of (WARPS, 16, 16)
    _store(
        view=dq_view, tiles=dqs, scale=scale, owners=owners, N=N, D=D, HEADS=HEADS, GROUPS=GROUPS
    )
    _store(
        view=dk_view, tiles=dks, scale=scale, owners=owners, N=N, D=D, HEADS=HEADS, GROUPS=GROUPS
    )
    _store(view=dv_view, tiles=dvs, scale=1.0, owners=owners, N=N, D=D, HEADS=HEADS, GROUPS=GROUPS)


def _launch(kernel: Any, tile: Tile, call: Call, arguments: dict[str, Any]) -> Launch:
    batch, heads, _, dim = call.query.shape
    views = {name: value for name, value in arguments.items() if name.endswith("_view")}
    # Heads that are not neighbours in memory get one warp each.
    most = tile["HEADS"] if all(view.stride_h == dim for view in views.values()) else 1
    of_warp = max(n for n in range(1, most + 1) if heads % n == 0)
    groups = heads // of_warp
    own = {"HEADS": of_warp, "GROUPS": groups, "owners": batch * groups}
    # Strides are compile-time constants: addresses need few registers.
    for name, view in views.items():
        arguments[name] = type(view)(view.ptr, *map(gl.constexpr, view[1:]))
    grid = (triton.cdiv(batch * groups, tile.options["num_warps"]),)
    return Launch(kernel, grid, arguments | tile.arguments | own)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

    With ``stats`` (statistics, B, H), it also writes ``stats`` and lse (B, H, N).
    """
    arguments = forward_arguments(_warp_multihead_fwd_kernel, call, results)
    return _launch(_warp_multihead_fwd_kernel, tile, call, arguments)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk and dv (B, H, N, D)."""
    arguments = backward_arguments(_warp_multihead_bwd_kernel, grad, call, saved, gradients)
    return _launch(_warp_multihead_bwd_kernel, tile, call, arguments)
