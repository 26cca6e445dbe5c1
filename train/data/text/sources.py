"""Find documents by name: Python's documentation, files, and Hugging Face data sets."""

import codecs
import hashlib
import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from train.data import hub
from train.data.classes import composed
from train.data.files import files_below, open_file, plain
from train.data.splits import HELD_OUT, splits_of

KINDS = (
    "a text file, a folder of them, pydoc, tinystories, synthetic, or hf:NAME or hf:NAME:CONFIG "
    "for a Hugging Face data set or a folder of .parquet, .jsonl or .csv files"
)
# Files that are read in a folder; a file given by name may have any ending.
TEXTS = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".adoc")
TABLES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
# First bytes of files that are not UTF-8 text, with a description of each.
_ENCODED = "{0}: iconv -f {0} -t UTF-8 converts it"
_COMPRESSED = "compressed with {}: decompress it first"
_STARTS = {
    # In this order: a byte order mark of UTF-16 begins one of UTF-32.
    codecs.BOM_UTF32_LE: _ENCODED.format("UTF-32"),
    codecs.BOM_UTF32_BE: _ENCODED.format("UTF-32"),
    codecs.BOM_UTF16_LE: _ENCODED.format("UTF-16"),
    codecs.BOM_UTF16_BE: _ENCODED.format("UTF-16"),
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"BZh": _COMPRESSED.format("bzip2"),
    b"\xfd7zXZ\x00": _COMPRESSED.format("xz"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    b"\x04\x22\x4d\x18": _COMPRESSED.format("lz4"),
    b"PK\x03\x04": "a zip archive, as .docx and .epub files are: extract its text first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: extract its text first",
    b"Rar!\x1a": "a RAR archive: extract its text first",
    b"%PDF-": "a PDF: extract its text first, for example with pdftotext",
    b"\xd0\xcf\x11\xe0": "an Office document: save it as plain text first",
    b"{\\rtf": "an RTF document: save it as plain text first",
    b"PAR1": "a Parquet table: put it into a folder and give hf:FOLDER and --text-column",
}
_NAMES = {"LATIN1": "Latin-1", "WINDOWS-1252": "Windows-1252"}
_HEAD = 1 << 16  # bytes of a file that are examined at a time
# Names, without endings, of files that describe a folder.
_ABOUT = {"changelog", "citation", "copying", "licence", "license", "notice", "readme"}
SEPARATOR = "<|endoftext|>"  # between the documents of a file
TINY_STORIES = "roneneldan/TinyStories"

Documents = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Attributes:
        name: for messages.
        facts: what distinguishes these documents from others, as plain JSON types.
        documents: function that yields the documents; none is blank.
    """

    name: str
    facts: list[Any]
    documents: Documents

    def digest(self, *more: Any) -> str:
        """Return a name for a file derived from these documents and ``more`` (plain JSON types)."""
        return hashlib.sha256(json.dumps([*self.facts, *more]).encode()).hexdigest()[:32]


def find_source(name: str, limit: int = 0, column: str = "text") -> TextSource:
    """Return the documents of a name.

    Args:
        name: one of ``KINDS``, without "synthetic", which has no documents.
        limit: documents to read; 0 reads all.
        column: column of a table, with the text.

    Raises:
        ValueError: no such text.
    """
    if name == "pydoc":
        facts, documents = ["pydoc", platform.python_version()], _pydoc
    elif name == "tinystories":
        facts, documents = _of_hub(TINY_STORIES, "text")
    elif name.startswith("hf:") and name != "hf:":
        facts, documents = _of_hub(name.removeprefix("hf:"), column)
    elif os.path.exists(name):
        facts, documents = _files(Path(name))
    else:
        raise ValueError(f"--data {name}: no such file or folder; give {KINDS}")
    filled = lambda: islice(filter(str.strip, documents()), limit or None)  # noqa: E731
    return TextSource(name, [*facts, limit], filled)


def _pydoc() -> Iterator[str]:
    """Yield the text of ``help`` on Python's topics, 0.4 MB, each paragraph once.

    Many topics repeat parts of others, so held-out text would otherwise occur in training.
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
        yield "\n\n".join(fresh)


def _files(path: Path) -> tuple[list[Any], Documents]:
    """Return the identity of a text file or of a folder of them, and their documents.

    The files of a folder are read in a fixed random order, so that the last resemble the others.
    """
    if path.suffix.lower() in TABLES:
        raise ValueError(
            f"--data {path} is a table: put it into a folder and give hf:FOLDER and --text-column"
        )
    files, is_folder = [path], path.is_dir()
    if is_folder:
        files = [file for file in files_below(path) if file.suffix.lower() in TEXTS]
        _check_splits(path, files)
        files.sort(key=lambda file: [*map(composed, file.parts)])
        if not files:
            raise ValueError(
                f"--data {path} contains no {', '.join(TEXTS)} file: give the file itself, or "
                f"hf:{path} for tables"
            )
    random.Random(0).shuffle(files)
    # Each file of a folder is a document; a single file has several.
    documents = lambda: chain.from_iterable(_of_file(file, is_folder) for file in files)  # noqa: E731
    return ["files", is_folder, *map(_facts_of, files)], documents


def _check_splits(root: Path, files: list[Path]) -> None:
    """Refuse a folder that contains only splits: held-out text would be trained on."""
    inside = {Path(file.relative_to(root).parts[0]) for file in files}
    names = {path.stem: path for path in inside if path.stem.lower() not in _ABOUT}
    splits = splits_of(names)
    parts = {split: root / names[name] for name, split in sorted(splits.items())}
    if len(splits) == len(names) and "train" in parts and len(parts) > 1:
        held_out = next(parts[split] for split in HELD_OUT if split in parts)
        raise ValueError(
            f"--data {root} has the splits {', '.join(sorted(splits))}: give --data "
            f"{parts['train']} --validation {held_out}"
        )


def _facts_of(path: Path) -> list[Any]:
    about = path.stat()
    # Changed contents may keep the size and the modification time, but not the change time.
    return [str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _of_file(path: Path, whole: bool) -> Iterator[str]:
    """Yield the documents of a file: between separators, else all of it, or between blank lines."""
    with open_file(path) as file:
        if said := _not_text(file.read(_HEAD)):
            raise ValueError(f"--data holds {path}, which is {said}")
    try:
        with TextIOWrapper(open_file(path), "utf-8-sig") as file:
            separated = any(SEPARATOR in line for line in file)
            file.seek(0)
            if whole and not separated:
                yield file.read()
            else:
                yield from _between(file, SEPARATOR if separated else None)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--data holds {path}, which is not UTF-8 ({error.reason}); {_advice(path)}"
        ) from None


def _not_text(head: bytes) -> str:
    """Describe a file by its first bytes; return "" if they may be UTF-8."""
    named = next((said for start, said in _STARTS.items() if head.startswith(start)), "")
    if named or b"\0" not in head:
        return named
    # In UTF-16, every other byte of common letters is zero.
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > len(head) // 16 and min(even, odd) < max(even, odd) // 8:
        order = "BE" if even > odd else "LE"
        return f"UTF-16 without a byte order mark: iconv -f UTF-16{order} -t UTF-8 converts it"
    return "a binary file, because it has zero bytes: give text in UTF-8"


def _advice(path: Path) -> str:
    """Return advice on a file that is not UTF-8, as far as its bytes reveal it."""
    decoder, bad = codecs.getincrementaldecoder("utf-8")(), b""
    with open_file(path) as file:
        while not bad and (block := file.read(_HEAD)):
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                bad = block
    if not bad:
        return "its last character is cut off"
    text = bad.decode("utf-8", "replace")
    damaged, whole = text.count("\ufffd"), sum(letter > "\x7f" for letter in text)
    if whole >= 2 * damaged:
        return f"iconv -c -f UTF-8 -t UTF-8 {path} leaves out its damaged characters"
    high = [byte > 0x7F for byte in bad]
    # Letters with accents stand alone. In other alphabets such bytes follow each other.
    in_a_row = sum(one and other for one, other in pairwise(high))
    if in_a_row > sum(high) / 3:
        return "iconv -f ENCODING -t UTF-8 converts it, if it is text of a known encoding"
    encoding = "WINDOWS-1252" if any(0x80 <= byte < 0xA0 for byte in bad) else "LATIN1"
    return f"iconv -f {encoding} -t UTF-8 {path} converts {_NAMES[encoding]}"


def _between(lines: Iterable[str], separator: str | None) -> Iterator[str]:
    """Yield the text between separators, or between blank lines, without these.

    The first line keeps its indentation, unless a separator stands before it in its line. Text
    without a separator or a blank line is one document, unchanged.
    """
    parts: list[str] = []
    one = True

    def document() -> str:
        text = "".join(parts)
        parts.clear()
        return text.rstrip("\n") if separator is None else text.rstrip()

    for line in lines:
        if separator is None and not line.strip():
            one = False
            yield document()
            continue
        for place, piece in enumerate([line] if separator is None else line.split(separator)):
            if place > 0:
                one = False
                yield document()
                piece = piece.lstrip(" \t")
            if parts or piece.strip():
                parts.append(piece)
    yield "".join(parts) if one else document()


def _of_hub(name: str, column: str) -> tuple[list[Any], Documents]:
    """Return the identity of a data set's split ``train``, and a column of it."""
    name, _, config = name.partition(":")
    splits = hub.load(name, config or None)
    if "train" not in splits:
        raise ValueError(f"--data hf:{name} must have a split train, got {', '.join(splits)}")
    table = splits["train"]
    documents = _column(table, f"--data hf:{name}", column)
    return ["hf", name, config, column, table._fingerprint], documents


def _column(table: Any, shown: str, column: str) -> Documents:
    """Return a function that reads a column of strings."""
    kind = table.features.get(column)
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(
            f"{shown} must have a column {column} of strings, got {', '.join(table.features)}: "
            "--text-column names another"
        )

    def documents() -> Iterator[str]:
        for rows in table.select_columns([column]).iter(batch_size=1000):
            yield from (plain(text) for text in rows[column] if text is not None)

    return documents
