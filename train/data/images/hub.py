"""Images of Hugging Face data sets: on the Hub, or in parquet files or WebDataset tars.

One column holds images, ``{"bytes": ..., "path": ...}``, and one whole numbers: ``label`` as in
ILSVRC/imagenet-1k, or ``cls`` as in tars. ``datasets`` keeps them in Arrow files, where each is one
seek away.
"""

import hashlib
import json
import os
from typing import Any

from train.data import hub
from train.data.classes import class_numbers, composed
from train.data.files import read_file
from train.data.images.files import size_of

# Largest number of classes, so that a label cannot exhaust memory or time.
_CLASSES = 1 << 20


class HubTable:
    """The images of one split, in any order.

    Attributes:
        classes: number of declared classes, or else the highest label plus one.
        names: names of the classes, None where none are declared.

    Raises:
        ValueError: other columns than expected, or an image without a class.
    """

    def __init__(self, table: Any, split: str):
        import datasets

        self.image, self.label = _columns(table, split)
        names = getattr(table.features[self.label], "names", None)
        self.names = names and [*map(composed, names)]
        if names and len(set(self.names)) < len(names):
            raise ValueError("--data must have a name of its own for each class, got two alike")
        declared = getattr(table.features[self.label], "num_classes", None)
        table = table.select_columns([self.image, self.label])
        # Read the bytes of files, which data workers decode.
        self.table = table.cast_column(self.image, datasets.Image(decode=False))
        self.split, self.labels = split, table[self.label][:]
        if not self.labels:
            raise ValueError(f"--data has no rows in its split {split}")
        for row, label in enumerate(self.labels):
            if type(label) is not int or not 0 <= label < _CLASSES:
                raise ValueError(
                    f"--data must have class numbers as {self.label}, got {repr(label)[:40]} in "
                    f"row {row} of its split {split}"
                )
        self.classes = declared or 1 + max(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, none where the row has no image, and its class."""
        image = self.table[index][self.image] or {"bytes": b"", "path": None}
        if image["bytes"] is None:
            return read_file(image["path"]) if image["path"] else b"", self.labels[index]
        return image["bytes"], self.labels[index]

    def number_as(self, names: list[str]) -> None:
        """Number the classes as in another split, which must have all of them.

        Raises:
            ValueError: one split has names and the other has not, or a name that the other lacks.
        """
        if self.names == names:
            return
        try:
            if self.names is None or names is None:
                raise ValueError("only one of them names its classes")
            numbers = class_numbers(self.names, names)
        except ValueError as error:
            raise ValueError(
                f"--data must have the same classes in its splits train and {self.split}: {error}"
            ) from None
        self.labels = [numbers[label] for label in self.labels]
        self.names, self.classes = names, len(names)

    def name(self, index: int) -> str:
        """Return which image this is."""
        return f"row {index} of the split {self.split}"

    def digest(self) -> str:
        """Return what tells these images from others: their classes and sizes, in order."""
        from pyarrow import compute

        whole = hashlib.sha256(json.dumps([self.names, self.labels]).encode())
        table = self.table.with_format("arrow")
        for start in range(0, len(self), 1000):
            rows = table[start : start + 1000][self.image]
            sizes = compute.binary_length(compute.struct_field(rows, "bytes")).to_pylist()
            paths = compute.struct_field(rows, "path").to_pylist()
            for size, path in zip(sizes, paths):
                # Some rows name a file instead of holding its bytes; its folder may move.
                file = (os.path.basename(path), size_of(path)) if size is None and path else size
                whole.update(f"{file}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()


def open_tables(name: str) -> tuple[HubTable, HubTable | None]:
    """Return the training images, and those held out if there are any.

    Args:
        name: name of a data set on the Hub, or of a folder with one.

    Raises:
        ValueError: no package ``datasets``, no such data set, or splits or columns other than
            expected.
    """
    splits = hub.load(name)
    if "train" not in splits:
        raise ValueError(f"--data {name} must have a split train, got {', '.join(splits)}")
    train, part = HubTable(splits["train"], "train"), hub.held_out_split(splits)
    if part is None:
        return train, None
    held_out = HubTable(splits[part], part)
    held_out.number_as(train.names)
    return train, held_out


def _columns(table: Any, split: str) -> tuple[str, str]:
    """Return the names of the columns of images and of classes."""
    import datasets

    features = table.features or {}
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    plain = features.get("image")
    if not images and isinstance(plain, dict) and "bytes" in plain:
        images = ["image"]  # parquet files that were not written by `datasets`
    labels = [name for name in ("label", "cls") if name in features]
    if len(images) != 1 or not labels:
        raise ValueError(
            f"--data must have one image column and a column label or cls in its split "
            f"{split}, got {', '.join(features) or 'no columns'}"
        )
    return images[0], labels[0]
