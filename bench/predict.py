"""Predict lower bounds of times from what compiled kernels do. Nothing is measured.

    python -m bench.predict            # a table; needs bench/results/floors.json

The model: a launch moves bytes and keeps the units of a card busy, all perfectly overlapped, so the
slowest alone decides.

- bytes: every tensor once (``Case.bytes``), over the part of the memory's peak rate that a copy
  attains. What a program reads again is taken to come from the L2 cache.
- units: the cycles that issue slots, tensor cores, arithmetic, special functions and shared memory
  are busy with the programs of a launch, spread evenly over the card. How often each machine
  instruction runs was counted by executing the kernels in software (``bench/gpu_model``).

Left out, all of which makes a kernel slower: launch latency, partial waves, and the latencies and
barriers that few resident programs cannot hide (a kernel with one program on a multiprocessor will
miss its prediction). So these are lower bounds, not estimates of the mean.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import CASES, Case
from bench.gpu_model.units import ATTAINED_BYTES, CARDS, cycles
from bench.vision_cases import VISION_CASES, VisionCase

FLOORS = Path(__file__).parent / "results" / "floors.json"


BYTES, UNKNOWN = "bytes", "unknown"


@dataclass(frozen=True)
class Prediction:
    """A direction of a case on a card, its launches together.

    Attributes:
        bytes: seconds that they take.
        units: of each launch the seconds by unit; empty where its machine code is not understood.
        programs_per_sm: the fewest that a multiprocessor holds at once, over the launches.
    """

    card: str
    case: Case | VisionCase
    direction: str
    bytes: float
    units: tuple[dict[str, float], ...]
    programs_per_sm: int

    @property
    def busy(self) -> float:
        """Seconds that the busiest unit of each launch takes, one launch after the other."""
        return sum(max(units.values(), default=0.0) for units in self.units)

    @property
    def seconds(self) -> float:
        """The predicted lower bound."""
        return max(self.bytes, self.busy)

    @property
    def limit(self) -> str:
        """What binds: bytes, or the busiest unit of the longest launch."""
        if self.bytes >= self.busy:
            return BYTES if all(self.units) else f"{BYTES}, units {UNKNOWN}"
        longest = max(self.units, key=lambda units: max(units.values(), default=0.0))
        return max(longest, key=lambda unit: longest[unit])


def predict(name: str, case: Case | VisionCase, launches: Sequence[dict[str, Any]]) -> Prediction:
    """Predict one direction on a card from the rows of its launches."""
    card = CARDS[name]
    direction = launches[0]["launch"]
    units = []
    for row in launches:
        rounds = row["programs"] / card.multiprocessors / card.clock_hz
        by_unit = cycles(row["executed"], row["wavefronts"], card) if row["executed"] else {}
        units.append({unit: n * rounds for unit, n in by_unit.items()})
    return Prediction(
        name,
        case,
        direction,
        bytes=case.bytes(direction) / (card.bytes_per_s * ATTAINED_BYTES),
        units=tuple(units),
        programs_per_sm=min(row["programs_per_sm"] for row in launches),
    )


def predictions(path: Path = FLOORS) -> list[Prediction]:
    """Predict every direction of the file on every card of its capability.

    Raises:
        SystemExit: the file cannot be read, in one line.
    """
    cases = {case.name: case for case in (*CASES, *VISION_CASES)}
    try:
        launches: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
        for row in json.loads(path.read_text("utf-8"))["rows"]:
            launches.setdefault((row["case"], row["launch"], row["capability"]), []).append(row)
        return [
            predict(name, cases[case], rows)
            for name, card in CARDS.items()
            for (case, _, capability), rows in launches.items()
            if capability == card.capability and case in cases
        ]
    except OSError as error:
        command = "python -m bench.gpu_model.floors"
        missing = f"{path}: {error.strerror}; write it: {command} {path}"
        raise SystemExit(missing) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a table of floors ({error!r})") from None


def table(rows: Iterable[Prediction]) -> Iterable[str]:
    """Render predictions as Markdown, a line for each case."""
    found: dict[Case | VisionCase, dict[str, Prediction]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.direction] = row
    head = "bytes | {} | bound by | programs"
    yield f"| case | {head.format('forward')} | {head.format('backward')} |"
    yield "|---|---:|---:|---|---:|---:|---:|---|---:|"
    for case, by_direction in found.items():
        cells = [case.name]
        for direction in ("forward", "backward"):
            one = by_direction[direction]
            cells += [f"{1e6 * one.bytes:.1f}", f"{1e6 * one.seconds:.1f}", one.limit]
            cells.append(str(one.programs_per_sm))
        yield f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each card."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("floors", nargs="?", type=Path, default=FLOORS)
    rows = predictions(parser.parse_args(arguments).floors)
    for card in dict.fromkeys(row.card for row in rows):
        lines = ["", f"{card}, µs, predicted:", *table(row for row in rows if row.card == card)]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
