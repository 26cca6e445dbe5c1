"""Warp-specialised Gluon kernels of softmax attention on Hopper, persistent, with copies by TMA.

Sizes: B batch, H query heads, N tokens, D head dimension. No table selects these kernels: no GPU
has timed them yet. ``python -m bench.tune --candidates`` compares them with the ones that run.

A program stays on its SM and computes one head, or a block of one, after the other. One warp, the
producer, copies tiles of 64 tokens into rings in shared memory; warpgroups, the consumers, compute.
Every stage of a ring has two mbarriers. The producer waits until consumers have released the stage,
a consumer until its bytes have arrived. So the copies of the next head run under the products of
this one. TMA fills tiles past the last token with zeros, and stores nothing there.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ... import _tiles
from ..._epilogue import NUM_SUMS, PART
from ..._gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..._launch_cache import Launch, Scratch
from ..._tiles import OPTIONS, Tile, Tiles, block_dim, rule
from ..._triton import LOG2_E
from ...route import Results
from ..call import Call, Gradients, backward_arguments, forward_arguments
from . import gluon_tiles as common
from .gluon_tiles import Dropout, Mask, RowState, Scoring
from .hopper import step

SLOTS = 2  # blocks of K and V on chip in a backward
TAILS = 16, 32  # keys of a product narrower than a tile

# For calls with as many rows as keys. STAGES are those of the ring of tiles. REGISTERS are those of
# a thread of a consumer.
FORWARD_TILES = Tiles(
    "hopper_tma_forward",
    rule(
        dim=64,
        tokens=128,
        takes=("padded_dim", "shared"),
        CONSUMERS=2,
        STAGES=4,
        REGISTERS=104,
        maxnreg=80,
    ),
    rule(dim=64, tokens=4096, takes=("padded_dim", "shared"), CONSUMERS=4, STAGES=8, REGISTERS=120),
    num_warps=4,
)
STATISTICS_TILES = Tiles("hopper_tma_forward_statistics", *FORWARD_TILES.rules)
BACKWARD_TILES = Tiles(
    "hopper_tma_backward",
    rule(dim=32, tokens=4096, takes=("padded_dim",), STAGES=4, REGISTERS=208),
    rule(dim=64, tokens=4096, takes=("padded_dim",), STAGES=3, REGISTERS=208),
    num_warps=4,
)


@gluon.jit
def ring_stage(count, STAGES: gl.constexpr):
    """Return the stage and the parity of the ``count``-th use of a ring."""
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
def init_ring(full, empty, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Initialise the mbarriers of a ring whose stages CONSUMERS partitions release."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)


@gluon.jit
def start_load(desc, b, h, row, stage, full):
    """Start copying the tile of a head that begins at ``row``; ``full`` awaits its bytes."""
    mbarrier.expect(full, desc.block_type.nbytes)
    load_tile(desc, [b, h, row, 0], full, stage)


@gluon.jit
def tile_of(stage):
    """Return a stage (1, 1, rows, D) as the tile (rows, D)."""
    return stage.reshape([stage.shape[2], stage.shape[3]])


@gluon.jit
def visible_key_tiles(N, limit, first, CAUSAL: gl.constexpr, ROWS: gl.constexpr):
    """Return the number of tiles of keys that rows from ``first`` on see at least in part."""
    tiles = (limit + 63) // 64
    if CAUSAL:
        tiles = gl.minimum(tiles, (gl.minimum(first + ROWS, N) + 63) // 64)
    return tiles


class Ring(NamedTuple):
    """A ring of tiles in shared memory.

    Attributes:
        tiles: the buffers.
        full: mbarriers, one a stage: the bytes of the stage have arrived.
        empty: mbarriers, one a stage: the consumers have released the stage.
    """

    tiles: Any
    full: Any
    empty: Any


class Work(NamedTuple):
    """The work of a launch: its programs take one block of a head after the other.

    Attributes:
        H: query heads.
        N: tokens.
        heads: query heads of all batch entries.
        blocks: number of blocks of a head.
        lengths_ptr: (B,) int32, or None.
    """

    H: Any
    N: Any
    heads: Any
    blocks: Any
    lengths_ptr: Any


@gluon.jit
def locate(work, item):
    """Return batch entry, head in it, head of all, block, and the number of keys it sees."""
    head, block = item // work.blocks, item % work.blocks
    b, h = head // work.H, head % work.H
    limit = work.N
    if work.lengths_ptr is not None:
        # Lengths are not checked on the host: clamping keeps accesses inside the tensor.
        limit = gl.minimum(gl.maximum(gl.load(work.lengths_ptr + b), 1), work.N)
    return b, h, head, block, limit


# --- Forward --------------------------------------------------------------------------------------


@gluon.jit
def _fwd_producer(
    q_desc,
    k_desc,
    v_desc,
    queries,
    keys,
    work,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Copy Q of each block, and K and V of the keys that it sees."""
    STAGES: gl.constexpr = keys.full.shape[0]
    CONSUMERS: gl.constexpr = queries.tiles.shape[0] // 2
    ROWS: gl.constexpr = CONSUMERS * 64
    copied = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), work.heads * work.blocks, gl.num_programs(0)):
        b, h, _, block, limit = locate(work, item)
        slot, phase = ring_stage(turn, 2)
        for c in gl.static_range(CONSUMERS):
            place = slot * CONSUMERS + c
            mbarrier.wait(queries.empty.index(place), phase ^ 1)
            start_load(
                q_desc,
                b,
                h,
                block * ROWS + c * 64,
                queries.tiles.index(place),
                queries.full.index(place),
            )
        for i in range(visible_key_tiles(work.N, limit, block * ROWS, CAUSAL, ROWS)):
            stage, phase = ring_stage(copied, STAGES)
            mbarrier.wait(keys.empty.index(stage), phase ^ 1)
            full = keys.full.index(stage)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_tile(k_desc, [b, h // GROUP, i * 64, 0], full, keys.tiles.index(2 * stage))
            load_tile(v_desc, [b, h // GROUP, i * 64, 0], full, keys.tiles.index(2 * stage + 1))
            copied += 1
        turn += 1


@gluon.jit
def _finish_rows(
    state,
    tile,
    head,
    start,
    scoring,
    scale,
    saved,
    STATS: gl.constexpr,
):
    """Write a tile of the output to shared memory, and the row statistics; return its ``Sums``."""
    acc, row_max, row_sum, centred, square = state
    ROWS: gl.constexpr = row_max.type.layout
    divisor = common.sum_threads(row_sum, ROWS)
    acc = acc * (1.0 / gl.convert_layout(divisor, gl.SliceLayout(1, acc.type.layout)))[:, None]
    tile.store(acc.to(tile.dtype))
    rows = start + gl.arange(0, 64, ROWS)
    inside = rows < scoring.N
    own = head.to(gl.int64) * scoring.N + rows
    log_sum = common.store_row_statistics(
        max_log_sum_ptr=saved.max_log_sum_ptr,
        lse_ptr=saved.lse_ptr,
        rows=own,
        row_max=row_max,
        divisor=divisor,
        factor=scoring.factor,
        unit=scale,
        inside=inside,
        MASKED=False,
        SCALED=False,
    )
    sums = common.no_sums(64, ROWS)
    if STATS:
        gl.store(saved.lse_ptr + own, row_max * scale + log_sum, mask=inside)
        sums = common.sums_of_rows(
            row_max,
            divisor,
            common.sum_threads(centred, ROWS),
            common.sum_threads(square, ROWS),
            gl.convert_layout(gl.sum(acc * acc, 1), ROWS),
            inside,
        )
    return sums


@gluon.jit
def _fwd_consumer(
    out_desc,
    queries,
    keys,
    work,
    scale,
    saved,
    parts_ptr,
    CONSUMER: gl.constexpr,
    CAUSAL: gl.constexpr,
    HIDES: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Compute one tile of 64 rows of each block."""
    D: gl.constexpr = out_desc.block_type.shape[3]
    STAGES: gl.constexpr = keys.full.shape[0]
    CONSUMERS: gl.constexpr = queries.tiles.shape[0] // 2
    ROWS: gl.constexpr = CONSUMERS * 64
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    STATS: gl.constexpr = parts_ptr is not None
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    # Of the last tile of keys, which is masked, products read the first TAIL.
    TAIL_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
    zero_tail = gl.zeros([64, TAIL], gl.float32, TAIL_SCORES)
    OWN: gl.constexpr = common.thread_sums(zero).type.layout
    no_partials = gl.zeros([64, 4], gl.float32, OWN)
    read = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for item in range(gl.program_id(0), work.heads * work.blocks, gl.num_programs(0)):
        b, h, head, block, limit = locate(work, item)
        scoring = Scoring(work.N, limit, scale * LOG2_E, Mask(None, None, None, None), Dropout())
        first = block * ROWS + CONSUMER * 64
        slot, phase = ring_stage(turn, 2)
        place = slot * CONSUMERS + CONSUMER
        mbarrier.wait(queries.full.index(place), phase)
        q = tile_of(queries.tiles.index(place))
        state = RowState(
            gl.zeros([64, D], gl.float32, OUT),
            gl.full([64], float("-inf"), gl.float32, BY_ROW),
            no_partials,
            no_partials,
            no_partials,
        )
        tiles = visible_key_tiles(work.N, limit, block * ROWS, CAUSAL, ROWS)
        # Tiles that every row of this consumer sees in full need no mask.
        whole = limit // 64
        if CAUSAL:
            whole = gl.minimum(whole, first // 64)
        whole = gl.minimum(whole, tiles)
        for i in range(whole):
            stage, phase = ring_stage(read, STAGES)
            mbarrier.wait(keys.full.index(stage), phase)
            k = tile_of(keys.tiles.index(2 * stage))
            v = tile_of(keys.tiles.index(2 * stage + 1))
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
                HIDES=False,
                CAUSAL=False,
                STATS=STATS,
            )
            mbarrier.arrive(keys.empty.index(stage), count=1)
            read += 1
        if HIDES or CAUSAL:
            for i in range(whole, tiles):
                stage, phase = ring_stage(read, STAGES)
                mbarrier.wait(keys.full.index(stage), phase)
                k = tile_of(keys.tiles.index(2 * stage)).slice(0, TAIL)
                v = tile_of(keys.tiles.index(2 * stage + 1)).slice(0, TAIL)
                if not CAUSAL or i * 64 <= first:
                    state = step(
                        state=state,
                        q=q,
                        k=k,
                        v=v,
                        zero=zero_tail,
                        first=first,
                        start=i * 64,
                        scoring=scoring,
                        SCALED=False,
                        HIDES=HIDES,
                        CAUSAL=CAUSAL,
                        STATS=STATS,
                    )
                mbarrier.arrive(keys.empty.index(stage), count=1)
                read += 1
        # The output is stored from the buffer of Q, which the last product has read.
        sums = _finish_rows(
            state=state,
            tile=q,
            head=head,
            start=first,
            scoring=scoring,
            scale=scale,
            saved=saved,
            STATS=STATS,
        )
        fence_async_shared()
        store_tile(out_desc, [b, h, first, 0], queries.tiles.index(place))
        if STATS:
            part = item * CONSUMERS + CONSUMER
            _store_part(parts_ptr, common.reduce_sums(sums), part, work.N, scale)
        tma.store_wait(0)  # until the buffer has been read
        mbarrier.arrive(queries.empty.index(place), count=1)
        turn += 1


@gluon.jit
def _store_part(ptr, sums, part, num_rows, scale):
    """Store reduced ``Sums`` as one of the parts that ``_epilogue.join`` adds up."""
    ptr += part.to(gl.int64) * PART
    # A maximum ignores nan and a sum propagates it; a diverged model must show.
    diverged = sums.entropy != sums.entropy
    gl.store(ptr, gl.where(diverged, float("nan"), sums.largest * scale))
    gl.store(ptr + 1, sums.entropy / num_rows)
    gl.store(ptr + 2, sums.square)
    gl.store(ptr + 3, sums.out_square)
    gl.store(ptr + 4, gl.where(diverged, float("nan"), sums.row_max * scale / num_rows))


@gluon.jit(do_not_specialize=["H", "N", "heads"])
def _hopper_tma_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lengths_ptr,
    lse_ptr,
    max_log_sum_ptr,
    parts_ptr,
    H,
    N,
    heads,
    blocks,
    scale,
    BLOCK_D: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TAIL: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, 1, 1, 64, BLOCK_D], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BARRIER)
    init_ring(full, empty, 2 * CONSUMERS, 1)
    queries = Ring(tiles, full, empty)
    tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, 1, 64, BLOCK_D], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_ring(full, empty, STAGES, CONSUMERS)
    keys = Ring(tiles, full, empty)
    fence_async_shared()
    work = Work(H, N, heads, blocks, lengths_ptr)
    saved = common.SavedRows(max_log_sum_ptr, lse_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        0,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        1,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (_fwd_producer, (q_desc, k_desc, v_desc, queries, keys, work, CAUSAL, GROUP)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        0,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        1,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        2,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (
                    _fwd_consumer,
                    (
                        out_desc,
                        queries,
                        keys,
                        work,
                        scale,
                        saved,
                        parts_ptr,
                        3,
                        CAUSAL,
                        HIDES,
                        TAIL,
                    ),
                ),
                (_fwd_producer, (q_desc, k_desc, v_desc, queries, keys, work, CAUSAL, GROUP)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


# --- Backward -------------------------------------------------------------------------------------
#
# A program owns a head: no other adds to its gradients. Blocks of keys pass one after the other,
# and for each all tiles of rows. A consumer owns tiles of keys, and sums their dK and dV in its
# registers. A third warpgroup serves the rows. It computes delta = sum(dO O) ahead of the
# consumers. They leave dS in shared memory, and it multiplies dS with K. One block completes dQ of
# a tile of rows; several are added up in their order. The result is bitwise deterministic.
#
# These are five products for each pair of tiles. Kernels with two passes compute S and dP twice.


class Rows(NamedTuple):
    """A ring of tiles of rows.

    Attributes:
        tiles: buffers of Q, dO and O, three a stage; dQ is stored from that of O.
        lses: (stages, 64) float32, log-sum-exps.
        deltas: (stages, 64) float32, sum(dO O).
        full: mbarriers: Q, dO and O have arrived.
        ready: mbarriers: log-sum-exps and deltas are written.
        empty: mbarriers: released.
    """

    tiles: Any
    lses: Any
    deltas: Any
    full: Any
    ready: Any
    empty: Any


class Keys(NamedTuple):
    """A ring of blocks of keys.

    Attributes:
        k_tiles: buffers of K, from which dK is stored.
        v_tiles: buffers of V, from which dV is stored.
        full: mbarriers: K and V have arrived.
        unread: mbarriers: no product of dQ reads K any more.
        empty: mbarriers: released.
    """

    k_tiles: Any
    v_tiles: Any
    full: Any
    unread: Any
    empty: Any


@gluon.jit
def first_row_tile(block, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first tile of rows that sees keys of a block."""
    first = block * 0
    if CAUSAL:
        first = block * (KEYS // 64)
    return first


@gluon.jit
def sees_tile(work, block, tile, row_tile, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return whether some row of a tile sees some key of a tile of a block."""
    first = block * KEYS + tile * 64
    sees = first < work.N
    if CAUSAL:
        sees = sees & (first <= row_tile * 64)
    return sees


@gluon.jit
def _bwd_producer(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    out_desc,
    rows,
    keys,
    work,
    CAUSAL: gl.constexpr,
):
    """Copy K and V of each block of keys, and Q, dO and O of the rows that see it."""
    STAGES: gl.constexpr = rows.full.shape[0]
    SLOTS: gl.constexpr = keys.full.shape[0]
    TILES: gl.constexpr = keys.k_tiles.shape[0] // SLOTS
    KEYS: gl.constexpr = TILES * 64
    num_tiles = (work.N + 63) // 64
    copied = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for head in range(gl.program_id(0), work.heads, gl.num_programs(0)):
        b, h = head // work.H, head % work.H
        for block in range(work.blocks):
            slot, phase = ring_stage(turn, SLOTS)
            mbarrier.wait(keys.empty.index(slot), phase ^ 1)
            full = keys.full.index(slot)
            mbarrier.expect(full, TILES * 2 * k_desc.block_type.nbytes)
            for t in gl.static_range(TILES):
                row = block * KEYS + t * 64
                load_tile(k_desc, [b, h, row, 0], full, keys.k_tiles.index(slot * TILES + t))
                load_tile(v_desc, [b, h, row, 0], full, keys.v_tiles.index(slot * TILES + t))
            for i in range(first_row_tile(block, KEYS, CAUSAL), num_tiles):
                stage, phase = ring_stage(copied, STAGES)
                mbarrier.wait(rows.empty.index(stage), phase ^ 1)
                full = rows.full.index(stage)
                mbarrier.expect(full, 3 * q_desc.block_type.nbytes)
                load_tile(do_desc, [b, h, i * 64, 0], full, rows.tiles.index(3 * stage + 1))
                load_tile(out_desc, [b, h, i * 64, 0], full, rows.tiles.index(3 * stage + 2))
                load_tile(q_desc, [b, h, i * 64, 0], full, rows.tiles.index(3 * stage))
                copied += 1
            turn += 1


@gluon.jit
def _bwd_consumer(
    dk_desc,
    dv_desc,
    rows,
    keys,
    ds,
    work,
    scale,
    CONSUMER: gl.constexpr,
    CAUSAL: gl.constexpr,
    HIDES: gl.constexpr,
):
    """Compute dK and dV of every second tile of keys, and dS for the warpgroup of the rows."""
    D: gl.constexpr = dk_desc.block_type.shape[3]
    DTYPE: gl.constexpr = dk_desc.dtype
    STAGES: gl.constexpr = rows.full.shape[0]
    SLOTS: gl.constexpr = keys.full.shape[0]
    TILES: gl.constexpr = keys.k_tiles.shape[0] // SLOTS
    KEYS: gl.constexpr = TILES * 64
    OWN: gl.constexpr = TILES // 2
    # Rows at once: more would spill.
    PIECE: gl.constexpr = 64 if D * OWN < 128 else 32
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    zero = gl.zeros([64, PIECE], gl.float32, SCORES)
    no_grads = gl.zeros([64, D], gl.float32, GRADS)
    factor = scale * LOG2_E
    num_tiles = (work.N + 63) // 64
    read = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    stored = gl.to_tensor(0)
    for head in range(gl.program_id(0), work.heads, gl.num_programs(0)):
        b, h = head // work.H, head % work.H
        limit = work.N
        if work.lengths_ptr is not None:
            limit = gl.minimum(gl.maximum(gl.load(work.lengths_ptr + b), 1), work.N)
        for block in range(work.blocks):
            slot, turn_phase = ring_stage(turn, SLOTS)
            mbarrier.wait(keys.full.index(slot), turn_phase)
            grads = (no_grads,) * (2 * OWN)
            for i in range(first_row_tile(block, KEYS, CAUSAL), num_tiles):
                stage, phase = ring_stage(read, STAGES)
                mbarrier.wait(rows.full.index(stage), phase)
                mbarrier.wait(rows.ready.index(stage), phase)
                q = tile_of(rows.tiles.index(3 * stage))
                do = tile_of(rows.tiles.index(3 * stage + 1))
                after = ()
                for t in gl.static_range(OWN):
                    dk, dv = grads[2 * t], grads[2 * t + 1]
                    if sees_tile(work, block, CONSUMER + 2 * t, i, KEYS, CAUSAL):
                        k = tile_of(keys.k_tiles.index(slot * TILES + CONSUMER + 2 * t))
                        v = tile_of(keys.v_tiles.index(slot * TILES + CONSUMER + 2 * t))
                        parts = ()
                        for n in gl.static_range(64 // PIECE):
                            q_part, do_part = q.slice(n * PIECE, PIECE), do.slice(n * PIECE, PIECE)
                            s, dp = common.start_products(
                                k, v, q_part, do_part, zero
                            )  # (keys, rows)
                            lse = rows.lses.index(stage).slice(n * PIECE, PIECE).load(COLS)[None, :]
                            s = warpgroup_mma_wait(1, [s])
                            if HIDES or CAUSAL:
                                key = block * KEYS + (CONSUMER + 2 * t) * 64
                                key += gl.arange(0, 64, gl.SliceLayout(1, SCORES))[:, None]
                                row = (i * 64 + n * PIECE + gl.arange(0, PIECE, COLS))[None, :]
                                # Scores, not P: Triton 3.6 moves what follows exp2 past the fence.
                                visible = limit if HIDES else None
                                s = common.mask_scores(s, row, key, visible, CAUSAL, float("-inf"))
                            p = gl.exp2(common.exponents_of(s, lse, factor, False))
                            left = gl.convert_layout(p.to(DTYPE), LEFT)
                            dv = warpgroup_mma(left, do_part, dv, is_async=True)
                            dp = warpgroup_mma_wait(1, [dp])
                            delta = (
                                rows.deltas.index(stage).slice(n * PIECE, PIECE).load(COLS)[None, :]
                            )
                            grad = (p * (dp - delta)).to(DTYPE)
                            dk = warpgroup_mma(
                                gl.convert_layout(grad, LEFT), q_part, dk, is_async=True
                            )
                            dk, dv = warpgroup_mma_wait(0, [dk, dv])
                            parts = parts + (grad,)  # noqa: RUF005
                        grad = parts[0]
                        if PIECE < 64:
                            grad = gl.join(parts[0], parts[1]).permute((0, 2, 1)).reshape([64, 64])
                        mbarrier.wait(ds.empty.index(CONSUMER), (stored & 1) ^ 1)
                        ds.tiles.index(CONSUMER).store(grad)
                        fence_async_shared()
                        mbarrier.arrive(ds.full.index(CONSUMER), count=1)
                        stored += 1
                    after = after + (dk, dv)  # noqa: RUF005
                grads = after
                mbarrier.arrive(rows.empty.index(stage), count=1)
                read += 1
            # The gradients are stored from the buffers of K and V.
            for t in gl.static_range(OWN):
                tile_of(keys.v_tiles.index(slot * TILES + CONSUMER + 2 * t)).store(
                    grads[2 * t + 1].to(DTYPE)
                )
            mbarrier.wait(keys.unread.index(slot), turn_phase)
            for t in gl.static_range(OWN):
                tile_of(keys.k_tiles.index(slot * TILES + CONSUMER + 2 * t)).store(
                    (grads[2 * t] * scale).to(DTYPE)
                )
            fence_async_shared()
            for t in gl.static_range(OWN):
                row = block * KEYS + (CONSUMER + 2 * t) * 64
                store_tile(
                    dk_desc, [b, h, row, 0], keys.k_tiles.index(slot * TILES + CONSUMER + 2 * t)
                )
                store_tile(
                    dv_desc, [b, h, row, 0], keys.v_tiles.index(slot * TILES + CONSUMER + 2 * t)
                )
            tma.store_wait(0)  # until the buffers have been read
            mbarrier.arrive(keys.empty.index(slot), count=1)
            turn += 1


@gluon.jit
def _prepare_rows(
    rows, saved, head, tile, count, N, factor, STAGES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Write log-sum-exps and deltas of a tile of rows, and correct its dO."""
    stage, phase = ring_stage(count, STAGES)
    mbarrier.wait(rows.full.index(stage), phase)
    index = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    own = head.to(gl.int64) * N + index
    lse, correction = common.load_row_statistics(saved, own, index < N, factor)
    do_tile = tile_of(rows.tiles.index(3 * stage + 1))
    out = tile_of(rows.tiles.index(3 * stage + 2)).load(LAYOUT)
    do = do_tile.load(LAYOUT).to(gl.float32) * correction[:, None]
    do_tile.store(do.to(do_tile.dtype))
    rows.lses.index(stage).store(lse)
    rows.deltas.index(stage).store(gl.sum(do * out.to(gl.float32), 1))
    fence_async_shared()
    mbarrier.arrive(rows.ready.index(stage), count=1)


@gluon.jit
def _bwd_rows(
    dq_desc,
    rows,
    keys,
    ds,
    work,
    scale,
    saved,
    sums_ptr,
    CAUSAL: gl.constexpr,
):
    """Prepare tiles of rows for the consumers, and compute dQ from their dS."""
    STAGES: gl.constexpr = rows.full.shape[0]
    SLOTS: gl.constexpr = keys.full.shape[0]
    TILES: gl.constexpr = keys.k_tiles.shape[0] // SLOTS
    KEYS: gl.constexpr = TILES * 64
    D: gl.constexpr = dq_desc.block_type.shape[3]
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT: gl.constexpr = common.copy_layout(D)
    factor = scale * LOG2_E
    num_tiles = (work.N + 63) // 64
    done = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    taken, taken_odd = gl.to_tensor(0), gl.to_tensor(0)
    _prepare_rows(rows, saved, gl.program_id(0), 0, done, work.N, factor, STAGES, LAYOUT)
    for head in range(gl.program_id(0), work.heads, gl.num_programs(0)):
        b, h = head // work.H, head % work.H
        for block in range(work.blocks):
            slot, turn_phase = ring_stage(turn, SLOTS)
            mbarrier.wait(keys.full.index(slot), turn_phase)
            for i in range(first_row_tile(block, KEYS, CAUSAL), num_tiles):
                # One tile ahead: of this block, of the next, or of the next head.
                next_tile, next_head = i + 1, head
                if next_tile == num_tiles:
                    next_tile = first_row_tile(block + 1, KEYS, CAUSAL)
                    if block + 1 == work.blocks:
                        next_tile, next_head = gl.to_tensor(0), head + gl.num_programs(0)
                if next_head < work.heads:
                    _prepare_rows(
                        rows, saved, next_head, next_tile, done + 1, work.N, factor, STAGES, LAYOUT
                    )
                stage, _ = ring_stage(done, STAGES)
                dq = gl.zeros([64, D], gl.float32, GRADS)
                for t in gl.static_range(TILES):
                    if sees_tile(work, block, t, i, KEYS, CAUSAL):
                        mbarrier.wait(
                            ds.full.index(t % 2), (taken if t % 2 == 0 else taken_odd) & 1
                        )
                        k = tile_of(keys.k_tiles.index(slot * TILES + t))
                        left = ds.tiles.index(t % 2).permute((1, 0))
                        dq = warpgroup_mma(left, k, dq, is_async=True)
                        dq = warpgroup_mma_wait(0, [dq])
                        mbarrier.arrive(ds.empty.index(t % 2), count=1)
                        if t % 2 == 0:
                            taken += 1
                        else:
                            taken_odd += 1
                if sums_ptr is not None:
                    # Each thread adds to its own sums: no order among threads is needed.
                    offsets = i * 64 + gl.arange(0, 64, gl.SliceLayout(1, GRADS))
                    dims = gl.arange(0, D, gl.SliceLayout(0, GRADS))
                    ptrs = sums_ptr + gl.program_id(0).to(gl.int64) * (num_tiles * 64 * D)
                    ptrs = ptrs + (offsets[:, None] * D + dims[None, :])
                    if block > 0:
                        dq += gl.load(ptrs)
                    last = block + 1 == work.blocks
                    if CAUSAL:
                        last = last | (i < (block + 1) * TILES)
                    gl.store(ptrs, dq, mask=not last)
                    if last:
                        _store_dq(dq_desc, rows, stage, dq * scale, b, h, i)
                else:
                    _store_dq(dq_desc, rows, stage, dq * scale, b, h, i)
                mbarrier.arrive(rows.empty.index(stage), count=1)
                done += 1
            mbarrier.arrive(keys.unread.index(slot), count=1)
            turn += 1


@gluon.jit
def _store_dq(dq_desc, rows, stage, dq, b, h, i):
    """Store a tile of dQ from the buffer of O, which has been read."""
    place = rows.tiles.index(3 * stage + 2)
    tile_of(place).store(dq.to(dq_desc.dtype))
    fence_async_shared()
    store_tile(dq_desc, [b, h, i * 64, 0], place)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "N", "heads", "blocks"])
def _hopper_tma_bwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    out_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    lengths_ptr,
    max_log_sum_ptr,
    lse_ptr,
    sums_ptr,
    H,
    N,
    heads,
    blocks,
    scale,
    BLOCK_D: gl.constexpr,
    HIDES: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    KEYS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    SHARED: gl.constexpr = q_desc.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TILES: gl.constexpr = KEYS // 64
    row_tiles = gl.allocate_shared_memory(DTYPE, [3 * STAGES, 1, 1, 64, BLOCK_D], SHARED)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, 64], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 64], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    init_ring(full, empty, STAGES, 3)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    rows = Rows(row_tiles, lses, deltas, full, ready, empty)
    k_tiles = gl.allocate_shared_memory(DTYPE, [SLOTS * TILES, 1, 1, 64, BLOCK_D], SHARED)
    v_tiles = gl.allocate_shared_memory(DTYPE, [SLOTS * TILES, 1, 1, 64, BLOCK_D], SHARED)
    keys_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    unread = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    keys_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    init_ring(keys_full, keys_empty, SLOTS, 2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(unread.index(i), count=1)
    keys = Keys(k_tiles, v_tiles, keys_full, unread, keys_empty)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    init_ring(ds_full, ds_empty, 2, 1)
    ds = Ring(ds_tiles, ds_full, ds_empty)
    fence_async_shared()
    work = Work(H, N, heads, blocks, lengths_ptr)
    saved = common.SavedRows(max_log_sum_ptr, lse_ptr)
    gl.warp_specialize(
        [
            (_bwd_consumer, (dk_desc, dv_desc, rows, keys, ds, work, scale, 0, CAUSAL, HIDES)),
            (_bwd_consumer, (dk_desc, dv_desc, rows, keys, ds, work, scale, 1, CAUSAL, HIDES)),
            (_bwd_rows, (dq_desc, rows, keys, ds, work, scale, saved, sums_ptr, CAUSAL)),
            (
                _bwd_producer,
                (q_desc, k_desc, v_desc, do_desc, out_desc, rows, keys, work, CAUSAL),
            ),
        ],
        [4, 4, 1],
        [REGISTERS, 72, 24],
    )


# --- Launches -------------------------------------------------------------------------------------


def describe(t: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of (B, H, N, D), by tiles of 64 rows of a head.

    A tile is as wide as ``block_dim`` of D; TMA fills what it has beyond with zeros.
    """
    width = block_dim(t.shape[-1])
    layout = gl.NVMMASharedLayout(2 * width, 16, 4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, 64, width], layout)


def _describe_arguments(kernel: Any, arguments: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace the arguments of a call by those of a kernel that copies by TMA."""
    heads = tensors["q"].shape[0] * tensors["q"].shape[1]
    arguments |= {f"{name}_desc": describe(t) for name, t in tensors.items()}
    arguments |= {"heads": heads, "HIDES": arguments["N"] % 64 != 0}
    if arguments["lengths_ptr"] is not None:
        arguments["HIDES"] = True
    for name in arguments.keys() - {*kernel.arg_names, *OPTIONS, "enable_fp_fusion"}:
        del arguments[name]


def block_size(tokens: int) -> int:
    """Return the keys of a backward's block: two or four tiles."""
    return 128 if tokens <= 128 else 256


def num_programs(device: torch.device, work: int, per_sm: int = 1) -> int:
    """Return the number of programs that share ``work``: at most ``per_sm`` on each SM."""
    return min(work, per_sm * _tiles.multiprocessors(device))


def prepare_forward(tile: Tile, call: Call, results: Results) -> Launch:
    """Return the launch that writes out (B, H, N, D) and max_log_sum (B, H, N, 2), or lse alone.

    With ``stats`` (statistics, B, H), it also writes lse (B, H, N), and parts of the statistics
    (B, H, T, NUM_SUMS), which ``_epilogue.join`` adds up.
    """
    batch, heads, tokens, _ = call.query.shape
    arguments = forward_arguments(_hopper_tma_fwd_kernel, call, results)
    blocks = triton.cdiv(tokens, 64 * tile["CONSUMERS"])
    parts = None
    if results.stats is not None:
        shape = batch, heads, tile["CONSUMERS"] * blocks, NUM_SUMS
        parts = call.query.new_empty(shape, dtype=torch.float32)
    tensors = {"q": call.query, "k": call.key, "v": call.value, "out": results.out}
    # A causal mask, and lengths, hide keys of any tile.
    uniform = call.key_lengths is None and not call.is_causal
    tail = next((size for size in TAILS if tokens % 64 <= size), 64) if uniform else 64
    arguments |= dict(**tile.arguments, TAIL=tail, blocks=blocks, parts_ptr=parts)
    _describe_arguments(_hopper_tma_fwd_kernel, arguments, tensors)
    per_sm = 2 if "maxnreg" in tile.options else 1
    programs = num_programs(call.query.device, batch * heads * blocks, per_sm)
    return Launch(_hopper_tma_fwd_kernel, (programs,), arguments)


def prepare_backward(
    tile: Tile, grad: Tensor, call: Call, saved: Results, gradients: Gradients
) -> Launch:
    """Return the launch that writes dq, dk, dv (B, H, N, D)."""
    batch, heads, tokens, _ = call.query.shape
    arguments = backward_arguments(_hopper_tma_bwd_kernel, grad, call, saved, gradients)
    keys, programs = block_size(tokens), num_programs(grad.device, batch * heads)
    blocks = triton.cdiv(tokens, keys)
    sums = None
    if blocks > 1:
        shape = programs, triton.cdiv(tokens, 64) * 64, arguments["BLOCK_D"]
        sums = grad.new_empty(shape, dtype=torch.float32)
    tensors = {
        **{"q": call.query, "k": call.key, "v": call.value, "do": grad, "out": saved.out},
        **{"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv},
    }
    arguments |= dict(**tile.arguments, KEYS=keys, SLOTS=SLOTS, blocks=blocks, sums_ptr=sums)
    _describe_arguments(_hopper_tma_bwd_kernel, arguments, tensors)
    scratch = () if sums is None else (Scratch("sums_ptr"),)
    return Launch(_hopper_tma_bwd_kernel, (programs,), arguments, scratch)
