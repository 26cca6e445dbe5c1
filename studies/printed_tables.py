"""Could the paper's printed gains be accidents of the test set?

python -m studies.printed_tables
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from tabulate import tabulate

from models import papers

QUESTION = "Could the printed gains be accidents of the test set?"

# Items of the sets that the printed accuracies are of. GLUE's are the development sets; its F1,
# Matthews and Pearson scores are no shares of items.
IMAGENET = 50_000
ITEMS = {
    ("crammed_bert", "mnli"): 9_815,
    ("crammed_bert", "qnli"): 5_463,
    ("crammed_bert", "rte"): 277,
    ("crammed_bert", "sst2"): 872,
    ("nystromformer_image", "accuracy"): 10_000,
    ("nystromformer_listops", "accuracy"): 2_000,
    ("nystromformer_pathfinder", "accuracy"): 20_000,
    ("nystromformer_retrieval", "accuracy"): 17_437,
    ("nystromformer_text", "accuracy"): 25_000,
}


class Gain(NamedTuple):
    """One printed gain of a lean model over its original.

    Attributes:
        row: of the paper.
        measure: of the row.
        original: printed, in percent.
        lean: printed, in percent.
        items: of the set that both are of.
        z: the gain in standard errors of the difference of two shares of so many items.
    """

    row: str
    measure: str
    original: float
    lean: float
    items: int
    z: float


def gains() -> list[Gain]:
    """Return every printed gain in accuracy."""
    found = []
    for (row, variant), lean in papers.ROWS.items():
        if variant != "lean":
            continue
        original = papers.ROWS[row, "original"].printed
        for measure, value in lean.printed.items():
            items = IMAGENET if measure == "top1" else ITEMS.get((row, measure))
            if items is not None:
                pair = original[measure], value
                found.append(Gain(row, measure, *pair, items, standard_errors(*pair, items)))
    return found


def standard_errors(one: float, other: float, items: int) -> float:
    """Return how many standard errors two accuracies in percent are apart.

    As if the models erred independently of each other, each on ``items`` items.
    """
    variance = sum(p / 100 * (1 - p / 100) / items for p in (one, other))
    return (other - one) / 100 / math.sqrt(variance)


def section() -> str:
    """Return the study's part of the page."""
    found = gains()
    rows = [
        (g.row, g.measure, f"{g.original:g}", f"{g.lean:g}", f"{g.items:,}", f"{g.z:+.1f}")
        for g in found
    ]
    headers = ("row", "measure", "original, %", "lean, %", "items", "standard errors")
    shown = tabulate(rows, headers, "github", disable_numparse=True)
    images = [g.z for g in found if g.measure == "top1"]
    inside, all_inside = (sum(abs(z) < 1.96 for z in zs) for zs in (images, [g.z for g in found]))
    together = sum(images) / math.sqrt(len(images))
    measured = (
        "**Measured.** The printed accuracies, as shares of the items that they are of. The "
        "standard error is that of two models that err independently. Models err on the same "
        "items, which makes it smaller; another seed would move each of them, which makes it "
        "larger, and by how much cannot be read off the tables."
    )
    result = (
        f"**Found.** {inside} of {len(images)} gains on ImageNet, and {all_inside} of all "
        f"{len(found)}, are within 1.96 standard errors. Taken together, and as if each were a "
        f"test of its own, those on ImageNet are {together:.1f} above zero. So the tables show "
        "that lean models are about as good as their originals; hardly a row shows that one is "
        "better."
    )
    not_shown = "**Not shown.** What the seeds do, which needs runs."
    return "\n\n".join([f"## {QUESTION}", measured, shown, result, not_shown]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the study's part of the page."""
    argparse.ArgumentParser(
        prog="python -m studies.printed_tables", description=QUESTION
    ).parse_args(argv)
    sys.stdout.write(section())


if __name__ == "__main__":
    main()
