"""Tokenisers: bytes, GPT-2's byte pairs, BERT's word pieces, a file, or one trained here.

All but bytes come from the library ``tokenizers``, whose threads do not survive a fork: encode in
the training process, not in a data worker.
"""

import hashlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers as library
import torch
from torch import Tensor

from leaner_kernels.monitor.run_files import check_own
from train.data.text.cache import build_once
from train.data.text.sources import TextSource

# Set explicitly, so that the library does not warn about every worker that is forked later.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

GPT = ("<|endoftext|>",)
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
KINDS = (
    "bytes, gpt2, bpe or wordpiece (trained on the data), a tokenizer.json, or a folder with one"
)
_ENDS = ("<|endoftext|>", "[SEP]", "</s>", "<|end_of_text|>")
_VOCAB_SIZES = {"bpe": 50_257, "wordpiece": 32_768}
_ENOUGH = 1 << 28  # largest number of characters to train a tokeniser on
_MOST = 1 << 22  # largest number of tokens of a tokeniser
_PIECE = 256  # longest part of a word in training, in characters
_CHARACTERS = 1000  # longest word for word pieces; longer ones become [UNK], as in BERT


class Tokenizer:
    """Encode and decode text with a tokeniser of the library ``tokenizers``.

    Args:
        tokenizer: tokenizer of the library.
        name: for messages.

    Attributes:
        vocab_size: tokens are below this.
        specials: tokens that do not represent text, by name.
        end: token after a document.
        unknown: token for text without a token, or None.
        digest: identifies the tokeniser.

    Raises:
        ValueError: if it has no token that ends a document, or a token number too large for any
            model.
    """

    def __init__(self, tokenizer: library.Tokenizer, name: str):
        self.tokenizer, self.name = tokenizer, name
        # A file may enable truncation or padding for its own model.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: number for number, token in added.items() if token.special}
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        if self.vocab_size > _MOST:
            raise ValueError(
                f"--tokenizer {name} must have at most {_MOST:,} tokens, got one numbered "
                f"{self.vocab_size - 1:,}"
            )
        ends = [self.specials[end] for end in _ENDS if end in self.specials]
        if not ends:
            raise ValueError(f"--tokenizer {name} must have one of {', '.join(_ENDS)}")
        self.end = ends[0]
        text = tokenizer.to_str()
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        model = json.loads(text)["model"]
        named = model.get("unk_token")
        self.unknown = model.get("unk_id") if named is None else tokenizer.token_to_id(named)
        self._lengths = self.bytes_per_token()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        with _errors_of_library(self.name):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        with _errors_of_library(self.name):
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; incomplete characters are shown as �.

        Tokens beyond the vocabulary are ignored.
        """
        with _errors_of_library(self.name):
            return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def files(self) -> dict[str, str]:
        """Return a tokenizer.json that ``--tokenizer`` accepts, as text by file name."""
        return {"tokenizer.json": self.tokenizer.to_str(pretty=True)}

    def bytes_per_token(self) -> Tensor | None:
        """Return how many bytes of text each token stands for, (vocab_size,) int64.

        None if tokens do not consist of bytes, or a normaliser changed the text.
        """
        if type(self.tokenizer.decoder).__name__ != "ByteLevel" or self.tokenizer.normalizer:
            return None
        lengths = torch.zeros(self.vocab_size, dtype=torch.int64)
        # Every byte is written as one character.
        for token, number in self.tokenizer.get_vocab().items():
            lengths[number] = 0 if token in self.specials else len(token)
        return lengths

    def bytes_lost(self, texts: Sequence[str], encodings: Sequence[list[int]]) -> int:
        """Return how many UTF-8 bytes of texts decoding their tokens does not restore.

        An unknown token restores nothing. Spaces do not count, nor do the case and the accents that
        a normaliser may remove.

        Args:
            texts: encoded texts.
            encodings: the tokens of each.
        """
        if self._lengths is not None:
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            if self._lengths[torch.tensor([*chain(*encodings)], dtype=torch.long)].sum() == size:
                return 0
        in_vocabulary = [
            [token for token in tokens if token != self.unknown] for tokens in encodings
        ]
        with _errors_of_library(self.name):
            decoded = self.tokenizer.decode_batch(in_vocabulary, skip_special_tokens=False)
        folds = self.tokenizer.normalizer is not None
        missing = _letters("".join(texts), folds) - _letters("".join(decoded), folds)
        return sum(n * len(c.encode("utf-8", "surrogatepass")) for c, n in missing.items())

    def model_size(self, vocab_size: int | None) -> int:
        """Return the vocabulary size of a model: ``vocab_size``, or the number of tokens here.

        Raises:
            ValueError: ``vocab_size`` is less than the number of tokens here.
        """
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ValueError(
                f"--vocab-size must be at least the {self.vocab_size} tokens of --tokenizer "
                f"{self.name}, got {vocab_size}"
            )
        return vocab_size or self.vocab_size


def _letters(text: str, folds: bool) -> Counter[str]:
    """Count characters except spaces; ``folds`` ignores case, accents and the like."""
    if folds:
        text = unicodedata.normalize("NFKD", text.casefold())
    ignored = ("Z", "Cc", "Cf", "Mn") if folds else ("Z", "Cc")
    counts = Counter(text)
    return Counter(
        {c: n for c, n in counts.items() if not unicodedata.category(c).startswith(ignored)}
    )


@contextmanager
def _errors_of_library(name: str) -> Iterator[None]:
    """Turn any error of the library into a ``ValueError`` of one line."""
    try:
        yield
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"--tokenizer {name} cannot be read: {cause}") from None


def open_tokenizer(
    name: str,
    source: TextSource,
    *,
    specials: tuple[str, ...],
    vocab_size: int | None = None,
    run: Path | None = None,
) -> Tokenizer:
    """Return a tokeniser by name.

    Args:
        name: one of ``KINDS``.
        source: documents to train on, where it is trained.
        specials: special tokens of one that is made here: ``GPT`` or ``BERT``.
        vocab_size: of one that is trained; 50,257 or 32,768 when omitted. Little text gives less.
        run: folder of a run that goes on, whose own is taken where one would be trained.

    Raises:
        ValueError: no such tokeniser, or one that cannot be read.
    """
    if name == "bytes":
        return Tokenizer(_bytes(specials), name)
    if name in _VOCAB_SIZES:
        if run is not None and (run / "tokenizer.json").is_file():
            check_own(run / "tokenizer.json")
            return Tokenizer(_read(run / "tokenizer.json"), name)
        return _trained(name, source, specials, vocab_size or _VOCAB_SIZES[name])
    if name == "gpt2":
        return Tokenizer(library.Tokenizer.from_file(_gpt2_file()), name)
    if Path(name).exists():
        return Tokenizer(_read(Path(name)), name)
    raise ValueError(f"--tokenizer must be {KINDS}, got {name!r}")


def _bytes(specials: Sequence[str]) -> library.Tokenizer:
    """Return the tokeniser of UTF-8 whose tokens are the bytes, and special ones from 256 on."""
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    # A printable byte is written as the character of its number, the others as 256 and on.
    others = iter(sorted({*range(256)} - {*map(ord, letters)}))
    numbers = {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in letters}
    return _byte_pairs(specials, library.models.BPE(numbers, []))


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
            "--tokenizer gpt2 is not in the cache of the Hugging Face Hub and cannot be "
            "downloaded: give the path of its tokenizer.json, or --tokenizer bpe to train one"
        ) from None


def _read(path: Path) -> library.Tokenizer:
    whole = path / "tokenizer.json" if path.is_dir() else path
    if not whole.is_file():
        raise ValueError(f"--tokenizer must be {KINDS}, got {path}")
    with _errors_of_library(str(path)):
        return library.Tokenizer.from_file(str(whole))


def _byte_pairs(specials: Sequence[str], model: Any) -> library.Tokenizer:
    """Return GPT-2's tokeniser with the byte pairs of a model."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _word_pieces(specials: Sequence[str], model: Any) -> library.Tokenizer:
    """Return BERT's tokeniser, of lowercase text without accents, with the pieces of a model."""
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _trained(
    name: str, source: TextSource, specials: tuple[str, ...], vocab_size: int
) -> Tokenizer:
    train = {"bpe": _train_byte_pairs, "wordpiece": _train_word_pieces}[name]
    file = f"tokenizer-{source.digest(name, specials, vocab_size)}.json"
    path = build_once(file, lambda path: train(source, specials, vocab_size).save(str(path)))
    return Tokenizer(library.Tokenizer.from_file(str(path)), name)


