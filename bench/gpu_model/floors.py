"""Write how long each launch of the benchmark's cases keeps each unit of a card busy.

    python -m bench.gpu_model.floors OUT.json [--arch 90] [--only CASE ...]

Each case is executed in part (``command.smaller``) as compiled for each card, forward and backward.
``bench.predict`` reads bench/results/floors.json. Nothing is measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.compile_ahead import compile_launch
from bench.gpu_model import command, machine_code
from bench.vision_cases import VISION_CASES

DIRECTIONS = "forward", "backward"


def rows(case: Any, capability: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each launch of a case.

    ``executed`` are a program's machine instructions, None where they are not understood, and
    ``wavefronts`` its own of shared memory; ``programs`` are the whole case's.
    """
    part, times = command.smaller(case)
    for direction in DIRECTIONS:
        for execution in command.run(part, direction, capability, check=False):
            used = compile_launch(execution.launch, capability)
            code, found = machine_code.of_execution(execution, used.cubin)
            executed = None
            if found.known:
                counts = machine_code.executed(code, found.of_block, execution.warps)
                executed = {name: round(n, 1) for name, n in counts.items() if n >= 0.05}
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
            }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file; progress goes to standard error."""
    cases = [c for c in (*CASES, *VISION_CASES) if c.device == "cuda"]
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_model.floors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--arch", type=int, nargs="+", choices=(80, 86, 90), default=(80, 86, 90))
    parser.add_argument("--only", nargs="+", choices=[c.name for c in cases], metavar="CASE")
    given = parser.parse_args(argv)
    written: list[dict[str, Any]] = []
    for case in cases:
        if given.only and case.name not in given.only:
            continue
        for capability in given.arch:
            written += rows(case, capability)
            sys.stderr.write(f"{case.name} sm_{capability}\n")
    versions = json.dumps({name: version(name) for name in ("triton", "torch")})
    lines = ",\n".join(map(json.dumps, written))
    given.output.write_text(f'{{"versions": {versions},\n"rows": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
