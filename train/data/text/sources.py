"""Documents by name: CPython's own English, files, and Hugging Face's data sets."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

KINDS = (
    "pydoc, tinystories, synthetic, a .txt file, a folder of such, hf:NAME or hf:NAME:CONFIG for "
    "Hugging Face's with a column text"
)
SEPARATOR = "<|endoftext|>"  # between the documents of a file
TINY_STORIES = "roneneldan/TinyStories"


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Attributes:
        name: for messages.
        facts: what distinguishes these documents from others, as plain JSON types.
        documents: starts to read them.
    """

    name: str
    facts: list[Any]
    documents: Callable[[], Iterator[str]]

    def digest(self, *more: Any) -> str:
        """Return a name for something made of these documents and ``more`` (plain JSON types)."""
        return hashlib.sha256(json.dumps([*self.facts, *more]).encode()).hexdigest()[:32]


def find_source(name: str, limit: int = 0) -> TextSource:
    """Return the documents of a name.

    Args:
        name: one of ``KINDS``, without "synthetic", which has no documents.
        limit: documents to read; 0 reads all.

    Raises:
        ValueError: no such text.
    """
    if name == "pydoc":
        facts, documents = ["pydoc", platform.python_version()], _pydoc
    elif name == "tinystories":
        facts, documents = _rows(TINY_STORIES)
    elif name.startswith("hf:") and name != "hf:":
        facts, documents = _rows(name.removeprefix("hf:"))
    elif Path(name).is_dir():
        facts, documents = _folder(Path(name))
    elif Path(name).is_file():
        facts, documents = [_facts_of(Path(name))], lambda: _of_file(Path(name), whole=False)
    else:
        raise ValueError(f"--data must be {KINDS}, got {name!r}")

    def stripped() -> Iterator[str]:
        kept = filter(str.strip, documents())
        return islice(kept, limit) if limit else kept

    return TextSource(name, [*facts, limit], stripped)


def _pydoc() -> Iterator[str]:
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
        yield "\n\n".join(fresh)


def _facts_of(path: Path) -> list[Any]:
    about = path.stat()
    return [str(path.resolve()), about.st_size, about.st_mtime_ns]


def _folder(root: Path) -> tuple[list[Any], Callable[[], Iterator[str]]]:
    files = sorted(root.rglob("*.txt"))
    if not files:
        raise ValueError(
            f"--data {root} holds no .txt file; a data set of Hugging Face is hf:{root}"
        )

    def documents() -> Iterator[str]:
        for path in files:
            yield from _of_file(path, whole=True)

    return ["folder", *map(_facts_of, files)], documents


def _of_file(path: Path, whole: bool) -> Iterator[str]:
    """Yield the documents of a file: between separators, else all of it, or between blank lines."""
    try:
        with path.open(encoding="utf-8") as file:
            separated = any(SEPARATOR in line for line in file)
            file.seek(0)
            if separated or not whole:
                yield from _between(file, SEPARATOR if separated else None)
            else:
                yield file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"--data holds {path}, which is not UTF-8: {error}") from None


def _between(lines: Iterator[str], separator: str | None) -> Iterator[str]:
    """Yield the text between separators, or between blank lines."""
    parts: list[str] = []
    for line in lines:
        if separator is not None:
            *ended, line = line.split(separator)
            for end in ended:
                yield "".join([*parts, end]).strip()
                parts.clear()
        elif not line.strip():
            yield "".join(parts).strip()
            parts.clear()
        parts.append(line)
    yield "".join(parts).strip()


def _rows(name: str) -> tuple[list[Any], Callable[[], Iterator[str]]]:
    """Return what identifies the split ``train`` of a data set, and its column ``text``."""
    try:
        import datasets
    except ImportError:
        raise ValueError("--data hf: needs the package datasets") from None
    name, _, config = name.partition(":")
    try:
        if any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
            table = datasets.load_from_disk(name)
        else:
            table = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"--data hf:{name} cannot be read: {_first_line(error)}") from error
    if isinstance(table, datasets.DatasetDict):
        if "train" not in table:
            raise ValueError(f"--data hf:{name} must have a split train, got {', '.join(table)}")
        table = table["train"]
    kind = table.features.get("text")
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(
            f"--data hf:{name} must have a column text of strings, got {', '.join(table.features)}"
        )

    def documents() -> Iterator[str]:
        for rows in table.select_columns(["text"]).iter(batch_size=1000):
            yield from (text for text in rows["text"] if text)

    return ["hf", name, config, table._fingerprint], documents


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
