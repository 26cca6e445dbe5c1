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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Prediction:
    """A direction of a case on a GPU, its launches together; times in seconds.

    Attributes:
        bytes: a floor.
        units: of each launch by unit; empty where its machine code is not understood.
        programs_per_sm: the fewest that an SM holds at once, over the launches.
        replayed: of each launch what the model predicts; None where it does not.
        binds: of each launch.
        peers: what others take, by name.
    """

    gpu: str
    case: AttentionCase | VisionCase
    direction: str
    bytes: float
    units: tuple[dict[str, float], ...]
    programs_per_sm: int
    replayed: tuple[float | None, ...] = ()
    binds: tuple[str, ...] = ()
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Seconds that the busiest unit of each launch takes, one launch after the other."""
        return sum(max(units.values(), default=0.0) for units in self.units)

    @property
    def floor(self) -> float:
        """What nothing can be faster than."""
        return max(self.bytes, self.busy)

    @property
    def seconds(self) -> float | None:
        """What the model predicts, None where one of the launches is unknown to it."""
        known = [seconds for seconds in self.replayed if seconds is not None]
        whole = known and len(known) == len(self.replayed)
        return sum(known) if whole else None

    @property
    def limit(self) -> str:
        """What sets the floor: bytes, or the busiest unit of the longest launch."""
        if self.bytes >= self.busy:
            return BYTES if all(self.units) else f"{BYTES}, units {UNKNOWN}"
        longest = max(self.units, key=lambda units: max(units.values(), default=0.0))
        return max(longest, key=lambda unit: longest[unit])


def predict(
    name: str,
    case: AttentionCase | VisionCase,
    launches: Sequence[dict[str, Any]],
    peers: Mapping[str, float] = {},
) -> Prediction:
    """Predict one direction on a GPU from the rows of its launches."""
    gpu = GPUS[name]
    direction = launches[0]["launch"]
    units = []
    for row in launches:
        rounds = row["programs"] / gpu.num_sms / gpu.boost_hz
        by_unit = cycles(row["executed"], row["wavefronts"], gpu) if row["executed"] else {}
        units.append({unit: n * rounds for unit, n in by_unit.items()})
    replayed = [row["predicted"].get(name, (None, UNKNOWN)) for row in launches]
    return Prediction(
        name,
        case,
        direction,
        bytes=case.bytes(direction) / (gpu.bytes_per_s * ATTAINED_BYTES),
        units=tuple(units),
        programs_per_sm=min(row["programs_per_sm"] for row in launches),
        replayed=tuple(seconds for seconds, _ in replayed),
        binds=tuple(binds for _, binds in replayed),
        peers={**derived(case, direction, name), **peers},
    )


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


def predictions(path: Path = PREDICTIONS) -> list[Prediction]:
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


def frame(rows: Iterable[Prediction]) -> pd.DataFrame:
    """Return a row for each prediction: times and floors in µs, peers as ``derived`` has them."""
    found = pd.DataFrame(
        {
            "gpu": row.gpu,
            "case": row.case.name,
            "stage": row.direction,
            "predicted": row.seconds,
            "binds": ", ".join(dict.fromkeys(row.binds)) if row.seconds else UNKNOWN,
            "bytes": row.bytes,
            "units": row.busy if all(row.units) else None,
            "floor": row.floor,
            "limit": row.limit,
            "programs": row.programs_per_sm,
            **{peer: row.peers.get(peer) for peer in PEERS},
        }
        for row in rows
    )
    times = ["predicted", "bytes", "units", "floor", *PEERS]
    found = found.reindex(columns=[*("gpu", "case", "stage", "binds", "programs", "limit"), *times])
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
