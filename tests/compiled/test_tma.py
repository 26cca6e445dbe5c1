"""TMA, mbarriers and partitions of warps: what the executor computes, and the mistakes it finds."""

import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor as OfTriton

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model import command, decode, library, ptx, replay, units
from bench.gpu_model.execute import Execution, ExecutionError, TensorBoxes, execute, executing
from leaner_kernels.ops import _gluon

if not _gluon.AVAILABLE:
    pytest.skip("this Triton has no Gluon", allow_module_level=True)

from leaner_kernels.ops._gluon import (
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
from tests.compiled.test_executor import LOAD_OTHER, run
from tests.compiled.test_executor import STORE as STORE_WORD
from tests.compiled.test_mutations import operation

# Triton 3.6 has no reduction.
add_box: Any = getattr(tma, "async_atomic_add", None)

BF16 = torch.bfloat16
NO_WAIT = "touched before the wait for a TMA load"
NO_BARRIER = "write after read without a barrier"
NO_FENCE = "used by TMA without fence.proxy.async"
DEADLOCK = "no warp can go on"
UNWRITTEN = "shared memory read before it is written"


def boxes(tensor: Tensor, shape: list[int], swizzle: int = 128, **rest: Any) -> TensorDescriptor:
    bits = 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(swizzle, bits, rank=len(shape))
    return TensorDescriptor.from_tensor(tensor, shape, layout, **rest)


# --- One copy, in PTX -----------------------------------------------------------------------------

COPY = """
.visible .entry kernel(
  .param .align 64 .b8 kernel_param_0[128],
  .param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
  .reg .pred %p<9>;
  .reg .b32 %r<40>;
  .reg .b64 %rd<9>;
  mov.b64 %rd1, kernel_param_0;
  cvta.param.u64 %rd2, %rd1;
  ld.param.b64 %rd3, [kernel_param_1];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd5, %rd3, %rd4;
  mov.b32 %r3, 0;
  mov.b32 %r4, {bytes};
  elect.sync %r5|%p2, -1;
  setp.ge.u32 %p3, %r1, {first};
  and.pred %p1, %p2, %p3;
{body}
  ret;
}}
"""
LOAD = """
  @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {bytes};
  @%p1 cp.async.bulk.tensor.{axes}d.shared::cta.global.mbarrier::complete_tx::bytes
 [%r3], [%rd2, {{{start}}}], [%r4];
  {{
  .reg .pred complete;
  waitLoop:
  mbarrier.try_wait.parity.shared::cta.b64 complete, [%r4], 0;
  @!complete bra.uni waitLoop;
  }}
""".replace("\n [", " [")
STORE = """
  fence.proxy.async.shared::cta;
  @%p1 cp{reduce}.async.bulk.tensor.{axes}d.global.shared::cta{add}.bulk_group
 [%rd2, {{{start}}}], [%r3];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
""".replace("\n [", " [")


def copy_box(
    tensor: Tensor,
    box: list[int],
    start: list[int],
    data: Tensor | None = None,
    reduce: bool = False,
    swizzle: int = 0,
    nan: bool = False,
) -> Tensor:
    """Copy a box of a tensor to shared memory, or ``data`` to it; return shared memory's bytes."""
    size = tensor.element_size()
    count = size
    for extent in box:
        count *= extent
    found = (
        torch.zeros(count, dtype=torch.uint8) if data is None else data.flatten().view(torch.uint8)
    )
    words = range(0, count, 128)
    fields = {"axes": len(box), "start": ", ".join(map(str, start[::-1])), "bytes": count}
    if data is None:
        lines = [LOAD.format(**fields)]
        lines += [f"ld.shared.b32 %r9, [%r2+{n}]; st.global.b32 [%rd5+{n}], %r9;" for n in words]
    else:
        lines = [f"ld.global.b32 %r9, [%rd5+{n}]; st.shared.b32 [%r2+{n}], %r9;" for n in words]
        verbs = {"reduce": ".reduce" if reduce else "", "add": ".add.tile" if reduce else ""}
        lines.append(STORE.format(**fields, **verbs))
    described = TensorBoxes(tensor, tensor.shape, tensor.stride(), box, swizzle, nan)
    execution = run_copy("\n".join(lines), described, found)
    assert not execution.found, execution.findings[0]
    return found


def run_copy(body: str, boxed: TensorBoxes, data: Tensor, threads: int = 32) -> Execution:
    """Execute PTX whose last warp copies: as many bytes as ``data`` has, and then an mbarrier."""
    executor = library.load()
    text = COPY.format(bytes=data.nbytes, body=body, threads=threads, first=threads - 32)
    program = decode.Program(ptx.parse(text), executor)
    return execute(executor, program, data.nbytes + 8, {"x": boxed, "data": data}, (1, 1, 1))


def padded(tensor: Tensor, box: list[int], start: list[int], fill: float) -> Tensor:
    """Return a box of a tensor, ``fill`` outside of it."""
    out = torch.full(box, fill, dtype=tensor.dtype)
    places = [
        (slice(max(0, -at), max(0, min(n, extent - at))), slice(max(0, at), max(0, at + n)))
        for at, n, extent in zip(start, box, tensor.shape)
    ]
    inside = tensor[tuple(of for _, of in places)]
    out[tuple(slice(to.start, to.start + n) for (to, _), n in zip(places, inside.shape))] = inside
    return out


def swizzled(data: Tensor, width: int) -> Tensor:
    """Return bytes as shared memory holds them: pieces of 16 bytes exchanged in each row."""
    if not width:
        return data
    piece = torch.arange(data.numel() // 16)
    mixed = piece ^ (piece >> 3 & width // 16 - 1)
    return data.reshape(-1, 16)[mixed].flatten()


@pytest.mark.parametrize(
    ("shape", "box", "start", "swizzle"),
    [
        ((100, 64), [16, 64], [8, 0], 128),
        ((100, 64), [16, 64], [92, 0], 128),
        ((100, 64), [16, 64], [-3, 8], 128),
        ((100, 64), [16, 32], [-20, 0], 64),
        ((100, 72), [16, 16], [96, 64], 32),
        ((100, 72), [8, 16], [97, -4], 32),
        ((100, 72), [8, 64], [97, 40], 0),
        ((200,), [256], [-10], 0),
        ((5, 7, 64), [1, 8, 64], [3, 2, 0], 128),
        ((3, 5, 7, 32), [2, 1, 8, 32], [2, 4, -1, 0], 64),
        ((2, 3, 5, 7, 16), [1, 2, 2, 8, 16], [1, 2, 4, 0, 8], 32),
    ],
)
def test_a_box_is_loaded_and_stored(
    shape: tuple[int, ...], box: list[int], start: list[int], swizzle: int
) -> None:
    """Of every number of axes, before the first and past the last element."""
    tensor = torch.randn(shape).to(BF16)
    for nan in (False, True):
        wanted = padded(tensor, box, start, float("nan") if nan else 0.0).flatten()
        loaded = copy_box(tensor, box, start, swizzle=swizzle, nan=nan)
        assert torch.equal(loaded, swizzled(wanted.view(torch.uint8), swizzle)) or nan
        pieces = swizzled(loaded, swizzle).view(BF16)  # exchanged back
        torch.testing.assert_close(pieces, wanted, rtol=0, atol=0, equal_nan=True)
    written, data = torch.zeros(shape, dtype=BF16), torch.randn(box).to(BF16)
    copy_box(
        written, box, start, swizzled(data.flatten().view(torch.uint8), swizzle), swizzle=swizzle
    )
    index = [torch.arange(n) + at for n, at in zip(box, start)]
    wanted = torch.zeros(shape, dtype=BF16)
    for place in product(*(range(n) for n in box)):
        at = [int(axis[n]) for axis, n in zip(index, place)]
        if all(0 <= n < extent for n, extent in zip(at, shape)):
            wanted[tuple(at)] = data[place]
    assert torch.equal(written, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.int32])
def test_a_reduction_adds(dtype: torch.dtype) -> None:
    tensor, data = ((100 * torch.randn(20, 16)).to(dtype) for _ in range(2))
    wanted = tensor.clone()
    wanted[15:] += data[:5]
    copy_box(tensor, [8, 16], [15, 0], data[:8], reduce=True)
    assert torch.equal(tensor, wanted)


FENCE = "fence.proxy.async.shared::cta; "
WRITE = "st.shared.b32 [%r2], %r3; "
WRITE_TENSOR = "st.global.b32 [%rd5], %r3; "
BOTH_MEET = "bar.sync 1, 64; "


@pytest.mark.parametrize(
    ("threads", "finding", "faulty", "right"),
    [
        (32, NO_FENCE, WRITE + "{load}", WRITE + FENCE + "{load}"),
        (32, NO_FENCE, WRITE_TENSOR + "{load}", WRITE_TENSOR + FENCE + "{load}"),
        (
            64,
            NO_FENCE,
            WRITE + BOTH_MEET + "{store}",
            WRITE + FENCE + BOTH_MEET + "{store}",
        ),
        (32, NO_WAIT, "{unwaited}{store}", "{load}{store}"),
        # Without a barrier one warp writes what TMA has read for the other one.
        (
            64,
            NO_BARRIER,
            WRITE + FENCE + BOTH_MEET + "{store}" + "@!%p3 st.shared.b32 [%r2], %r1;",
            WRITE + FENCE + BOTH_MEET + "{store}" + BOTH_MEET + "@!%p3 st.shared.b32 [%r2], %r1;",
        ),
    ],
)
def test_memory_that_tma_shares_with_warps_needs_order(
    threads: int, finding: str, faulty: str, right: str
) -> None:
    tensor = torch.zeros(4, 16)
    fields = {"axes": 2, "start": "0, 0", "bytes": 256}
    load = LOAD.format(**fields)
    store = STORE.format(**fields, reduce="", add="").replace(FENCE.strip(), "")
    boxed = TensorBoxes(tensor, (4, 16), (16, 1), [4, 16], 0)
    unwaited = load.partition("  {")[0]
    found = [
        run_copy(
            body.format(load=load, unwaited=unwaited, store=store), boxed, tensor, threads
        ).found
        for body in (faulty, right)
    ]
    assert finding in found[0]
    assert not found[1]


def test_what_tma_cannot_copy_stops() -> None:
    tensor = torch.zeros(64, 72, dtype=BF16)
    for changed, swizzle, width in ((tensor[:, :64], 128, 32), (tensor[:, 1:], 0, 64)):
        with pytest.raises(ExecutionError, match="TMA"):
            copy_box(changed, [8, width], [0, 0], swizzle=swizzle)
    with pytest.raises(ExecutionError, match="TMA"):
        copy_box(torch.zeros(64, 65, dtype=BF16), [8, 64], [0, 0])


# --- Barriers, in PTX -----------------------------------------------------------------------------

WARPS = "setp.lt.u32 %p1, %r1, 32; setp.eq.b32 %p2, %r1, 0; setp.eq.b32 %p3, %r1, 32; "
INIT = WARPS + "@%p2 mbarrier.init.shared::cta.b64 [512], {count}; "
ARRIVE = "@%p{lane} mbarrier.arrive.shared::cta.b64 _, [512]; "
MEET = "bar.sync 0; "
SET = (
    WARPS
    + """
  @%p1 bra $first;
  setmaxnreg.{second}.sync.aligned.u32 {fewer};
  bra $end;
$first:
  setmaxnreg.{first}.sync.aligned.u32 {more};
$end:
"""
)
OF_ALL, OF_ONE = "bar.sync 1, 64; ", "bar.sync 1, 32; "


@pytest.mark.parametrize(
    ("finding", "faulty", "right", "registers"),
    [
        (
            "an mbarrier used without a barrier after its init",
            INIT.format(count=1) + ARRIVE.format(lane=3),
            INIT.format(count=1) + MEET + ARRIVE.format(lane=3),
            0,
        ),
        (
            "no mbarrier where one is used",
            WARPS + MEET + ARRIVE.format(lane=3),
            INIT.format(count=1) + MEET + ARRIVE.format(lane=3),
            0,
        ),
        (
            "more arrivals than an mbarrier expects",
            INIT.format(count=1) + MEET + ARRIVE.format(lane=3).replace("512]", "512], 2"),
            INIT.format(count=2) + MEET + ARRIVE.format(lane=3).replace("512]", "512], 2"),
            0,
        ),
        (
            "an mbarrier touched as ordinary memory",
            INIT.format(count=1) + MEET + "@%p2 st.shared.b32 [516], %r1;",
            INIT.format(count=1) + MEET + "@%p2 st.shared.b32 [520], %r1;",
            0,
        ),
        # Of two named barriers neither is for both warps.
        (
            "read after write without a barrier",
            STORE_WORD + OF_ONE + LOAD_OTHER,
            STORE_WORD + OF_ALL + LOAD_OTHER,
            0,
        ),
        (
            "setmaxnreg of registers that cannot be",
            SET.format(first="dec", more=72, second="dec", fewer=56),
            SET.format(first="inc", more=72, second="dec", fewer=56),
            64,
        ),
        (
            "waits for ever",
            SET.format(first="inc", more=72, second="dec", fewer=64),
            SET.format(first="inc", more=72, second="dec", fewer=56),
            64,
        ),
        ("waits for ever", WARPS + "@%p1 bra $end; bar.sync 1, 64; $end:", "bar.sync 1, 64;", 0),
        (
            "warps at different barriers",
            WARPS + "@%p1 bra $one; bar.sync 1, 64; bra $end; $one: bar.sync 1; $end:",
            WARPS + "@%p1 bra $one; bar.sync 1, 64; bra $end; $one: bar.sync 1, 64; $end:",
            0,
        ),
    ],
)
def test_misuse_of_barriers_is_found(finding: str, faulty: str, right: str, registers: int) -> None:
    def findings(body: str) -> str:
        try:
            execution = run(body, threads=64, registers=registers, shared=1024)
        except ExecutionError as error:
            return str(error) + ("waits for ever" if DEADLOCK in str(error) else "")
        return str(execution.found)

    assert finding in findings(faulty)
    assert findings(right) == "{}"


@pytest.mark.parametrize(
    "text",
    [
        "setmaxnreg.inc.sync.aligned.u32 28",
        "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%rd1], 1",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd1, {%r1}], [%r2]",
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1]",
        "bar.arrive 1, 64",
    ],
)
def test_an_unsupported_copy_or_barrier_stops_with_its_text(text: str) -> None:
    opcode = text.split()[0].replace("::cta", "")
    with pytest.raises(ptx.UnsupportedError, match=re.escape(opcode)):
        run(f"{text};")


