"""Open a task of the Long-Range Arena: tables of text or of pictures, or folders of pictures.

As published, text is read as bytes and a picture as its grey pixels, row by row, and all sequences
of a task are padded to one power of two. One thing differs: the published code treats every token 0
as padding, which hides black pixels. Here every pixel counts.

Source: Tay et al. 2021, "Long Range Arena" (arXiv:2011.04006),
github.com/google-research/long-range-arena.
"""

import csv
import glob
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data import hub, listops
from train.data.classes import class_numbers
from train.data.files import open_file
from train.data.images.files import ImageFiles, class_folders, in_classes, open_folder
from train.data.images.hub import HubTable
from train.data.images.sources import Part
from train.data.loader import Key
from train.data.pictures import decoded, opened
from train.data.splits import splits_of

SIDE = 32  # pixels of a picture
SPLITS = listops.SPLITS
DIGITS = tuple("0123456789")  # classes of ListOps
_SPLITS = {"train": "train", "validation": "dev", "test": "test"}  # by the usual names
_TABLES = (".tsv", ".csv", ".parquet")
_HELD_OUT = 10  # one in this many training items goes to a split that the data lacks


@dataclass(frozen=True)
class Kind:
    """How a task's items become sequences of tokens.

    Attributes:
        vocab: number of tokens, padding included.
        text_columns: text columns of a table; several make an item of several sequences. None for
            pictures.
        label_column: label column of a table.
    """

    vocab: int
    text_columns: tuple[str, ...] | None = None
    label_column: str = "label"


TASKS = {
    "listops": Kind(len(listops.SYMBOLS) + 1, ("Source",), "Target"),
    "text": Kind(257, ("text",)),
    "retrieval": Kind(257, ("text1", "text2")),
    "image": Kind(256),
    "pathfinder": Kind(256),
}


