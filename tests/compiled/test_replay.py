"""The timing model: what each unit, latency and barrier costs, on a few machine instructions."""

import os
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench import frames, report
from bench.attention.cases import CASES
from bench.gpu_model import command, compile_ahead, machine_code, replay, units
from bench.gpu_model.execute import executing

GPU_NAME = units.GPUS["H100"]
MODEL = units.MODELS[90]
NONE = 7  # no scoreboard
ROOT = Path(__file__).parents[2]


def line(text: str, stall: int = 1, writes: int = NONE, reads: int = NONE, waits: int = 0) -> str:
    """Return an instruction as nvdisasm writes it, what it waits for in its code."""
    control = (stall | writes << 5 | reads << 8 | waits << 11) << 41
    return f"        /*0000*/    {text} ;    /* 0x0000000000000000 */\n    /* 0x{control:016x} */"


def work(*lines: str, repeat: int = 1, warps: int = 4, programs: float = 1, resident: int = 1):
    code = machine_code.parse("\n".join([*lines, line("EXIT")]))
    end = len(code.instructions) - 1
    trace = [*range(end)] * repeat + [end]
    return replay.Work(code, [trace], warps, programs * GPU_NAME.num_sms, resident, {}, 1.0)


def seconds(given: replay.Work) -> float:
    """Return how long the SMs are busy, without what the launch itself takes."""
    return replay.time(given, GPU_NAME).seconds - MODEL.launch


def cycles(given: replay.Work) -> float:
    return seconds(given) * GPU_NAME.sustained_hz


@pytest.mark.parametrize(
    ("opcode", "each"),
    [
        ("FFMA R1, R2, R3, R4", 1),
        ("IMAD R1, R2, R3, R4", 2),
        ("LOP3.LUT R1, R2, R3, R4", 2),
        ("MUFU.EX2 R1, R2", 8),
        ("HMMA.16816.F32.BF16 R4, R8, R2, R4", 4 / 0.62),
        ("HMMA.1688.F32.TF32 R4, R8, R2, R4", 4 / 0.62),
    ],
)
def test_a_unit_takes_an_instruction_every_so_many_cycles(opcode: str, each: float) -> None:
    assert cycles(work(line(opcode), repeat=1000)) == pytest.approx(1000 * each, rel=0.01)
    # Two warps of a scheduler share it.
    assert cycles(work(line(opcode), repeat=1000, warps=8)) == pytest.approx(2000 * each, rel=0.01)


