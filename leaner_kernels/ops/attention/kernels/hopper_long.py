"""Gluon forward of softmax attention for long sequences on Hopper: a program owns 128 rows.

Sizes: B batch, H query heads, N tokens, D head dimension, S programs of a head. K and V are read in
tiles of 64 keys, once for two tiles of rows. The next tile is copied while one is in use, and the
products of one tile of rows run under the softmax of the other. The sums of a head's statistics are
left in S parts, as in online.py.
"""

import torch
import triton

from ..._epilogue import NUM_SUMS, store_part
from ..._gluon import barrier, commit_copies, fence_async_shared, gl, gluon, wait_copies
from ..._launch_cache import Launch
from ..._tiles import Tile, Tiles, rule
from ..._triton import LOG2_E
from ...route import Results
from ..call import Call, forward_arguments
from . import gluon_tiles as common
from .gluon_tiles import Dropout, Mask, RowState, Scoring
from .hopper import paired_step, step

ROWS = 128  # of a program

# For calls with as many rows as keys and at least 264 heads over all batch entries, whose K and V
# do not fit on chip as in hopper.py. Without statistics, PyTorch's attention is faster.
STATISTICS_TILES = Tiles(
    "hopper_long_forward_statistics",
    rule(dim=64, takes=("padded_dim", "shared"), maxnreg=255),
    num_warps=4,
)


@gluon.jit
def _next_tile(ks, vs, k_view, v_view, i, num_tiles, limit, D: gl.constexpr, GROUP: gl.constexpr):
    """Wait for tile ``i`` of keys, start copying the next one, and return K and V."""
    # One group is in flight, tile ``i``. The fence orders it before wgmma's reads.
    wait_copies(0)
    fence_async_shared()
    # All threads have copied tile ``i``, and all warps are done with tile ``i - 1``: their products
    # were waited for. Its buffer is filled again below.
    barrier()
    if i + 1 < num_tiles:
        other = (i + 1) & 1
        common.fetch_rows(
            shared=ks.index(other),
            view=k_view,
            start=(i + 1) * 64,
            end=limit,
            D=D,
            MASK=True,
            GROUP=GROUP,
        )
        common.fetch_rows(
            shared=vs.index(other),
            view=v_view,
            start=(i + 1) * 64,
            end=limit,
            D=D,
            MASK=True,
            GROUP=GROUP,
        )
    commit_copies()
    return ks.index(i & 1), vs.index(i & 1)


