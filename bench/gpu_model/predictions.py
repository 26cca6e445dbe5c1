"""Write what the benchmark's cases would take on GPUs that are not here.

    python -m bench.gpu_model.predictions OUT.json [--arch 90] [--only CASE ...]

Each case is executed in part (``command.smaller``) as compiled for each GPU, forward and backward,
and timed (``replay``); on GPUs that nobody has measured, FlashAttention 2 beside it (``peers``).
``bench.predict`` reads bench/results/predictions.json. Nothing is measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.attention.cases import CASES, AttentionCase
from bench.attention.vision_cases import VISION_CASES
from bench.gpu_model import command, machine_code, peers, replay, units
from bench.gpu_model.compile_ahead import compile_launch

DIRECTIONS = "forward", "backward"


def rows(
    case: Any, capability: int, directions: Sequence[str] = DIRECTIONS, packed: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield a row for each launch of a case; ``packed`` is that of ``command.run``.

    ``executed`` are a program's machine instructions, None where they are not understood, and
    ``wavefronts`` its own of shared memory; ``programs`` are the whole case's. ``predicted`` has
    seconds and what binds, by GPU; it is empty where nothing is predicted.
    """
    part, times = command.smaller(case)
    for direction in directions:
        for execution in command.run(
            part, direction, capability, times=times, check=False, packed=packed
        ):
            used = compile_launch(execution.launch, capability)
            code, found = machine_code.of_execution(execution, used.cubin)
            executed, predicted = None, {}
            if found.known:
                counts = machine_code.executed(code, found.of_block, execution.warps)
                executed = {name: round(n, 1) for name, n in counts.items() if n >= 0.05}
                try:
                    work = replay.work_of(execution, used, code, found, times)
                    for name, gpu in units.GPUS.items():
                        if gpu.capability == capability:
                            timing = replay.time(work, gpu)
                            predicted[name] = [float(f"{timing.seconds:.4g}"), timing.binds]
                except ValueError as error:
                    sys.stderr.write(f"{case.name} {direction}: {execution.name}: {error}\n")
            yield {
                "case": case.name,
                "launch": direction,
                "capability": capability,
                "kernel": execution.name,
                "programs": round(execution.programs * times),
                "programs_per_sm": used.programs_per_sm,
                "off": round(found.off, 4),
                "executed": executed,
                "wavefronts": execution.wavefronts,
                "predicted": predicted,
            }


def peer_rows(case: Any, capability: int) -> Iterator[dict[str, Any]]:
    """Yield what FlashAttention 2 would take for a case, on each GPU of a capability.

    Not on sm_90: its time on an H200 is measured.
    """
    plain = (
        isinstance(case, AttentionCase)
        and case.queries is None
        and not (case.padded or case.lengths or case.window)
    )
    if capability == 90 or not plain or case.head_dim not in (32, 64):
        return
    for direction in DIRECTIONS:
        for name, gpu in units.GPUS.items():
            if gpu.capability == capability:
                try:
                    seconds = getattr(peers, direction)(case, gpu).seconds
                except peers.NotThereError as error:
                    sys.stderr.write(f"{case.name} {direction}: {error}\n")
                    continue
                row = {"case": case.name, "launch": direction, "gpu": name}
                yield row | {"peer": "FlashAttention 2", "seconds": float(f"{seconds:.4g}")}


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
    given = parser.parse_args(argv)
    written: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for case in cases:
        if given.only and case.name not in given.only:
            continue
        for capability in given.arch:
            written += rows(case, capability)
            beside += peer_rows(case, capability)
            sys.stderr.write(f"{case.name} sm_{capability}\n")
    versions = json.dumps({name: version(name) for name in ("triton", "torch")})
    lines, others = (",\n".join(map(json.dumps, found)) for found in (written, beside))
    given.output.write_text(
        f'{{"versions": {versions},\n"rows": [\n{lines}\n],\n"peers": [\n{others}\n]}}\n', "utf-8"
    )


if __name__ == "__main__":
    main()
