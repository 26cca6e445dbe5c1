"""Could the paper's printed gains be accidents of the test set?

python -m studies.printed_tables
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

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


def gains() -> list[dict[str, Any]]:
    """Return every printed gain in accuracy of a lean model over its original.

    Accuracies are in percent, both of ``items``; ``z`` is the gain in ``standard_errors``.
    """
    found = []
    for (row, variant), entry in papers.ROWS.items():
        for measure, lean in entry.printed.items() if variant == "lean" else ():
            items = IMAGENET if measure == "top1" else ITEMS.get((row, measure))
            if items is not None:
                original = papers.ROWS[row, "original"].printed[measure]
                gain = {"row": row, "measure": measure, "original": original, "lean": lean}
                z = standard_errors(original, lean, items)
                found.append(gain | {"items": items, "z": z})
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
    headers = ("row", "measure", "original, %", "lean, %", "items", "standard errors")
    formats = ("", "", "g", "g", ",", "+.1f")
    shown = tabulate(
        [list(gain.values()) for gain in found],
        headers,
        "github",
        numalign="left",
        floatfmt=formats,
        intfmt=",",
    )
    images = [g["z"] for g in found if g["measure"] == "top1"]
    inside, all_inside = (
        sum(abs(z) < 1.96 for z in zs) for zs in (images, [g["z"] for g in found])
    )
    together = sum(images) / math.sqrt(len(images))
    measured = (
        "**Measured.** The printed accuracies, as shares of the items in the test set. The "
        "standard error is that of two models that err independently. Two things change it by an "
        "unknown amount: models err on the same items, which makes it smaller, and other seeds "
        "would move each accuracy, which makes it larger."
    )
    result = (
        f"**Found.** {inside} of {len(images)} gains on ImageNet are within 1.96 standard errors, "
        f"and so are {all_inside} of all {len(found)}. Taken together, as if each were a test of "
        f"its own, the gains on ImageNet are {together:.1f} standard errors above zero. So the "
        "tables show that lean models are about as good as their originals. Hardly a row shows "
        "that one of them is better."
    )
    not_shown = "**Not shown.** How much the seeds change, which needs runs."
    return "\n\n".join([f"## {QUESTION}", measured, shown, result, not_shown]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the study's part of the page."""
    argparse.ArgumentParser(
        prog="python -m studies.printed_tables", description=QUESTION
    ).parse_args(argv)
    sys.stdout.write(section())


if __name__ == "__main__":
    main()
