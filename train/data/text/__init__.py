"""Text as sequences of tokens, for train/gpt.py and train/bert.py.

``open_text(name, tokenizer)`` finds documents by name (``sources``), a tokeniser (``tokenizers``;
trained on the documents if there is none), and encodes once into a file that ranks and later
runs share (``cache``, ``stream``). The result is one stream of tokens, with ``tokenizer.end`` after
each document. Its first nine tenths are for training and the rest is held out, unless there is
other text for that. ``Windows`` and ``RandomWindows`` cut sequences from a stream and are data sets
as train/data/loader.py has them: a batch is ``(tokens,)`` with tokens (B, length) int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.data.text.sources import find_source
from train.data.text.stream import Encoded, TokenStream, encoded
from train.data.text.tokenizers import Tokenizer, open_tokenizer

TRAIN = 0.9  # share of the tokens for training; the rest are held out
# Share of the tokens that may be unknown; more is allowed if the model need not predict them, as in
# BERT.
MOST_UNKNOWN, MOST_UNKNOWN_MASKED = 0.01, 0.5
MOST_LOST = 0.01  # share of the bytes that may have no token


@dataclass(frozen=True)
class Text:
    """Training tokens, held-out tokens, and their tokenizer.

    Attributes:
        tokenizer: its ``vocab_size``, ``specials`` (name -> token), ``end``, ``encode``,
            ``encode_batch`` and ``decode``; see ``tokenizers.Tokenizer``.
        documents: how many there are.
        train: the first nine tenths of the tokens.
        held_out: the rest, or other text.
        validation: description of the held-out text.
        lost: share of the bytes of the text that decoding its tokens does not restore.
        bytes_per_token: how many bytes of the text each token stands for, (vocab_size,) int64;
            None where these are not all of its bytes.
        identity: digests of the documents and the tokeniser, as ``Task`` has them.
    """

    tokenizer: Tokenizer
    documents: int
    train: TokenStream
    held_out: TokenStream
    validation: str
    lost: float = 0.0
    bytes_per_token: Tensor | None = None
    identity: dict[str, str] = field(default_factory=dict)

    def facts(self, without: Sequence[int] = ()) -> dict[str, Any]:
        """Return the amount of text, and the scores of a model that knows only token frequencies.

        Args:
            without: tokens that are never predicted.
        """
        size, unnamed = self.tokenizer.vocab_size, list(without)
        seen, wanted = (stream.counts(size).double() for stream in (self.train, self.held_out))
        seen += 1  # so that a token that occurs only in held-out text has a probability above zero
        seen[unnamed], wanted[unnamed] = 0, 0
        wanted /= wanted.sum()
        likely = (seen / seen.sum()).clamp(min=torch.finfo(torch.float64).tiny)
        lost = {"lost_by_the_tokeniser": f"{self.lost:.2%} of the text"} if self.lost else {}
        return {
            "documents": self.documents,
            "training_tokens": len(self.train),
            "held-out_tokens": len(self.held_out),
            "validation": self.validation,
            "tokeniser's_tokens": size,
            **lost,
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
    run: Path | None = None,
) -> Text:
    """Open text by name; all ranks may call this, and one on each machine does the work.

    Args:
        name: a text file, a folder of them, "pydoc", "tinystories", or "hf:" and a data
            set of Hugging Face; ``NoiseTokens`` is "synthetic".
        tokenizer: "bytes", "gpt2", "bpe", "wordpiece", or the path of a vocabulary.
        specials: tokens that a tokeniser made here begins or ends with, ``tokenizers.GPT`` or
            ``tokenizers.BERT``.
        limit: documents to read; 0 reads all.
        vocab_size: vocabulary size of a tokeniser that is trained here; the usual one when omitted.
        max_density: documents with more tokens than this per character are left out (0.25 in
            Geiping and Goldstein 2023, arXiv:2212.14034).
        column: column of a table, with the text.
        validation: text to hold out, by name; the last tenth when omitted.
        most_held_out: tokens that a last tenth may have.
        run: folder of a run that goes on, whose own tokeniser is taken where one would be trained.

    Returns:
        The text.

    Raises:
        ValueError: no such text or tokeniser, one that cannot be read or does not fit the other, or
            nothing in it.
    """
    source = find_source(name, limit, column)
    chosen = open_tokenizer(tokenizer, source, specials=specials, vocab_size=vocab_size, run=run)
    whole = encoded(source, chosen, max_density)
    _check_fit(whole, chosen)
    identity = {"the text of --data": whole.digest, "the tokeniser": chosen.digest}
    if validation is not None:
        which = f"--validation {validation}"
        try:
            part = encoded(find_source(validation, 0, column), chosen, max_density)
        except ValueError as error:
            raise ValueError(str(error).replace("--data", "--validation")) from error
        part = replace(part, tokens=replace(part.tokens, name=which))
        _check_fit(part, chosen)
        identity["the text of --validation"] = part.digest
        train, held_out = whole.tokens, part.tokens
    else:
        part, size = whole, len(whole.tokens)
        boundary = int(size * TRAIN)
        if most_held_out is not None:
            boundary = max(boundary, size - most_held_out)
        train, held_out = whole.tokens.part(0, boundary), whole.tokens.part(boundary, size)
        which = f"the last {len(held_out):,} of {size:,} tokens"
    read = [whole] if part is whole else [whole, part]
    return Text(
        tokenizer=chosen,
        documents=whole.documents,
        train=train,
        held_out=held_out,
        validation=which,
        lost=sum(text.lost for text in read) / sum(text.size for text in read),
        bytes_per_token=_exact(part, chosen),
        identity=identity,
    )


def _exact(text: Encoded, tokenizer: Tokenizer) -> Tensor | None:
    """Return the bytes of each token if they add up to those of the text."""
    lengths = tokenizer.bytes_per_token()
    if lengths is None or text.tokens.counts(len(lengths)) @ lengths != text.size:
        return None
    return lengths


def _check_fit(text: Encoded, tokenizer: Tokenizer) -> None:
    """Refuse a tokeniser that does not know enough of the text.

    Raises:
        ValueError: more of the tokens are unknown, or more of the text has no token, than is
            allowed.
    """
    bad = f"--tokenizer {tokenizer.name} does not fit {text.tokens.name}"
    better = "--tokenizer bytes fits any text"
    unknown = 0.0
    if tokenizer.unknown is not None:
        count = text.tokens.counts(tokenizer.vocab_size)[tokenizer.unknown].item()
        unknown = count / len(text.tokens)
    masked = "[MASK]" in tokenizer.specials
    if unknown > (MOST_UNKNOWN_MASKED if masked else MOST_UNKNOWN):
        raise ValueError(f"{bad}: {unknown:.0%} of its tokens are unknown; {better}")
    if text.lost > MOST_LOST * text.size and not (masked and unknown):
        raise ValueError(f"{bad}: {text.lost / text.size:.1%} of it has no token; {better}")
