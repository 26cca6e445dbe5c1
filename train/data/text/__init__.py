"""Text as sequences of tokens, for train/gpt.py and train/bert.py.

``open_text(name, tokenizer)`` finds documents by name (``sources``), a tokeniser (``tokenizers``;
trained on the documents where there is none), and encodes once into a file that ranks and later
runs share (``cache``, ``stream``). What comes of it is one stream of tokens, each document followed
by ``tokenizer.end``; its first nine tenths train and the rest is held out, unless other text is
given for that, or a folder has parts for both. ``Windows`` and ``RandomWindows`` cut sequences from
a stream and are data sets as train/data/loader.py has them: a batch is ``(tokens,)`` with tokens
(B, length) int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from train.data.text.sources import KINDS, find_source
from train.data.text.stream import NoiseTokens, RandomWindows, TokenStream, Windows, encoded
from train.data.text.tokenizers import Tokenizer, open_tokenizer

__all__ = [
    "KINDS",
    "NoiseTokens",
    "RandomWindows",
    "Text",
    "TokenStream",
    "Tokenizer",
    "Windows",
    "open_text",
]

TRAIN = 0.9  # share of the tokens; those after it are held out
MOST_UNKNOWN = 0.5  # share of the tokens


@dataclass(frozen=True)
class Text:
    """Tokens to train on, tokens held out from them, and what they mean.

    Attributes:
        name: for messages.
        tokenizer: its ``vocab_size``, ``specials`` (name -> token), ``end``, ``encode``,
            ``encode_batch`` and ``decode``; see ``tokenizers.Tokenizer``.
        documents: how many there are.
        train: the first nine tenths of the tokens.
        held_out: the rest, or other text.
        validation: in words, what is held out.
    """

    name: str
    tokenizer: Tokenizer
    documents: int
    train: TokenStream
    held_out: TokenStream
    validation: str

    def facts(self, without: Sequence[int] = ()) -> dict[str, Any]:
        """Return how much there is, and the scores of a model of each token's frequency alone.

        Args:
            without: tokens that are never to be named.
        """
        size, unnamed = self.tokenizer.vocab_size, list(without)
        seen, wanted = (stream.counts(size).double() for stream in (self.train, self.held_out))
        seen += 1  # so that a token that is only held out has a chance
        seen[unnamed], wanted[unnamed] = 0, 0
        wanted /= wanted.sum()
        likely = (seen / seen.sum()).clamp(min=torch.finfo(torch.float64).tiny)
        return {
            "documents": self.documents,
            "training_tokens": len(self.train),
            "held-out_tokens": len(self.held_out),
            "validation": self.validation,
            "tokeniser's_tokens": size,
            "unigram_loss": -(wanted @ likely.log()).item(),
            "unigram_accuracy": wanted[seen.argmax()].item(),
        }


def open_text(
    name: str,
    tokenizer: str,
    *,
    specials: tuple[str, ...],
    limit: int = 0,
    vocab_size: int | None = None,
    max_density: float | None = None,
    column: str = "text",
    validation: str | None = None,
    most_held_out: int | None = None,
) -> Text:
    """Open text by name; every rank may call this, and one of a machine does the work.

    Args:
        name: text files with commas between, a folder of them, tables, "pydoc", "tinystories", or
            "hf:" and a data set of Hugging Face; ``NoiseTokens`` is "synthetic".
        tokenizer: "bytes", "gpt2", "bpe", "wordpiece", or the path of a vocabulary.
        specials: tokens that a tokeniser made here begins or ends with, ``tokenizers.GPT`` or
            ``tokenizers.BERT``.
        limit: documents to read; 0 reads all.
        vocab_size: of a tokeniser that is trained here; the usual one when omitted.
        max_density: documents with more tokens than this per character are left out (0.25 in
            Geiping and Goldstein 2023, arXiv:2212.14034).
        column: of a table, with the text.
        validation: text to hold out, by name; when omitted the part of a folder that has one, or
            the last tenth.
        most_held_out: tokens that a last tenth may have.

    Returns:
        The text.

    Raises:
        ValueError: no such text or tokeniser, one that cannot be read or does not fit the other, or
            nothing in it.
    """
    source = find_source(name, limit, column)
    chosen = open_tokenizer(tokenizer, source, specials=specials, vocab_size=vocab_size)
    stream, documents = encoded(source, chosen, max_density)
    _check_fit(stream, chosen)
    if validation is not None:
        try:
            other = find_source(validation, 0, column)
            held_out, _ = encoded(other.held_out or other, chosen, max_density)
        except ValueError as error:
            raise ValueError(str(error).replace("--data", "--validation")) from error
        return Text(source.name, chosen, documents, stream, held_out, f"--validation {validation}")
    if source.held_out is not None:
        held_out, _ = encoded(source.held_out, chosen, max_density)
        return Text(source.name, chosen, documents, stream, held_out, source.splits)
    cut = int(len(stream) * TRAIN)
    if most_held_out is not None:
        cut = max(cut, len(stream) - most_held_out)
    train, held_out = stream.part(0, cut), stream.part(cut, len(stream))
    which = f"the last {len(held_out):,} of {len(stream):,} tokens"
    return Text(source.name, chosen, documents, train, held_out, which)


def _check_fit(stream: TokenStream, tokenizer: Tokenizer) -> None:
    """Refuse a tokeniser that has no tokens for most of the text.

    Raises:
        ValueError: more than half of the tokens are unknown.
    """
    unknown = tokenizer.specials.get("[UNK]")
    if unknown is not None and len(stream):
        share = stream.counts(tokenizer.vocab_size)[unknown].item() / len(stream)
        if share > MOST_UNKNOWN:
            raise ValueError(
                f"--tokenizer {tokenizer.name} does not fit --data: {share:.0%} of its tokens are "
                "[UNK]; --tokenizer bytes fits any text"
            )
