"""Predict the peak memory of training every row of the paper's tables; on a GPU measure it too.

    python -m bench.memory                              # predictions; needs no GPU
    python -m bench.memory --row vit_base --batch 256 --precision fp32 --json

Both use the same step (``models.memory.Step``, then AdamW), by default with as many samples as each
of the paper's GPUs had. The paper prints the sum over 8 GPUs without a precision, so only the ratio
of the lean model to the original can be compared.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch.optim import AdamW

from bench.harness import command
from models import memory, papers
from models.json_rows import json_rows

GB = 1e9


def table_rows() -> list[str]:
    """Return the names of the rows that the paper compares, each original and lean."""
    return list(dict.fromkeys(r.row for r in papers.ROWS.values() if r.variant == "lean"))


def records(
    rows: Sequence[str], batch: int | None, precision: memory.Precision
) -> Iterator[dict[str, Any]]:
    """Yield one record for each model: bytes predicted and measured, and the paper's ratio."""
    for row in rows:
        size = memory.paper_batch_size(row) if batch is None else batch
        original: dict[str, Any] = {}
        for variant in ("original", "lean"):
            model = partial(papers.build, row, variant)
            predicted = memory.predict(model, size, precision=precision)
            measured = measure(model, size, precision) if torch.cuda.is_available() else None
            printed = papers.ROWS[row, variant].printed.get("memory_gb")
            record = {"row": row, "variant": variant, "batch": size, "precision": precision}
            record |= {
                "predicted": vars(predicted) | {"total": predicted.total},
                "measured": measured,
                "printed_memory_gb": printed,
            }
            original = original or record
            record["ratio"] = predicted.total / original["predicted"]["total"]
            record["ratio_measured"] = measured and measured / original["measured"]
            record["ratio_paper"] = printed and printed / original["printed_memory_gb"]
            record["error_percent"] = measured and 100 * (predicted.total / measured - 1)
            yield record


def measure(build: Any, batch_size: int, precision: memory.Precision) -> int:
    """Return the peak bytes of tensors in a training step on the GPU, the second of a run.

    Args:
        build: as in ``models.memory.predict``, here called under the CUDA device.
        batch_size: samples in the step.
        precision: as in ``models.memory.Step``.
    """
    gc.collect()
    with torch.device("cuda"):
        step = memory.Step(build(), precision=precision)
        inputs = step.batch(batch_size)
    optimizer = AdamW(step.model.parameters(), fused=True)
    for _ in range(2):
        # The first step makes the moments and, while kernels are tuned, scratch space.
        torch.cuda.reset_peak_memory_stats()
        step.loss(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def table(found: Sequence[dict[str, Any]]) -> str:
    """Lay the records out in aligned columns, in GB; a value that was not measured is empty."""
    rows = pd.json_normalize(list(found)).rename(columns=lambda name: name.split(".")[-1])
    rows["other"] = rows[["gradients", "inputs", "temporaries"]].sum(axis=1)
    sizes = ["parameters", "optimizer", "activations", "other", "total", "measured"]
    rows[sizes] /= GB
    ratios = ["error_percent", "ratio", "ratio_measured", "ratio_paper"]
    rows = rows[["row", "variant", "batch", *sizes, *ratios]].dropna(axis="columns", how="all")
    text = rows.to_string(index=False, float_format="{:.3f}".format, na_rep="-")
    return f"{text}\n\nGB = 1e9 bytes, predicted but for what is named measured.\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table, or JSON, to standard output."""
    parser = command.parser("bench.memory", __doc__)
    option = parser.add_argument
    option(
        "--row",
        action="append",
        choices=table_rows(),
        help="row of the paper; may be repeated (all rows)",
    )
    option("--batch", type=int, metavar="N", help="samples per step (as in the paper)")
    option(
        "--precision",
        choices=memory.PRECISIONS,
        default="bf16",
        help="precision of the step (bf16)",
    )
    option("--json", action="store_true", help="print a JSON list, one model per line")
    flags = parser.parse_args(arguments)
    if flags.batch is not None and flags.batch < 1:
        parser.error(f"--batch must be at least 1, got {flags.batch}")
    found = list(records(flags.row or table_rows(), flags.batch, flags.precision))
    if flags.json:
        sys.stdout.write(json_rows(found))
    else:
        sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
