"""Predict times of GPUs that are not here from what compiled kernels do. Nothing is measured.

    python -m bench.predict            # a table; needs bench/results/predictions.json

Of each direction of a case:

- *predicted*: one SM replays the machine code (``bench/gpu_model``, whose README has
  how far it lies from published times).
- *bytes*, a floor: every tensor once (``AttentionCase.bytes``), over the part of the memory's peak
  rate that a copy attains.
- *units*, a floor: the cycles that the busiest of issue slots, tensor cores, arithmetic, special
  functions and shared memory takes, spread evenly over the GPU.
- peers: FlashAttention 2 by the same model, out of PyTorch's wheel; others by their published rate
  at the nearest published length of head dimension 64, rows and keys filled up to tiles of 128.
"""

import argparse
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench import frames
from bench.attention.cases import CASES, AttentionCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.gpu_model.units import ATTAINED_BYTES, GPUS, cycles

PREDICTIONS = Path(__file__).parent / "results" / "predictions.json"
PUBLISHED = Path(__file__).parent / "gpu_model" / "published.toml"

BYTES, UNKNOWN = "bytes", "unknown"
PEERS = "FlashAttention 2", "FlashAttention 3", "cuDNN"
TILE = 128


def predict(
    name: str,
    case: AttentionCase | VisionCase,
    launches: Sequence[dict[str, Any]],
    peers: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Predict one direction of a case on a GPU from the rows of its launches, together.

    Returns:
        Times and floors in seconds, None where the machine code of a launch is not understood or
        the model does not predict it. ``units`` is what the busiest unit of each launch takes, one
        launch after the other, ``busy`` the same by unit, of each launch; ``limit`` is what sets
        the floor, ``programs`` the fewest that an SM holds at once.
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
        **dict.fromkeys(PEERS),
        **derived(case, direction, name),
        **peers,
    }


def derived(case: AttentionCase | VisionCase, direction: str, gpu: str) -> dict[str, float]:
    """Return seconds of peers by their published rates, where one of like shape is published."""
    if not isinstance(case, AttentionCase) or case.causal or case.padded or case.lengths:
        return {}
    if case.head_dim != 64 or case.queries is not None:
        return {}
    padded = -(-case.tokens // TILE) * TILE
    work = case.flops(direction) * (padded / case.tokens) ** 2
    least = case.bytes(direction) / (GPUS[gpu].bytes_per_s * ATTAINED_BYTES)
    found = {}
    for peer in tomllib.loads(PUBLISHED.read_text("utf-8"))["peer"]:
        if peer["launch"] == direction and gpu in peer["gpus"]:
            rates = {int(tokens): rate for tokens, rate in peer["rates"].items()}
            nearest = min(rates, key=lambda tokens: abs(math.log(tokens / case.tokens)))
            if case.tokens < 2 * nearest:
                found[peer["name"]] = max(least, work / (rates[nearest] * 1e12))
    return found


def predictions(path: Path = PREDICTIONS) -> list[dict[str, Any]]:
    """Predict every direction of the file on every GPU of its capability.

    Raises:
        SystemExit: the file cannot be read, in one line.
    """
    cases = {case.name: case for case in (*CASES, *VISION_CASES)}
    try:
        table = json.loads(path.read_text("utf-8"))
        launches: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for row in table["rows"]:
            launches.setdefault((row["case"], row["launch"], row["capability"]), []).append(row)
        peers: dict[tuple[str, str, str], dict[str, float]] = {}
        for row in table["peers"]:
            of_row = peers.setdefault((row["case"], row["launch"], row["gpu"]), {})
            of_row[row["peer"]] = row["seconds"]
        return [
            predict(name, cases[case], rows, peers.get((case, direction, name), {}))
            for name, gpu in GPUS.items()
            for (case, direction, capability), rows in launches.items()
            if capability == gpu.capability and case in cases
        ]
    except OSError as error:
        command = "python -m bench.gpu_model.predictions"
        missing = f"{path}: {error.strerror}; write it: {command} {path}"
        raise SystemExit(missing) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a table of predictions ({error!r})") from None


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return a row for each prediction, its times and floors in µs."""
    times = ["predicted", "bytes", "units", "floor", *PEERS]
    columns = ["gpu", "case", "stage", "binds", "programs", "limit", *times]
    found = pd.DataFrame(rows, columns=columns)
    found[times] = 1e6 * found[times].astype(float)
    return found.assign(times_best=found[[*PEERS]].min(axis=1) / found["predicted"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("predictions", nargs="?", type=Path, default=PREDICTIONS)
    rows = frame(predictions(parser.parse_args(arguments).predictions))
    rows = rows.rename(columns={"stage": "pass", "times_best": "fastest peer / predicted"})
    for gpu, here in rows.groupby("gpu", sort=False):
        table = frames.markdown(here.drop(columns="gpu"))
        sys.stdout.write(f"\n{gpu}, µs, predicted:\n\n{table}\n")


if __name__ == "__main__":
    main()