# --- A ring that one warp fills -------------------------------------------------------------------


@gluon.jit
def _fill_ring(x_desc, ring, ready, empty, tiles, FAULT: gl.constexpr):
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    BYTES: gl.constexpr = x_desc.block_type.nbytes
    first = gl.program_id(0) * tiles
    for n in range(tiles):
        stage, phase = n % STAGES, n // STAGES & 1
        if FAULT == "producer's phase":
            phase ^= 1
        if FAULT != "reused stage":
            mbarrier.wait(empty.index(stage), phase ^ 1)
        if FAULT == "no expect":
            mbarrier.arrive(ready.index(stage), count=1)
        elif FAULT == "too many bytes":
            mbarrier.expect(ready.index(stage), BYTES + 16)
        elif FAULT == "too few bytes":
            mbarrier.expect(ready.index(stage), BYTES - 16)
        else:
            mbarrier.expect(ready.index(stage), BYTES)
        load_tile(x_desc, [(first + n) * ROWS, 0], ready.index(stage), ring.index(stage))
    if FAULT == "unseen load":
        mbarrier.wait(empty.index(tiles % STAGES), (tiles // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(tiles % STAGES), BYTES)
        load_tile(x_desc, [0, 0], ready.index(tiles % STAGES), ring.index(tiles % STAGES))


@gluon.jit
def _double_ring(y_desc, ring, out, ready, empty, tiles, FAULT: gl.constexpr):
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    first = gl.program_id(0) * tiles
    for n in range(tiles):
        stage, phase = n % STAGES, n // STAGES & 1
        if FAULT == "consumer's phase":
            phase ^= 1
        if FAULT != "no wait":
            mbarrier.wait(ready.index(stage), phase)
        if FAULT == "early release":
            mbarrier.arrive(empty.index(stage), count=1)
        tile = ring.index(stage).load(layout)  # (ROWS, 64)
        if FAULT != "no fence before the load":
            fence_async_shared()
        if FAULT != "early release" and FAULT != "no release":
            mbarrier.arrive(empty.index(stage), count=1)
        if FAULT != "overwritten store":
            tma.store_wait(0)
        out.store(tile + tile)
        fence_async_shared()
        store_tile(y_desc, [(first + n) * ROWS, 0], out)
    if FAULT != "unseen store":
        tma.store_wait(0)


@gluon.jit
def _ring_kernel(x_desc, y_desc, tiles, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Write twice what is read, by tiles; a warp loads while four others double."""
    SHAPE: gl.constexpr = x_desc.block_type.shape
    ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, SHAPE[0], SHAPE[1]], x_desc.layout)
    out = gl.allocate_shared_memory(x_desc.dtype, SHAPE, y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_double_ring, (y_desc, ring, out, ready, empty, tiles, FAULT)),
            (_fill_ring, (x_desc, ring, ready, empty, tiles, FAULT)),
        ],
        [1],
        [24],
    )


def run_ring(fault: str = "") -> tuple[bool, Execution]:
    """Return whether the result is right."""
    tiles, stages, rows = 7, 3, 32
    torch.manual_seed(0)
    x = torch.randn(2 * tiles * rows - 5, 64).to(BF16)  # of the last tile rows are missing
    y = torch.zeros_like(x)
    with executing(90) as executions:
        _ring_kernel[2,](
            boxes(x, [rows, 64]), boxes(y, [rows, 64]), tiles, stages, fault, num_warps=4
        )
    return torch.equal(y, 2 * x), executions[0]


def findings_of(run: Callable[[], tuple[bool, Execution]]) -> Counter[str]:
    """Return what was found, or why the kernel could not go on."""
    try:
        _, execution = run()
    except ExecutionError as error:
        return Counter([str(error)])
    return Counter(execution.found)


def test_a_ring_is_filled_and_emptied() -> None:
    right, execution = run_ring()
    assert right
    assert not execution.found
    assert execution.program.partitioned


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("no wait", {NO_WAIT, UNWRITTEN}),
        ("consumer's phase", {NO_WAIT, UNWRITTEN, DEADLOCK}),
        ("producer's phase", {DEADLOCK}),
        ("reused stage", {NO_WAIT, NO_BARRIER}),
        ("early release", {NO_BARRIER}),
        ("no release", {"lacks 1 arrivals and 0 bytes"}),
        ("no expect", {NO_WAIT, UNWRITTEN}),
        ("too many bytes", {"lacks 0 arrivals and 16 bytes"}),
        ("too few bytes", {"lacks 0 arrivals and -16 bytes"}),
        ("no fence before the load", {NO_FENCE}),
        ("overwritten store", {"written while a TMA store reads"}),
        ("unseen load", {"a TMA copy that nothing waits for"}),
        ("unseen store", {"a TMA copy that nothing waits for"}),
    ],
)
def test_mistakes_with_a_ring_are_found(fault: str, wanted: set[str]) -> None:
    found = findings_of(lambda: run_ring(fault))
    assert any(text in key for text in wanted for key in found), found


# --- Products of two groups of warps --------------------------------------------------------------


@gluon.jit
def _load_operands(a_desc, b_desc, a_ring, b_ring, ready, empty, depth):
    STAGES: gl.constexpr = a_ring.shape[0]
    ROWS: gl.constexpr = a_ring.shape[1]
    DEPTH: gl.constexpr = a_ring.shape[2]
    for n in range(depth):
        stage, phase = n % STAGES, n // STAGES & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(ready.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        rows = gl.program_id(0) * ROWS
        load_tile(a_desc, [rows, n * DEPTH], ready.index(stage), a_ring.index(stage))
        load_tile(b_desc, [n * DEPTH, 0], ready.index(stage), b_ring.index(stage))


@gluon.jit
def _multiply(
    a_ring, b_ring, ready, empty, depth, out_ptr, HALF: gl.constexpr, FAULT: gl.constexpr
):
    STAGES: gl.constexpr = a_ring.shape[0]
    COLS: gl.constexpr = b_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    acc = gl.zeros([64, COLS], gl.float32, layout)
    for n in range(depth):
        stage, phase = n % STAGES, n // STAGES & 1
        if FAULT != "no wait":
            mbarrier.wait(ready.index(stage), phase)
        a = a_ring.index(stage).slice(HALF * 64, 64)
        acc = warpgroup_mma(a, b_ring.index(stage), acc, is_async=True)
        if FAULT == "early release":
            mbarrier.arrive(empty.index(stage), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        if FAULT != "early release":
            mbarrier.arrive(empty.index(stage), count=1)
    rows = gl.program_id(0) * 128 + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * COLS + cols[None, :], acc)


@gluon.jit
def _product_kernel(
    a_desc,
    b_desc,
    out_ptr,
    depth,
    STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
    FAULT: gl.constexpr,
):
    """Multiply 128 rows of A by B: each group of four warps half of the rows."""
    A: gl.constexpr = a_desc.block_type.shape
    B: gl.constexpr = b_desc.block_type.shape
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, A[0], A[1]], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B[0], B[1]], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=ARRIVALS)
    gl.warp_specialize(
        [
            (_multiply, (a_ring, b_ring, ready, empty, depth, out_ptr, 0, FAULT)),
            (_multiply, (a_ring, b_ring, ready, empty, depth, out_ptr, 1, FAULT)),
            (_load_operands, (a_desc, b_desc, a_ring, b_ring, ready, empty, depth)),
        ],
        [4, 1],
        [240, 24],
    )


def run_product(fault: str = "", arrivals: int = 2, stages: int = 2) -> tuple[bool, Execution]:
    torch.manual_seed(0)
    # Sums of few halves are exact in float32, in any order.
    a, b = (torch.randint(-8, 9, shape).to(BF16) for shape in ((256, 320), (320, 128)))
    out = torch.zeros(256, 128)
    with executing(90, count=True) as executions:
        operands = boxes(a, [128, 64]), boxes(b, [64, 128])
        _product_kernel[2,](*operands, out, 5, stages, arrivals, fault, num_warps=4)
    return torch.equal(out.double(), a.double() @ b.double()), executions[0]


def test_groups_of_warps_multiply_what_another_warp_loads() -> None:
    right, execution = run_product()
    assert right
    assert not execution.found
    assert execution.warps == 12


@pytest.mark.parametrize(
    ("fault", "arrivals", "wanted"),
    [
        ("early release", 2, {"written while wgmma reads", NO_BARRIER}),
        ("no wait", 2, {NO_WAIT}),
        ("", 1, {DEADLOCK}),
        ("", 3, {DEADLOCK}),
    ],
)
def test_mistakes_with_products_are_found(fault: str, arrivals: int, wanted: set[str]) -> None:
    found = findings_of(lambda: run_product(fault, arrivals))
    assert any(text in key for text in wanted for key in found), found


# --- One partition -------------------------------------------------------------------------------


@gluon.jit
def _squares_kernel(x_desc, out_ptr, tiles, EARLY: gl.constexpr):
    """Sum the squares of (64, 64) tiles, each loaded into the same buffer."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    buffer = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, x_desc.block_type.nbytes)
    load_tile(x_desc, [0, 0], ready, buffer)
    acc = gl.zeros([64, 64], gl.float32, layout)
    for n in range(tiles):
        mbarrier.wait(ready, n & 1)
        acc = warpgroup_mma(buffer, buffer, acc, is_async=True)
        if not EARLY:
            acc = warpgroup_mma_wait(0, [acc])
        more = n + 1 < tiles
        mbarrier.expect(ready, x_desc.block_type.nbytes, pred=more)
        load_tile(x_desc, [(n + 1) * 64, 0], ready, buffer, pred=more)
        if EARLY:
            acc = warpgroup_mma_wait(0, [acc])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * 64 + cols[None, :], acc)


def run_squares(early: bool = False) -> tuple[bool, Execution]:
    torch.manual_seed(0)
    x = torch.randint(-8, 9, (5 * 64, 64)).to(BF16)
    out = torch.zeros(64, 64)
    with executing(90, count=True) as executions:
        _squares_kernel[1,](boxes(x, [64, 64]), out, 5, early, num_warps=4)
    tiles = x.double().reshape(5, 64, 64)
    return torch.equal(out.double(), (tiles @ tiles).sum(0)), executions[0]


def test_one_partition_loads_what_it_multiplies() -> None:
    right, execution = run_squares()
    assert right
    assert not execution.found
    timing = command.predict(execution, 90, 132.0).on["H200"].timing
    assert timing is not None
    # Each load waits for the product before, and the product for the load.
    model = units.MODELS[90]
    cycles = (timing.seconds - model.launch) * units.GPUS["H200"].sustained_hz
    assert cycles > 5 * (model.bulk + model.cache_latency + 8192 / model.cache_bytes)


def test_a_load_over_operands_of_a_product_under_way_is_found() -> None:
    assert findings_of(lambda: run_squares(early=True))["written while wgmma reads"]


@triton.jit
def _product_of_boxes(a_desc, b_desc, out_desc, depth, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    sums = tl.zeros([ROWS, ROWS], tl.float32)
    for n in tl.range(depth, num_stages=3):
        a = a_desc.load([tl.program_id(0) * ROWS, n * DEPTH])
        sums = tl.dot(a, b_desc.load([n * DEPTH, 0]), sums)
    out_desc.store([tl.program_id(0) * ROWS, 0], sums)


def test_tensor_descriptors_of_triton_are_copied_too() -> None:
    """Triton pipelines the loads itself, in every warp alike."""
    torch.manual_seed(0)
    a, b = (torch.randint(-8, 9, shape).to(BF16) for shape in ((100, 256), (256, 64)))
    out = torch.zeros(100, 64)
    shapes = (a, [64, 64]), (b, [64, 64]), (out, [64, 64])
    described = [OfTriton.from_tensor(tensor, shape) for tensor, shape in shapes]
    with executing(90) as executions:
        _product_of_boxes[2,](*described, 4, 64, 64)
    assert not executions[0].found
    assert torch.equal(out.double(), a.double() @ b.double())


# --- In time --------------------------------------------------------------------------------------


def predicted_ring(stages: int) -> tuple[float, replay.Timing]:
    """Return the bytes a second that a copy through a ring moves on an H200, and its timing."""
    tiles, gpu = 48, units.GPUS["H200"]
    x = torch.randn(2 * tiles * 64, 64).to(BF16)
    y = torch.zeros_like(x)
    with executing(90, count=True, check=False) as executions:
        described = boxes(x, [64, 64]), boxes(y, [64, 64])
        _ring_kernel[2,](*described, tiles, stages, "", num_warps=4)
    timing = command.predict(executions[0], 90, gpu.num_sms / 2).on["H200"].timing
    assert timing is not None
    moved = gpu.num_sms * tiles * 2 * 64 * 64 * 2
    return moved / (timing.seconds - units.MODELS[90].launch), timing


def test_a_ring_is_bound_by_memory_where_it_has_stages() -> None:
    """Within 15% of what a copy attains; with a stage alone each load waits for the one before."""
    gpu = units.GPUS["H200"]
    rate, timing = predicted_ring(4)
    assert timing.binds == "global memory"
    assert rate == pytest.approx(gpu.bytes_per_s * units.ATTAINED_BYTES, rel=0.15)
    waiting, alone = predicted_ring(1)
    assert waiting < 0.6 * rate
    assert alone.binds == "latency"
    assert alone.waited["mbarrier"] > 0.1


def test_products_of_partitions_are_timed() -> None:
    """Longer with a stage than with two, for then each product waits for its operands."""
    seconds = []
    for stages in (2, 1):
        _, execution = run_product(stages=stages)
        predicted = command.predict(execution, 90, 66.0)
        timing = predicted.on["H200"].timing
        assert timing is not None, predicted.on["H200"].reason
        assert predicted.runs.off < 0.05
        seconds.append(timing.seconds)
    assert seconds[1] > 1.1 * seconds[0]


# --- Reductions -----------------------------------------------------------------------------------


@gluon.jit
def _reduce_kernel(
    x_desc, out_desc, tiles, EACH: gl.constexpr, WAIT: gl.constexpr, LEFT: gl.constexpr
):
    """Add tiles of a program to a tile of its own, or all to one."""
    SHAPE: gl.constexpr = x_desc.block_type.shape
    ROWS: gl.constexpr = SHAPE[0]
    buffer = gl.allocate_shared_memory(x_desc.dtype, [2, SHAPE[0], SHAPE[1]], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
    first = gl.program_id(0)
    for n in range(tiles):
        mbarrier.expect(ready.index(n & 1), x_desc.block_type.nbytes)
        tma.store_wait(LEFT)
        load_tile(x_desc, [(first * tiles + n) * ROWS, 0], ready.index(n & 1), buffer.index(n & 1))
        mbarrier.wait(ready.index(n & 1), n >> 1 & 1)
        if WAIT:
            tma.store_wait(0, read_only=False)
        add_box(out_desc, [first * ROWS * EACH, 0], buffer.index(n & 1))
    tma.store_wait(0)


@pytest.mark.skipif(add_box is None, reason="this Triton's Gluon has no reduction by TMA")
@pytest.mark.parametrize(
    ("dtype", "each", "wait", "left", "wanted"),
    [
        (torch.float32, True, True, 1, set()),
        (BF16, True, True, 1, set()),
        (torch.int32, False, False, 1, set()),
        (torch.float32, True, False, 1, {"floats added by TMA in no fixed order"}),
        (torch.float32, False, True, 1, {"floats added by TMA in no fixed order"}),
        (torch.int32, False, False, 2, {"written while a TMA store reads"}),
    ],
)
def test_reductions_of_floats_need_an_order(
    dtype: torch.dtype, each: bool, wait: bool, left: int, wanted: set[str]
) -> None:
    x = (8 * torch.randn(2 * 5 * 16, 32)).to(dtype)
    tiles = x.reshape(2, 5, 16, 32)
    out = torch.zeros(32, 32, dtype=dtype)
    swizzle = 32 * x.element_size()
    with executing(90) as executions:
        described = boxes(x, [16, 32], swizzle), boxes(out, [16, 32], swizzle)
        _reduce_kernel[2,](*described, 5, each, wait, left, num_warps=4)
    assert set(executions[0].found) == wanted
    total = torch.zeros(2, 16, 32, dtype=dtype)
    for n in range(5):
        total += tiles[:, n]
    if each:
        assert torch.equal(out, total.reshape(32, 32))
    else:
        torch.testing.assert_close(out[:16], total.sum(0).to(dtype))


# --- Every barrier, wait and fence that Triton compiles -------------------------------------------

SYNCHRONISING = {
    *("bar", "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait", "bulk.commit_group"),
    *("bulk.wait_group", "fence.proxy.async", "wgmma.wait_group", "wgmma.fence"),
}


def unnoticed(run: Callable[[], tuple[bool, Execution]]) -> Counter[str]:
    """Return what can go without a finding, a stop or another result, by its kind."""
    _, execution = run()
    program = execution.program
    missed: Counter[str] = Counter()
    for index, instruction in enumerate(program.code):
        kind = operation(program, index)
        if kind not in SYNCHRONISING:
            continue
        before = instruction.operation
        # A wait that is taken away has ended.
        instead = "not.pred" if kind == "mbarrier.try_wait" else "nop"
        instruction.operation = program.operation_names.index(instead)
        try:
            right, mutated = run()
            missed[kind] += right and not mutated.found
        except ExecutionError:
            pass
        finally:
            instruction.operation = before
    return missed


# Barriers of Triton alone: two stand where no partition gets to, and of those before its end
# one suffices. Triton before 3.8 adds three.
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


@pytest.mark.parametrize(
    ("run", "barriers"),
    [pytest.param(run_ring, 4, id="ring"), pytest.param(run_product, 2, id="product")],
)
def test_what_orders_partitions_is_missed(
    run: Callable[[], tuple[bool, Execution]], barriers: int
) -> None:
    missed = unnoticed(run)
    assert missed.pop("bar") <= barriers + 3 * OLD
    assert not missed.total(), missed
