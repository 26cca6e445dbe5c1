"""Tokenisers: bytes, GPT-2's byte pairs, BERT's word pieces, a file, or one trained here.

All but bytes are those of the library ``tokenizers``. Its threads do not survive a fork: encode in
the process that trains, not in one that prepares batches.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from train.data.text.cache import build_once
from train.data.text.sources import TextSource

GPT = ("<|endoftext|>",)
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS = (
    "bytes, gpt2, bpe or wordpiece (trained on the data), a tokenizer.json, or a folder with one, "
    "with vocab.json and merges.txt, or with vocab.txt"
)
_ENDS = ("<|endoftext|>", "[SEP]", "</s>", "<|end_of_text|>")
_VOCAB_SIZES = {"bpe": 50_257, "wordpiece": 32_768}
_ENOUGH = 1 << 28  # characters that a tokeniser is trained on at most
_CHARACTERS = 1000  # that a word piece may be of; others become [UNK], as in BERT


class Tokenizer(Protocol):
    """Turns text into tokens and back.

    Attributes:
        vocab_size: tokens are below this.
        specials: the tokens that stand for no text, by name.
        end: the one after a document.
        digest: tells it from others.
    """

    vocab_size: int
    specials: dict[str, int]
    end: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, with no special ones added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no whole character is shown as �."""

    def files(self) -> dict[str, str]:
        """Return what to keep beside a model to have this tokeniser again: text by file name."""

    def bytes_per_token(self) -> Tensor | None:
        """Return how many bytes of text each token stands for, (vocab_size,) int64.

        None where tokens do not say, as where text was lowercased.
        """


class Bytes:
    """The bytes of UTF-8, and special tokens from 256 on."""

    def __init__(self, specials: Sequence[str]):
        self.specials = {name: 256 + i for i, name in enumerate(specials)}
        self.vocab_size = 256 + len(specials)
        self.end = _end(self.specials, "bytes")
        self.digest = f"bytes {' '.join(specials)}"

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes, with special tokens by name."""
        names = {token: name.encode() for name, token in self.specials.items()}
        parts = (bytes([token]) if token < 256 else names.get(token, b"") for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def files(self) -> dict[str, str]:
        """Return nothing: the name "bytes" is enough."""
        return {}

    def bytes_per_token(self) -> Tensor:
        """Return 1 for a byte and 0 for a special token."""
        return torch.tensor([1] * 256 + [0] * len(self.specials))


class Subwords:
    """A tokeniser of the library ``tokenizers``."""

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer = tokenizer
        # A file may say that texts are cut or filled up for its own model.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in added.items() if token.special}
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.end = _end(self.specials, name)
        self.digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, with no special ones added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; those past the vocabulary stand for none."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        """Return a tokenizer.json, to be given as ``--tokenizer``."""
        return {"tokenizer.json": self.tokenizer.to_str(pretty=True)}

    def bytes_per_token(self) -> Tensor | None:
        """Return how many bytes each token stands for, where tokens are made of bytes."""
        if type(self.tokenizer.decoder).__name__ != "ByteLevel":
            return None
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        # Every byte is written as one character.
        for token, number in self.tokenizer.get_vocab().items():
            lengths[number] = 0 if token in self.specials else len(token)
        return lengths

    def save(self, path: Path) -> None:
        """Write a tokenizer.json, to be given as ``--tokenizer``."""
        self.tokenizer.save(str(path))


def open_tokenizer(
    name: str, source: TextSource, *, specials: tuple[str, ...], vocab_size: int | None = None
) -> Tokenizer:
    """Return a tokeniser by name.

    Args:
        name: one of ``KINDS``.
        source: documents to train on, where it is trained.
        specials: special tokens of one that is made here: ``GPT`` or ``BERT``.
        vocab_size: of one that is trained; 50,257 or 32,768 when omitted. Little text gives less.

    Raises:
        ValueError: no such tokeniser, one that cannot be read, or no package ``tokenizers``.
    """
    if name == "bytes":
        return Bytes(specials)
    if name in _VOCAB_SIZES:
        return _trained(name, source, specials, vocab_size or _VOCAB_SIZES[name])
    if name == "gpt2":
        return Subwords(_library(name).Tokenizer.from_file(_gpt2_file()), name)
    if Path(name).exists():
        return Subwords(_read(Path(name)), name)
    raise ValueError(f"--tokenizer must be {KINDS}, got {name!r}")


def _library(name: str) -> Any:
    # Said explicitly, so that it does not warn of each worker that is forked later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"--tokenizer {name} needs the package tokenizers; bytes does without"
        ) from None
    return tokenizers


def _end(specials: dict[str, int], name: str) -> int:
    found = next((specials[end] for end in _ENDS if end in specials), None)
    if found is None:
        raise ValueError(f"--tokenizer {name} must have one of {', '.join(_ENDS)}")
    return found


def _gpt2_file() -> str:
    """Return the path of GPT-2's vocabulary, from the cache of Hugging Face's Hub or from there."""
    import huggingface_hub  # comes with tokenizers

    where = "openai-community/gpt2", "tokenizer.json"
    try:
        try:
            return huggingface_hub.hf_hub_download(*where, local_files_only=True)
        except OSError:
            return huggingface_hub.hf_hub_download(*where)
    except OSError:
        raise ValueError(
            "--tokenizer gpt2 is neither in the cache of Hugging Face's Hub nor to be had from it: "
            "give --tokenizer FILE with its tokenizer.json, a folder with its vocab.json and "
            "merges.txt, or --tokenizer bpe to train one"
        ) from None


def _read(path: Path) -> Any:
    library = _library(str(path))
    whole = path / "tokenizer.json" if path.is_dir() else path
    try:
        if whole.is_file():
            return library.Tokenizer.from_file(str(whole))
        if (path / "merges.txt").is_file():
            files = str(path / "vocab.json"), str(path / "merges.txt")
            return _byte_pairs(library, GPT, library.models.BPE.from_file(*files))
        if (path / "vocab.txt").is_file():
            model = library.models.WordPiece.from_file(str(path / "vocab.txt"), unk_token="[UNK]")
            return _word_pieces(library, BERT, model)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"--tokenizer {path} cannot be read: {error}") from error
    raise ValueError(f"--tokenizer must be {KINDS}, got {path}")


def _byte_pairs(library: Any, specials: Sequence[str], model: Any) -> Any:
    """Return GPT-2's tokeniser with the byte pairs of a model."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _word_pieces(library: Any, specials: Sequence[str], model: Any) -> Any:
    """Return BERT's tokeniser, of lowercase text without accents, with the pieces of a model."""
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _trained(name: str, source: TextSource, specials: tuple[str, ...], vocab_size: int) -> Subwords:
    library = _library(name)
    train = {"bpe": _train_byte_pairs, "wordpiece": _train_word_pieces}[name]
    file = f"tokenizer-{source.digest(name, specials, vocab_size)}.json"
    path = build_once(
        file, lambda path: train(library, source, specials, vocab_size).save(str(path))
    )
    return Subwords(library.Tokenizer.from_file(str(path)), name)


