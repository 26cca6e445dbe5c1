"""The executor itself, on kernels of a few lines of PTX: what it computes, finds and counts."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if os.environ.get("LEANER_EXECUTE") != "1":
    pytest.skip("runs with --backend executed", allow_module_level=True)

from bench.gpu_model import decode, library, ptx
from bench.gpu_model.execute import Execution, ExecutionError, execute

KERNEL = """
.visible .entry kernel(
  .param .u64 .ptr .global .align 1 kernel_param_0,
  .param .u64 .ptr .global .align 1 kernel_param_1,
  .param .u64 .ptr .global .align 1 kernel_param_2
)
.reqntid {threads}
{{
  .reg .pred %p<20>;
  .reg .b16 %rs<20>;
  .reg .b32 %r<40>;
  .reg .b64 %rd<20>;
  ld.param.b64 %rd1, [kernel_param_0];
  ld.param.b64 %rd2, [kernel_param_1];
  ld.param.b64 %rd3, [kernel_param_2];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mul.wide.u32 %rd4, %r1, 4;
  shl.b32 %r3, %r1, 2;
{body}
  ret;
}}
"""
LOAD = """
  add.s64 %rd5, %rd1, %rd4;
  add.s64 %rd6, %rd2, %rd4;
  add.s64 %rd7, %rd3, %rd4;
  ld.global.b32 %r10, [%rd5];
  ld.global.b32 %r11, [%rd6];
