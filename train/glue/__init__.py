"""GLUE: eight tasks that measure a pre-trained encoder by fine-tuning it.

``tasks`` defines what each one is, ``rows`` reads its files, ``metrics`` scores it
and ``table`` sums it up as the paper's Table 1 does.

Source: Wang et al. 2018, "GLUE" (arXiv:1804.07461).
"""

from train.glue.rows import GlueSplit, Sentences, open_task
from train.glue.tasks import TASKS, GlueTask, chosen

__all__ = ["TASKS", "GlueSplit", "GlueTask", "Sentences", "chosen", "open_task"]
