"""Define the tasks of GLUE: columns, classes, metrics and evaluation splits."""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["accuracy", "f1", "matthews", "pearson"]


@dataclass(frozen=True)
class GlueTask:
    """One task, as nyu-mll/glue stores it.

    Attributes:
        name: of its folder.
        columns: of its sentence, or of its pair of sentences.
        classes: how many; 1 where the label is a number to be predicted.
        metric: what it is scored by.
        names: of the classes, in the order of their numbers.
        held_out: the splits that score it, with the name that each score ends in.
    """

    name: str
    columns: tuple[str, ...]
    classes: int = 2
    metric: Metric = "accuracy"
    held_out: tuple[tuple[str, str], ...] = (("validation", ""),)
    names: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number to be predicted."""
        return self.classes == 1

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of its scores, the one that the table shows first."""
        return tuple(self.metric + ending for _, ending in self.held_out)


_MNLI_SPLITS = (("validation_matched", ""), ("validation_mismatched", "_mismatched"))
_ENTAILED = ("entailment", "not entailment")

# In the order in which the paper's Table 1 has them. The ninth task of GLUE, WNLI, is left out
# there, as elsewhere: its training and validation sentences contradict each other.
TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            "mnli",
            ("premise", "hypothesis"),
            classes=3,
            held_out=_MNLI_SPLITS,
            names=("entailment", "neutral", "contradiction"),
        ),
        GlueTask("sst2", ("sentence",), names=("negative", "positive")),
        GlueTask(
            "stsb",
            ("sentence1", "sentence2"),
            classes=1,
            metric="pearson",
        ),
        GlueTask(
            "rte",
            ("sentence1", "sentence2"),
            names=_ENTAILED,
        ),
        GlueTask(
            "qnli",
            ("question", "sentence"),
            names=_ENTAILED,
        ),
        GlueTask(
            "qqp",
            ("question1", "question2"),
            metric="f1",
            names=("different", "duplicate"),
        ),
        GlueTask(
            "mrpc",
            ("sentence1", "sentence2"),
            metric="f1",
            names=("different", "equivalent"),
        ),
        GlueTask(
            "cola",
            ("sentence",),
            metric="matthews",
            names=("unacceptable", "acceptable"),
        ),
    )
}


def chosen(names: tuple[str, ...] | None) -> list[GlueTask]:
    """Return the tasks of these names, or all of them, in the order of the table.

    Raises:
        ValueError: a name that is none of a task's.
    """
    for name in names or ():
        if name not in TASKS:
            raise ValueError(f"--tasks must be of {', '.join(TASKS)}, got {name!r}")
    return [task for task in TASKS.values() if names is None or task.name in names]