"""


def run(
    body: str,
    *tensors: Tensor,
    threads: int = 32,
    grid: int = 1,
    shared: int = 1024,
    registers: int = 0,
    **options: bool,
) -> Execution:
    """Execute a body: %rd1 to %rd3 are tensors, %r1 the thread, %r2 the program, %r3 4 %r1.

    ``registers`` is the value of .maxnreg, if any.
    """
    executor = library.load()
    limits = f"{threads} .maxnreg {registers}" if registers else threads
    program = decode.Program(ptx.parse(KERNEL.format(threads=limits, body=body)), executor)
    given = [*tensors, *(torch.zeros(1),) * (3 - len(tensors))]
    arguments = dict(zip("abc", given, strict=True))
    return execute(executor, program, shared, arguments, (grid, 1, 1), **options)


def found(body: str, *tensors: Tensor, **options: int) -> set[str]:
    return set(run(body, *tensors, **options).found)


def compute(instructions: str, a: Tensor, b: Tensor) -> Tensor:
    """Return 32 numbers: %r12, from %r10 of ``a`` and %r11 of ``b``."""
    out = torch.empty_like(a)
    execution = run(f"{LOAD}{instructions}\n st.global.b32 [%rd7], %r12;", a, b, out)
    assert not execution.found
    return out


INTEGERS = torch.tensor([0, 1, -1, 5, -7, 2**31 - 1, -(2**31), 123456789] * 4, dtype=torch.int32)
OTHERS = torch.tensor([3, -2, 0, 31, 32, 40, -1, 7], dtype=torch.int32).repeat_interleave(4)


def wrapped(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def unsigned(x: int) -> int:
    return x % 2**32


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32", lambda a, b: a + b),
        ("sub.s32", lambda a, b: a - b),
        ("mul.lo.s32", lambda a, b: a * b),
        ("mul.hi.s32", lambda a, b: a * b >> 32),
        ("mul.hi.u32", lambda a, b: unsigned(a) * unsigned(b) >> 32),
        ("min.s32", min),
        ("and.b32", lambda a, b: a & b),
        ("xor.b32", lambda a, b: a ^ b),
        ("shl.b32", lambda a, b: a << unsigned(b) if unsigned(b) < 32 else 0),
        ("shr.u32", lambda a, b: unsigned(a) >> unsigned(b) if unsigned(b) < 32 else 0),
        ("shr.s32", lambda a, b: a >> min(unsigned(b), 31)),
        ("div.u32", lambda a, b: unsigned(a) // unsigned(b) if b else -1),
        ("rem.u32", lambda a, b: unsigned(a) % unsigned(b) if b else a),
    ],
)
def test_integers(instruction: str, expected: Callable[[int, int], int]) -> None:
    actual = compute(f"{instruction} %r12, %r10, %r11;", INTEGERS, OTHERS)
    wanted = [wrapped(expected(a, b)) for a, b in zip(INTEGERS.tolist(), OTHERS.tolist())]
    assert actual.tolist() == wanted


FLOATS = torch.tensor([0.0, -0.0, 1.5, -2.25, float("inf"), float("nan"), 3e-39, 1e30]).repeat(4)
MORE = FLOATS.reshape(4, 8).T.flatten().contiguous()
PAIRS = "mov.b64 %rd8, {%r10, %r11}; mov.b64 %rd9, {%r11, %r10};"
UNPACK = "mov.b64 {_, %r12}, %rd8"


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.f32 %r12, %r10, %r11", torch.add),
        ("mul.rn.f32 %r12, %r10, %r11", torch.mul),
        ("fma.rn.f32 %r12, %r10, %r11, %r10", lambda a, b: (a.double() * b + a).float()),
        ("div.full.f32 %r12, %r10, %r11", torch.div),
        ("max.f32 %r12, %r10, %r11", torch.fmax),
        ("max.f32 %r12, %r10, %r11, %r10", torch.fmax),
        ("redux.sync.max.f32 %r12, %r10, -1", lambda a, b: torch.full_like(a, float("inf"))),
        (f"{PAIRS} sub.rn.f32x2 %rd8, %rd8, %rd9; {UNPACK}", lambda a, b: b - a),
        (
            f"{PAIRS} fma.rn.f32x2 %rd8, %rd8, %rd8, %rd9; {UNPACK}",
            lambda a, b: (b.double() * b + a).float(),
        ),
        ("neg.f32 %r12, %r10", lambda a, b: -a),
        ("sqrt.approx.f32 %r12, %r10", lambda a, b: a.sqrt()),
        ("add.ftz.f32 %r12, %r10, %r10", lambda a, b: torch.where(a.abs() < 1e-37, 0.0, 2 * a)),
    ],
)
def test_floats(instruction: str, expected: Callable[[Tensor, Tensor], Tensor]) -> None:
    actual = compute(f"{instruction};", FLOATS, MORE)
    torch.testing.assert_close(actual, expected(FLOATS, MORE), rtol=0, atol=0, equal_nan=True)


def test_a_conversion_takes_the_low_half_of_a_wider_register() -> None:
    body = """
      cvt.u64.u32 %rd8, %r10;
      cvt.s64.s32 %rd8, %rd8;
      shr.s64 %rd8, %rd8, 32;
      cvt.u32.u64 %r12, %rd8;
    """
    assert torch.equal(compute(body, INTEGERS, OTHERS), INTEGERS >> 31)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_half_precision_rounds_to_nearest_even(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(32) * torch.logspace(-9, 5, 32)
    x[:4] = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 70000.0, 1 + 2**-12])
    there = compute(f"cvt.rn.{name}.f32 %rs1, %r10; cvt.f32.{name} %r12, %rs1;", x, torch.zeros(32))
    assert torch.equal(there, x.to(dtype).float())
    mixed = f"cvt.rn.{name}.f32 %rs1, %r10; fma.rn.f32.{name} %r12, %rs1, %rs1, %r11;"
    rounded = x.to(dtype).double()
    assert torch.equal(compute(mixed, x, 2 * x), (rounded * rounded + 2 * x).float())
    mixed = f"cvt.rn.{name}.f32 %rs1, %r10; add.rn.f32.{name} %r12, %rs1, %r11;"
    assert torch.equal(compute(mixed, x, 2 * x), (rounded + 2 * x).float())
    pairs = compute(f"cvt.rn.{name}x2.f32 %r12, %r11, %r10;", x, 2 * x).view(dtype)
    assert torch.equal(pairs, torch.stack([x, 2 * x], 1).to(dtype).flatten())


def test_powers() -> None:
    x = torch.linspace(-130, 129, 32)
    exact = torch.exp2(x.double()).float()
    torch.testing.assert_close(
        compute("ex2.approx.f32 %r12, %r10;", x, x), exact, rtol=1.2e-7, atol=1e-45
    )


def test_lanes_shuffle() -> None:
    lanes = torch.arange(32, dtype=torch.int32)
    for mode, amount, expected in (
        ("bfly", "4", lanes ^ 4),
        ("idx", "3", lanes.clamp(3, 3)),
        ("idx", "%r11", lanes.flip(0)),
    ):
        shuffled = f"shfl.sync.{mode}.b32 %r12, %r10, {amount}, 31, -1;"
        assert torch.equal(compute(shuffled, lanes, lanes.flip(0)), expected)


def test_sides_of_a_branch_meet_again() -> None:
    """Lanes count down from their own number; each round is another way for even and odd."""
    out = torch.empty(32, dtype=torch.int32)
    body = """
  mov.b32 %r12, 0;
  mov.b32 %r13, %r1;
