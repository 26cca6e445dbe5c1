"""Predict times from a roofline and from what the compiler gave each kernel. Nothing is measured.

    python -m bench.predict            # a table; needs bench/results/resources.json

The model: a launch moves bytes, multiplies matrices and takes exponentials, perfectly overlapped,
so the slowest of the three alone decides.

- bytes: every tensor once (``Case.bytes``), over the part of the memory's peak rate that a copy
  attains. What a program reads again is taken to come from the L2 cache. A backward whose programs
  do not hold whole rows of scores also reads the output and the log-sum-exp.
- matrix: products of whole tiles, the padding of N and D included, over the part of the tensor
  cores' peak rate that a large product attains. On Hopper a kernel without a warp-group instruction
  (HGMMA) reaches the smaller rate of the older ones.
- exp: one exponential for each score of a whole tile, over the rate of the special-function units.

Of the operators of XCiT, DaViT and VOLO, which bytes bind, only useful work is counted.

Left out, all of which makes a kernel slower: launch latency, partial waves, the loads and barriers
that few resident programs cannot hide (a kernel with one program on a multiprocessor will miss its
prediction), and every instruction that is not in the list. So these are lower bounds that know the
tiles, not estimates of the mean.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import CASES, Case
from bench.vision_cases import VISION_CASES, VisionCase

RESOURCES = Path(__file__).parent / "results" / "resources.json"


class Card(NamedTuple):
    """Peak rates of a card: dense bfloat16 products with float32 sums, boost clock."""

    capability: int
    bytes_per_s: float
    flop_per_s: float
    multiprocessors: int
    clock_hz: float


# NVIDIA's data sheets: "H200 Tensor Core GPU" (SXM), "H100 Tensor Core GPU" (SXM), "A100 80GB"
# (SXM), "RTX A6000". The clock is the one at which the multiprocessors' tensor cores make the rate.
CARDS = {
    "H200": Card(90, 4.80e12, 989e12, 132, 1.83e9),
    "H100": Card(90, 3.35e12, 989e12, 132, 1.83e9),
    "A100": Card(80, 2.04e12, 312e12, 108, 1.41e9),
    "RTX A6000": Card(86, 0.768e12, 154.8e12, 84, 1.80e9),
}
# What a copy and a large product attain of the peaks: 4.3 TB/s and 790 TFLOP/s on an H200.
ATTAINED_BYTES, ATTAINED_FLOPS = 0.9, 0.8
# Of the rate of HGMMA; a working assumption.
WITHOUT_HGMMA = 0.6
EXPS_PER_CLOCK = 16  # CUDA C++ Programming Guide, "Arithmetic Instructions", each multiprocessor


@dataclass(frozen=True)
class Prediction:
    """A launch on a card: seconds by each limit, and how many programs a multiprocessor holds."""

    card: str
    case: Case | VisionCase
    direction: str
    programs_per_sm: int
    bytes: float
    matrix: float
    exp: float

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return max(self.bytes, self.matrix, self.exp)

    @property
    def limit(self) -> str:
        """What binds."""
        return max(("bytes", "matrix", "exp"), key=lambda name: getattr(self, name))


def padded(count: int, tile: int) -> int:
    """Round up to whole tiles."""
    return -(-count // tile) * tile


def tile_scores(case: Case, tiles: dict[str, Any]) -> int:
    """Count the scores that whole tiles hold, over all heads and sequences.

    ``tiles`` holds, of a grouped kernel, HEADS of ROWS by COLS; of a resident kernel SEGMENTS of
    (start, size), which are keys and meet every tile of BLOCK_M rows, or are rows and meet every
    tile of BLOCK_N keys; of the others both blocks: each sequence is cut by itself, and causal
    tiles above the diagonal are left out.
    """
    heads = case.batch * case.heads
    if "HEADS" in tiles:
        return padded(heads, tiles["HEADS"]) * tiles["ROWS"] * tiles["COLS"]
    if "SEGMENTS" in tiles:
        on_chip = sum(size for _, size in tiles["SEGMENTS"])
        if "BLOCK_M" in tiles:
            return heads * padded(case.rows, tiles["BLOCK_M"]) * on_chip
        return heads * padded(case.tokens, tiles["BLOCK_N"]) * on_chip
    block, count = tiles["BLOCK_M"], 0
    for rows in case.lengths or (case.rows,) * case.batch:
        keys = rows if case.ragged else case.tokens
        for first in range(0, rows, block):
            seen = min(keys, first + block) if case.causal else keys
            count += block * padded(seen, tiles["BLOCK_N"])
    return case.heads * count


def predict(name: str, case: Case | VisionCase, row: dict[str, Any]) -> Prediction:
    """Predict one launch on a card from its row of the table of resources."""
    direction = row["launch"]
    work = _useful_work if isinstance(case, VisionCase) else _tile_work
    moved, flops, exps = work(case, direction, row["tiles"])
    card = CARDS[name]
    rate = card.flop_per_s * ATTAINED_FLOPS
    if card.capability == 90 and not row["instructions"].get("HGMMA"):
        rate *= WITHOUT_HGMMA
    return Prediction(
        name,
        case,
        direction,
        row["programs_per_sm"],
        bytes=moved / (card.bytes_per_s * ATTAINED_BYTES),
        matrix=flops / rate,
        exp=exps / (EXPS_PER_CLOCK * card.multiprocessors * card.clock_hz),
    )


def _useful_work(case: VisionCase, direction: str, tiles: dict[str, Any]) -> tuple[int, int, int]:
    return case.bytes(direction), case.flops(direction), case.exps(direction)


def _tile_work(case: Case, direction: str, tiles: dict[str, Any]) -> tuple[int, int, int]:
    """Return bytes, operations of matrix products and exponentials of whole tiles."""
    products, exps = {"forward": (2, 1), "backward": (5, 1)}[direction]
    moved = case.bytes(direction)
    if direction == "backward":
        if "HEADS" not in tiles and "SEGMENTS" not in tiles:
            # Programs that own rows and programs that own columns both compute the scores and dP.
            products, exps = 7, 2
        if "HEADS" not in tiles and tiles["BLOCK_N"] < case.tokens:
            moved += case.query_rows * case.heads * (case.head_dim * case.dtype.itemsize + 4)
    scores = tile_scores(case, tiles)
    return moved, 2 * products * scores * tiles["BLOCK_D"], exps * scores


def predictions(path: Path = RESOURCES) -> list[Prediction]:
    """Predict every launch of the table on every card of its capability.

    Raises:
        SystemExit: the table cannot be read, in one line.
    """
    cases = {case.name: case for case in (*CASES, *VISION_CASES)}
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        return [
            predict(name, cases[row["case"]], row)
            for name, card in CARDS.items()
            for row in rows
            if row["capability"] == card.capability
            and row["launch"] in ("forward", "backward")
            and row["case"] in cases
        ]
    except OSError as error:
        missing = f"{path}: {error.strerror}; write it: python -m bench.resources --write"
        raise SystemExit(missing) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a table of resources ({error!r})") from None


def table(rows: Iterable[Prediction]) -> Iterable[str]:
    """Render predictions as Markdown, a line for each case; a direction sums its launches."""
    found: dict[Case, dict[str, list[Prediction]]] = {}
    for row in rows:
        found.setdefault(row.case, {}).setdefault(row.direction, []).append(row)
    yield "| case | forward | bound by | programs | backward | bound by | programs | both |"
    yield "|---|---:|---|---:|---:|---|---:|---:|"
    for case, by_direction in found.items():
        cells, both = [case.name], 0.0
        for launches in (by_direction[direction] for direction in ("forward", "backward")):
            seconds = sum(launch.seconds for launch in launches)
            longest = max(launches, key=lambda launch: launch.seconds)
            cells += [f"{seconds * 1e6:.1f}", longest.limit, str(longest.programs_per_sm)]
            both += seconds
        yield f"| {' | '.join(cells)} | {both * 1e6:.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each card."""
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__)
    parser.add_argument("resources", nargs="?", type=Path, default=RESOURCES)
    rows = predictions(parser.parse_args(arguments).resources)
    for card in dict.fromkeys(row.card for row in rows):
        lines = ["", f"{card}, µs, predicted:", *table(row for row in rows if row.card == card)]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
