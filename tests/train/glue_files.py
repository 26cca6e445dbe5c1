"""Small files of GLUE's tasks, in the schema of nyu-mll/glue on the Hub."""

import json
from pathlib import Path

import numpy as np

from train.glue import TASKS

CLASSES = {
    "mnli": ("entailment", "neutral", "contradiction"),
    "sst2": ("negative", "positive"),
    "rte": ("entailment", "not_entailment"),
    "qnli": ("entailment", "not_entailment"),
    "qqp": ("not_duplicate", "duplicate"),
    "mrpc": ("not_equivalent", "equivalent"),
    "cola": ("unacceptable", "acceptable"),
}
SPLITS = ("train", "validation", "test")
MNLI_SPLITS = ("train", *(f"{s}_{m}" for s in SPLITS[1:] for m in ("matched", "mismatched")))
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "no", "dog"]


def write_task(root: Path, name: str, rows: int = 12, shards: int = 1) -> None:
    """``root/cola/train-00000-of-00001.parquet`` and so on.

    Whether the first sentence ends in "dog" says whether the label is odd. Labels of test splits
    are hidden, as GLUE's are.
    """
    import pyarrow as pa
    from pyarrow import parquet

    task = TASKS[name]
    number = pa.float32() if task.is_regression else pa.int64()
    columns = [*((c, pa.string()) for c in task.columns), ("label", number), ("idx", pa.int32())]
    kind = {"dtype": "float32", "_type": "Value"}
    if not task.is_regression:
        kind = {"names": CLASSES[name], "_type": "ClassLabel"}
    about = json.dumps({"info": {"features": {"label": kind}}})
    schema = pa.schema(columns).with_metadata({"huggingface": about})
    (root / name).mkdir(parents=True, exist_ok=True)
    for at, split in enumerate(MNLI_SPLITS if name == "mnli" else SPLITS):
        draw, made = np.random.default_rng(at), []
        for idx in range(rows):
            label = idx % (6 if task.is_regression else task.classes)
            texts = [" ".join(draw.choice(WORDS[:-1], 1 + idx % 7)) for _ in task.columns]
            texts[0] += " dog" if label % 2 else " cat"
            row = {"label": -1 if split.startswith("test") else label, "idx": idx}
            made.append(dict(zip(task.columns, texts)) | row)
        for shard in range(shards):
            path = root / name / f"{split}-{shard:05d}-of-{shards:05d}.parquet"
            parquet.write_table(pa.Table.from_pylist(made[shard::shards], schema), path)
