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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.attention.cases import CASES, AttentionCase
from bench.attention.vision_cases import VISION_CASES, VisionCase
from bench.gpu_model.units import ATTAINED_BYTES, GPUS, MODELS, cycles

PREDICTIONS = Path(__file__).parent / "results" / "predictions.json"
CALIBRATION = Path(__file__).parent / "results" / "calibration.json"
PUBLISHED = Path(__file__).parent / "gpu_model" / "published.toml"

BYTES, UNKNOWN = "bytes", "unknown"
PEERS = "FlashAttention 2", "FlashAttention 3", "cuDNN"
TILE = 128
HEADERS = (
    *("case", "pass", "measured", "predicted", "binds", "bytes", "units", "programs"),
    *(f"{peer}{note}" for peer, note in zip(PEERS, ("", ", derived", ", derived"))),
    "fastest peer / predicted",
)


LEGEND = """\
## Predicted, not measured

**Nothing below was measured**, but for what stands under *measured*. Times in µs, of the kernels
alone. *predicted* is what a model of one SM makes of the kernels' machine code; from
published times of other kernels, which its clock was fitted to, it is off by ERRORS
([bench/gpu_model](../bench/gpu_model/README.md)). *binds* is the busiest unit where one is busy for
70% of the time, otherwise latency. *bytes* and *units* are floors: what the tensors of a direction
take to and from memory, and how long the busiest unit of the GPU is busy. *programs* is how many
programs one SM holds at once. FlashAttention 2 is predicted by the same model from the
machine code in PyTorch's wheel; *derived* is work, filled up to tiles of 128, over a rate that
others published for head dimension 64 ([sources](../bench/gpu_model/published.toml)). The last
column is above 1 where we are predicted to be faster than all of them, below 1 a loss.

To measure, run this on a machine with the GPU, each stage up to nine minutes:

```sh
for stage in first bench models compiled; do
  bench/gpu.sh OUTDIR $stage
  cp OUTDIR/$stage.json bench/results/$(date +%F)-GPU-$stage.json
done
python -m bench.report
```
"""
Measured = dict[tuple[str, str, str], float]  # seconds by GPU, case and direction


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
    def key(self) -> tuple[str, str, str]:
        """What a measurement of the same is found by."""
        return self.gpu, self.case.name, self.direction

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


def table(rows: Iterable[Prediction], measured: Measured) -> str:
    """Render predictions of one GPU as Markdown, in µs."""
    from tabulate import tabulate

    lines = []
    for row in rows:
        seconds = row.seconds
        peers = [row.peers.get(name) for name in PEERS]
        fastest = min((peer for peer in peers if peer is not None), default=None)
        binds = ", ".join(dict.fromkeys(row.binds)) if seconds else UNKNOWN
        ratio = f"{fastest / seconds:.2f}" if fastest and seconds else ""
        times = map(_us, (measured.get(row.key), seconds))
        floors = map(_us, (row.bytes, row.busy if all(row.units) else None))
        who = row.case.name, row.direction
        lines.append([*who, *times, binds, *floors, row.programs_per_sm, *map(_us, peers), ratio])
    return tabulate(lines, HEADERS, tablefmt="pipe", disable_numparse=True)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:,.1f}"


def tables(rows: Sequence[Prediction], measured: Measured) -> Iterator[str]:
    """Yield the part of docs/results.md about every GPU; nothing without predictions."""
    if rows:
        rates = json.loads(CALIBRATION.read_text("utf-8"))["rows"]
        errors = [row["error"] for row in rates if not row["source"].startswith("derived")]
        spread = f"{min(errors):+.0%} to {max(errors):+.0%} over {len(errors)} rates"
        yield LEGEND.replace("ERRORS", spread)
    for gpu, here in _by_gpu(rows):
        yield from (f"### {gpu}, predicted", "", table(here, measured), "")


def against(rows: Sequence[Prediction], measured: Measured) -> Iterator[str]:
    """Yield a line for each prediction that was measured, and what would fit each GPU better.

    A measurement below its floor shows that the model is wrong.
    """
    for gpu, every in _by_gpu(rows):
        here = [row for row in every if row.key in measured]
        ratios = []
        for row in here:
            took, model = measured[row.key], UNKNOWN
            if row.seconds:
                if "global memory" not in row.binds:  # which no clock of an SM changes
                    ratios.append(row.seconds / took)
                model = f"{took / row.seconds:.2f} times the predicted {_us(row.seconds)}"
            yield (
                f"model: {row.case.name} {row.direction}: {_us(took)} µs, {model}, "
                f"{took / row.floor:.2f} times the floor {_us(row.floor)} ({row.limit})"
            )
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            clock = MODELS[GPUS[gpu].capability].clock
            yield (
                f"model: {gpu}: predicted over measured {min(ratios):.2f} to {max(ratios):.2f}, "
                f"mean {mean:.2f}; clock {clock * mean:.2f} for {clock:.2f} would fit"
            )


def _by_gpu(rows: Sequence[Prediction]) -> Iterator[tuple[str, list[Prediction]]]:
    for gpu in dict.fromkeys(row.gpu for row in rows):
        yield gpu, [row for row in rows if row.gpu == gpu]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("predictions", nargs="?", type=Path, default=PREDICTIONS)
    rows = predictions(parser.parse_args(arguments).predictions)
    for gpu, here in _by_gpu(rows):
        sys.stdout.write(f"\n{gpu}, µs, predicted:\n{table(here, {})}\n")


if __name__ == "__main__":
    main()