class Items:
    """The items of one split: a data set as ``train.data.loader`` has them.

    Args:
        source: source of the items: a ``TextTable``, or pictures.
        labels: (items,) int64, indices of the classes.
        task: key of ``TASKS``.
        length: tokens that are read of a text.
    """

    def __init__(self, source: Any, labels: np.ndarray, task: str, length: int):
        self.source, self.labels, self.task, self.length = source, labels, task, length

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens (B, N) or (B, 2, N) int64, lengths int32, labels (B,) int64.

        Raises:
            ValueError, OSError: an item cannot be read; the message names it.
        """
        chosen = [index for _, index in keys]
        tokens, lengths = pad([self._sequences(index) for index in chosen], padded(self.length))
        return tokens, lengths, torch.from_numpy(self.labels[chosen])

    def _sequences(self, index: int) -> list[np.ndarray]:
        if TASKS[self.task].text_columns is None:
            content, _ = self.source.read(index)
            return [grey_pixels(content, partial(self.source.name, index))]
        return [encode(text, self.task, self.length) for text in self.source.read(index)]

    def digest(self) -> str:
        """Return a SHA-256 that identifies these items."""
        return hashlib.sha256(self.source.digest().encode() + self.labels.tobytes()).hexdigest()


def pad(items: Sequence[Sequence[np.ndarray]], length: int) -> tuple[Tensor, Tensor]:
    """Return a batch of items, each of one sequence or of two.

    Args:
        items: sequences, (tokens,) of whole numbers, at most ``length`` each.
        length: N, tokens of a sequence in the batch, padded with 0.

    Returns:
        Tokens (B, N) or (B, 2, N) int64, and their numbers (B,) or (B, 2) int32.
    """
    tokens = np.zeros((len(items), len(items[0]), length), np.int64)
    lengths = np.zeros(tokens.shape[:2], np.int32)
    for row, item in enumerate(items):
        for place, sequence in enumerate(item):
            tokens[row, place, : len(sequence)] = sequence
            lengths[row, place] = len(sequence)
    if tokens.shape[1] == 1:
        tokens, lengths = tokens[:, 0], lengths[:, 0]
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def encode(text: str, task: str, length: int) -> np.ndarray:
    """Return the first tokens of a text, (tokens,) uint16: its bytes, or the symbols of lists.

    Args:
        text: to read.
        task: key of ``TASKS``.
        length: tokens that are read.

    Raises:
        ValueError: an empty text, or another symbol in lists.
    """
    if task != "listops":
        # 0 is padding, so the token of a byte is the byte plus one.
        tokens = [byte + 1 for byte in text.encode("utf-8", "surrogatepass")[:length]]
    else:
        words = re.sub("[()]", " ", text).split()
        unknown = [word for word in words if word not in listops.IDS]
        if unknown:
            raise ValueError(f"lists must have {' '.join(listops.SYMBOLS)}, got {unknown[0]!r:.40}")
        tokens = [listops.IDS[word] for word in words[:length]]
    if not tokens:
        raise ValueError(f"text must not be empty, got {text!r:.40}")
    return np.array(tokens, np.uint16)


def grey_pixels(content: bytes, name: Callable[[], str]) -> np.ndarray:
    """Return the grey pixels of a picture, row by row, (1024,) uint8.

    Args:
        content: bytes of the file.
        name: returns which picture it is, for a message.

    Raises:
        ValueError: it is no picture, or not one of 32 x 32 pixels.
    """
    image = opened(content, name)
    if image.size != (SIDE, SIDE):
        raise ValueError(
            f"{name()} must be {SIDE} x {SIDE} pixels, got {image.width} x {image.height}"
        )
    return np.asarray(decoded(image, name).convert("L")).reshape(-1)


class TextTable:
    """The rows of one split: columns of text, and one of classes.

    Args:
        table: a ``datasets.Dataset``.
        split: its name, for messages.
        columns: columns of text.
        label: column of classes: their numbers, or their names.

    Attributes:
        labels: (rows,) int64, indices of ``names``.
        names: names of the classes.

    Raises:
        ValueError: no such column, or a row without a class.
    """

    def __init__(self, table: Any, split: str, columns: Sequence[str], label: str):
        for column in columns:
            _check_column(table, split, "--text-column", column)
        _check_column(table, split, "--label-column", label)
        self.table, self.split, self.columns = table, split, tuple(columns)
        declared = getattr(table.features[label], "names", None)
        cells = [_class_name(cell, declared) for cell in table[label]]
        if None in cells:
            raise ValueError(f"--data has no class in row {cells.index(None)} of its split {split}")
        numeric = all(cell.isdecimal() for cell in cells)
        self.names = declared or sorted(set(cells), key=int if numeric else str)
        place = {name: index for index, name in enumerate(self.names)}
        self.labels = np.array([place[cell] for cell in cells], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> list[str]:
        """Return the texts of a row, one for each column.

        Raises:
            ValueError: if one is empty, or is not text.
        """
        row = self.table[int(index)]
        texts = [row[column] for column in self.columns]
        for column, text in zip(self.columns, texts):
            if not isinstance(text, str) or not text:
                raise ValueError(f"{self.name(index)} must have text in {column}, got {text!r:.40}")
        return texts

    def name(self, index: int) -> str:
        """Return which row this is."""
        return f"row {index} of the split {self.split}"

    def digest(self) -> str:
        """Return the SHA-256 of the classes and texts."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # computed once, even if the rows are divided into several splits
        whole = hashlib.sha256(repr((self.names, self.labels.tolist())).encode())
        for batch in self.table.select_columns([*self.columns]).iter(1000):
            whole.update(repr(batch).encode("utf-8", "surrogatepass"))
        return whole.hexdigest()


def _check_column(table: Any, split: str, flag: str, name: str) -> None:
    if name not in table.column_names:
        raise ValueError(
            f"{flag} must be one of {', '.join(table.column_names)}, the columns of the split "
            f"{split}, got {name}"
        )


def _class_name(cell: Any, declared: Sequence[str] | None) -> str | None:
    """Return the class name in a cell of a table, or None."""
    if declared is not None:
        return declared[cell] if cell is not None and 0 <= cell < len(declared) else None
    text = "" if cell is None else str(cell).strip()
    return re.sub(r"^(\d+)\.0$", r"\1", text) or None