def _train_byte_pairs(
    source: TextSource, specials: tuple[str, ...], vocab_size: int
) -> library.Tokenizer:
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    _check_size("bpe", vocab_size, len(specials) + len(alphabet))
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer = _byte_pairs((), library.models.BPE())
    _train(tokenizer, source, trainer)
    return tokenizer


def _train_word_pieces(
    source: TextSource, specials: tuple[str, ...], vocab_size: int
) -> library.Tokenizer:
    blank = _word_pieces((), library.models.WordPiece(unk_token="[UNK]"))
    counts: Counter[str] = Counter()
    for text in _up_to(_ENOUGH, source):
        counts.update(blank.normalizer.normalize_str(text))
    common = sorted({*counts} - {*" \t\n\r"}, key=lambda letter: (-counts[letter], letter))
    alphabet = sorted(common[:_CHARACTERS])
    _check_size("wordpiece", vocab_size, len(specials) + 2 * len(alphabet))
    # The trainer numbers ##a, ##b, ... in the order of a hash map, which differs between processes,
    # and breaks ties between pairs by these numbers. Listed beforehand, they get fixed numbers.
    inside = [f"##{letter}" for letter in alphabet]
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*specials, *alphabet, *inside],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    _train(blank, source, trainer)
    vocabulary = json.loads(blank.to_str())["model"]["vocab"]
    model = library.models.WordPiece(vocabulary, unk_token="[UNK]")
    return _word_pieces(specials, model)


def _train(tokenizer: library.Tokenizer, source: TextSource, trainer: Any) -> None:
    """Train on the documents; long words are cut.

    The time of the library grows with the square of a word's length, and text without spaces is one
    word.
    """
    own, kinds = tokenizer.pre_tokenizer, library.pre_tokenizers
    pieces = kinds.Split(library.Regex(f".{{{_PIECE}}}"), "isolated")
    tokenizer.pre_tokenizer = kinds.Sequence([own, pieces])
    tokenizer.train_from_iterator(_up_to(_ENOUGH, source), trainer)
    tokenizer.pre_tokenizer = own


def _check_size(name: str, vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise ValueError(
            f"--vocab-size must be at least {least} for --tokenizer {name} on this data, got "
            f"{vocab_size}"
        )


def _up_to(characters: int, source: TextSource) -> Iterator[str]:
    """Yield documents until they have enough characters."""
    for text in source.documents():
        yield text
        characters -= len(text)
        if characters < 0:
            return