def _train_byte_pairs(
    library: Any, source: TextSource, specials: tuple[str, ...], vocab_size: int
) -> Any:
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    _check_size("bpe", vocab_size, len(specials) + len(alphabet))
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer = _byte_pairs(library, (), library.models.BPE())
    tokenizer.train_from_iterator(_up_to(_ENOUGH, source), trainer)
    return tokenizer


def _train_word_pieces(
    library: Any, source: TextSource, specials: tuple[str, ...], vocab_size: int
) -> Any:
    blank = _word_pieces(library, (), library.models.WordPiece(unk_token="[UNK]"))
    counts = np.zeros(0x110000, np.int64)
    for text in _up_to(_ENOUGH, source):
        letters = blank.normalizer.normalize_str(text).encode("utf-32-le", "replace")
        counts += np.bincount(np.frombuffer(letters, np.uint32), minlength=len(counts))
    counts[[ord(space) for space in " \t\n\r"]] = 0
    common = np.argsort(-counts, kind="stable")[:_CHARACTERS]
    alphabet = sorted(chr(letter) for letter in common if counts[letter])
    _check_size("wordpiece", vocab_size, len(specials) + 2 * len(alphabet))
    # The trainer numbers ##a, ##b, ... in the order of a hash map, another one in every process,
    # and settles draws between pairs by these numbers. Named beforehand, they have fixed ones.
    inside = [f"##{letter}" for letter in alphabet]
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*specials, *alphabet, *inside],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    blank.train_from_iterator(_up_to(_ENOUGH, source), trainer)
    vocabulary = json.loads(blank.to_str())["model"]["vocab"]
    model = library.models.WordPiece(vocabulary, unk_token="[UNK]")
    return _word_pieces(library, specials, model)


def _check_size(name: str, vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise ValueError(
            f"--vocab-size must be at least {least} for --tokenizer {name} on this data, got "
            f"{vocab_size}"
        )


def _up_to(characters: int, source: TextSource) -> Iterator[str]:
    for text in source.documents():
        yield text
        characters -= len(text)
        if characters < 0:
            return
