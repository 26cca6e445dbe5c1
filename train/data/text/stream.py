"""Store text as one stream of tokens in a file, and cut sequences from it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train.data.loader import Key
from train.data.sampler import seed_of
from train.data.text.cache import build_once
from train.data.text.sources import TextSource
from train.data.text.tokenizers import Tokenizer

_FORMAT = 5  # version of the cached files; a change rebuilds them
_AT_ONCE = 1 << 20  # characters to encode at a time, of any number of documents


@dataclass(frozen=True)
class TokenStream:
    """Tokens ``begin`` to ``end`` of a file; ``name`` describes them in messages.

    It does not map the file: workers could not share the map, which would keep every page that was
    ever read.
    """

    path: Path
    dtype: str
    begin: int
    end: int
    name: str = "--data"

    def __len__(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "TokenStream":
        """Return tokens ``begin`` to ``end`` of these."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs: (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self), 1 << 20):
            # Read, not mapped: a process keeps the pages of a map.
            tokens = self.part(start, min(start + (1 << 20), len(self)))
            counts += np.bincount(_cut(tokens, [0], len(tokens))[0][0], minlength=vocab_size)
        return torch.from_numpy(counts)


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens.

    Attributes:
        tokens: tokens of all documents, each with ``tokenizer.end`` after it.
        documents: how many there are.
        digest: SHA-256 of the documents, those of too many tokens included.
        size: bytes of UTF-8 that they have.
        lost: how many of these decoding does not restore; see ``Tokenizer.bytes_lost``.
    """

    tokens: TokenStream
    documents: int
    digest: str
    size: int
    lost: int


def encoded(source: TextSource, tokenizer: Tokenizer, max_density: float | None = None) -> Encoded:
    """Return documents as tokens; they are encoded once, and kept.

    Args:
        source: source of the documents.
        tokenizer: what encodes them.
        max_density: documents with more tokens than this per character are left out.

    Raises:
        ValueError: if there is no document, or the cached file is damaged.
    """
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"

    def make(folder: Path) -> None:
        folder.mkdir()
        read = documents = tokens = size = lost = 0
        whole = hashlib.sha256()
        with (folder / "tokens.bin").open("wb") as file:
            for texts in _batches(source.documents()):
                read += len(texts)
                kept: list[tuple[str, list[int]]] = []
                for text, ids in zip(texts, tokenizer.encode_batch(texts)):
                    content = text.encode("utf-8", "surrogatepass")
                    # A byte that never occurs in UTF-8 separates documents.
                    whole.update(content + b"\xff")
                    if max_density is not None and len(ids) > max_density * len(text):
                        continue
                    file.write(np.array([*ids, tokenizer.end], dtype).tobytes())
                    documents, tokens = documents + 1, tokens + len(ids) + 1
                    size += len(content)
                    kept.append((text, ids))
                lost += tokenizer.bytes_lost([text for text, _ in kept], [ids for _, ids in kept])
        if read == 0:
            raise ValueError(f"--data {source.name} contains no text: it is empty or blank")
        if documents == 0:
            raise ValueError(
                f"--data {source.name}: every document has more than --max-density "
                f"{max_density:g} tokens per character; --max-density 0 keeps all"
            )
        about = {"documents": documents, "tokens": tokens, "size": size, "lost": lost}
        about["digest"] = whole.hexdigest()
        (folder / "about.json").write_text(json.dumps(about))

    digest = source.digest(_FORMAT, tokenizer.digest, dtype, max_density)
    folder = build_once(f"text-{digest}", make)
    try:
        about = json.loads((folder / "about.json").read_text())
        size = (folder / "tokens.bin").stat().st_size
        if size != about["tokens"] * np.dtype(dtype).itemsize:
            raise ValueError(f"tokens.bin has {size:,} bytes")
        tokens = TokenStream(folder / "tokens.bin", dtype, 0, about.pop("tokens"))
        return Encoded(tokens=tokens, **about)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder} is damaged: remove it to create it again ({error})") from None


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents to encode at once."""
    batch, characters = [], 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Windows:
    """Consecutive sequences; with a seed, every epoch starts at another token.

    Args:
        tokens: to cut from.
        length: length of a sequence.
        stride: from the start of one to that of the next: ``length`` when omitted.
        seed: seed of the start of epochs, 0 to ``stride`` - 1 tokens after the first.

    Raises:
        ValueError: fewer tokens than one sequence has.
    """

    def __init__(
        self,
        tokens: TokenStream,
        length: int,
        *,
        stride: int | None = None,
        seed: int | None = None,
    ):
        self.tokens, self.length, self.seed = tokens, length, seed
        self.stride = stride or length
        latest_start = 0 if seed is None else self.stride - 1
        _check_length(tokens, length + latest_start)
        self._count = 1 + (len(tokens) - length - latest_start) // self.stride

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor]:
        return _cut(self.tokens, [self._start(*key) for key in keys], self.length)

    def _start(self, epoch: int, index: int) -> int:
        shift = 0 if self.seed is None else seed_of(self.seed, epoch) % self.stride
        return shift + index * self.stride


class RandomWindows:
    """Sequences from anywhere, drawn for each epoch and index.

    Args:
        tokens: to cut from.
        length: length of a sequence.
        count: sequences in an epoch.
        seed: seed of the draws.

    Raises:
        ValueError: fewer tokens than one sequence has.
    """

    def __init__(self, tokens: TokenStream, length: int, *, count: int, seed: int):
        _check_length(tokens, length)
        self.tokens, self.length, self.count, self.seed = tokens, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor]:
        starts = [seed_of(self.seed, *key) % (len(self.tokens) - self.length + 1) for key in keys]
        return _cut(self.tokens, starts, self.length)


class NoiseTokens:
    """Sequences of random tokens from a small pool, to measure throughput."""

    LENGTH, POOL = 1_000_000, 64

    def __init__(self, vocab_size: int, length: int):
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(vocab_size, (self.POOL, length), generator=generator)

    def __len__(self) -> int:
        return self.LENGTH

    def __getitems__(self, keys: Sequence[Key]) -> tuple[Tensor]:
        return (self.pool[torch.tensor([index % self.POOL for _, index in keys])],)


def _check_length(tokens: TokenStream, length: int) -> None:
    if len(tokens) < length:
        wanted = " to train on and as many held out" if tokens.name == "--data" else ""
        raise ValueError(f"{tokens.name} needs at least {length} tokens{wanted}, got {len(tokens)}")


def _cut(tokens: TokenStream, starts: list[int], length: int) -> tuple[Tensor]:
    """Return the sequences that begin at these tokens.

    They are read, not mapped: if a mapped file shrinks or its disk fails, the reading process is
    killed.
    """
    rows = np.empty((len(starts), length), tokens.dtype)
    with tokens.path.open("rb", buffering=0) as file:
        for row, start in zip(rows, starts):
            first = (tokens.begin + start) * row.itemsize
            file.seek(first)
            if file.readinto(row) != row.nbytes:
                raise ValueError(f"{tokens.path} is truncated: reading at byte {first:,} failed")
    return (torch.from_numpy(rows.astype(np.int64)),)
