"""Read the sentences of GLUE's tasks from parquet files or the Hugging Face Hub.

An item is ``[CLS] sentence [SEP]``, or ``[CLS] first [SEP] second [SEP]``.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from leaner_kernels.monitor.files import check_file, plain
from train.data import hub
from train.data.loader import Key
from train.data.text import Tokenizer
from train.glue.tasks import GlueTask

# Batches are as wide as their longest item, rounded up to this, so that few widths occur.
_WIDTHS = 16
_AT_ONCE = 10_000  # texts that are encoded together


@dataclass(frozen=True)
class GlueSplit:
    """One split.

    Attributes:
        items: tokens of each, int32.
        labels: (items,) int64 classes, or float32 numbers.
        digest: SHA-256 of its texts and labels.
        cut: how many items are longer than the context, and were cut to it.
    """

    items: list[np.ndarray]
    labels: Tensor
    digest: str = ""
    cut: int = 0


class Sentences:
    """Batches of items of one or several splits, by their keys.

    Args:
        parts: the splits, one after another.
        pad: the token after the end of an item.
        length: tokens of an item at most.
    """

    def __init__(self, parts: Sequence[GlueSplit], pad: int, length: int):
        self.items = [item for part in parts for item in part.items]
        self.labels = torch.cat([part.labels for part in parts])
        self.parts = torch.repeat_interleave(torch.tensor([len(part.items) for part in parts]))
        self.pad, self.length = pad, length
        self.splits = list(parts)
        self.digest = " ".join(part.digest for part in parts)

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens (B, N) int64, lengths (B,) int32, labels (B,) and parts (B,) int64."""
        chosen = [index for _, index in keys]
        items = [self.items[index] for index in chosen]
        lengths = torch.tensor([len(item) for item in items], dtype=torch.int32)
        width = min(-(-int(lengths.max()) // _WIDTHS) * _WIDTHS, self.length)
        tokens = torch.full((len(items), width), self.pad)
        for row, item in zip(tokens, items):
            row[: len(item)] = torch.from_numpy(item)
        return tokens, lengths, self.labels[chosen], self.parts[chosen]

    def facts(self, name: str) -> dict[str, str]:
        """Return how many items are cut to the context; ``name``: of these items."""
        cut = sum(part.cut for part in self.splits)
        return {f"{name}_cut_to_the_context": f"{cut:,} of {len(self):,}"}

    def mean_length(self) -> int:
        """Return the tokens of an item in the mean."""
        return round(sum(map(len, self.items)) / len(self))


def encode(
    tokenizer: Tokenizer, columns: Sequence[list[str]], length: int
) -> tuple[list[np.ndarray], int]:
    """Return the tokens of each item, int32, and how many were cut: longer sentences first.

    Args:
        tokenizer: with the special tokens "[CLS]", "[SEP]" and "[PAD]".
        columns: texts of one column or of two.
        length: tokens of an item at most.

    Raises:
        ValueError: one of the special tokens is missing.
    """
    specials = tokenizer.specials
    for name in ("[CLS]", "[SEP]", "[PAD]"):
        if name not in specials:
            known = ", ".join(specials) or "none"
            raise ValueError(f"--tokenizer must have the token {name}, got {known}")
    whole = tokenizers.Tokenizer.from_str(tokenizer.tokenizer.to_str())
    whole.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, specials[name]) for name in ("[CLS]", "[SEP]")],
    )
    whole.enable_truncation(length, strategy="longest_first")
    rows = columns[0] if len(columns) == 1 else list(zip(*columns))
    batches = (rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE))
    items, cut = [], 0
    for encoding in chain.from_iterable(map(whole.encode_batch_fast, batches)):
        items.append(np.array(encoding.ids, np.int32))
        cut += bool(encoding.overflowing)
    return items, cut


def open_task(
    source: str, task: GlueTask, tokenizer: Tokenizer, length: int
) -> tuple[Sentences, Sentences]:
    """Return the items that a task trains on, and those that score it.

    Args:
        source: a folder with ``TASK/SPLIT.parquet`` or ``TASK/SPLIT-*.parquet``, or ``hf:NAME`` of
            the Hub.
        task: which.
        tokenizer: of the pre-trained model.
        length: tokens of an item at most.

    Raises:
        ValueError: no such files, other columns than GLUE's, or labels that are no classes.
    """
    splits = ["train", *(split for split, _ in task.held_out)]
    train, *held_out = [_read_part(source, task, split, tokenizer, length) for split in splits]
    pad = tokenizer.specials["[PAD]"]
    return Sentences([train], pad, length), Sentences(held_out, pad, length)


def _read_part(
    source: str, task: GlueTask, split: str, tokenizer: Tokenizer, length: int
) -> GlueSplit:
    if source.startswith("hf:"):
        columns = _of_the_hub(source.removeprefix("hf:"), task, split)
    else:
        columns = _of_files(Path(source), task, split)
    where = f"--glue {source}: {task.name}/{split}"
    missing = [name for name in (*task.columns, "label") if name not in columns]
    if missing:
        raise ValueError(f"{where} must have the column {missing[0]}, got {', '.join(columns)}")
    labels = columns["label"]
    if not labels:
        raise ValueError(f"{where} has no rows")
    invalid = [label for label in labels if not _is_label(label, task)]
    if invalid:
        allowed = "0 to 5" if task.is_regression else f"0 to {task.classes - 1}"
        raise ValueError(
            f"{where} must have labels {allowed} (-1 marks hidden ones), got {invalid[0]}"
        )
    for name in task.columns:
        if any(not isinstance(text, str | None) for text in columns[name]):
            raise ValueError(f"{where} must have text in the column {name}")
    dtype = torch.float32 if task.is_regression else torch.int64
    texts = [[plain(text or "") for text in columns[name]] for name in task.columns]
    whole = json.dumps([texts, labels]).encode("utf-8", "surrogatepass")
    items, cut = encode(tokenizer, texts, length)
    return GlueSplit(
        items=items,
        cut=cut,
        labels=torch.tensor(labels, dtype=dtype),
        digest=hashlib.sha256(whole).hexdigest(),
    )


def _is_label(label: Any, task: GlueTask) -> bool:
    if not isinstance(label, int | float):
        return False
    return 0 <= label <= 5 if task.is_regression else label in range(task.classes)


def _of_files(root: Path, task: GlueTask, split: str) -> dict[str, list[Any]]:
    """Return the columns of a split's parquet files."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError("--glue needs the package pyarrow: pip install pyarrow") from None
    folder = root / task.name
    whole = folder / f"{split}.parquet"
    files = sorted(folder.glob(f"{split}-*.parquet")) or [whole] * whole.is_file()
    if not files:
        raise ValueError(
            f"--glue must be hf:NAME or a folder with {task.name}/{split}-*.parquet or "
            f"{split}.parquet, got {root}"
        )
    columns: dict[str, list[Any]] = {}
    for file in files:
        check_file(file)
        try:
            table = parquet.read_table(file)
        except ArrowException as error:
            raise ValueError(f"--glue contains {file}, which is not readable: {error}") from None
        for name in table.column_names:
            columns.setdefault(name, []).extend(table[name].to_pylist())
    return columns


def _of_the_hub(name: str, task: GlueTask, split: str) -> dict[str, list[Any]]:
    table = hub.load(name, task.name, flag="--glue")[split]
    return {column: list(table[column]) for column in table.column_names}
