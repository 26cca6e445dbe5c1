"""What a case of the benchmark does on a GPU that is not there.

    python -m bench.gpu_model vit_base                  # every launch, as compiled for sm_90
    python -m bench.gpu_model vit_base --arch 80 --only backward --lines 12
    python -m bench.gpu_model vit_base --tile BLOCK=16 num_warps=4
    python -m bench.gpu_model nystrom_listops --only backward --unchecked

One entry of the batch and up to four heads are executed (eight entries of short sequences, every
head of operators other than softmax attention), with all checks, and what programs did is counted:
bank conflicts, sectors of global memory, and, of the machine code that ptxas made, instructions of
warps by kind and the source lines that take most.
The time of the whole case is predicted from the machine code, with what its warps wait for and
where; floors are how long each unit of the GPU is busy with it, which nothing can be faster than.
"""

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import CASES, AttentionCase
from bench.attention.operators import OPERATOR_CASES
from bench.attention.vision_cases import VISION_CASES
from bench.gpu_model import launches, library, machine_code, ptx, replay, units
from bench.gpu_model.compile_ahead import Resources, compile_launch
from bench.gpu_model.execute import Execution, ExecutionError, executing
from leaner_kernels.ops import _tiles
from leaner_kernels.ops._tiles import OPTIONS, Rule

