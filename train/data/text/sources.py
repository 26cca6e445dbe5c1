"""Documents by name: CPython's own English, files, and Hugging Face's data sets."""

import codecs
import csv
import errno
import hashlib
import json
import os
import platform
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import IncrementalNewlineDecoder, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any

from leaner_kernels.monitor.files import DATA, check_below, files_below, lines_of, open_file
from train.data.copies import contents
from train.data.splits import HELD_OUT, Split, by_part, split_of
from train.data.tables import (
    AS_TEXT,
    builder_of,
    errors_of_datasets,
    pattern_of,
    separator_of,
    with_rows,
)
from train.data.text.cache import build_once

KINDS = (
    "text files, a folder of them, .parquet, .jsonl, .csv or .tsv, pydoc, tinystories, synthetic, "
    "or hf:NAME or hf:NAME:CONFIG for Hugging Face's"
)
# What is read of a folder; a file that is named may have any ending.
TEXTS = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc")
# Endings of tables, and what the library datasets calls their format.
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
# Names of texts about a folder, without endings.
_ABOUT = {"changelog", "citation", "copying", "licence", "license", "notice", "readme"}
SEPARATOR = "<|endoftext|>"  # between the documents of a file
TINY_STORIES = "roneneldan/TinyStories"
_BLOCK = 1 << 18  # characters, or bytes of a table, that are read at once

# What starts to read documents: see ``TextSource.parts``.
Documents = Callable[[], Iterator[Iterable[str]]]


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Attributes:
        name: for messages.
        facts: what distinguishes these documents from others, as plain JSON types.
        parts: starts to read them, each in parts, which are to be taken before the next document.
        held_out: what its folder has for measuring, beside what it has for training.
        splits: which parts these are.
    """

    name: str
    facts: list[Any]
    parts: Documents
    held_out: "TextSource | None" = None
    splits: str = ""

    def documents(self) -> Iterator[str]:
        """Yield the documents, each as a whole."""
        return map("".join, self.parts())

    def digest(self, *more: Any) -> str:
        """Return a name for something made of these documents and ``more`` (plain JSON types)."""
        return hashlib.sha256(json.dumps([*self.facts, *more]).encode()).hexdigest()[:32]


def files_of(name: str) -> list[Path]:
    """Return the paths of ``--data``: one, or several with commas between; none for other names.

    A comma after a backslash belongs to a path.

    Raises:
        ValueError: some of several are there, and this one is not.
    """
    # Path.exists raises where the names of many files are too long for one.
    if os.path.exists(name):
        return [Path(name)]
    parts = re.split(r"(?<!\\),", name)
    paths = [Path(part.replace("\\,", ",")) for part in parts]
    missing = [path for path in paths if not os.path.exists(path)]
    if missing and len(missing) < len(paths):
        raise ValueError(f"--data {missing[0]}: no such file or folder")
    return [] if missing else paths


def find_source(name: str, limit: int = 0, column: str = "text") -> TextSource:
    """Return the documents of a name.

    Args:
        name: one of ``KINDS``, without "synthetic", which has no documents; several paths have
            commas between, and a backslash before a comma of their own.
        limit: documents to read; 0 reads all.
        column: of a table, with the text.

    Raises:
        ValueError: no such text.
    """
    shown, held_out, splits = name, None, ""
    if name == "pydoc":
        facts, documents = ["pydoc", platform.python_version()], _pydoc
    elif name == "tinystories":
        facts, documents = _rows(TINY_STORIES, "text")
    elif name.startswith("hf:") and name != "hf:":
        facts, documents = _rows(name.removeprefix("hf:"), column)
    elif paths := files_of(name):
        if len(paths) == 1 and (split := _split_folder(paths[0])):
            paths, measured, splits = split
            about, rows = _files(measured, column)
            held_out = TextSource(name, about, lambda: _filled(rows()))
        facts, documents = _files(paths, column)
        if len(paths) > 1 and not splits:
            shown = f"{paths[0]} and {len(paths) - 1} more"
    else:
        raise ValueError(f"--data {name}: no such file or folder; it may be {KINDS}")

    def parts() -> Iterator[Iterable[str]]:
        return islice(_filled(documents()), limit or None)

    return TextSource(shown, [*facts, limit], parts, held_out, splits)


def _filled(documents: Iterator[Iterable[str]]) -> Iterator[Iterable[str]]:
    """Yield the documents that are not blank."""
    for document in documents:
        parts, blank = iter(document), []
        for part in parts:
            blank.append(part)
            if part.strip():
                yield chain(blank, parts)
                break


def size_of(source: TextSource) -> int:
    """Return how many bytes of UTF-8 the documents have, counted once and kept.

    Raises:
        ValueError: none, or they cannot be read.
    """

    def count(path: Path) -> None:
        parts = chain.from_iterable(source.parts())
        size = sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)
        if size == 0:
            raise ValueError(f"--data {source.name} holds no text: it is empty or blank")
        path.write_text(str(size))

    return int(build_once(f"size-{source.digest()}.txt", count).read_text())


def _pydoc() -> Iterator[Iterable[str]]:
    """Yield what ``help`` says of Python's topics, 0.4 MB, each paragraph once.

    Many topics repeat parts of others; so what is held out would be known from training.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for topic in sorted(topics):
        fresh = []
        for paragraph in topics[topic].split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                fresh.append(paragraph)
        yield ["\n\n".join(fresh)]


