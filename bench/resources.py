"""Report the GPU resources of every shipped attention kernel by compiling it without a GPU.

``python -m bench.resources --write`` writes bench/results/resources.json. tests/aot compiles
softmax attention again and fails if it needs more. The launches are those that the CUDA operators
request for each case. ``python -m bench.gpu_model CASE`` prints those of one case.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from bench.attention.catalogue import ON_GPU
from bench.gpu_model.compile_ahead import Launch, compile_launch
from bench.gpu_model.launches import AnyCase, call_of
from bench.harness import command
from leaner_kernels.ops.gpus import TUNED_GPUS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "bench" / "results" / "resources.json"
# Held to the limits and, by the tests, to the table; what else is in GPUS to the limits alone.
SUPPORTED = TUNED_GPUS
IN_TABLE = *SUPPORTED, 100
KEYS = "case", "launch", "capability", "kernel"
KEPT = "registers", "shared", "spills", "programs_per_sm"
FIGURES = *KEPT, "stack", "looped_spills"  # the last two are held to limits


def launches(
    cases: Iterable[AnyCase], gpus: Iterable[int]
) -> Iterator[tuple[dict[str, Any], Launch]]:
    """Yield the name of every row with its launch, without compiling anything."""
    for case, gpu in product(cases, gpus):
        for launch, found in call_of(case).launches(gpu).items():
            for one in found:
                yield dict(zip(KEYS, (case.name, launch, gpu, one.name))), one


def rows(cases: Iterable[AnyCase], gpus: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield every row of the table: its name and the resources of its launch."""
    for name, one in launches(cases, gpus):
        used = compile_launch(one, name["capability"])
        yield name | {figure: getattr(used, figure) for figure in FIGURES}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command.parser("bench.resources", __doc__)
    parser.add_argument(
        "--write", action="store_true", required=True, help="write bench/results/resources.json"
    )
    parser.parse_args(arguments)
    kept: list[dict[str, Any]] = []
    for case in ON_GPU.values():
        found = rows([case], IN_TABLE)
        kept += ({name: row[name] for name in (*KEYS, *KEPT)} for row in found)
        sys.stderr.write(f"{case.name}: {len(kept)} rows\n")
    versions = {name: version(name) for name in ("triton", "torch")}
    command.write(TABLE, kept, versions=versions)


if __name__ == "__main__":
    main()
