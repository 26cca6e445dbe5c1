"""How the library datasets is asked for files: by their names, and never as patterns."""

import glob
import os
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from leaner_kernels.monitor.command_line import first_line
from leaner_kernels.monitor.files import (
    SETTINGS,
    check_below,
    check_file,
    files_below,
    identity,
    is_hidden,
    lines_of,
    open_file,
)
from train.data.splits import by_part, parts_of

# Of one kind the first that is there is read.
ENDINGS = (".parquet", ".tar", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
# Of a CSV: "NA", "None" and "null" are text, and an empty cell alone has no value.
AS_TEXT = {"keep_default_na": False, "na_values": [""]}
# What describes a data set, and is none of its tables.
_ABOUT = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json"}


@contextmanager
def errors_of_datasets(shown: str) -> Iterator[None]:
    """Turn whatever the library raises of a data set into a ``ValueError`` of one line.

    Args:
        shown: names the data set: a flag and its value.
    """
    try:
        yield
    except Exception as error:  # it lets the errors of its readers through
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{shown} cannot be read: {reason}") from error


def builder_of(name: str, config: str | None = None) -> tuple[Any, str]:
    """Return the library's builder of a data set of the Hub or of a folder, and what is left out.

    In the path of a folder it would take brackets, stars and question marks for patterns; of its
    files it would read those of system folders, pass over linked folders, and know the splits by
    small letters alone. What the README of a folder says of its files it is left to read.
    """
    from datasets.info import DatasetInfosDict
    from datasets.splits import SplitDict

    root = Path(name).resolve()
    if not root.is_dir():
        return _builder(name, config), ""
    check_below(root)
    files, left_out, about = None, "", None
    if not _is_described(root):
        if config is not None and (root / config).is_dir():
            root, name, config = root / config, str(root / config), None
        files, left_out = _files(root)
        # The library forgets what a README declares of files that are named.
        infos = DatasetInfosDict.from_directory(str(root)) if files else {}
        about = next(iter(infos.values())) if len(infos) == 1 else infos.get("default")
    features = about and about.features
    builder = _builder(name, config, data_files=files, features=features)
    if about and about.splits:
        parts = parts_of(about.splits)
        builder.info.splits = SplitDict({parts.get(n, n): s for n, s in about.splits.items()})
    for paths in (builder.config.data_files or {}).values() if files is None else ():
        paths[:] = [path for path in paths if not is_hidden(os.path.relpath(path, root))]
    return builder, left_out


def _builder(*which: Any, **how: Any) -> Any:
    import datasets

    builder = datasets.load_dataset_builder(*which, **how)
    if hasattr(builder.config, "keep_default_na"):
        builder = datasets.load_dataset_builder(*which, **how, **AS_TEXT)
    return builder


def separator_of(suffix: str) -> str:
    """Return what stands between the cells of a line, by the ending of a file's name."""
    return "\t" if suffix.lower() == ".tsv" else ","


def pattern_of(path: Path) -> str:
    """Return the pattern that only this file matches; the library searches no linked folders."""
    return glob.escape(os.path.join(os.path.realpath(path.parent), path.name))


def tables_below(root: Path) -> list[Path]:
    """Return the tables or archives of a folder and its folders, each file once."""
    files: dict[Hashable, Path] = {}
    for file in sorted(files_below(root)):
        if file.suffix.lower() in ENDINGS and file.name not in _ABOUT:
            files.setdefault(identity(file), file)
    endings = {file.suffix.lower() for file in files.values()}
    kind = next((ending for ending in ENDINGS if ending in endings), None)
    return [file for file in files.values() if file.suffix.lower() == kind]


def with_rows(files: list[Path]) -> list[Path]:
    """Return the tables that have rows; of others the library reads nothing, or fails."""
    return [file for file in files if _has_rows(file)]


def _has_rows(file: Path) -> bool:
    ending = file.suffix.lower()
    if ending not in (".parquet", ".csv", ".tsv", ".jsonl", ".json"):
        return True
    needed = 2 if ending in (".csv", ".tsv") else 1
    with open_file(file) as opened:
        # A parquet file has no lines, but all that is blank has no rows.
        lines = [opened.read(4)] if ending == ".parquet" else lines_of(opened)
        filled = (line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip())
        if len(list(islice(filled, needed))) < needed:
            return False
    if ending == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return parquet.read_metadata(file).num_rows > 0
        except ArrowException:
            pass  # for the library to say what it is
    return True


def _files(root: Path) -> tuple[dict[str, list[str]] | None, str]:
    """Return the tables of a folder by split, if it has any, and which are of no split."""
    tables = tables_below(root)
    filled = with_rows(tables)
    if tables and not filled:
        more = f", nor have {len(tables) - 1} more" if len(tables) > 1 else ""
        raise ValueError(f"{tables[0]} has no rows: it is empty, blank or a header{more}")
    parts, others = by_part(root, filled), []
    for path in parts.pop("", []):
        # The Hub's names, of any split.
        shard = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}", path.stem)
        parts.setdefault(shard[1], []).append(path) if shard else others.append(path)
    if not parts and others:
        parts, others = {"train": others}, []
    files = {part: list(map(pattern_of, paths)) for part, paths in parts.items()}
    left_out = [f"{len(others):,} of no split: {others[0]}"] if others else []
    empty = [path for path in tables if path not in filled]
    left_out += [f"{len(empty):,} without rows: {empty[0]}"] if empty else []
    return files or None, "; ".join(left_out)


def _is_described(root: Path) -> bool:
    """Return whether a folder says which of its files are of which split."""
    from huggingface_hub import DatasetCard

    if glob.escape(str(root)) != str(root):
        return False  # the library would join what it says to a pattern
    readme = root / "README.md"
    if readme.is_file():
        check_file(readme, SETTINGS)
        if DatasetCard.load(readme).data.to_dict().get("configs"):
            return True
    return (root / ".huggingface.yaml").exists()
