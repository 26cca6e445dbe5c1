"""The recipe ``small``: settings for a user's own text, chosen by its size.

Its budget is what two cores of a CPU do in about five minutes with a model of a million parameters,
which is also about as large as so few tokens can teach. The rest follows from the amount of text:
the tokeniser, the passes over it, and how much dropout they need.
"""

import dataclasses
from typing import Any, ClassVar, TypeVar

from train.config.flags import Settings, count, flag, positive
from train.data.text import KINDS, Text, tokenizers

_Settings = TypeVar("_Settings", bound=Settings)


@dataclasses.dataclass(frozen=True)
class TextSettings(Settings):
    """What one run on text does, whatever the model."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("tokenizer", "vocab_size", "documents", "context", "text_column", "validation"),
    )
    OWN_GROUP: ClassVar[str] = "text"

    data: str | None = flag(
        None, str, f"{KINDS}; pydoc without this flag and --recipe", several=True
    )
    text_column: str = flag(
        "text", str, "column that holds the text of a table or Hugging Face data set"
    )
    validation: str | None = flag(
        None, str, "held-out text, as in --data; the last tenth of the text if omitted"
    )
    tokenizer: str | None = flag(None, str, f"{tokenizers.KINDS}; chosen by the recipe if omitted")
    vocab_size: int | None = flag(
        None, positive, "vocabulary size of the model and of a trained tokeniser"
    )
    documents: int | None = flag(None, count, "number of documents to read; 0 reads all")


TOKENS, PIECES = 3e6, 1.5e6  # of a run: bytes; longer ones, of which each costs twice as much
EPOCHS = 20  # at most
TRAINED_FROM = 1_000_000  # bytes; a tokeniser trained on less knows the text by heart
MOST_HELD_OUT = 100_000  # tokens
LEAST_CONTEXT = 8


def is_own(data: str) -> bool:
    """Return whether ``--data`` is files, and not a name that a script knows."""
    return data not in ("pydoc", "tinystories", "synthetic") and not data.startswith("hf:")


def vocab_size(size: int, kind: str) -> int:
    """Return the tokens of a tokeniser trained on ``size`` bytes: about one for each 500 of them.

    A power of two up to 4,096, of "bpe" at least 512, of "wordpiece" at least 2,048: so many
    characters may have a piece at the start of a word and one inside.
    """
    least = {"bpe": 9, "wordpiece": 11}[kind]
    return 1 << min(12, max(least, (size // 500).bit_length() - 1))


def by_amount(size: int, tokenizer: str | None, trained: str) -> dict[str, Any]:
    """Return values of flags for so much text.

    Args:
        size: bytes of UTF-8.
        tokenizer: the user's, or None.
        trained: the kind that is trained where there is enough text: "bpe" or "wordpiece".
    """
    chosen = tokenizer or ("bytes" if size < TRAINED_FROM else trained)
    # A token of a trained tokeniser stands for about three bytes.
    tokens = size if chosen == "bytes" else size / 3
    budget = min(TOKENS if chosen == "bytes" else PIECES, EPOCHS * tokens)
    epochs = float(f"{budget / tokens:.3g}")
    batch_size = 8 if tokens < 50_000 else 16 if tokens < 200_000 else 32
    return {
        "tokenizer": chosen,
        "batch_size": batch_size,
        "epochs": max(0.001, epochs),
        "eval_every": epochs / 5,
        "dropout": 0.1 if epochs > 5 else 0.0,
    }


def context_of(text: Text, wanted: int, batch_size: int) -> int:
    """Return how many tokens a sequence may have: as many as wanted, or the half of it, and so on.

    Raises:
        ValueError: too little text for the shortest.
    """
    context = wanted
    while context >= LEAST_CONTEXT:
        # A sequence may begin anywhere, and its last token is only predicted.
        enough = (batch_size + 1) * context + 1
        if len(text.train) >= enough and len(text.held_out) > context:
            return context
        context //= 2
    raise ValueError(
        f"--data {text.name} is too little text: needs {(batch_size + 1) * LEAST_CONTEXT + 1} "
        f"tokens to train on and {LEAST_CONTEXT + 1} held out, got {len(text.train)} and "
        f"{len(text.held_out)}"
    )


def fitted(
    settings: _Settings, given: _Settings, text: Text, size: int
) -> tuple[_Settings, dict[str, str]]:
    """Return the settings with sequences that are short enough, and the plan's rows on all this.

    Args:
        settings: with every value filled in.
        given: from the command line.
        text: what there is.
        size: of it, in bytes.

    Raises:
        ValueError: too little text.
    """
    rows = {}
    if given.context is None:
        context = context_of(text, settings.context, settings.batch_size)
        if context != settings.context:
            rows["context_made_shorter"] = f"from {settings.context} to {context}: little text"
        settings = dataclasses.replace(settings, context=context)
    names = ("tokenizer", "model", "context", "batch_size", "epochs", "lr", "dropout")
    chosen = {name: getattr(settings, name) for name in names if getattr(given, name) is None}
    values = (
        f"{name.replace('_', ' ')} {_short(value)}"
        for name, value in chosen.items()
        if value is not None
    )
    return settings, {"chosen_by_the_data": f"{size:,} bytes of text: {', '.join(values)}"} | rows


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
