"""Write what the benchmark's cases would take on GPUs that are not here. Nothing is measured.

    python -m bench.gpu_model.predictions OUT.json [--arch 90] [--only CASE ...] [--separate]

Each case is executed in part (``command.smaller``) as compiled for each GPU, forward and backward,
and timed (``replay``); on GPUs that nobody has measured, FlashAttention 2 beside it (``peers``).
``bench.report`` shows bench/results/predictions.json. bench/results/calibration.json is the same
with ``--separate``, by the release of Triton that an H200 ran; a test holds it to what it measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench.attention.cases import CASES, AttentionCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.gpu_model import command, machine_code, peers, replay, units
from bench.gpu_model.compile_ahead import compile_launch

DIRECTIONS = "forward", "backward"
BYTES, UNKNOWN = "bytes", "unknown"


class Launch(NamedTuple):
    """What the model makes of one launch on one GPU.

    Attributes:
        seconds: None where the machine code is not understood or not predicted.
        binds: what takes most of that time.
        busy: seconds by unit that the launch takes if nothing waits, empty where it is not known.
        programs: how many an SM holds at once.
    """

    seconds: float | None
    binds: str
    busy: dict[str, float]
    programs: int


def row(
    name: str, case: AttentionCase | VisionCase, direction: str, launches: Sequence[Launch]
) -> dict[str, Any]:
    """Return one direction of a case on a GPU: seconds predicted, and the floor.

    The floor is the larger of every tensor moved once, at the part of the memory's peak rate that
    a copy attains, and of what the busiest unit of each launch takes. ``limit`` says which.
    """
    gpu = units.GPUS[name]
    moved = case.bytes(direction) / (gpu.bytes_per_s * units.ATTAINED_BYTES)
    understood = all(launch.busy for launch in launches)
    busiest = max(launches, key=lambda launch: max(launch.busy.values(), default=0.0)).busy
    computed = sum(max(launch.busy.values(), default=0.0) for launch in launches)
    limit = BYTES if understood else f"{BYTES}, units {UNKNOWN}"
    seconds = [launch.seconds for launch in launches]
    known = None not in seconds
    binds = ", ".join(dict.fromkeys(launch.binds for launch in launches))
    return {
        "gpu": name,
        "case": case.name,
        "stage": direction,
        "predicted": _short(sum(filter(None, seconds))) if known else None,
        "floor": _short(max(moved, computed)),
        "limit": limit if moved >= computed else max(busiest, key=busiest.__getitem__),
        "binds": binds if known else UNKNOWN,
        "programs": min(launch.programs for launch in launches),
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def rows(
    case: AttentionCase | VisionCase,
    capability: int,
    directions: Sequence[str] = DIRECTIONS,
    packed: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield ``row`` for each direction and GPU; ``packed`` is that of ``command.run``."""
    part, times = command.smaller(case)
    gpus = {name: gpu for name, gpu in units.GPUS.items() if gpu.capability == capability}
    for direction in directions:
        launches: dict[str, list[Launch]] = {name: [] for name in gpus}
        for execution in command.run(
            part, direction, capability, times=times, check=False, packed=packed
        ):
            used = compile_launch(execution.launch, capability)
            code, runs = machine_code.of_execution(execution, used.cubin)
            for name, gpu in gpus.items():
                seconds, binds, busy = None, UNKNOWN, {}
                if runs.known:
                    executed = machine_code.executed(code, runs.of_block, execution.warps)
                    by_unit = units.cycles(executed, execution.wavefronts, gpu)
                    a_cycle = round(execution.programs * times) / gpu.num_sms / gpu.boost_hz
                    busy = {unit: n * a_cycle for unit, n in by_unit.items()}
                    try:
                        work = replay.work_of(execution, used, code, runs, times)
                        timing = replay.time(work, gpu)
                        seconds, binds = timing.seconds, timing.binds
                    except ValueError as error:
                        sys.stderr.write(f"{case.name} {direction}: {execution.name}: {error}\n")
                launches[name].append(Launch(seconds, binds, busy, used.programs_per_sm))
        for name in gpus:
            yield row(name, case, direction, launches[name]) | _peer(name, case, direction)


def _peer(name: str, case: AttentionCase | VisionCase, direction: str) -> dict[str, float]:
    """Return what FlashAttention 2 would take, nothing on sm_90: an H200 has measured it."""
    gpu = units.GPUS[name]
    plain = (
        isinstance(case, AttentionCase)
        and case.queries is None
        and not (case.padded or case.lengths or case.window)
    )
    if gpu.capability == 90 or not plain or case.head_dim not in (32, 64):
        return {}
    try:
        return {"flash_attn_2": _short(getattr(peers, direction)(case, gpu).seconds)}
    except peers.NotThereError as error:
        sys.stderr.write(f"{case.name} {direction}: {error}\n")
        return {}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file; progress goes to standard error."""
    cases = [c for c in (*CASES, *VISION_CASES) if c.device == "cuda"]
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_model.predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path)
    modelled = tuple(units.MODELS)
    parser.add_argument("--arch", type=int, nargs="+", choices=modelled, default=modelled)
    parser.add_argument("--only", nargs="+", choices=[c.name for c in cases], metavar="CASE")
    parser.add_argument("--separate", action="store_true", help="q, k and v apart, not packed")
    options = parser.parse_args(argv)
    written: list[dict[str, Any]] = []
    for case in cases:
        if options.only and case.name not in options.only:
            continue
        # Benchmarks have the tensors of vision operators always packed.
        packed = not (options.separate and isinstance(case, AttentionCase))
        for capability in options.arch:
            written += rows(case, capability, packed=packed)
            sys.stderr.write(f"{case.name} sm_{capability}\n")
    versions = json.dumps({name: version(name) for name in ("triton", "torch")})
    lines = ",\n".join(map(json.dumps, written))
    options.output.write_text(f'{{"versions": {versions},\n"rows": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