def _facts_of(path: Path) -> list[Any]:
    about = path.stat()
    # A file with other contents may have the size and the time of before, but is then changed.
    return [str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _split_folder(root: Path) -> tuple[list[Path], list[Path], str] | None:
    """Return the files of a folder that train, those that are held out, and what to say of them.

    None where it is no folder with files, or folders, for both and for nothing else.
    """
    files = _of_folder(root) if root.is_dir() else []
    parts = by_part(root, files)
    held_out = next((part for part in HELD_OUT if part in parts), None)
    others = parts.pop("", [])
    of_folders = all(path.parent != root for of in parts.values() for path in of)
    about = [p for p in others if p.stem.lower() in _ABOUT or (of_folders and p.parent == root)]
    if "train" not in parts or held_out is None or len(about) < len(others):
        return None
    named = {part: _shown(root, of) for part, of in parts.items()}
    rest = [name for part, name in named.items() if part not in ("train", held_out)]
    rest += [str(path.relative_to(root)) for path in others]
    split = Split(named["train"], named[held_out], tuple(rest))
    return parts["train"], parts[held_out], split.shown()


def _shown(root: Path, paths: list[Path]) -> str:
    folders = {path.relative_to(root).parts[0] for path in paths}
    more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
    return f"{min(folders)}{more}"


def _of_folder(root: Path) -> list[Path]:
    """Return the texts of a folder and its folders, or else its tables."""
    inside = sorted(files_below(root))
    texts = [path for path in inside if path.suffix.lower() in TEXTS]
    tables = [path for path in inside if path.suffix.lower() in TABLES]
    about = all(path.stem.lower() in _ABOUT for path in texts)
    return tables if tables and about else texts


def _files(paths: list[Path], column: str) -> tuple[list[Any], Documents]:
    """Return what identifies text files and tables, and their documents.

    Several files are taken in an order that chance fixed, so that the last are like the others.
    """
    files = [path for path in paths if not path.is_dir()]
    texts = [path for path in files if path.suffix.lower() not in TABLES]
    tables = [path for path in files if path.suffix.lower() in TABLES]
    for root in filter(Path.is_dir, paths):
        inside = _of_folder(root)
        if not inside:
            raise ValueError(
                f"--data {root} holds no {', '.join(TEXTS)}, .parquet, .jsonl, .csv or .tsv file: "
                f"name the files themselves, or hf:{root} for a data set of Hugging Face"
            )
        texts += [path for path in inside if path.suffix.lower() not in TABLES]
        tables += [path for path in inside if path.suffix.lower() in TABLES]
    # A file that is there twice would be held out and trained on.
    texts, tables = (list(dict(zip(contents(p), p)).values()) for p in (texts, tables))
    if tables:
        suffixes = {path.suffix.lower() for path in tables}
        if texts or len({(TABLES[suffix], separator_of(suffix)) for suffix in suffixes}) > 1:
            raise ValueError(f"--data takes tables of one kind alone, got {tables[0]} and others")
        return _table(tables, column)
    random.Random(0).shuffle(texts)
    # A folder's file is a document; one that is all there is has some.
    whole = len(texts) > 1 or paths[0].is_dir()

    def documents() -> Iterator[Iterable[str]]:
        for path in texts:
            yield from _of_file(path, whole)

    return ["files", whole, *map(_facts_of, texts)], documents


def _of_file(path: Path, whole: bool) -> Iterator[Iterable[str]]:
    """Yield the documents of a file: between separators, else all of it, or between blank lines."""
    try:
        with TextIOWrapper(open_file(path), "utf-8-sig") as file:
            separated = _holds(file, SEPARATOR)
            file.seek(0)
            if separated or not whole:
                documents = _between(lines_of(file), SEPARATOR if separated else None)
                yield from ([document] for document in documents)
            else:
                yield iter(partial(file.read, _BLOCK), "")
    except UnicodeDecodeError:
        raise ValueError(f"--data holds {path}, which is {_not_text(path)}") from None


def _holds(file: TextIOWrapper, wanted: str) -> bool:
    """Return whether a file holds a text; False where all of it has been read and is UTF-8.

    Raises:
        OSError: a line is too long, as a hole in a file is.
    """
    before, line = "", 0
    while block := file.read(_BLOCK):
        if wanted in before + block:
            return True
        before, line = block[1 - len(wanted) :], line * ("\n" not in block) + len(block)
        if line > DATA:
            raise OSError(errno.EFBIG, f"has a line longer than {DATA:,}", file.name)
    return False


def _not_text(path: Path) -> str:
    """Return what is wrong with a file that is not UTF-8."""
    with open_file(path) as file:
        offset, bad, data = 0, None, file.read(DATA)
    for line in data.splitlines(keepends=True):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            bad = offset + error.start
            break
        offset += len(line)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"UTF-16: iconv -f UTF-16 -t UTF-8 {path} converts it"
    if bad is None:
        return "not UTF-8"
    where = f"byte {bad:,} is 0x{data[bad]:02x}"
    if b"\0" in data[:8192]:
        return f"a binary file, not text: {where}"
    return f"not UTF-8: {where}; iconv -f LATIN1 -t UTF-8 {path} converts it if it is Latin-1"


def _between(lines: Iterator[str], separator: str | None) -> Iterator[str]:
    """Yield the text between separators, or between blank lines, which alone are left out.

    The first line keeps its indentation, unless a separator stands before it in its line.
    """
    parts: list[str] = []

    def document() -> str:
        text = "".join(parts)
        parts.clear()
        return text.rstrip("\n") if separator is None else text.rstrip()

    for line in lines:
        if separator is None and not line.strip():
            yield document()
            continue
        for place, piece in enumerate([line] if separator is None else line.split(separator)):
            if place > 0:
                yield document()
                piece = piece.lstrip(" \t")
            if parts or piece.strip():
                parts.append(piece)
    yield document()


def _table(paths: list[Path], column: str) -> tuple[list[Any], Documents]:
    """Return what identifies files of rows, and their documents."""
    datasets = _library(f"--data {paths[0]}")
    kind = TABLES[paths[0].suffix.lower()]
    files = list(map(pattern_of, with_rows(paths)))
    if not files:
        raise ValueError(f"--data {paths[0]} holds no text: it is empty, blank or a header")
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with errors_of_datasets(f"--data {paths[0]}"):
            how = _of_csv(paths[0], column) if kind == "csv" else {}
            table = datasets.load_dataset(kind, data_files=files, split="train", **how)
    finally:
        if shown:
            datasets.enable_progress_bars()
    documents = _column(table, f"--data {paths[0]}", column)
    return ["table", column, *map(_facts_of, paths)], documents


def _of_csv(path: Path, column: str) -> dict[str, Any]:
    """Return how the library reads a column: as text, whatever its cells look like."""
    import datasets

    separator = separator_of(path.suffix)
    how = AS_TEXT | {"sep": separator}
    with path.open(newline="", encoding="utf-8-sig") as file:
        header = next(filter(None, csv.reader(file, delimiter=separator)), [])
    names = [name for name in header if name.strip() == column]
    if len(names) != 1:
        return how
    features = datasets.Features({names[0]: datasets.Value("string")})
    return how | {"usecols": names, "features": features}


def _library(wanted: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{wanted} needs the package datasets: pip install datasets") from None
    return datasets


def _rows(name: str, column: str) -> tuple[list[Any], Documents]:
    """Return what identifies the split ``train`` of a data set, and a column of it."""
    datasets = _library("--data hf:")
    name, _, config = name.partition(":")
    with errors_of_datasets(f"--data hf:{name}"):
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            check_below(name)
            table = datasets.load_from_disk(name)
        else:
            builder, _ = builder_of(name, config or None)
            builder.download_and_prepare()
            table = builder.as_dataset()
    if isinstance(table, datasets.DatasetDict):
        train = split_of([*map(str, table)], f"--data hf:{name}").train
        if train is None:
            raise ValueError(f"--data hf:{name} must have a split train, got {', '.join(table)}")
        table = table[train]
    documents = _column(table, f"--data hf:{name}", column)
    return ["hf", name, config, column, table._fingerprint], documents


def _column(table: Any, shown: str, column: str) -> Documents:
    """Return what reads a column of strings."""
    # "text" is a column whose name in the file is "text ".
    column = next((name for name in table.features if name.strip() == column), column)
    kind = table.features.get(column)
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(
            f"{shown} must have a column {column} of strings, got {', '.join(table.features)}: "
            "--text-column names another"
        )

    def documents() -> Iterator[Iterable[str]]:
        rows = table.select_columns([column]).with_format("arrow").iter(batch_size=1000)
        for text in chain.from_iterable(batch[column] for batch in rows):
            if text.is_valid:
                yield _decoded(text.as_buffer())

    return documents


def _decoded(text: Any) -> Iterator[str]:
    """Yield the parts of a text in UTF-8, whose lines end as those of a file."""
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    for start in range(0, len(text), _BLOCK):
        yield decoder.decode(text[start : start + _BLOCK].to_pybytes())
    yield decoder.decode(b"", final=True)
