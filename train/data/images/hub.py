"""Images in Hugging Face's datasets: of its Hub, or a folder of parquet files or WebDataset tars.

One column holds images, ``{"bytes": ..., "path": ...}``, and one whole numbers: ``label`` as in
ILSVRC/imagenet-1k, or ``cls`` as in tars. ``hf:`` lets ``datasets`` keep them in Arrow files, where
each is one seek away. ``hf-stream:`` keeps nothing and streams them.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from leaner_kernels.monitor.files import check_below, is_hidden
from leaner_kernels.monitor.reading import DATA, open_file, read_file
from train.data.sampler import seed_of
from train.data.splits import HELD_OUT, Split, split_of
from train.data.tables import builder_of, errors_of_datasets, tables_below

# Classes of a data set: neither memory nor time may follow from a label alone.
_CLASSES = 1 << 20


class HubTable:
    """The images of one split, in any order.

    Attributes:
        classes: as many as are declared, else up to the highest that is there.
        left_out: files of no split.

    Raises:
        ValueError: other columns than expected, or an image without a class.
    """

    left_out = ""

    def __init__(self, table: Any, split: str):
        self.image, self.label = _columns(table, split)
        self.table, self.split = _as_bytes(table, self.image, self.label), split
        labels = table[self.label][:]
        if not labels:
            raise ValueError(f"--data has no rows in its split {split}")
        kinds = set(map(type, labels))
        if kinds != {int} or min(labels) < 0 or max(labels) >= _CLASSES:
            row = next(row for row, label in enumerate(labels) if not _is_class(label))
            what = _shown(self.label, labels[row])
            raise ValueError(f"--data has {what} in row {row} of its split {split}")
        self.labels = labels
        self.names = getattr(table.features[self.label], "names", None)
        self.classes = _declared_classes(table, self.label) or 1 + max(labels)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        row = self.table[index]
        return _content(row[self.image]), row[self.label]

    def name(self, index: int) -> str:
        """Return which image this is."""
        return f"row {index} of the split {self.split}"

    def sizes(self) -> list[int | None]:
        """Return the bytes of each image, None of one that is a file elsewhere."""
        from pyarrow import compute

        table = self.table.with_format("arrow")
        rows = (table[start : start + 1000][self.image] for start in range(0, len(table), 1000))
        sizes = (compute.binary_length(compute.struct_field(row, "bytes")) for row in rows)
        return [size for part in sizes for size in part.to_pylist()]

    def files(self) -> Iterator[bytes]:
        """Yield what identifies the file of each image: a digest, for rows keep no whole paths."""
        for row in self.table.select_columns([self.image]):
            yield hashlib.sha256(_content(row[self.image])).digest()


class HubStream:
    """The images of one split, streamed.

    Args:
        table: a ``datasets.IterableDataset``.
        split: name of it.
        length: how many items it has.
        seed: of the order; None keeps that of the files.
    """

    left_out = ""
    # Items among which the next one is drawn: at about 110 kB each, half a gigabyte per rank.
    BUFFER = 4096

    def __init__(self, table: Any, split: str, length: int, seed: int | None):
        self.image, self.label = _columns(table, split)
        self.table, self.split = _as_bytes(table, self.image, self.label), split
        self.length, self.seed = length, seed
        self.classes = _declared_classes(table, self.label)

    def __len__(self) -> int:
        return self.length

    def stream(self, epoch: int, rank: int, ranks: int) -> Iterator[tuple[bytes, int]]:
        """Yield the bytes and class of one rank's images, in the epoch's order.

        Files are dealt to the ranks where their number divides evenly; otherwise every rank reads
        all of them and keeps its share of the images.
        """
        from datasets.distributed import split_dataset_by_node

        table = self.table
        if self.seed is not None:
            order = seed_of(self.seed, epoch) % 2**32
            table = table.shuffle(seed=order, buffer_size=self.BUFFER)
        if ranks > 1:
            table = split_dataset_by_node(table, rank, ranks)
        for row in table:
            label = row[self.label]
            if not _is_class(label, self.classes or _CLASSES):
                what = _shown(self.label, label)
                raise ValueError(f"--data has {what} in its split {self.split}")
            yield _content(row[self.image]), label


def open_tables(name: str) -> tuple[HubTable, HubTable | None, int, str]:
    """Return the training images, those held out if any, the number of classes, and the splits.

    Args:
        name: of a data set on the Hub, or of a folder with one.

    Raises:
        ValueError: no package ``datasets``, no such data set, or splits or columns other than
            expected.
    """
    datasets, left_out = _datasets("hf"), ""
    if (Path(name) / "dataset_dict.json").is_file():
        with errors_of_datasets(f"--data {name}"):
            check_below(name)
            tables = datasets.load_from_disk(name)
    else:
        _check_tars(name)
        with errors_of_datasets(f"--data {name}"):
            builder, left_out = _builder(name)
            builder.download_and_prepare()
            tables = builder.as_dataset()
    split = _split(name, tables, needed=False)
    train = HubTable(tables[split.train], split.train)
    train.left_out = left_out
    if split.held_out is None:
        return train, None, train.classes, split.shown()
    held_out = HubTable(tables[split.held_out], split.held_out)
    return train, held_out, max(train.classes, held_out.classes), split.shown()


def open_streams(name: str, seed: int) -> tuple[HubStream, HubStream, int, str]:
    """Return streams of images to train on and held out, the number of classes, and the splits.

    Args:
        name: of a data set on the Hub, or of a folder with one.
        seed: of the training order.

    Raises:
        ValueError: no package ``datasets``, splits or columns other than expected, or a data set
            that does not declare how many items or classes it has.
    """
    _datasets("hf-stream")
    _check_tars(name)
    with errors_of_datasets(f"--data hf-stream:{name}"):
        builder, left_out = _builder(name)
        tables = builder.as_streaming_dataset()
    split = _split(name, tables)
    train, held_out = (
        HubStream(tables[part], part, _length(name, builder, part), order)
        for part, order in ((split.train, seed), (split.held_out, None))
    )
    train.left_out = left_out
    if train.classes is None:
        raise ValueError(f"--data hf-stream:{name} must declare the classes of {train.label}")
    return train, held_out, train.classes, split.shown()


def _datasets(kind: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"--data {kind}: needs the package datasets: pip install datasets"
        ) from None
    return datasets


def _builder(name: str) -> tuple[Any, str]:
    """Return what reads a data set, without the hidden members of its tars; what is left out."""
    builder, left_out = builder_of(name)
    if read := getattr(builder, "_get_pipeline_from_tar", None):
        builder._get_pipeline_from_tar = partial(_visible, read)
    return builder, left_out


def _visible(read: Callable[..., Iterator], tar: str, members: Iterable[tuple[str, Any]]) -> Any:
    # The library itself passes over hidden files, but not over files in hidden folders; and it
    # keeps names, which in its tables must be UTF-8.
    def visible() -> Iterator[tuple[str, Any]]:
        for name, file in members:
            # Its header may claim any size, of a file with holes.
            if getattr(getattr(file, "raw", None), "size", 0) > DATA:
                raise ValueError(f"{tar} holds {name}, which has more than {DATA:,} bytes")
            name = name.encode("utf-8", "backslashreplace").decode()
            if not is_hidden(name):
                yield name, file

    return read(tar, visible())


def _check_tars(name: str) -> None:
    """Refuse a tar that is empty, or was cut off, which ``datasets`` reads as far as it goes."""
    for path in tables_below(Path(name)) if Path(name).is_dir() else ():
        if path.suffix.lower() != ".tar":
            continue
        with open_file(path) as file:
            if file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"--data holds {path}, a tar without a file")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tarfile.BLOCKSIZE))
            if file.read() != bytes(tarfile.BLOCKSIZE):
                raise ValueError(f"--data holds {path}, no tar or cut off after {size:,} bytes")


def _split(name: str, tables: Any, *, needed: bool = True) -> Split:
    split = split_of(tuple(map(str, tables)), f"--data {name}")
    if split.train is None or (needed and split.held_out is None):
        raise ValueError(
            f"--data {name} must have a split train and one of {', '.join(HELD_OUT)}, got "
            f"{', '.join(tables)}"
        )
    return split


def _columns(table: Any, split: str) -> tuple[str, str]:
    """Return the names of the columns of images and of classes."""
    import datasets

    features = table.features or {}
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    plain = features.get("image")
    if not images and isinstance(plain, dict) and "bytes" in plain:
        images = ["image"]  # parquet files that were not written by `datasets`
    stripped = {name.strip(): name for name in features}
    labels = [stripped[name] for name in ("label", "cls") if name in stripped]
    if len(images) != 1 or not labels:
        raise ValueError(
            f"--data must have one column of images and one named label or cls in its split "
            f"{split}, got {', '.join(features) or 'no columns'}"
        )
    return images[0], labels[0]


def _as_bytes(table: Any, image: str, label: str) -> Any:
    """Keep two columns, and the images as the bytes of their files."""
    import datasets

    return table.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))


def _content(image: dict[str, Any] | None) -> bytes:
    """Return the bytes of an image, none where the row has no image."""
    if image is None or image["bytes"] is image["path"] is None:
        return b""
    return read_file(image["path"], DATA) if image["bytes"] is None else image["bytes"]


def _is_class(label: Any, classes: int = _CLASSES) -> bool:
    return type(label) is int and 0 <= label < classes


def _shown(column: str, label: Any) -> str:
    return (
        f"no {column}"
        if label is None
        else f"the {column} {repr(label)[:40]}, no number of a class,"
    )


def _declared_classes(table: Any, label: str) -> int | None:
    return getattr(table.features[label], "num_classes", None)


def _length(name: str, builder: Any, split: str) -> int:
    """Return the number of items of a split, from the data set's README or its files' footers."""
    declared = (builder.info.splits or {}).get(split)
    if declared is not None and declared.num_examples:
        return declared.num_examples
    files = [Path(str(path)) for path in (builder.config.data_files or {}).get(split, ())]
    if not files or not all(path.suffix == ".parquet" and path.is_file() for path in files):
        raise ValueError(
            f"--data hf-stream:{name} must declare how many items its split {split} has; hf: does "
            "without"
        )
    from pyarrow import parquet

    with errors_of_datasets(f"--data hf-stream:{name}"):
        return sum(parquet.read_metadata(path).num_rows for path in files)
