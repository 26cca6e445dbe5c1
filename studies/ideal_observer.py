"""How well can the mazes of the studies be read at best?

python -m studies.ideal_observer
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from models.json_rows import json_rows
from studies import train_small
from studies.runner import RESULTS
from studies.train_small import CELLS, PIXELS

NAME = "ideal_observer"
QUESTION = "How well can the mazes of the studies be read at best?"
PLACES = CELLS * CELLS
SAMPLES = 4000  # sets of walls of each maze


def probabilities(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the probability that the start of each maze reaches each cell, if that is open.

    Given the pixels and the start, the cells are walls independently of each other. Sets of walls
    are drawn from these probabilities. A cell that is open is reached if one of its neighbours is,
    whether or not the cell was a wall in the sample, so each sample counts for each cell. The start
    is taken to be the cell of the lowest mean, which is wrong in one maze of sixty thousand.

    Args:
        images: (mazes, side, side) pixels.
        generator: draws the samples.

    Returns:
        (mazes, PLACES) float64, above 0 and below 1.
    """
    cells = images.reshape(-1, CELLS, PIXELS, CELLS, PIXELS).mean(axis=(2, 4))
    prior = np.log(train_small.WALLS / (1 - train_small.WALLS))
    # log p(wall | pixels) - log p(open | pixels): means 1 and 0, deviation NOISE / PIXELS.
    of_walls = expit((cells - 0.5) * (PIXELS / train_small.NOISE) ** 2 + prior)
    return np.stack([_probabilities(*pair, generator) for pair in zip(cells, of_walls)])


def _probabilities(
    cells: np.ndarray, of_walls: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return those of one maze, from the means of its cells: both (CELLS, CELLS)."""
    start = np.unravel_index(cells.argmin(), cells.shape)
    free = generator.random((SAMPLES, CELLS, CELLS), np.float32) >= of_walls
    free[:, *start] = True
    reached = np.zeros_like(free)
    reached[:, *start] = True
    next_to = train_small.step_to_sides(train_small.spread(reached, free))
    next_to[:, *start] = True
    return ((next_to.sum(axis=0) + 0.5) / (SAMPLES + 1)).reshape(-1)


def measure() -> dict[str, Any]:
    """Return the loss and the accuracy of the ideal observer on the held-out mazes."""
    images, targets = (part.numpy() for part in train_small.pictures().held_out)
    share = probabilities(images[:, 0].astype(np.float64), np.random.default_rng(0))
    is_open = targets >= 0
    given = np.where(targets == 1, share, 1 - share)[is_open]
    return {
        "mazes": len(images),
        "held_out_loss": float(-np.log(given).mean()),
        "held_out_accuracy": float((given > 0.5).mean()),
        "reached": float((targets[is_open] == 1).mean()),
    }


def section() -> str:
    """Return what the page says about it, or nothing if it was not recorded."""
    path = RESULTS / f"{NAME}.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    return (
        f"**The ceiling.** An ideal observer draws {SAMPLES:,} sets of walls of each maze by their "
        f"probability given the pixels. On the same {found['mazes']:,} held-out mazes, it is right "
        f"in {found['held_out_accuracy']:.2%} of the open cells, and its loss is "
        f"{found['held_out_loss']:.4f} (`python -m studies.ideal_observer`). On average over mazes "
        "no model does better; on these, one may by chance. To call every open cell reached is "
        f"right in {found['reached']:.2%}."
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