@dataclass(frozen=True)
class LongRange:
    """The items of a task.

    Attributes:
        train: training items.
        dev: items that choose the weights.
        test: items that measure them.
        classes: names, in the order of the labels.
        made: splits made here, each from a tenth of the training items of each class.
    """

    train: Any
    dev: Any
    test: Any
    classes: tuple[str, ...]
    made: tuple[str, ...] = ()


def open_task(
    task: str, data: str, *, text_columns: Sequence[str], label_column: str, length: int
) -> LongRange:
    """Open the items of a task.

    Args:
        task: key of ``TASKS``.
        data: "hf:" and a data set of Hugging Face, a folder of tables (TSV, CSV or Parquet), or of
            pictures a folder with a subfolder for each class.
        text_columns: text columns of a table of text.
        label_column: label column of a table.
        length: tokens that are read of a text.

    Raises:
        ValueError: no such data, or data of another task.
    """
    sources = _sources(task, data, text_columns, label_column)
    if "train" not in sources:
        raise ValueError(f"--data {data} must have a split train, got {', '.join(sources)}")
    training = sources["train"]
    classes = DIGITS if task == "listops" else tuple(training.names)
    if len(classes) < 2:
        raise ValueError(f"--data {data} must have at least two classes, got {len(classes)}")
    labels = {s: _labels(source, classes, s) for s, source in sources.items()}
    made = tuple(split for split in SPLITS if split not in sources)
    place = _places(labels["train"]) % _HELD_OUT
    for split in made:
        own = np.flatnonzero(place == made.index(split))
        sources[split], labels[split] = Part(training, own), labels["train"][own]
    if made:
        rest = np.flatnonzero(place >= len(made))
        sources["train"], labels["train"] = Part(training, rest), labels["train"][rest]
    for split in SPLITS:
        if not len(labels[split]):
            raise ValueError(f"--data {data} must have items of {split}, got none")
    make = partial(_lists, length=length) if task == "listops" else Items
    more = () if task == "listops" else (task, length)
    parts = {split: make(sources[split], labels[split], *more) for split in SPLITS}
    return LongRange(parts["train"], parts["dev"], parts["test"], classes, made)


def _places(labels: np.ndarray) -> np.ndarray:
    """Return the place of each item within its class, in a fixed random order."""
    draw, places = np.random.default_rng(0), np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        places[draw.permutation(own)] = np.arange(len(own))
    return places


def _lists(source: Any, labels: np.ndarray, length: int) -> listops.Lists:
    """Return rows of text as ``Lists``, whose first tokens are needed."""
    sequences = []
    for row in range(len(labels)):
        (text,) = source.read(row)
        try:
            sequences.append(encode(text, "listops", length))
        except ValueError as error:
            raise ValueError(f"{source.name(row)}: {error}") from None
    tokens = np.concatenate(sequences).astype(np.uint8)
    offsets = np.cumsum([0, *map(len, sequences)])
    return listops.Lists(tokens, offsets, labels.astype(np.uint8), padded(length))


def _labels(source: Any, classes: Sequence[str], split: str) -> np.ndarray:
    """Return the labels of a source as indices of ``classes``."""
    try:
        own = np.array(class_numbers(source.names, classes), np.int64)
    except ValueError as error:
        raise ValueError(f"--data has other classes in its split {split}: {error}") from None
    return own[np.asarray(source.labels)]


