"""Predict times of GPUs that are not here from what compiled kernels do. Nothing is measured.

    python -m bench.predict            # a table; needs bench/results/predictions.json

Of each direction of a case:

- *predicted*: one SM replays the machine code (``bench/gpu_model``, whose README has
  how far it lies from measured times).
- *bytes*, a floor: every tensor once (``AttentionCase.bytes``), over the part of the memory's peak
  rate that a copy attains.
- *units*, a floor: the cycles that the busiest of issue slots, tensor cores, arithmetic, special
  functions and shared memory takes, spread evenly over the GPU.
- *FlashAttention 2*, by the same model, out of PyTorch's wheel, on GPUs that nobody has measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench import frames
from bench.attention.cases import CASES, AttentionCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.gpu_model.units import ATTAINED_BYTES, GPUS, cycles

PREDICTIONS = Path(__file__).parent / "results" / "predictions.json"
CALIBRATION = PREDICTIONS.with_name("calibration.json")
BEFORE = PREDICTIONS.with_name("calibration-before.json")

BYTES, UNKNOWN = "bytes", "unknown"
PEER = "FlashAttention 2"
# Of our peers in benchmarks those that always run our own kernels, by the case's operator.
OWN_KERNELS = "leaner_kernel", "leaner_varlen", "leaner"


def predict(
    name: str,
    case: AttentionCase | VisionCase,
    launches: Sequence[dict[str, Any]],
    peer: float | None = None,
) -> dict[str, Any]:
    """Predict one direction of a case on a GPU from the rows of its launches, together.

    Returns:
        Times and floors in seconds, None where the machine code of a launch is not understood or
        the model does not predict it. ``units`` is what the busiest unit of each launch takes, one
        launch after the other, ``busy`` the same by unit, of each launch; ``limit`` is what sets
        the floor, ``programs`` the fewest that an SM holds at once. ``peer`` is handed through.
    """
    gpu = GPUS[name]
    direction = launches[0]["launch"]
    busy = []
    for row in launches:
        rounds = row["programs"] / gpu.num_sms / gpu.boost_hz
        by_unit = cycles(row["executed"], row["wavefronts"], gpu) if row["executed"] else {}
        busy.append({unit: n * rounds for unit, n in by_unit.items()})
    longest = max(busy, key=lambda units: max(units.values(), default=0.0))
    units = sum(max(each.values(), default=0.0) for each in busy)
    moved = case.bytes(direction) / (gpu.bytes_per_s * ATTAINED_BYTES)
    limit = BYTES if all(busy) else f"{BYTES}, units {UNKNOWN}"
    replayed = [row["predicted"].get(name, (None, UNKNOWN)) for row in launches]
    known = all(seconds is not None for seconds, _ in replayed)
    return {
        "gpu": name,
        "case": case.name,
        "stage": direction,
        "binds": ", ".join(dict.fromkeys(binds for _, binds in replayed)) if known else UNKNOWN,
        "programs": min(row["programs_per_sm"] for row in launches),
        "limit": limit if moved >= units else max(longest, key=longest.__getitem__),
        "predicted": sum(seconds for seconds, _ in replayed) if known else None,
        "bytes": moved,
        "units": units if all(busy) else None,
        "floor": max(moved, units),
        "busy": busy,
        PEER: peer,
    }


def cases() -> dict[str, AttentionCase | VisionCase]:
    """Return the cases that are predicted, by name."""
    return {case.name: case for case in (*CASES, *VISION_CASES)}


def own_kernels(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``frames.timed`` that hold times of what is predicted, and their GPU.

    Those are forward and backward passes of our own kernels, replayed as CUDA graphs.
    """
    rows = timed[timed["peer"].isin(OWN_KERNELS) & (timed["mode"] == "graph")]
    rows = rows[rows["stage"].isin(["forward", "backward"]) & rows["case"].isin([*cases()])]
    gpus = [next((gpu for gpu in GPUS if gpu in on), None) for on in rows["on"]]
    return rows.assign(gpu=pd.Series(gpus, rows.index, dtype=object)).dropna(subset="gpu")


def predictions(path: Path = PREDICTIONS) -> list[dict[str, Any]]:
    """Predict every direction of the file on every GPU of its capability.

    Raises:
        SystemExit: the file cannot be read, in one line.
    """
    known = cases()
    try:
        table = json.loads(path.read_text("utf-8"))
        launches: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for row in table["rows"]:
            launches.setdefault((row["case"], row["launch"], row["capability"]), []).append(row)
        peers = {(row["case"], row["launch"], row["gpu"]): row["seconds"] for row in table["peers"]}
        triton = {"triton": table.get("versions", {}).get("triton")}
        return [
            predict(name, known[case], rows, peers.get((case, direction, name))) | triton
            for name, gpu in GPUS.items()
            for (case, direction, capability), rows in launches.items()
            if capability == gpu.capability and case in known
        ]
    except OSError as error:
        command = "python -m bench.gpu_model.predictions"
        missing = f"{path}: {error.strerror}; write it: {command} {path}"
        raise SystemExit(missing) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a table of predictions ({error!r})") from None


def calibration(path: Path = CALIBRATION) -> pd.DataFrame:
    """Return ``frame`` of what ``bench.calibration`` wrote."""
    data = json.loads(path.read_text("utf-8"))
    return frame([row | {"triton": data["versions"]["triton"]} for row in data["rows"]])


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a row for each prediction, its times and floors in µs.

    ``triton`` is the release whose machine code was predicted.
    """
    times = ["predicted", "bytes", "units", "floor", PEER]
    columns = ["gpu", "case", "stage", "triton", "binds", "programs", "limit", *times]
    found = pd.DataFrame(rows, columns=columns)
    found[times] = 1e6 * found[times].astype(float)
    return found.assign(times_peer=found[PEER] / found["predicted"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("predictions", nargs="?", type=Path, default=PREDICTIONS)
    rows = frame(predictions(parser.parse_args(arguments).predictions))
    rows = rows.rename(columns={"stage": "pass", "times_peer": f"{PEER} / predicted"})
    for gpu, here in rows.groupby("gpu", sort=False):
        table = frames.markdown(here.drop(columns=["gpu", "triton"]))
        sys.stdout.write(f"\n{gpu}, µs, predicted:\n\n{table}\n")


if __name__ == "__main__":
    main()
