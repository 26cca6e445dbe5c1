"""How well can the mazes of the studies be read at best?

python -m studies.ideal_observer
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from models.json_rows import json_rows
from studies import train_small
from studies.runner import RESULTS
from studies.train_small import CELLS, PIXELS

NAME = "ideal_observer"
QUESTION = "How well can the mazes of the studies be read at best?"
PLACES = CELLS * CELLS
BATCH = 100  # mazes whose posteriors are in memory together


def configurations() -> np.ndarray:
    """Return all sets of walls as (2 ** PLACES, PLACES) float32: 1 is a wall."""
    numbers = np.arange(1 << PLACES)
    return (numbers[:, None] >> np.arange(PLACES) & 1).astype(np.float32)


def reached_from(start: int, walls: np.ndarray) -> np.ndarray:
    """Return which cells a start reaches among walls: both (configurations, PLACES) float32."""
    free = walls.reshape(-1, CELLS, CELLS) == 0
    reached = np.zeros_like(free)
    reached.reshape(len(free), PLACES)[:, start] = True
    reached &= free
    return train_small.spread(reached, free).reshape(len(free), PLACES).astype(np.float32)


def probabilities(images: np.ndarray) -> np.ndarray:
    """Return the probability that the start of each maze reaches each cell, if that is open.

    Given the start, it is exact: a sum over all sets of walls, weighted by their probability given
    the pixels. The start is taken to be the cell of the lowest mean. At this noise, another cell is
    lower in one maze of ten million.

    Args:
        images: (mazes, side, side) pixels.

    Returns:
        (mazes, PLACES) float64.
    """
    cells = images.reshape(-1, CELLS, PIXELS, CELLS, PIXELS).mean(axis=(2, 4)).reshape(-1, PLACES)
    starts = cells.argmin(axis=1)
    prior = np.log(train_small.WALLS / (1 - train_small.WALLS))
    # log p(wall | pixels) - log p(open | pixels): means 1 and 0, deviation NOISE / PIXELS.
    of_walls = (cells - 0.5) * (PIXELS / train_small.NOISE) ** 2 + prior
    walls = configurations()
    found = np.zeros(cells.shape)
    for start in np.unique(starts):
        reached = reached_from(start, walls)
        mazes = np.flatnonzero(starts == start)
        for own in np.array_split(mazes, -(-len(mazes) // BATCH)):
            # The odds of a set of walls are the product of those of its walls.
            odds = of_walls[own] @ walls.T
            odds[:, walls[:, start] == 1] = -np.inf
            weights = np.exp(odds - odds.max(axis=1, keepdims=True))
            is_open = weights @ (1 - walls)  # 0, and the result nan, where walls are certain
            with np.errstate(invalid="ignore"):
                found[own] = weights @ reached / is_open
    return found


def measure() -> dict[str, Any]:
    """Return the loss and the accuracy of the ideal observer on the held-out mazes."""
    images, targets = (part.numpy() for part in train_small.pictures().held_out)
    share = probabilities(images[:, 0].astype(np.float64))
    is_open = targets >= 0
    given = np.where(targets == 1, share, 1 - share)[is_open]
    return {
        "mazes": len(images),
        "held_out_loss": float(-np.log(given).mean()),
        "held_out_accuracy": float((given > 0.5).mean()),
    }


def section() -> str:
    """Return what the page says about it, or nothing if it was not recorded."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    return (
        f"**The ceiling.** An ideal observer weighs all {1 << PLACES:,} sets of walls by their "
        f"probability given the pixels. On the same {found['mazes']:,} held-out mazes, it is right "
        f"in {found['held_out_accuracy']:.2%} of the open cells, and its loss is "
        f"{found['held_out_loss']:.4f} (`python -m studies.ideal_observer`). On average "
        "over mazes no model does better; on these, one may by chance."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the ideal observer; see ``--help``."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{NAME}", description=QUESTION)
    parser.add_argument(
        "--record", action="store_true", help="write the results to studies/results"
    )
    args = parser.parse_args(argv)
    text = json_rows(measure())
    if args.record:
        (RESULTS / f"{NAME}.json").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
