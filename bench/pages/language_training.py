"""Rows trained in full with several seeds, beside the accuracies of the paper.

They are the ``summary.json`` that train/lra.py writes over all seeds, in bench/results as
listops-original.json and listops-lean.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.pages.markdown import goal, table
from models import papers

ROW = "nystromformer_listops"
FILES = {"original": "listops-original.json", "lean": "listops-lean.json"}
GOAL_SECONDS = 120

HEADING = """\
## ListOps, trained in full

Lists generated here by the published grammar, not the published split; the recipe is the paper's,
5,000 steps. Means over seeds with their standard error, in percent. *first operator* predicts the
likeliest result of a list's outermost operator and reads no more, *constant* always the same class.
"""


def section(folder: Path) -> str:
    """Return the table of the files in a folder, or nothing where there is none.

    Raises:
        SystemExit: a file cannot be read or is no such summary, in one line.
    """
    found = {variant: folder / name for variant, name in FILES.items()}
    rows = list(_rows({variant: path for variant, path in found.items() if path.exists()}))
    if not rows:
        return ""
    head = "depth, heads", "accuracy", "paper", "first operator", "constant", "seeds", "seconds"
    return "\n".join([HEADING, *table(("", *head, ""), rows)])


def _rows(paths: dict[str, Path]) -> Iterator[list[str]]:
    for variant, path in paths.items():
        try:
            yield _row(variant, json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not a summary of train/lra.py ({error!r})") from None


def _row(variant: str, whole: dict[str, Any]) -> list[str]:
    printed = papers.ROWS[ROW, variant].printed["accuracy"]
    accuracy, error = (100 * whole[f"test_accuracy{kind}"] for kind in ("", "_standard_error"))
    seconds = whole.get("seconds_of_each")
    text = f"at most {GOAL_SECONDS} s"
    met = "–" if seconds is None else goal(text, "", max(seconds) <= GOAL_SECONDS)[2]
    return [
        variant,
        f"{whole['depth']}, {whole['heads']}",
        f"{accuracy:.2f} ± {error:.2f}",
        f"{printed:.2f}",
        *(
            f"{100 * whole[f'baseline_{rule}']:.2f}"
            for rule in ("first_operator", "constant_class")
        ),
        str(whole["seeds"]),
        "–" if seconds is None else f"{max(seconds):.0f}",
        f"{text}: {met}",
    ]
