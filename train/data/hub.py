"""Load Hugging Face data sets from the Hub, from a folder, or as saved to disk."""

import glob
import json
import os
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.pretrained import first_line
from train.data.classes import shown
from train.data.files import files_below, open_file, read_file
from train.data.pictures import PICTURES
from train.data.splits import split_in, splits_of

# Endings of tables of pictures, and of all tables, with the names of their readers in `datasets`.
OF_PICTURES = {".parquet": "parquet", ".tar": "webdataset"}
TABLES = OF_PICTURES | {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
# Files beside tables that describe them.
_ABOUT = {"config", "dataset_dict", "dataset_info", "dataset_infos", "metadata"}


def load(name: str, config: str | None = None, *, called: str | None = None, **options: Any) -> Any:
    """Return the splits of a data set by name, each a ``datasets.Dataset``.

    Splits with the usual names, such as "Training" or "dev", are called "train", "validation" and
    "test".

    Args:
        name: on the Hub, or of a folder of its files or of what ``save_to_disk`` wrote; with
            options, of a reader of ``datasets``.
        config: one of several that it has.
        called: name to use in messages instead.
        **options: of ``datasets.load_dataset``, such as ``data_files``.

    Raises:
        ValueError: no package ``datasets``, or no such data set.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"--data {name} needs the package datasets: pip install datasets"
        ) from None
    folder = Path(name)
    try:
        if options:
            return datasets.load_dataset(name, config, **options)
        if (folder / "dataset_dict.json").is_file():
            return _renamed(datasets.load_from_disk(name))
        files = {} if config or not folder.is_dir() else _tables(folder)
        if not files:
            return _renamed(datasets.load_dataset(name, config))
        ending = next(iter(files.values()))[0].suffix.lower()
        how = {"sep": "\t"} if ending == ".tsv" else {}
        tables = datasets.DatasetDict()
        # Load splits one by one: of several, `datasets` reads class names only in the first.
        for split, paths in files.items():
            if ending == ".parquet":
                _check_classes(paths)
            # `datasets` treats names as patterns.
            escaped = {split: [glob.escape(str(path)) for path in paths]}
            kind = TABLES[ending]
            tables[split] = datasets.load_dataset(kind, data_files=escaped, split=split, **how)
        return tables
    except Exception as error:  # it does not wrap the errors of its readers
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"--data {called or name} cannot be read: {reason}") from error


def held_out_split(splits: Any) -> str | None:
    """Return the name of the split to evaluate on: validation, or else test."""
    # A data set may have two validation splits, which then keep their names.
    names = ("validation", "valid", "val", "dev", "test")
    return next((name for name in names if name in splits), None)


def tables_below(folder: Path, endings: Iterable[str] = TABLES) -> list[Path]:
    """Return the tables in a folder and its folders, in order, without hidden ones."""
    endings = set(endings)
    return sorted(
        path
        for path in files_below(folder)
        if path.suffix.lower() in endings and path.stem not in _ABOUT
    )


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Return the tables of a folder by split, or nothing to let `datasets` inspect the folder.

    `datasets` treats the most frequent kind of file as the data, so it would read a few pictures or
    archives beside a table instead of the table.
    """
    if _is_described(folder / "README.md"):
        return {}
    paths = tables_below(folder, OF_PICTURES)
    if not paths and not any(p.suffix.lower() in PICTURES for p in files_below(folder)):
        paths = tables_below(folder)
    kinds = Counter(path.suffix.lower() for path in paths)
    kind = ".parquet" if ".parquet" in kinds else next(iter(kinds.most_common(1)), [None])[0]
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if path.suffix.lower() == kind:
            # `datasets` does not search linked folders.
            file = path.parent.resolve() / path.name
            if kind == ".tar":
                _check_tar(file)
            files[split_of(path.relative_to(folder))].append(file)
    if set(files) == {""}:
        return {"train": files[""]}
    files.pop("", None)
    return dict(files)


def _check_classes(paths: list[Path]) -> None:
    """Refuse Parquet files of a split that number their classes differently.

    `datasets` reads class names only in the first file.
    """
    from pyarrow import parquet

    first: dict[str, tuple[Path, list[str]]] = {}
    for path in paths:
        about = json.loads((parquet.read_schema(path).metadata or {}).get(b"huggingface", "{}"))
        for column, kind in about.get("info", {}).get("features", {}).items():
            names = kind.get("names") if isinstance(kind, dict) else None
            if names and first.setdefault(column, (path, names))[1] != names:
                raise ValueError(
                    f"{first[column][0]} and {path} must have the same classes in the same order "
                    f"as {column}, got {shown(first[column][1])} and {shown(names)}"
                )


def _check_tar(path: Path) -> None:
    """Refuse a truncated tar, which `datasets` would read as far as possible."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tarfile.BLOCKSIZE))
        if file.read() != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"{path} is no tar, or was cut off after {size:,} bytes")


def _is_described(readme: Path) -> bool:
    """Return whether a data set's card says which files are its tables, or of what columns."""
    if not readme.is_file():
        return False
    text = read_file(readme).decode("utf-8", "replace")
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    return any(line.startswith(("configs:", "dataset_info:")) for line in header.splitlines())


def split_of(path: Path) -> str:
    """Return the split of a table by its name, or else by its folders; "" of none."""
    named = map(split_in, (path.stem, *reversed(path.parent.parts)))
    return next(filter(None, named), "")


def _renamed(splits: Any) -> Any:
    """Return splits under their usual names, unless two would have one."""
    named = splits_of(splits)
    taken = Counter(named.get(name, name) for name in splits)
    new = {name: split for name, split in named.items() if taken[split] == 1}
    return type(splits)({new.get(name, name): table for name, table in splits.items()})
