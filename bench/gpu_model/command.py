"""Simulate a case of the benchmark on a GPU that is not present.

    python -m bench.gpu_model vit_base                  # every launch, as compiled for sm_90
    python -m bench.gpu_model vit_base --arch 80 --only backward --lines 12
    python -m bench.gpu_model nystrom_listops --only backward --unchecked

One entry of the batch and up to four heads are executed (eight entries of short sequences, every
head of operators other than softmax attention), with all checks, and what programs did is counted:
bank conflicts, sectors of global memory, and, of the machine code that ptxas made, instructions of
warps and the source lines that run most of them.
The time of the whole case is predicted from the machine code, with what its warps wait for and
where; floors are how long each unit of the GPU is busy with it, which nothing can be faster than.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ON_GPU
from bench.gpu_model import launches, library, machine_code, ptx, replay, units
from bench.gpu_model.compile_ahead import Resources, compile_launch
from bench.gpu_model.execute import Execution, ExecutionError, executing
from bench.gpu_model.machine_code import MachineCode, Runs
from bench.harness.command import parser as parser_of
from leaner_kernels.ops import _tiles

DIRECTIONS = "forward", "statistics", "backward"


def smaller(case: Any) -> tuple[Any, float]:
    """Return a case with less of the same, and how many times as much the whole one is.

    One entry of the batch, of varlen sequences all; of attention four heads, and eight entries
    where a program may own several heads.
    """
    if not isinstance(case, AttentionCase):
        return dataclasses.replace(case, batch=1), float(case.batch)
    entries = case.batch if case.ragged else 8 if case.tokens <= 64 else 1
    heads = min(case.heads, 4)
    part = dataclasses.replace(case, batch=entries, heads=heads)
    return part, case.batch * case.heads / (entries * heads)


def run(
    case: Any,
    direction: str,
    capability: int,
    *,
    times: float = 1.0,
    check: bool = True,
    packed: bool = True,
) -> list[Execution]:
    """Execute one direction of a case, counted and, with ``check``, checked.

    The case is a part of one of ``times`` as many heads: rows of a head go to one program or to
    several as they would in the whole. Its tensors are views of one projection or, unless
    ``packed``, contiguous.
    """
    call = launches.call_of(case)
    if not packed:
        call = launches.separate(call)
    inputs = launches.filled(call.inputs)
    for t in inputs:
        if isinstance(t, Tensor) and t.dtype == torch.int32:  # starts of sequences, or lengths
            t.copy_(torch.tensor([0, *case.lengths]).cumsum(0) if case.ragged else case.tokens)
    with mock.patch.object(_tiles, "ENOUGH_PROGRAMS", int(_tiles.ENOUGH_PROGRAMS / times)):
        if direction == "backward":
            with executing(capability, check=False):
                out, kept = call.attend(*inputs, *call.params)
            grad = torch.randn_like(out)  # strides too, as models have it
        with executing(capability, count=True, check=check) as executions:
            if direction == "forward":
                call.attend(*inputs, *call.params)
            elif direction == "statistics":
                call.with_stats(*inputs, None, *call.params)
            else:
                call.gradients(grad, inputs, out, kept)
    return executions


class Prediction(NamedTuple):
    """What the model makes of a launch on a GPU.

    Attributes:
        floors: seconds by unit that the launch takes if nothing waits; empty where its machine code
            is not understood.
        timing: None where it is not understood or not modelled, as ``reason`` says.
    """

    floors: dict[str, float]
    timing: replay.Timing | None
    reason: str = ""


def predict(
    execution: Execution,
    used: Resources,
    of_code: tuple[MachineCode, Runs],
    gpu: units.GPU,
    times: float,
) -> Prediction:
    """Time a launch, ``times`` as large as it was executed, on a GPU."""
    code, found = of_code
    if not found.known:
        return Prediction(
            {}, None, f"its machine code is unknown, counts differ by {found.off:.0%}"
        )
    executed = machine_code.executed(code, found.of_block, execution.warps)
    cycles = units.cycles(executed, execution.wavefronts, gpu)
    a_cycle = round(execution.programs * times) / gpu.num_sms / gpu.boost_hz
    floors = {unit: n * a_cycle for unit, n in cycles.items()}
    try:
        work = replay.work_of(execution, used, code, found, times)
        return Prediction(floors, replay.time(work, gpu))
    except ValueError as error:
        return Prediction(floors, None, str(error))


def describe(
    execution: Execution, used: Resources, capability: int, times: float, lines: int
) -> Iterator[str]:
    """Yield lines about a launch; counts are of a program, floors of ``times`` such launches."""
    per = execution.programs
    grid = " x ".join(map(str, execution.grid))
    yield (
        f"{execution.name}: {grid} programs of {execution.warps} warps, {used.programs_per_sm} at "
        f"once on an SM; {used.registers} registers, {used.shared} bytes shared, "
        f"{used.stack} of stack"
    )
    for name, actual, least in (
        ("wavefronts of shared memory", "wavefronts", "min_wavefronts"),
        ("sectors of global memory", "sectors", "min_sectors"),
    ):
        total = sum(getattr(n, actual) for n in execution.counts)
        fewest = sum(getattr(n, least) for n in execution.counts)
        if fewest:
            yield f"  {total / per:,.0f} {name}, {total / fewest:.2f} times the fewest"
    of_code = machine_code.of_execution(execution, used.cubin)
    name, gpu = units.gpu_of(capability)
    predicted = predict(execution, used, of_code, gpu, times)
    code, found = of_code
    if predicted.floors:
        by_line: Counter[tuple[str, int]] = Counter()
        for (start, end), runs in zip(code.blocks, found.of_block, strict=True):
            for one in code.instructions[start:end]:
                by_line[one.file, one.line] += runs * execution.warps
        yield (
            f"  {by_line.total():,.0f} machine instructions of warps, counts differ from the "
            f"executor's by {found.off:.1%}; at {_hottest(by_line, lines)}"
        )
        floors = {unit: 1e6 * seconds for unit, seconds in predicted.floors.items()}
        yield f"  predicted floors on {name}, µs: {_ranked(floors, '{:,.1f}')}"
    if timing := predicted.timing:
        yield f"  predicted on {name}: {1e6 * timing.seconds:,.1f} µs; {timing.binds} binds"
        yield f"    units are busy: {_ranked(timing.busy, '{:.0%}', 0.1)}"
        yield f"    warps wait for: {_ranked(timing.waited, '{:.0%}', 0.02)}"
        by_line = Counter()
        for one, cycles in zip(code.instructions, timing.waited_at, strict=True):
            by_line[one.file, one.line] += cycles  # type: ignore[assignment] - a float
        yield f"    and at: {_hottest(by_line, lines)}"
    else:
        yield f"  not timed: {predicted.reason}"
    for name, n in execution.found.items():
        yield f"  FOUND {n} times: {name}"
    for finding in execution.findings[:5]:
        yield f"    {finding}"


def _ranked(amounts: Mapping[str, float], form: str, least: float = 0.0) -> str:
    """Return amounts and their names, the largest first."""
    ranked = sorted(amounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {form.format(n)}" for name, n in ranked if n > least)


def _hottest(by_line: Counter[tuple[str, int]], lines: int) -> str:
    total = by_line.total() or 1
    ranked = by_line.most_common(lines)
    return ", ".join(f"{file}:{line} {n / total:.0%}" for (file, line), n in ranked)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = parser_of("bench.gpu_model", __doc__)
    parser.add_argument(
        "case", choices=ON_GPU, metavar="CASE", help=f"case to simulate: {', '.join(ON_GPU)}"
    )
    parser.add_argument(
        "--arch",
        type=int,
        choices=tuple(units.MODELS),
        default=90,
        help="compute capability to compile for (90)",
    )
    parser.add_argument(
        "--only",
        choices=DIRECTIONS,
        nargs="+",
        default=DIRECTIONS,
        help="directions to execute (all)",
    )
    parser.add_argument(
        "--lines", type=int, default=8, help="number of the hottest source lines to print (8)"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="skip the checks, and only count and time"
    )
    args = parser.parse_args(argv)
    whole = ON_GPU[args.case]
    part, times = smaller(whole)
    name, gpu = units.gpu_of(args.arch)
    found = False
    try:
        for direction in args.only:
            executions = run(part, direction, args.arch, times=times, check=not args.unchecked)
            for execution in executions:
                used = compile_launch(execution.launch, args.arch)
                lines = describe(execution, used, args.arch, times, args.lines)
                print(f"{direction}, sm_{args.arch}", *lines, sep="\n", flush=True)  # noqa: T201
                found |= bool(execution.findings)
            if direction != "statistics":
                us = 1e6 * whole.bytes(direction) / (gpu.bytes_per_s * units.ATTAINED_BYTES)
                print(f"  predicted floor of bytes on {name}: {us:.1f} µs\n")  # noqa: T201
    except (library.NoCompilerError, ptx.UnsupportedError, ExecutionError) as error:
        sys.exit(f"python -m bench.gpu_model: {error}")
    sys.exit(found)
