"""The sentences of GLUE's tasks: parquet files ``TASK/SPLIT-*.parquet``, or Hugging Face's Hub.

An item is ``[CLS] sentence [SEP]``, or ``[CLS] first [SEP] second [SEP]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data.loader import Key
from train.data.text import Tokenizer
from train.glue.tasks import GlueTask

# Batches are as wide as their longest item, rounded up to this, so that few widths occur.
_WIDTHS = 16
_AT_ONCE = 10_000  # texts that are encoded together


class EncodedTexts:
    """Texts as tokens, one after another."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        parts, ends = [], [0]
        for start in range(0, len(texts), _AT_ONCE):
            for ids in tokenizer.encode_batch(texts[start : start + _AT_ONCE]):
                parts.append(np.array(ids, np.int32))
                ends.append(ends[-1] + len(ids))
        self.tokens, self.ends = np.concatenate(parts), np.array(ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.ends[index] : self.ends[index + 1]]


@dataclass(frozen=True)
class GlueSplit:
    """One split.

    Attributes:
        columns: texts of its one column or two.
        labels: (items,) int64 classes, or float32 numbers.
    """

    columns: list[EncodedTexts]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class Sentences:
    """Batches of items of one or several splits, by their keys.

    Args:
        parts: the splits, one after another.
        specials: "[CLS]", "[SEP]" and "[PAD]" among the tokens.
        length: tokens of an item at most; the longer sentence of a pair is cut first.

    Raises:
        ValueError: one of the special tokens is missing.
    """

    def __init__(self, parts: Sequence[GlueSplit], specials: Mapping[str, int], length: int):
        for name in ("[CLS]", "[SEP]", "[PAD]"):
            if name not in specials:
                known = ", ".join(specials) or "none"
                raise ValueError(f"--tokenizer must have the token {name}, got {known}")
        self.begin, self.end, self.pad = (specials[n] for n in ("[CLS]", "[SEP]", "[PAD]"))
        self.parts, self.length = parts, length
        self.places = [(p, row) for p, part in enumerate(parts) for row in range(len(part))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens (B, N) int64, lengths (B,) int32, labels (B,) and parts (B,) int64."""
        places = [self.places[index] for _, index in keys]
        items = [self.tokens(*place) for place in places]
        lengths = torch.tensor([len(item) for item in items], dtype=torch.int32)
        width = min(-(-int(lengths.max()) // _WIDTHS) * _WIDTHS, self.length)
        tokens = torch.full((len(items), width), self.pad)
        for row, item in zip(tokens, items):
            row[: len(item)] = torch.tensor(item)
        labels = torch.stack([self.parts[part].labels[row] for part, row in places])
        return tokens, lengths, labels, torch.tensor([part for part, _ in places])

    def tokens(self, part: int, row: int) -> list[int]:
        """Return the tokens of one item."""
        texts = [column[row] for column in self.parts[part].columns]
        limits = _limits([len(text) for text in texts], self.length - 1 - len(texts))
        item = [self.begin]
        for text, limit in zip(texts, limits):
            item += [*text[:limit].tolist(), self.end]
        return item

    def mean_length(self) -> int:
        """Return the tokens of an item in the mean, of a thousand spread over all."""
        some = self.places[:: -(-len(self) // 1000)]
        return round(sum(len(self.tokens(*place)) for place in some) / len(some))


def _limits(lengths: list[int], room: int) -> list[int]:
    """Return how much of each text is kept: of a pair, tokens of the longer one go first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    half = room // 2
    if first <= half:
        return [first, room - first]
    if second <= room - half:
        return [room - second, second]
    return [half, room - half]


def open_task(
    source: str, task: GlueTask, tokenizer: Tokenizer, length: int
) -> tuple[Sentences, Sentences]:
    """Return the items that a task trains on, and those that score it.

    Args:
        source: a folder with ``TASK/SPLIT-*.parquet``, or ``hf:NAME`` of the Hub.
        task: which.
        tokenizer: of the pre-trained model.
        length: tokens of an item at most.

    Raises:
        ValueError: no such files, other columns than GLUE's, or labels that are no classes.
    """
    splits = ["train", *(split for split, _ in task.held_out)]
    train, *held_out = [_read_part(source, task, split, tokenizer) for split in splits]
    specials = tokenizer.specials
    return Sentences([train], specials, length), Sentences(held_out, specials, length)


def _read_part(source: str, task: GlueTask, split: str, tokenizer: Tokenizer) -> GlueSplit:
    if source.startswith("hf:"):
        columns = _of_the_hub(source.removeprefix("hf:"), task, split)
    else:
        columns = _of_files(Path(source), task, split)
    where = f"--glue {source} holds {task.name}/{split}"
    missing = [name for name in (*task.columns, "label") if name not in columns]
    if missing:
        raise ValueError(f"{where} without the column {missing[0]}: it has {', '.join(columns)}")
    labels = columns["label"]
    if not labels:
        raise ValueError(f"{where} without a row")
    invalid = [label for label in labels if not _is_label(label, task)]
    if invalid:
        allowed = "numbers from 0 to 5" if task.is_regression else f"0 to {task.classes - 1}"
        raise ValueError(f"{where} whose labels must be {allowed} (-1 is hidden), got {invalid[0]}")
    for name in task.columns:
        if any(not isinstance(text, str | None) for text in columns[name]):
            raise ValueError(f"{where} whose column {name} must be text")
    dtype = torch.float32 if task.is_regression else torch.int64
    texts = [EncodedTexts([text or "" for text in columns[n]], tokenizer) for n in task.columns]
    return GlueSplit(texts, torch.tensor(labels, dtype=dtype))


def _is_label(label: Any, task: GlueTask) -> bool:
    if not isinstance(label, int | float):
        return False
    return 0 <= label <= 5 if task.is_regression else label in range(task.classes)


def _of_files(root: Path, task: GlueTask, split: str) -> dict[str, list[Any]]:
    """Return the columns of ``root/TASK/SPLIT-*.parquet``."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError("--glue needs the package pyarrow, which comes with datasets") from None
    files = sorted((root / task.name).glob(f"{split}-*.parquet"))
    if not files:
        raise ValueError(
            f"--glue must be hf:NAME or a folder with {task.name}/{split}-*.parquet, got {root}"
        )
    columns: dict[str, list[Any]] = {}
    for file in files:
        try:
            table = parquet.read_table(file)
        except ArrowException as error:
            raise ValueError(f"--glue holds {file}, which is not readable: {error}") from None
        for name in table.column_names:
            columns.setdefault(name, []).extend(table[name].to_pylist())
    return columns


def _of_the_hub(name: str, task: GlueTask, split: str) -> dict[str, list[Any]]:
    try:
        import datasets
    except ImportError:
        raise ValueError("--glue hf: needs the package datasets") from None
    try:
        table = datasets.load_dataset(name, task.name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"--glue hf:{name} cannot be read: {reason}") from error
    return {column: list(table[column]) for column in table.column_names}
