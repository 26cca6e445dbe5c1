"""Show the scores of a fine-tuned model beside those of the paper's Table 1."""

from collections.abc import Mapping

from rich.table import Table

from models import papers
from train.glue.tasks import TASKS

TITLES = {
    "mnli": "MNLI",
    "sst2": "SST-2",
    "stsb": "STSB",
    "rte": "RTE",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mrpc": "MRPC",
    "cola": "CoLA",
    "glue": "GLUE",
}
ROW = "crammed_bert"


def in_percent(measures: dict[str, dict[str, float]]) -> dict[str, float | None]:
    """Return the row of the table, in percent: None for tasks that were not run.

    MNLI is the mean of both its validation splits, as GLUE counts it; the average is over the
    eight tasks, and None until all were run.

    Args:
        measures: of each task by name, the means of its held-out items.
    """
    row: dict[str, float | None] = dict.fromkeys(TASKS)
    for name, values in measures.items():
        scores = [values[score] for score in TASKS[name].scores]
        row[name] = 100 * sum(scores) / len(scores)
    known = [score for score in row.values() if score is not None]
    return row | {"glue": sum(known) / len(row) if len(known) == len(row) else None}


def printed(variant: str) -> dict[str, float]:
    """Return what the paper prints for the "original" or the "lean" model."""
    values = papers.ROWS[ROW, variant].printed
    return {name: values[name] for name in TITLES}


def shown(measures: dict[str, dict[str, float]], model: str) -> Table:
    """Return the table to be shown: this model and the paper's two.

    MNLI is shown by both of its splits.
    """
    table = Table(title="GLUE, in percent, beside Table 1 of the paper")
    table.add_column("model")
    for title in TITLES.values():
        table.add_column(title, justify="right")
    own = _cells(in_percent(measures))
    if "mnli" in measures:
        both = (100 * measures["mnli"][score] for score in TASKS["mnli"].scores)
        own["mnli"] = "/".join(f"{score:.1f}" for score in both)
    table.add_row(model, *own.values())
    for variant in ("original", "lean"):
        table.add_row(f"paper, {variant}", *_cells(printed(variant)).values())
    return table


def _cells(row: Mapping[str, float | None]) -> dict[str, str]:
    return {name: "-" if row[name] is None else f"{row[name]:.1f}" for name in TITLES}