def _sources(
    task: str, data: str, text_columns: Sequence[str], label_column: str
) -> dict[str, Any]:
    """Return the source of the items of each split that the data has."""
    folder, pictures = Path(data), TASKS[task].text_columns is None
    if data.startswith("hf:"):
        tables = hub.load(data.removeprefix("hf:"))
    elif not folder.is_dir():
        raise ValueError(f"--data must be a folder or hf:NAME, got {data}")
    elif pictures and in_classes(folder):
        return _pictures(folder, label_column)
    elif files := hub.tables_below(folder, _TABLES):
        tables = _load_tables(folder, files, [*text_columns, label_column])
    elif pictures:
        return _pictures(folder, label_column)
    else:
        raise ValueError(f"--data must contain .tsv, .csv or .parquet files, got none in {data}")
    sources: dict[str, Any] = {}
    for name, split in _SPLITS.items():
        if name not in tables:
            continue
        if not pictures:
            sources[split] = TextTable(tables[name], split, text_columns, label_column)
            continue
        table = _with_label(tables[name], split, label_column)
        sources[split] = source = HubTable(table, split)
        source.names = source.names or [str(number) for number in range(source.classes)]
    return sources


def _with_label(table: Any, split: str, column: str) -> Any:
    """Return a table of pictures whose column of classes ``HubTable`` can read."""
    if column == "label":  # the default: tars have cls
        return table
    _check_column(table, split, "--label-column", column)
    others = [name for name in ("label", "cls") if name in table.column_names and name != column]
    return table.remove_columns(others).rename_column(column, "label")


def _pictures(folder: Path, label_column: str) -> dict[str, ImageFiles]:
    """Return the pictures of class folders by split."""
    if label_column != "label":
        raise ValueError(f"--label-column is for tables, got {label_column} for folders of classes")
    train, held_out, _ = open_folder(folder)
    if held_out is None:
        return {"train": train}
    names = splits_of(path.name for path in folder.iterdir() if path.is_dir())
    parts = {
        _SPLITS[split]: class_folders(folder / name)
        for name, split in names.items()
        # Test pictures outside of folders have no classes.
        if split != "test" or any(path.is_dir() for path in (folder / name).iterdir())
    }
    return parts | {"train": train}


def _load_tables(folder: Path, files: list[Path], columns: Sequence[str]) -> Mapping[str, Any]:
    """Return tables of text cells by split; if there are several files, each names its split."""
    import datasets

    kinds = {path.suffix.lower() for path in files}
    if len(kinds) > 1:
        raise ValueError(
            f"--data must contain tables of one kind, got {files[0].name} and {files[-1].name}"
        )
    if kinds == {".parquet"}:
        return hub.load(str(folder))
    splits: dict[str, list[str]] = {}
    for path in files:
        split = hub.split_of(path.relative_to(folder)) or ("train" if len(files) == 1 else None)
        if split is None:
            raise ValueError(
                f"--data {path} must have train, validation or test in its name or its folder's, "
                f"as one of {len(files)} tables"
            )
        splits.setdefault(split, []).append(glob.escape(str(path)))
    # Cells of TSV are not quoted. Numbers as column names mean that no line names the columns.
    style = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kinds == {".tsv"} else {}
    for path in files:
        names = _names_of_columns(path, style)
    if all(column.isdecimal() for column in columns):
        names = [str(place) for place in range(len(names))]
        style |= {"header": None, "column_names": names}
    features = datasets.Features({name: datasets.Value("string") for name in names})
    options = {"features": features, "na_filter": False, "encoding": "utf-8-sig"}
    return hub.load("csv", called=str(folder), data_files=splits, **options, **style)


def _names_of_columns(path: Path, style: Mapping[str, Any]) -> list[str]:
    """Return the cells of the first line of a table, of which the second must have as many.

    If rows have one more cell, pandas would treat their first cell as the row's name.
    """
    with TextIOWrapper(open_file(path), "utf-8-sig", "replace", newline="") as file:
        rows = csv.reader(file, **style)
        try:
            names = next(rows, [])
            cells = len(next(rows, names))
        except csv.Error:  # such as a text of more than 128 KiB, which pandas reads
            return names
    if cells != len(names):
        raise ValueError(
            f"--data {path} must have as many cells in each row as in its first, {len(names)}, got "
            f"{cells}: quote texts with a comma in a .csv, and leave no tab in texts of a .tsv"
        )
    return names


def padded(length: int) -> int:
    """Return the padded length of sequences of which ``length`` tokens are read: a power of two."""
    return 1 << (length - 1).bit_length()
