"""Simulate cases of the benchmark on a GPU that is not present.

    python -m bench.gpu_model vit_base                  # every launch, as compiled for sm_90
    python -m bench.gpu_model vit_base --arch 80 --only backward --lines 12
    python -m bench.gpu_model xcit_m --only backward --unchecked
    python -m bench.gpu_model all --arch 80 86 90 --only forward backward --unchecked --json FILE

The simulator executes one batch entry and up to four heads with all checks: eight entries of short
sequences, and every head of operators other than softmax attention. It counts bank conflicts and
sectors of global memory and, in the machine code of ptxas, the instructions of warps and the source
lines that run most of them.

The time of the whole case is predicted from the machine code, along with the causes and places at
which warps wait. A floor is the time that a unit of the GPU is busy with the case, a lower bound on
its time.

The last command above writes bench/results/predictions.json, which ``bench.report`` shows. The file
calibration.json next to it covers sm_90 with ``--separate``, and the release of Triton that ran on
an H200. A test compares it with the measurements.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ON_GPU
from bench.gpu_model import launches, library, machine_code, ptx, replay, units
from bench.gpu_model.candidates import CANDIDATES, TMA
from bench.gpu_model.compile_ahead import Resources, compile_launch
from bench.gpu_model.execute import Execution, ExecutionError, executing
from bench.gpu_model.launches import AnyCase
from bench.gpu_model.machine_code import MachineCode, Runs
from bench.harness import command
from leaner_kernels.ops import _tiles

DIRECTIONS = "forward", "statistics", "backward"
SMS = _tiles.multiprocessors(torch.device("cpu"))
BYTES, UNKNOWN = "bytes", "unknown"


def smaller(case: AnyCase, *, persistent: bool = False) -> tuple[AnyCase, float]:
    """Return a smaller part of a case, and the ratio of the whole case to it.

    One entry of the batch, of varlen sequences all; of attention four heads, and eight entries
    where a program may own several heads. ``persistent`` programs get as many as in the whole.
    """
    if not isinstance(case, AttentionCase):
        return dataclasses.replace(case, batch=1), float(case.batch)
    entries = case.batch if case.ragged else 8 if case.tokens <= 64 else 1
    heads = -(-case.batch * case.heads // SMS) if persistent else min(case.heads, 4)
    part = dataclasses.replace(case, batch=entries, heads=heads)
    return part, case.batch * case.heads / (entries * heads)


def run(
    case: AnyCase,
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
    with fewer_programs(times):
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


@contextmanager
def fewer_programs(times: float) -> Iterator[None]:
    """Let programs compute as many heads as in a call of ``times`` as many heads."""
    sms = max(1, int(SMS / times))
    with (
        mock.patch.object(_tiles, "ENOUGH_PROGRAMS", int(_tiles.ENOUGH_PROGRAMS / times)),
        mock.patch.object(_tiles, "multiprocessors", return_value=sms),
    ):
        yield


class Prediction(NamedTuple):
    """The prediction of the model for a launch on a GPU.

    Attributes:
        floors: seconds by unit that the launch takes if nothing waits; empty where its machine code
            is not understood.
        timing: None where it is not understood or not modelled, as ``reason`` says.
    """

    floors: dict[str, float]
    timing: replay.Timing | None
    reason: str = ""


class Predicted(NamedTuple):
    """A launch that was executed, its machine code, and a prediction by the name of each GPU."""

    execution: Execution
    used: Resources
    code: MachineCode
    runs: Runs
    on: dict[str, Prediction]


def predict(execution: Execution, capability: int, times: float) -> Predicted:
    """Time a launch, ``times`` as large as it was executed, on the GPUs of a compute capability."""
    used = compile_launch(execution.launch, capability)
    code: MachineCode = used.code
    found: list[list[replay.WarpTrace]] = []
    unknown = ""
    if execution.recorded is None:
        runs = machine_code.runs(code, replay.counted(execution))
    else:
        try:
            runs, found = replay.partitions(execution, code)
        except ValueError as error:
            runs, unknown = Runs([0.0] * len(code.blocks), [], 1.0), str(error)

    def on(gpu: units.GPU) -> Prediction:
        if unknown:
            return Prediction({}, None, unknown)
        if not runs.usable:
            return Prediction(
                {}, None, f"its machine code is unknown, counts differ by {runs.off:.0%}"
            )
        executed = machine_code.executed(code, runs.of_block, execution.warps)
        cycles = units.cycles(executed, execution.wavefronts, gpu)
        a_cycle = round(execution.programs * times) / gpu.num_sms / gpu.boost_hz
        floors = {unit: n * a_cycle for unit, n in cycles.items()}
        try:
            work = replay.Work(
                code,
                [] if found else machine_code.walks(code, runs),
                execution.warps,
                execution.programs * times,
                used.programs_per_sm,
                replay.accesses(execution),
                execution.tensor_bytes * times,
                found,
            )
            return Prediction(floors, replay.time(work, gpu))
        except ValueError as error:
            return Prediction(floors, None, str(error))

    by_name = {name: on(gpu) for name, gpu in units.gpus_of(capability).items()}
    return Predicted(execution, used, code, runs, by_name)


def simulate(
    case: AnyCase,
    direction: str,
    capability: int,
    *,
    check: bool = True,
    packed: bool = True,
    persistent: bool = False,
) -> list[Predicted]:
    """Execute a part of one direction of a case as ``run`` does, and time the whole."""
    part, times = smaller(case, persistent=persistent)
    executions = run(part, direction, capability, times=times, check=check, packed=packed)
    return [predict(execution, capability, times) for execution in executions]


def describe(launch: Predicted, lines: int) -> Iterator[str]:
    """Yield lines about a launch; counts are of a program, the rest is of the first GPU."""
    execution, used, code, runs, on = launch
    name, predicted = next(iter(on.items()))
    grid = " x ".join(map(str, execution.grid))
    yield (
        f"{execution.name}: {grid} programs of {execution.warps} warps, {used.programs_per_sm} at "
        f"once on an SM; {used.registers} registers, {used.shared} bytes shared, "
        f"{used.stack} of stack"
    )
    for unit, actual, least in (
        ("wavefronts of shared memory", "wavefronts", "min_wavefronts"),
        ("sectors of global memory", "sectors", "min_sectors"),
    ):
        total = sum(getattr(n, actual) for n in execution.counts)
        fewest = sum(getattr(n, least) for n in execution.counts)
        if fewest:
            mean = total / execution.programs
            yield f"  {mean:,.0f} {unit}, {total / fewest:.2f} times the fewest"
    if predicted.floors:
        sizes = [end - start for start, end in code.blocks]
        of_each = [
            n * execution.warps for n, size in zip(runs.of_block, sizes) for _ in range(size)
        ]
        yield (
            f"  {sum(of_each):,.0f} machine instructions of warps, counts differ from the "
            f"executor's by {runs.off:.1%}; at {_hottest(code, of_each, lines)}"
        )
        floors = {unit: 1e6 * seconds for unit, seconds in predicted.floors.items()}
        yield f"  predicted floors on {name}, µs: {_ranked(floors, '{:,.1f}')}"
    if timing := predicted.timing:
        yield f"  predicted on {name}: {1e6 * timing.seconds:,.1f} µs; {timing.binds} binds"
        yield f"    units are busy: {_ranked(timing.busy, '{:.0%}', 0.1)}"
        yield f"    warps wait for: {_ranked(timing.waited, '{:.0%}', 0.02)}"
        yield f"    and at: {_hottest(code, timing.waited_at, lines)}"
    else:
        yield f"  not timed: {predicted.reason}"
    for what, n in execution.found.items():
        yield f"  FOUND {n} times: {what}"
    for finding in execution.findings[:5]:
        yield f"    {finding}"


def _ranked(amounts: Mapping[str, float], template: str, least: float = 0.0) -> str:
    """Return amounts and their names, the largest first."""
    ranked = sorted(amounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {template.format(n)}" for name, n in ranked if n > least)


def _hottest(code: MachineCode, amounts: Iterable[float], lines: int) -> str:
    """Return the source lines whose machine instructions have most of an amount."""
    by_line: Counter[tuple[str, int]] = Counter()
    for one, n in zip(code.instructions, amounts, strict=True):
        by_line[one.file, one.line] += n  # type: ignore[assignment] - a float
    total = by_line.total() or 1
    ranked = by_line.most_common(lines)
    return ", ".join(f"{file}:{line} {n / total:.0%}" for (file, line), n in ranked)


def floor_of_bytes(case: AnyCase, direction: str, gpu: units.GPU) -> float:
    """Return the seconds of every tensor moved once, at the rate that a copy attains."""
    return case.bytes(direction) / (gpu.bytes_per_s * units.ATTAINED_BYTES)


def row(
    name: str, case: AnyCase, direction: str, predictions: Sequence[Prediction], programs: int
) -> dict[str, Any]:
    """Return one direction of a case on a GPU: seconds predicted, and the floor.

    The floor is the larger of ``floor_of_bytes`` and of what the busiest unit of each launch takes.
    ``limit`` says which.

    Args:
        name: name of the GPU.
        case: of the benchmark.
        direction: ``forward`` or ``backward``.
        predictions: of each launch.
        programs: how many an SM holds at once, the fewest of any launch.
    """
    copied = floor_of_bytes(case, direction, units.GPUS[name])
    busiest = [max(one.floors.values(), default=0.0) for one in predictions]
    floors = predictions[busiest.index(max(busiest))].floors
    computed = sum(busiest)
    limit = BYTES if all(one.floors for one in predictions) else f"{BYTES}, units {UNKNOWN}"
    timings = [one.timing for one in predictions if one.timing is not None]
    complete = len(timings) == len(predictions)
    return {
        "gpu": name,
        "case": case.name,
        "stage": direction,
        "predicted": float(f"{sum(t.seconds for t in timings):.4g}") if complete else None,
        "floor": float(f"{max(copied, computed):.4g}"),
        "limit": limit if copied >= computed else max(floors, key=floors.__getitem__),
        "binds": ", ".join(dict.fromkeys(t.binds for t in timings)) if complete else UNKNOWN,
        "programs": programs,
    }


def rows(case: AnyCase, direction: str, launched: Sequence[Predicted]) -> Iterator[dict[str, Any]]:
    """Yield ``row`` for each GPU that the launches of a direction were timed on."""
    programs = min(launch.used.programs_per_sm for launch in launched)
    for name in launched[0].on:
        yield row(name, case, direction, [launch.on[name] for launch in launched], programs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command.parser("bench.gpu_model", __doc__)
    parser.add_argument(
        "case",
        nargs="+",
        choices=(*ON_GPU, "all"),
        metavar="CASE",
        help=f"cases to simulate, or all: {', '.join(ON_GPU)}",
    )
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=tuple(units.MODELS),
        default=[90],
        help="compute capabilities to compile for (90)",
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
    parser.add_argument(
        "--separate", action="store_true", help="pass q, k and v as separate tensors, not packed"
    )
    parser.add_argument(
        "--candidate",
        choices=tuple(CANDIDATES),
        metavar="NAME",
        help="variant of bench.gpu_model.candidates to simulate (the shipped code)",
    )
    parser.add_argument(
        "--json", type=Path, help="file to write predictions of forward and backward to (none)"
    )
    args = parser.parse_args(argv)
    written: list[dict[str, Any]] = []
    found = False
    try:
        for case in map(ON_GPU.__getitem__, ON_GPU if "all" in args.case else args.case):
            # Benchmarks have the tensors of vision operators always packed.
            packed = not (args.separate and isinstance(case, AttentionCase))
            for arch, direction in product(args.arch, args.only):
                variant = CANDIDATES[args.candidate].selected() if args.candidate else nullcontext()
                with variant:
                    launched = simulate(
                        case,
                        direction,
                        arch,
                        check=not args.unchecked,
                        packed=packed,
                        persistent=args.candidate in {candidate.name for candidate in TMA},
                    )
                for launch in launched:
                    lines = describe(launch, args.lines)
                    print(f"{case.name} {direction}, sm_{arch}", *lines, sep="\n", flush=True)  # noqa: T201
                    found |= bool(launch.execution.findings)
                if direction != "statistics":
                    written += rows(case, direction, launched)
                    name, gpu = next(iter(units.gpus_of(arch).items()))
                    us = 1e6 * floor_of_bytes(case, direction, gpu)
                    print(f"  predicted floor of bytes on {name}: {us:.1f} µs\n")  # noqa: T201
    except (library.NoCompilerError, ptx.UnsupportedError, ExecutionError) as error:
        sys.exit(f"python -m bench.gpu_model: {error}")
    if args.json:
        versions = {name: version(name) for name in ("triton", "torch")}
        command.write(args.json, written, versions=versions)
    sys.exit(found)
