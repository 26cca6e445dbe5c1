"""Predict what a GPU measured, from the machine code that ran there.

    python -m bench.calibration OUT.json [RESULT.json ...]

Takes every forward and backward pass of our own kernels in the results (those of bench/results
unless files are named) that a GPU of ``units.GPUS`` ran with the installed release of Triton:
another one makes other machine code, and a few more registers may cost a program of an SM. So does
a changed kernel: run it at the commit of the results. ``python -m bench.report`` shows
bench/results/calibration.json beside what was measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from bench import frames, predict
from bench.attention.cases import AttentionCase
from bench.gpu_model import predictions
from bench.gpu_model.units import GPUS

KEPT = "gpu", "case", "stage", "binds", "programs", "limit"
TIMES = "predicted", "bytes", "units", "floor"


def rows(measured: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield what the model predicts of each row of ``predict.own_kernels``, in seconds."""
    for row in measured.to_dict("records"):
        case = predict.cases()[row["case"]]
        capability = GPUS[row["gpu"]].capability
        # As benchmarks lay tensors out: those of vision operators are always packed.
        packed = not isinstance(case, AttentionCase)
        launches = predictions.rows(case, capability, [row["stage"]], packed)
        found = predict.predict(row["gpu"], case, list(launches))
        times = {name: found[name] and float(f"{found[name]:.4g}") for name in TIMES}
        yield {name: found[name] for name in KEPT} | times


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file; progress goes to standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of bench/")
    options = parser.parse_args(argv)
    paths = options.results or sorted(frames.RESULTS.glob("20*.json"))
    measured = predict.own_kernels(frames.timed([frames.read(path) for path in paths]))
    measured = measured[measured["triton"] == version("triton")]
    written = []
    for row in rows(measured):
        written.append(row)
        sys.stderr.write(f"{row['gpu']} {row['case']} {row['stage']}\n")
    versions = json.dumps({name: version(name) for name in ("triton", "torch")})
    lines = ",\n".join(map(json.dumps, written))
    options.output.write_text(f'{{"versions": {versions},\n"rows": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
