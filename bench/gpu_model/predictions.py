"""Predict the times of the benchmark's cases on GPUs that are not present.

    python -m bench.gpu_model.predictions OUT.json [--arch 90] [--only CASE ...] [--separate]

Each case is executed in part (``command.smaller``) as compiled for each GPU, forward and backward,
and timed (``replay``).
``bench.report`` shows bench/results/predictions.json. bench/results/calibration.json is the same
with ``--separate``, by the release of Triton that an H200 ran; a test holds it to what it measured.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.attention.cases import AttentionCase
from bench.attention.catalogue import ON_GPU
from bench.gpu_model import command, machine_code, units
from bench.gpu_model.command import Prediction
from bench.gpu_model.compile_ahead import compile_launch
from bench.gpu_model.launches import AnyCase
from bench.harness.command import parser as parser_of
from bench.harness.command import write

DIRECTIONS = "forward", "backward"
BYTES, UNKNOWN = "bytes", "unknown"


def row(
    name: str, case: AnyCase, direction: str, predictions: Sequence[Prediction], programs: int
) -> dict[str, Any]:
    """Return one direction of a case on a GPU: seconds predicted, and the floor.

    The floor is the larger of every tensor moved once, at the part of the memory's peak rate that
    a copy attains, and of what the busiest unit of each launch takes. ``limit`` says which.

    Args:
        name: of the GPU.
        case: of the benchmark.
        direction: ``forward`` or ``backward``.
        predictions: of each launch.
        programs: how many an SM holds at once, the fewest of any launch.
    """
    gpu = units.GPUS[name]
    moved = case.bytes(direction) / (gpu.bytes_per_s * units.ATTAINED_BYTES)
    busiest = [max(one.floors.values(), default=0.0) for one in predictions]
    floors = predictions[busiest.index(max(busiest))].floors
    computed = sum(busiest)
    limit = BYTES if all(one.floors for one in predictions) else f"{BYTES}, units {UNKNOWN}"
    timings = [one.timing for one in predictions if one.timing is not None]
    known = len(timings) == len(predictions)
    return {
        "gpu": name,
        "case": case.name,
        "stage": direction,
        "predicted": _short(sum(timing.seconds for timing in timings)) if known else None,
        "floor": _short(max(moved, computed)),
        "limit": limit if moved >= computed else max(floors, key=floors.__getitem__),
        "binds": ", ".join(dict.fromkeys(t.binds for t in timings)) if known else UNKNOWN,
        "programs": programs,
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def rows(
    case: AnyCase, capability: int, directions: Sequence[str] = DIRECTIONS, packed: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield ``row`` for each direction and GPU; ``packed`` is that of ``command.run``."""
    part, times = command.smaller(case)
    gpus = {name: gpu for name, gpu in units.GPUS.items() if gpu.capability == capability}
    for direction in directions:
        predictions: dict[str, list[Prediction]] = {name: [] for name in gpus}
        programs = []
        for execution in command.run(
            part, direction, capability, times=times, check=False, packed=packed
        ):
            used = compile_launch(execution.launch, capability)
            programs.append(used.programs_per_sm)
            of_code = machine_code.of_execution(execution, used.cubin)
            for name, gpu in gpus.items():
                one = command.predict(execution, used, of_code, gpu, times)
                predictions[name].append(one)
                if one.reason:
                    sys.stderr.write(f"{case.name} {direction}: {execution.name}: {one.reason}\n")
        for name in gpus:
            yield row(name, case, direction, predictions[name], min(programs))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file; progress goes to standard error."""
    cases = [case for name, case in ON_GPU.items() if not name.startswith("nystrom")]  # slow
    parser = parser_of("bench.gpu_model.predictions", __doc__)
    parser.add_argument("output", type=Path, help="JSON file to write")
    modelled = tuple(units.MODELS)
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=modelled,
        default=modelled,
        help="compute capabilities to predict (all)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[c.name for c in cases],
        metavar="CASE",
        help="cases to predict (all)",
    )
    parser.add_argument(
        "--separate", action="store_true", help="pass q, k and v as separate tensors, not packed"
    )
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
    versions = {name: version(name) for name in ("triton", "torch")}
    write(options.output, written, versions=versions)


if __name__ == "__main__":
    main()