def test_wgmma_reaches_the_peak_where_it_overlaps() -> None:
    product = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
    many = work(*[line(product)] * 7, line(product + ", gsb0"), repeat=100)
    sustained = GPU_NAME.sustained_hz / GPU_NAME.clock_hz
    peak = GPU_NAME.flop_per_s / GPU_NAME.num_sms * sustained
    assert 100 * 8 * 2 * 64 * 128 * 16 / seconds(many) == pytest.approx(peak, rel=0.02)
    wait = line("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    one = line(product + ", gsb0")
    serialised, whole = cycles(work(one, wait, repeat=800)), cycles(many)
    assert serialised > whole + 800 * MODEL.wgmma_tail


def test_shared_memory_serves_one_wavefront_a_cycle_of_all_warps() -> None:
    narrow, wide = line("LDS R1, [R2]"), line("LDS.128 R1, [R2]")
    assert cycles(work(narrow, repeat=1000)) == pytest.approx(4 * 1000, rel=0.02)
    assert cycles(work(wide, repeat=1000)) == pytest.approx(16 * 1000, rel=0.02)
    conflicted = work(narrow, repeat=1000)
    key = machine_code.key_of("LDS", "?", 0)
    slow = conflicted._replace(accesses={key: replay.Access(wavefronts=32)})
    assert cycles(slow) == pytest.approx(32 * 4 * 1000, rel=0.02)


def test_what_is_read_from_memory_takes_its_latency() -> None:
    load, use = line("LDG.E R1, desc[UR4][R2.64]", writes=0), line("FADD R1, R1, R1", waits=1)
    far = work(load, use, repeat=100)._replace(memory_bytes=1e12)
    near = work(load, use, repeat=100)._replace(memory_bytes=0.0)
    assert cycles(near) == pytest.approx(100 * MODEL.cache_latency, rel=0.1)
    assert cycles(far) > 100 * MODEL.memory_latency
    timing = replay.time(near, GPU_NAME)
    assert timing.waited["global memory"] > 0.9
    assert timing.waited_at[1] > 0.9 * sum(timing.waited_at)


def test_many_programs_are_bound_by_the_bandwidth() -> None:
    load = line("LDG.E.128 R1, desc[UR4][R2.64]", writes=0)
    moved = 512 * 4 * 16
    copy = work(*[load] * 16, line("FADD R1, R1, R1", waits=1), programs=200, resident=8)
    copy = copy._replace(memory_bytes=moved * copy.programs)
    rate = moved * copy.programs / seconds(copy)
    assert rate == pytest.approx(GPU_NAME.bytes_per_s * units.ATTAINED_BYTES, rel=0.1)
    assert replay.time(copy, GPU_NAME).binds == "global memory"


def test_warps_take_turns_and_so_reach_a_load_together() -> None:
    """Where one went on while it can, the other would compute while the first one waits."""
    load, use = line("LDG.E R1, desc[UR4][R2.64]", writes=0), line("FADD R1, R1, R1", waits=1)
    compute = [line("FFMA R1, R2, R3, R4")] * 250
    both = cycles(work(*compute, load, use, repeat=20, warps=8)._replace(memory_bytes=0.0))
    assert both == pytest.approx(20 * (2 * 250 + MODEL.cache_latency), rel=0.05)


def test_a_fence_waits_for_the_earlier_stores_of_its_warp() -> None:
    store, fence = line("STG.E desc[UR4][R2.64], R1"), line("MEMBAR.ALL.CTA")
    stored = cycles(work(store, fence, repeat=100)._replace(memory_bytes=0.0))
    assert stored == pytest.approx(100 * MODEL.cache_latency, rel=0.1)
    assert cycles(work(fence, repeat=100)) < 0.1 * stored
    assert cycles(work(store, repeat=100)._replace(memory_bytes=0.0)) < 0.3 * stored
    timing = replay.time(work(store, fence, repeat=100), GPU_NAME)
    assert timing.waited["global memory"] > 0.8


def test_cp_async_waits_for_its_group_alone() -> None:
    copy, commit = line("LDGSTS.E.128 [R1], desc[UR4][R2.64]"), line("LDGDEPBAR")
    first = [copy, commit, *[line("MUFU.EX2 R1, R2")] * 60, copy, commit]
    one_left, none_left = (
        cycles(work(*first, line(f"DEPBAR.LE SB0, {left}"))) for left in ("0x1", "0x0")
    )
    assert none_left > one_left + 100


def test_warps_meet_at_a_barrier() -> None:
    meet = line("BAR.SYNC.DEFER_BLOCKING 0x0")
    assert cycles(work(meet, repeat=100, warps=8)) == pytest.approx(100 * MODEL.barrier, rel=0.2)
    timing = replay.time(work(meet, repeat=100, warps=8), GPU_NAME)
    assert timing.waited["barrier"] > 0.8
    # A named one is for as many warps as it says: of an odd number of arrivals one meets nobody.
    named = line("BAR.SYNC.DEFER_BLOCKING 0x1, 0x40")
    assert cycles(work(named, repeat=100)) == pytest.approx(100 * MODEL.barrier, rel=0.2)
    with pytest.raises(ValueError, match="wait for each other"):
        cycles(work(named, repeat=99, warps=5))
    for text in ("BAR.SYNC R4, 0x80", "BAR.ARV 0x1, 0x80", "BAR.SYNC 0x10"):
        with pytest.raises(ValueError, match="is not modelled"):
            cycles(work(line(text)))


def test_a_warp_waits_for_the_bytes_of_a_phase() -> None:
    """Another warp copies and a third arrives; whoever waits goes on after both."""
    copy, wait = (
        line("UTMALDG.2D [UR8], [UR6]"),
        line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3"),
    )
    compute, arrive = line("MUFU.EX2 R1, R2"), line("SYNCS.ARRIVE.TRANS64 RZ, [R2], RZ")
    given = work(copy, wait, arrive, compute, warps=3)
    end = len(given.code.instructions) - 1

    def seconds_of(size: int, before: int) -> float:
        event = replay.Event(0, size, True)
        partitions = [
            replay.WarpTrace([0, end], [event]),
            replay.WarpTrace([1, end], [replay.Event(0, 0, False)]),
            replay.WarpTrace([*[3] * before, 2, end], [event._replace(bytes=0)]),
        ]
        return cycles(given._replace(partitions=[partitions], memory_bytes=0.0))

    arrives = MODEL.bulk + MODEL.cache_latency + MODEL.barrier
    for size in (1024, 32 * 1024):
        expected = arrives + size / MODEL.cache_bytes
        assert seconds_of(size, 1) == pytest.approx(expected, rel=0.05)
    assert seconds_of(1024, 1000) == pytest.approx(8 * 1000 + MODEL.barrier, rel=0.05)


def test_warps_that_wait_for_each_others_phases_are_found() -> None:
    wait, arrive = (
        line("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3"),
        line("SYNCS.ARRIVE [R2], R3"),
    )
    given = work(wait, arrive, warps=2)
    events = [replay.Event(n, 0, False) for n in range(2)]
    partitions = [
        replay.WarpTrace([0, 1, 2], [events[n], events[1 - n]._replace(arrives=True)])
        for n in range(2)
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        cycles(given._replace(partitions=[partitions]))


NESTED = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   STG.E [R2], R4 ;
        /*0050*/              @!P5 CALL.REL.NOINC `(.L_x_3) ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*0070*/                   EXIT ;
.L_x_4:
        /*0080*/                   RET.REL.NODEC R12 `(kernel) ;
"""


def test_a_warp_walks_through_nested_loops_in_order() -> None:
    code = machine_code.parse(NESTED)
    known = {("HMMA", "?", 0): 12.0, ("LDG", "?", 0): 3.0, ("STG", "?", 0): 3.0}
    found = machine_code.runs(code, known)
    assert found.off < 1e-3
    inner = [2, 3] * 4
    assert machine_code.walks(code, found) == [[0, *[1, *inner, 4, 5, 6] * 2, 1, *inner, 4, 5, 7]]


def test_counts_that_no_flow_explains_are_off() -> None:
    known = {("HMMA", "?", 0): 12.0, ("LDG", "?", 0): 3.0, ("STG", "?", 0): 15.0}
    assert machine_code.runs(machine_code.parse(NESTED), known).off > 0.1


def test_a_loop_that_flow_alone_would_leave_apart_is_entered() -> None:
    """Nothing counted stands between the start and the loop, and there is a way around it."""
    text = """
        /*0000*/               @P0 BRA `(.L_x_2) ;
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   EXIT ;
"""
    code = machine_code.parse(text)
    found = machine_code.runs(code, {("HMMA", "?", 0): 7.0})
    assert machine_code.walks(code, found) == [[0, 1, *[2, 3] * 7, 4]]


def test_warps_that_differ_take_turns_as_often_as_counted() -> None:
    text = """
        /*0000*/               @P0 BRA `(.L_x_1) ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
.L_x_1:
        /*0020*/                   STG.E [R2], R4 ;
        /*0030*/                   EXIT ;
"""
    code = machine_code.parse(text)
    found = machine_code.runs(code, {("HMMA", "?", 0): 0.375, ("STG", "?", 0): 1.0})
    walks = machine_code.walks(code, found)
    assert len(walks) == 8
    assert sum(1 in walk for walk in walks) == 3


def test_a_function_is_no_branch() -> None:
    text = NESTED.replace("CALL.REL.NOINC `(.L_x_3)", "CALL.REL.NOINC `(.L_x_4)")
    code = machine_code.parse(text)
    found = machine_code.runs(code, {("HMMA", "?", 0): 4.0})
    with pytest.raises(ValueError, match="no end of the kernel"):
        machine_code.walks(code, found)


RESULTS = sorted((ROOT / "bench/results").glob("20*-h200-*.json"))


@pytest.mark.parametrize(
    ("name", "stage", "lines"),
    # Of kernels that are as they ran there.
    [
        ("lra_2048", "forward", True),
        ("vit_base", "forward", True),
        ("gpt2_512", "forward", True),
        ("long_1024", "backward", False),
    ],
)
def test_what_an_h200_measured_is_met(
    name: str, stage: str, lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 10%, though the machine code is that of another release of Triton.

    The counts of machine instructions are found by source line. In a backward whose calls take
    several lines they are off by 3%, and right without lines; other kernels need the lines.
    """
    monkeypatch.setattr(knobs.compilation, "disable_line_info", not lines)
    monkeypatch.setattr(compile_ahead, "_compiled", {})
    measured = report.own_kernels(frames.timed([frames.read(path) for path in RESULTS]))
    measured = measured[(measured["case"] == name) & (measured["stage"] == stage)]
    (case,) = (case for case in CASES if case.name == name)
    launched = command.simulate(case, stage, 90, check=False, packed=False)
    found = next(command.rows(case, stage, launched))
    assert (found["gpu"], found["case"], found["stage"]) == ("H200", name, stage)
    assert found["predicted"] == pytest.approx(measured["median"].item(), rel=0.1)


def test_loops_with_nothing_inside_are_told_from_the_others() -> None:
    code = machine_code.parse(NESTED)
    found = [code.blocks[number] for number in machine_code.innermost_loops(code)]
    assert found == [(2, 4)], "the product and its branch"
    alone = machine_code.parse(NESTED.replace("@P1 BRA `(.L_x_2)", "NOP"))
    found = sorted(alone.blocks[number] for number in machine_code.innermost_loops(alone))
    assert (found[0][0], found[-1][1]) == (1, 7), "all but what comes first and last"


# --- A kernel that is compiled and executed -------------------------------------------------------


@triton.jit
def _products_kernel(x_ptr, out_ptr, rounds, DEPTH: tl.constexpr, BARRIER: tl.constexpr):
    rows, cols = tl.arange(0, 64)[:, None] * 64, tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + rows + tl.arange(0, DEPTH)[None, :])  # (64, DEPTH)
    decaying = tl.load(x_ptr + rows + cols).to(tl.float32)
    sums = tl.zeros([64, 64], tl.float32)
    for _ in range(rounds):
        for _ in tl.static_range(64 // DEPTH):
            sums = tl.dot(x, x.T, sums)
        decaying = decaying * 0.5 + 1.0
        if BARRIER:
            tl.debug_barrier()
    tl.store(out_ptr + rows + cols, (sums + decaying).to(x.dtype))


def described(depth: int = 64, barrier: bool = False, **options: int) -> str:
    """Return what the command prints of products in a loop, in as many calls as depths need."""
    x = torch.randn(64, 64).bfloat16()
    with executing(90, count=True) as executions:
        _products_kernel[1,](x, torch.empty_like(x), 40, depth, barrier, num_warps=4, **options)
    (execution,) = executions
    return "\n".join(command.describe(command.predict(execution, 90, 132.0), 4))


def predicted(text: str) -> float:
    """Return the predicted µs, without what any launch takes."""
    found = re.search(r"predicted on H200: ([\d,.]+) µs", text)
    assert found is not None, text
    return float(found[1].replace(",", "")) - 1e6 * units.MODELS[90].launch


def test_defects_in_a_loop_show() -> None:
    """Products that wait for each other, a barrier in each round, registers that do not suffice."""
    good = described()
    waiting, meeting, spilling = described(depth=16), described(barrier=True), described(maxnreg=64)
    assert predicted(waiting) > 1.5 * predicted(good)
    assert predicted(meeting) >= predicted(good)  # where the product takes longer, it costs nothing
    assert predicted(spilling) > 1.02 * predicted(good)


def test_what_cannot_be_timed_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "MAX_DIFFERENCE", -1.0)
    text = described()
    assert re.search(r"^  not timed: the way through its blocks differs", text, re.MULTILINE)
    assert "predicted floors on H200" in text