$again:
  setp.eq.b32 %p1, %r13, 0;
  @%p1 bra $leave;
  and.b32 %r14, %r13, 1;
  setp.eq.b32 %p2, %r14, 0;
  @%p2 bra $even;
  add.s32 %r12, %r12, 100;
  bra.uni $on;
$even:
  add.s32 %r12, %r12, 1;
$on:
  add.s32 %r13, %r13, -1;
  bra.uni $again;
$leave:
  shfl.sync.bfly.b32 %r15, %r12, 1, 31, -1;
  add.s64 %rd5, %rd1, %rd4;
  st.global.b32 [%rd5], %r15;
"""
    assert not run(body, out).found
    mine = [sum(100 if n % 2 else 1 for n in range(1, lane + 1)) for lane in range(32)]
    assert out.tolist() == [mine[lane ^ 1] for lane in range(32)]


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.fence",
        "lg2.approx.f32 %r5, %r6",
        "bar.red.popc.u32 %r5, 1, 64, %p1",
        "shfl.sync.up.b32 %r5, %r6, 1, 0, -1",
    ],
)
def test_an_unknown_instruction_stops_with_its_text(text: str) -> None:
    with pytest.raises(ptx.UnsupportedError, match=text.replace(".", r"\.")):
        run(f"  {text};")


READ = "add.s64 %rd5, %rd1, %rd4; ld.global.b32 %r10, [%rd5{offset}];"
WRITE = "add.s64 %rd5, %rd1, %rd4; st.global.b32 [%rd5], %r1;"


def test_an_access_outside_of_every_tensor_stops() -> None:
    assert not run(READ.format(offset=""), torch.zeros(32)).found
    for offset in ("+4", "+-4", "+4096000"):
        with pytest.raises(ExecutionError, match=r"out of bounds.*ld\.global\.b32"):
            run(READ.format(offset=offset), torch.zeros(32))
    with pytest.raises(ExecutionError, match="misaligned"):
        run(READ.format(offset="+2"), torch.zeros(40))


def test_what_no_tensor_owns_is_found() -> None:
    block = torch.zeros(33)
    assert found(READ.format(offset=""), block[:16]) == {"between the elements of a tensor"}
    assert not found(READ.format(offset=""), block[:32])


BARRIER = "bar.sync 0;"
OTHER = "xor.b32 %r5, %r3, 128; cvt.u64.u32 %rd6, %r5; add.s64 %rd6, %rd1, %rd6; "
READ_OTHER, WRITE_OTHER = OTHER + "ld.global.b32 %r6, [%rd6];", OTHER + "st.global.b32 [%rd6], %r1;"
READS = READ.format(offset="")
WRITE_OF = "setp.eq.b32 %p1, %r2, {}; add.s64 %rd5, %rd1, %rd4; @%p1 st.global.b32 [%rd5], %r1;"
STORE = "st.shared.b32 [%r3], %r1;"
LOAD_OTHER = "xor.b32 %r5, %r3, 128; ld.shared.b32 %r6, [%r5];"
STORE_OTHER = "xor.b32 %r5, %r3, 128; st.shared.b32 [%r5], %r1;"
STORE_ALIKE = "and.b32 %r4, %r3, 60; st.shared.b32 [%r4], {};"
DISAGREE = "two lanes write different numbers to one address"
MISSED_BY_SOME = "setp.lt.u32 %p1, %r1, {}; @%p1 bra $skip; bar.sync 0; $skip: bar.sync 0;"


@pytest.mark.parametrize(
    ("finding", "faulty", "right", "options"),
    [
        (DISAGREE, STORE_ALIKE.format("%r1"), STORE_ALIKE.format("7"), {}),
        (DISAGREE, "st.global.b32 [%rd1], %r1;", "st.global.b32 [%rd1], %r2;", {}),
        ("written by two programs", WRITE, STORE, {"grid": 2}),
        *(
            (
                "read and written by different programs",
                WRITE_OF.format(n) + READS,
                READS,
                {"grid": 2},
            )
            for n in (0, 1)
        ),
        # Of two warps, first in global and then in shared memory.
        *(
            (f"{kind} without a barrier", first + second, first + BARRIER + second, {"threads": 64})
            for kind, first, second in (
                ("read after write", WRITE, READ_OTHER),
                ("write after write", WRITE, WRITE_OTHER),
                ("write after read", READ_OTHER, WRITE),
                ("read after write", STORE, LOAD_OTHER),
                ("write after write", STORE, STORE_OTHER),
                ("write after read", STORE + BARRIER + LOAD_OTHER, STORE),
            )
        ),
        # The second warp reads what the first has yet to write: warps run one after another.
        (
            "shared memory read before it is written",
            STORE + LOAD_OTHER,
            STORE + BARRIER + LOAD_OTHER,
            {"threads": 64},
        ),
        (
            "lanes of a warp apart where all must take part",
            MISSED_BY_SOME.format(16),
            MISSED_BY_SOME.format(0),
            {},
        ),
        (
            "warps at different barriers",
            MISSED_BY_SOME.format(32),
            MISSED_BY_SOME.format(0),
            {"threads": 64},
        ),
    ],
)
def test_what_hangs_on_luck_is_found(
    finding: str, faulty: str, right: str, options: dict[str, int]
) -> None:
    assert finding in found(faulty, torch.zeros(64, dtype=torch.int32), **options)
    assert not found(right, torch.zeros(64, dtype=torch.int32), **options)


def test_shared_memory_out_of_bounds_stops() -> None:
    with pytest.raises(ExecutionError, match="out of bounds of shared memory"):
        run("ld.shared.b32 %r6, [%r3+1024];")


COPY = "add.s64 %rd5, %rd1, %rd4; cp.async.ca.shared.global [%r3], [%rd5], 4; "
COMMIT = "cp.async.commit_group; "
KEEP = "ld.shared.b32 %r6, [%r3]; add.s64 %rd6, %rd2, %rd4; st.global.b32 [%rd6], %r6; "


def test_copies_arrive_at_their_wait() -> None:
    x, out = torch.randn(2, 64)
    assert not run(COPY + COMMIT + "cp.async.wait_group 0; " + KEEP, x, out, threads=64).found
    assert torch.equal(out, x)
    for body in (COPY + COMMIT + KEEP, COPY + COMMIT + "cp.async.wait_group 1; " + KEEP):
        assert found(body, x, out, threads=64) == {"touched while cp.async copies"}
    others = KEEP.replace("[%r3]", "[%r5]")
    wait = COPY + COMMIT + "cp.async.wait_group 0; xor.b32 %r5, %r3, 128; "
    assert found(wait + others, x, out, threads=64) & {
        "read after write without a barrier",
        "shared memory read before it is written",
    }
    assert not found(wait + BARRIER + others, x, out, threads=64)


def test_copies_fill_what_they_do_not_read_with_zeros() -> None:
    x, out = torch.randn(2, 32)
    body = "add.s64 %rd5, %rd1, %rd4; cp.async.ca.shared.global [%r3], [%rd5], 4, 0; " + COMMIT
    assert not run(body + "cp.async.wait_group 0; " + KEEP, x, out).found
    assert (out == 0).all()


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu_model.execute.MAX_INSTRUCTIONS", 10_000)
    with pytest.raises(ExecutionError, match="endless loop"):
        run("$again: bra.uni $again;")


@pytest.mark.parametrize(
    ("stride", "kind", "wavefronts"),
    [
        (4, "b32", 1),
        (8, "b32", 2),
        (128, "b32", 32),
        (0, "b32", 1),
        (16, "v4.b32", 4),
        (144, "v4.b32", 4),
        (128, "v4.b32", 32),
    ],
)
def test_bank_conflicts_are_counted(stride: int, kind: str, wavefronts: int) -> None:
    names = "{%r10, %r11, %r12, %r13}" if "v4" in kind else "%r10"
    body = f"mul.lo.u32 %r5, %r1, {stride}; ld.shared.{kind} {names}, [%r5];"
    execution = run(body, shared=8192, check=False, count=True)
    load = next(i for i, s in enumerate(execution.program.kernel.statements) if "ld.sh" in s.text)
    counts = execution.counts[load]
    assert (counts.executed, counts.wavefronts) == (1, wavefronts)
    assert counts.min_wavefronts == (4 if "v4" in kind else 1)


@pytest.mark.parametrize(
    ("stride", "sectors", "least"), [(4, 4, 4), (8, 8, 4), (32, 32, 4), (0, 1, 1)]
)
def test_sectors_are_counted(stride: int, sectors: int, least: int) -> None:
    body = (
        f"mul.wide.u32 %rd5, %r1, {stride}; add.s64 %rd5, %rd1, %rd5; ld.global.b32 %r10, [%rd5];"
    )
    storage = torch.zeros(1024 + 8)
    x = storage[-storage.data_ptr() // 4 % 8 :]
    execution = run(body, x, count=True)
    load = next(i for i, s in enumerate(execution.program.kernel.statements) if "ld.gl" in s.text)
    assert execution.counts[load].sectors == sectors
    assert execution.counts[load].min_sectors == least
