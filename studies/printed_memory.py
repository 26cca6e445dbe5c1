"""Which training step takes the memory that the paper prints?

python -m studies.printed_memory [--record]
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

from models import memory, papers
from models.json_rows import json_rows
from studies.runner import RESULTS

NAME = "printed_memory"
QUESTION = "Which training step takes the memory that the paper prints?"

# Rows whose every layer is softmax attention: what eager code keeps of other operators depends on
# whose code it is.
ROWS = ("vit_base", "vit_large", "tnt_base", "crammed_bert", "gpt2_tinystories")
# The printed memory of ImageNet's models is the sum over this many GPUs.
GPUS = {"vit_base": 8, "vit_large": 8, "tnt_base": 8}
STEPS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp32, eager, 1": {"precision": "fp32", "eager": 1},
    "fp32, eager, 2": {"precision": "fp32", "eager": 2},
}
# A prediction this close to the printed value may be the printed step.
CLOSE = 0.05


def predictions(rows: Sequence[str] = ROWS) -> dict[str, Any]:
    """Return printed and predicted bytes on one GPU of rows' models, and the version of torch."""
    found = []
    for row in rows:
        for variant in ("original", "lean"):
            build = partial(papers.build, row, variant)
            size = memory.paper_batch_size(row)
            printed = papers.ROWS[row, variant].printed["memory_gb"] * 1e9 / GPUS.get(row, 1)
            steps = {
                name: memory.predict(build, size, **options).total
                for name, options in STEPS.items()
            }
            found.append({"row": row, "variant": variant, "printed": printed, "steps": steps})
    return {"torch": torch.__version__, "models": found}


def section(predicted: dict[str, Any]) -> str:
    """Return the study's part of the page."""
    found = predicted["models"]
    rows = [
        (
            f"{each['row']}, {each['variant']}",
            f"{each['printed'] / 1e9:.1f}",
            *(f"{each['steps'][name] / 1e9:.1f} ({_apart(each, name):+.0%})" for name in STEPS),
        )
        for each in found
    ]
    shown = tabulate(rows, ("row", "printed, GB", *STEPS), "github", disable_numparse=True)
    close = {name: [e for e in found if abs(_apart(e, name)) < CLOSE] for name in STEPS}
    best = max(STEPS, key=lambda name: len(close[name]))
    far = dict.fromkeys(e["row"] for e in found if all(e not in near for near in close.values()))
    near = ", ".join(f"{e['row']} {e['variant']}" for e in close[best])
    asked = (
        "**Measured.** Peak memory of a training step on one GPU, with the paper's samples on each "
        "GPU, compared with the printed value. It is predicted on the meta device "
        f"(`models/memory.py`, torch {predicted['torch']}), and no GPU has run it. For the models "
        "of ImageNet the printed value is divided by eight, because the paper very likely adds up "
        "8 GPUs. *Eager* attention consists of PyTorch's matrix products and softmax. It keeps one "
        "tensor of scores a layer for the backward, or two if dropout is applied to the "
        "probabilities. The table has the rows in which every layer is softmax attention. The "
        "paper does not say which precision and which code it used."
    )
    others = [name for name in STEPS if name != best]
    result = (
        f"**Found.** {best!r} comes within {CLOSE:.0%} of {len(close[best])} of {len(found)} "
        f"models: {near}. Of the other steps, "
        + ", ".join(f"{name!r} comes so close to {len(close[name])}" for name in others)
        + ". The close ones fit float32 with attention that is not fused. But with so many steps "
        f"tried, some fit by chance, and some models of {', '.join(far)} fit none. Eager attention "
        "keeps scores, and a part of the memory that fewer layers save is theirs. Fused kernels "
        "keep no scores. The lean ViT-B takes "
        f"{_ratio(found, None):.0%} of the original's memory as printed, and "
        f"{_ratio(found, 'bf16'):.0%} in bf16 with these kernels."
    )
    not_shown = (
        "**Not shown.** What a GPU reports. The memory of XCiT, VOLO and DaViT, because their "
        "eager code differs between implementations."
    )
    return "\n\n".join([f"## {QUESTION}", asked, shown, result, not_shown]) + "\n"


def _apart(each: dict[str, Any], name: str) -> float:
    return each["steps"][name] / each["printed"] - 1


def _ratio(found: Sequence[dict[str, Any]], name: str | None) -> float:
    """Return lean over original of ViT-B, by a step or, for None, as printed."""
    original, lean = (
        each["printed"] if name is None else each["steps"][name]
        for each in found
        if each["row"] == "vit_base"
    )
    return lean / original


def main(argv: Sequence[str] | None = None) -> None:
    """Predict, and print the study's part of the page."""
    parser = argparse.ArgumentParser(prog=f"python -m studies.{NAME}", description=QUESTION)
    parser.add_argument(
        "--record", action="store_true", help="write the predictions to studies/results"
    )
    args = parser.parse_args(argv)
    found = predictions()
    if args.record:
        (RESULTS / f"{NAME}.json").write_text(json_rows(found))
    sys.stdout.write(section(found))


if __name__ == "__main__":
    main()