DIRECTIONS = "forward", "statistics", "backward"
# Machine instructions by kind; what is in none is integer arithmetic and moves.
KINDS = {
    "tensor cores": {"HMMA", "HGMMA"},
    "waits for tensor cores": {"WARPGROUP", "WARPSYNC"},
    "float arithmetic": {"FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "F2FP", "FMNMX3"},
    "exponentials and roots": {"MUFU"},
    "shared memory": {"LDS", "STS", "LDSM", "STSM"},
    "global memory": {"LDG", "STG", "LDGSTS"},
    "local memory": units.LOCAL,
    "shuffles": {"SHFL", "VOTE", "VOTEU"},
    "barriers": {"BAR", "DEPBAR", "LDGDEPBAR"},
    "branches": {"BRA", "EXIT", "BSSY", "BSYNC"},
}
TILES = "BLOCK", "largest_segment", "HEADS", *OPTIONS
OTHERS = "integers and moves"


def kind_of(name: str) -> str:
    """Return the kind of a machine instruction."""
    return next((kind for kind, names in KINDS.items() if name in names), OTHERS)


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


def changed_tile(changes: dict[str, int], rule: Rule | None) -> Rule | None:
    """Return a rule with some of its tile changed; what it has no entry of stays.

    The name of an option of every kernel, as ``num_warps``, changes each of them.
    """
    if rule is None:
        return None
    kept = {k: v for k, v in changes.items() if k in OPTIONS or k in rule.tile.constexprs}
    return dataclasses.replace(rule, tile=rule.tile.replace(**kept))


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
    code, found = machine_code.of_execution(execution, used.cubin)
    if not found.known:
        yield f"  machine code: unknown, counts differ by {found.off:.0%}"
    else:
        yield from _of_machine_code(code, found, execution.warps, lines)
        name, gpu = units.gpu_of(capability)
        executed = machine_code.executed(code, found.of_block, execution.warps)
        cycles = units.cycles(executed, execution.wavefronts, gpu)
        microseconds = 1e6 * per * times / gpu.num_sms / gpu.boost_hz
        floors = {unit: n * microseconds for unit, n in cycles.items()}
        yield f"  predicted floors on {name}, µs: {_ranked(floors, '{:,.1f}')}"
        try:
            work = replay.work_of(execution, used, code, found, times)
            yield from _of_replay(work, lines, capability)
        except ValueError as error:
            yield f"  not timed: {error}"
    for name, n in execution.found.items():
        yield f"  FOUND {n} times: {name}"
    for finding in execution.findings[:5]:
        yield f"    {finding}"


def _ranked(amounts: Mapping[str, float], form: str, least: float = 0.0) -> str:
    """Return amounts and their names, the largest first."""
    ranked = sorted(amounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {form.format(n)}" for name, n in ranked if n > least)


def _of_replay(work: replay.Work, lines: int, capability: int) -> Iterator[str]:
    name, gpu = units.gpu_of(capability)
    timing = replay.time(work, gpu)
    yield f"  predicted on {name}: {1e6 * timing.seconds:,.1f} µs; {timing.binds} binds"
    yield f"    units are busy: {_ranked(timing.busy, '{:.0%}', 0.1)}"
    yield f"    warps wait for: {_ranked(timing.waited, '{:.0%}', 0.02)}"
    by_line: Counter[tuple[str, int]] = Counter()
    for one, cycles in zip(work.code.instructions, timing.waited_at, strict=True):
        by_line[one.file, one.line] += cycles  # type: ignore[assignment] - a float
    total = by_line.total() or 1
    where = (f"{file}:{line} {n / total:.0%}" for (file, line), n in by_line.most_common(lines))
    yield f"    and at: {', '.join(where)}"


def _of_machine_code(
    code: machine_code.MachineCode, found: machine_code.Runs, warps: int, lines: int
) -> Iterator[str]:
    by_kind: Counter[str] = Counter()
    by_line: Counter[tuple[str, int]] = Counter()
    for (start, end), times in zip(code.blocks, found.of_block, strict=True):
        for one in code.instructions[start:end]:
            by_kind[kind_of(one.name)] += times * warps
            by_line[one.file, one.line] += times * warps
    total = by_kind.total()
    yield (
        f"  {total:,.0f} machine instructions of warps; counts differ from the executor's by "
        f"{found.off:.1%}"
    )
    for kind, n in by_kind.most_common():
        if n:
            yield f"    {n:>10,.0f}  {n / total:4.0%}  {kind}"
    yield "  hottest lines:"
    for (file, line), n in by_line.most_common(lines):
        yield f"    {n:>10,.0f}  {n / total:4.0%}  {file}:{line}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    every = *CASES, *VISION_CASES, *OPERATOR_CASES
    cases = {case.name: case for case in every if case.device == "cuda"}
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=cases, metavar="CASE", help=", ".join(cases))
    parser.add_argument("--arch", type=int, choices=tuple(units.MODELS), default=90)
    parser.add_argument("--only", choices=DIRECTIONS, nargs="+", default=DIRECTIONS)
    parser.add_argument("--lines", type=int, default=8, help="how many of the hottest to name")
    parser.add_argument(
        "--tile",
        nargs="+",
        default=(),
        metavar="NAME=NUMBER",
        help=f"change tiles of short sequences: {', '.join(TILES)}",
    )
    parser.add_argument("--unchecked", action="store_true", help="count and time alone: sooner")
    given = parser.parse_args(argv)
    try:
        changes = {name: int(number) for name, number in (t.split("=") for t in given.tile)}
    except ValueError:
        changes = {"": 0}
    if not changes.keys() <= set(TILES):
        parser.error(f"--tile takes {', '.join(TILES)}, each with a number: BLOCK=64")
    whole = cases[given.case]
    if changes and not isinstance(whole, AttentionCase):
        parser.error(f"--tile is for softmax attention, {given.case} is none")
    part, times = smaller(whole)
    name, gpu = units.gpu_of(given.arch)
    found = False
    try:
        for direction in given.only:
            with launches.changed_rules(lambda _, rule: changed_tile(changes, rule)):
                executions = run(
                    part, direction, given.arch, times=times, check=not given.unchecked
                )
            for execution in executions:
                used = compile_launch(execution.launch, given.arch)
                lines = describe(execution, used, given.arch, times, given.lines)
                print(f"{direction}, sm_{given.arch}", *lines, sep="\n", flush=True)  # noqa: T201
                found |= bool(execution.findings)
            if hasattr(whole, "bytes") and direction != "statistics":
                us = 1e6 * whole.bytes(direction) / (gpu.bytes_per_s * units.ATTAINED_BYTES)
                print(f"  predicted floor of bytes on {name}: {us:.1f} µs\n")  # noqa: T201
    except (library.NoCompilerError, ptx.UnsupportedError, ExecutionError) as error:
        sys.exit(f"python -m bench.gpu_model: {error}")
    sys.exit(found)