@gluon.jit(do_not_specialize=["H", "N"])
def _hopper_long_fwd_kernel(
    q_view,
    k_view,
    v_view,
    lengths_ptr,
    out_view,
    lse_ptr,
    max_log_sum_ptr,
    parts_ptr,
    H,
    N,
    scale,
    mask_view,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
):
    DTYPE: gl.constexpr = q_view.ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_D, 16, 2)
    qs = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK_D], SHARED)  # two tiles of rows
    ks = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK_D], SHARED)  # two buffers, used alternately
    vs = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK_D], SHARED)
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    limit = common.visible_keys(lengths_ptr, N)
    # Calls with a mask or dropout go to online.py.
    mask = Mask(None, None, None, None)
    scoring = Scoring(N, limit, scale * LOG2_E, mask, Dropout())
    first = gl.program_id(2) * 128
    head = gl.program_id(1) * H + gl.program_id(0)
    row_stats = head.to(gl.int64) * N
    # All 128 rows see the first ``num_unmasked`` tiles of keys, some row the first ``num_visible``.
    num_unmasked, num_visible = common.visible_tiles(
        (N + 63) // 64, limit, first, 128, True, CAUSAL
    )
    for n in gl.static_range(2):
        common.fetch_rows(qs.index(n), q_view, first + n * 64, N, D, True)
    common.fetch_rows(
        shared=ks.index(0), view=k_view, start=0, end=limit, D=D, MASK=True, GROUP=GROUP
    )
    common.fetch_rows(
        shared=vs.index(0), view=v_view, start=0, end=limit, D=D, MASK=True, GROUP=GROUP
    )
    commit_copies()
    # Q must land before it is loaded into registers, where it stays as the left operand. No fence:
    # ordinary loads read it.
    wait_copies(0)
    barrier()
    q = qs.index(0).load(gl.DotOperandLayout(0, OUT, 2))
    next_q = qs.index(1).load(gl.DotOperandLayout(0, OUT, 2))
    OWN: gl.constexpr = common.thread_sums(zero).type.layout
    zero_partials = gl.zeros([64, 4], gl.float32, OWN)
    acc = gl.zeros([64, BLOCK_D], gl.float32, OUT)
    row_max = gl.full([64], float("-inf"), gl.float32, ROW)
    state = RowState(acc, row_max, zero_partials, zero_partials, zero_partials)
    next_state = state
    # The first call waits for nothing: tile 0 landed with Q.
    for i in range(num_unmasked):
        k, v = _next_tile(
            ks=ks,
            vs=vs,
            k_view=k_view,
            v_view=v_view,
            i=i,
            num_tiles=num_visible,
            limit=limit,
            D=D,
            GROUP=GROUP,
        )
        state, next_state = paired_step(
            state=state,
            next_state=next_state,
            q=q,
            next_q=next_q,
            k=k,
            v=v,
            zero=zero,
            scoring=scoring,
            SCALED=False,
            STATS=True,
        )
    # Tiles that a mask or a length cuts: one tile of rows after the other.
    for i in range(num_unmasked, num_visible):
        k, v = _next_tile(
            ks=ks,
            vs=vs,
            k_view=k_view,
            v_view=v_view,
            i=i,
            num_tiles=num_visible,
            limit=limit,
            D=D,
            GROUP=GROUP,
        )
        state = step(
            state=state,
            q=q,
            k=k,
            v=v,
            zero=zero,
            first=first,
            start=i * 64,
            scoring=scoring,
            SCALED=False,
            HIDES=True,
            CAUSAL=CAUSAL,
            STATS=True,
        )
        next_state = step(
            state=next_state,
            q=next_q,
            k=k,
            v=v,
            zero=zero,
            first=first + 64,
            start=i * 64,
            scoring=scoring,
            SCALED=False,
            HIDES=True,
            CAUSAL=CAUSAL,
            STATS=True,
        )
    states, sums = (state, next_state), common.no_sums(64, ROW)
    for n in gl.static_range(2):
        acc, row_max, row_sum, centred, square = states[n]
        start = first + n * 64
        divisor = common.sum_threads(row_sum, ROW)
        acc = acc * (1.0 / gl.convert_layout(divisor, gl.SliceLayout(1, OUT)))[:, None]
        # Q is in registers, so that its buffer may stage the output.
        common.store_staged_rows(
            view=out_view, x=acc, stage=qs.index(n), start=start, end=N, D=D, MASK=True
        )
        rows = start + gl.arange(0, 64, ROW)
        inside = rows < N
        log_sum = common.store_row_statistics(
            max_log_sum_ptr=max_log_sum_ptr,
            lse_ptr=lse_ptr,
            rows=row_stats + rows,
            row_max=row_max,
            divisor=divisor,
            factor=scoring.factor,
            unit=scale,
            inside=inside,
            MASKED=False,
            SCALED=False,
        )
        gl.store(lse_ptr + row_stats + rows, row_max * scale + log_sum, mask=inside)
        norm = gl.convert_layout(gl.sum(acc * acc, 1), ROW)
        centred, square = common.sum_threads(centred, ROW), common.sum_threads(square, ROW)
        sums = common.add_sums(
            sums, common.sums_of_rows(row_max, divisor, centred, square, norm, inside)
        )
    # ``join`` adds the parts of a head up in a fixed order.
    part = head.to(gl.int64) * gl.num_programs(2) + gl.program_id(2)
    store_part(parts_ptr, sums, part, N, scale)


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D), max_log_sum (B, H, N, 2) and lse (B, H, N).

    The launch also writes the parts of the statistics, (B, H, S, NUM_SUMS).
    """
    batch, heads, tokens, _ = call.query.shape
    programs = triton.cdiv(tokens, ROWS)
    parts = call.query.new_empty((batch, heads, programs, NUM_SUMS), dtype=torch.float32)
    arguments = forward_arguments(_hopper_long_fwd_kernel, call, results)
    arguments |= dict(**tile.options, parts_ptr=parts)
    return Launch(_hopper_long_fwd_kernel, (heads, batch, programs), arguments)
