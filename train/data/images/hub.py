"""Images in Hugging Face's datasets: of its Hub, or a folder of parquet files or WebDataset tars.

One column holds images, ``{"bytes": ..., "path": ...}``, and one whole numbers: ``label`` as in
ILSVRC/imagenet-1k, or ``cls`` as in tars. ``hf:`` lets ``datasets`` keep them in Arrow files, where
each is one seek away. ``hf-stream:`` keeps nothing but how many rows each file has, and reads the
files where they are, in an order in which each worker reads on in a few of them.
"""

import bisect
import hashlib
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from leaner_kernels.monitor.files import DATA, check_below, is_hidden, open_file, read_file
from train.data.sampler import Split as BatchSplit
from train.data.sampler import seed_of
from train.data.splits import HELD_OUT, Split, split_of
from train.data.tables import builder_of, errors_of_datasets, tables_below
from train.data.text.cache import build_once

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
    """The images of one split, read from its files: any of them, and soonest in ``order``.

    Args:
        table: a ``datasets.IterableDataset``.
        split: name of it.
        files: of the split, by their paths or addresses.
        seed: of the order; None for images that are taken in the order of the files.
    """

    left_out = ""
    # What a rank reads goes through so many lanes, step by step in turn, each of which reads on in
    # a few places at once. Workers whose number divides it, or is divided, read different lanes.
    LANES, PLACES = 24, 4
    # Images of a lane among which the next one is drawn: half a gigabyte per rank at 110 kB each.
    BLOCK = 4096 // LANES

    def __init__(self, table: Any, split: str, files: list[str], seed: int | None):
        self.image, self.label = _columns(table, split)
        self.table, self.split = _as_bytes(table, self.image, self.label), split
        self.files, self.seed = files, seed
        self.classes = _declared_classes(table, self.label)
        counts = json.loads(build_once(f"rows-{self._digest()}.json", self._count).read_text())
        # Image i is in the file whose first one is the last at or before it.
        self.first = [0, *np.cumsum(counts).tolist()]
        self._process = 0
        self._reading: dict[int, Iterator[dict[str, Any]]] = {}  # by the image that is next
        self._passed: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return self.first[-1]

    def order(self, epoch: int, batch: BatchSplit, rank: int) -> np.ndarray:
        """Return the images of one rank: (steps, share of a batch), each in an epoch at most once.

        A function of the seed, the epoch, the batch size and the number of ranks.
        """
        generator = torch.Generator().manual_seed(seed_of(self.seed or 0, epoch))

        def shuffled(rows: np.ndarray) -> np.ndarray:
            return rows[torch.randperm(len(rows), generator=generator).numpy()]

        files = shuffled(np.arange(len(self.first) - 1))
        images = np.concatenate([np.arange(*self.first[file : file + 2]) for file in files])
        steps, share = len(images) // batch.batch_size, batch.batch_size // batch.ranks
        own = images[rank * steps * share :][: steps * share]
        order = np.empty((steps, share), np.int64)
        for lane in range(min(self.LANES, steps)):
            rows, own = np.split(own, [len(order[lane :: self.LANES]) * share])
            whole = len(rows) - len(rows) % self.PLACES
            rows[:whole] = rows[:whole].reshape(self.PLACES, -1).T.ravel()
            blocks = (rows[start : start + self.BLOCK] for start in range(0, len(rows), self.BLOCK))
            order[lane :: self.LANES] = np.concatenate([*map(shuffled, blocks)]).reshape(-1, share)
        return order

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of an image, and its class."""
        if self._process != os.getpid():
            # Files that were open before a fork would be read by two processes at once.
            self._process, self._reading, self._passed = os.getpid(), {}, {}
        row = self._passed.pop(index, None) or self._read_on(index)
        label = row[self.label]
        if not _is_class(label, self.classes or _CLASSES):
            raise ValueError(f"{self.name(index)} has {_shown(self.label, label)}")
        return _content(row[self.image]), label

    def name(self, index: int) -> str:
        """Return which image this is."""
        return f"image {index} of the split {self.split}"

    def _read_on(self, index: int) -> dict[str, Any]:
        """Return a row, and keep those before it that are likely to be next."""
        file = bisect.bisect_right(self.first, index) - 1
        begins = range(max(self.first[file], index - self.BLOCK), index + 1)
        begin = max((place for place in self._reading if place in begins), default=None)
        if begin is None:
            # Those of the same block that come before it in the file are still to be read.
            begin = max(self.first[file], index - self.BLOCK // self.PLACES)
            rows = self._rows(file, begin - self.first[file])
        else:
            rows = self._reading.pop(begin)
        for place in range(begin, index):
            self._passed[place] = next(rows, {})
        row = next(rows, None)
        if row is None:
            raise ValueError(f"{self.name(index)} is no longer in {self.files[file]}")
        if index + 1 < self.first[file + 1]:
            self._reading[index + 1] = rows
        # A worker has its share of the lanes; what is oldest was passed for another, or done.
        about = get_worker_info()
        lanes = -(-self.LANES // (about.num_workers if about else 1))
        for kept, most in ((self._reading, self.PLACES), (self._passed, self.BLOCK)):
            while len(kept) > 2 * most * lanes:
                kept.pop(next(iter(kept)))
        return row

    def _rows(self, file: int, first: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file from one of them on."""
        if not self.files[file].endswith(".parquet"):
            rows = self.table.shard(num_shards=len(self.files), index=file)
            return islice(rows, first, None)
        return self._rows_of_parquet(self.files[file], first)

    def _rows_of_parquet(self, file: str, first: int) -> Iterator[dict[str, Any]]:
        with _opened(file) as opened:
            parquet = _parquet(opened)
            groups = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            group = 0
            while group < len(groups) and first >= groups[group]:
                first, group = first - groups[group], group + 1
            batches = parquet.iter_batches(
                16, range(group, len(groups)), [self.image, self.label], use_threads=False
            )
            for batch in batches:
                for row in batch.slice(first).to_pylist():
                    image = row[self.image]
                    if isinstance(image, bytes):
                        row[self.image] = {"bytes": image, "path": None}
                    yield row
                first = max(0, first - len(batch))

    def _digest(self) -> str:
        """Return what tells the files of the split from others."""
        stats = (os.stat(file) if os.path.exists(file) else None for file in self.files)
        sizes = [about and (about.st_size, about.st_mtime_ns) for about in stats]
        return hashlib.sha256(json.dumps([self.files, sizes]).encode()).hexdigest()[:32]

    def _count(self, path: Path) -> None:
        """Write how many rows each file has: a parquet file says so, others are read once."""
        shown = f"--data hf-stream: the split {self.split}"
        read = sum(not file.endswith(".parquet") for file in self.files)
        if read:
            sys.stderr.write(f"{shown}: {read} files are read once to count their images\n")
        with errors_of_datasets(shown), ThreadPoolExecutor(16) as threads:
            counts = list(threads.map(self._rows_in, range(len(self.files))))
        path.write_text(json.dumps(counts))

    def _rows_in(self, file: int) -> int:
        if not self.files[file].endswith(".parquet"):
            return sum(1 for _ in self._rows(file, 0))
        with _opened(self.files[file]) as opened:
            return _parquet(opened).metadata.num_rows


def _opened(file: str) -> Any:
    import fsspec

    return fsspec.open(file, "rb", expand=False)


def _parquet(opened: Any) -> Any:
    from pyarrow import parquet

    # Read page by page: a group of rows may be a gigabyte.
    return parquet.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)


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
            that does not declare its classes.
    """
    _datasets("hf-stream")
    _check_tars(name)
    with errors_of_datasets(f"--data hf-stream:{name}"):
        builder, left_out = _builder(name)
        tables = builder.as_streaming_dataset()
    split = _split(name, tables)
    train, held_out = (
        HubStream(tables[part], part, list(map(str, builder.config.data_files[part])), order)
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
