"""Define the flags of runs on text, and the length of a run on a user's own text."""

import dataclasses
from typing import ClassVar

from train.config.flags import Settings, count, flag, positive
from train.data.text import tokenizers
from train.data.text.sources import KINDS

# For the recipe ``small``: the number of tokens that two CPU cores process in about five minutes
# with a million parameters, and the largest number of held-out tokens, which limits the time of
# evaluations.
TOKENS, EPOCHS, MOST_HELD_OUT = 3e6, 20, 100_000


@dataclasses.dataclass(frozen=True)
class TextSettings(Settings):
    """The settings of a run on text, for any model."""

    SAME_AFTER_RESUME: ClassVar[tuple[str, ...]] = (
        *("tokenizer", "vocab_size", "documents", "context", "text_column", "validation"),
    )
    OWN_GROUP: ClassVar[str] = "text"

    data: str | None = flag(None, str, f"{KINDS}; pydoc without this flag and --recipe")
    text_column: str = flag("text", str, "column that holds the text of a Hugging Face data set")
    validation: str | None = flag(
        None, str, "held-out text, as in --data; the last tenth of the text if omitted"
    )
    tokenizer: str | None = flag(None, str, f"{tokenizers.KINDS}; chosen by the recipe if omitted")
    vocab_size: int | None = flag(
        None, positive, "vocabulary size of the model and of a trained tokeniser"
    )
    documents: int | None = flag(None, count, "number of documents to read; 0 reads all")


def is_own(data: str) -> bool:
    """Return whether ``--data`` names files, not a data set that a script knows."""
    return data not in ("pydoc", "tinystories", "synthetic") and not data.startswith("hf:")


def small_run(tokens: int) -> dict[str, float]:
    """Return the length of a run of the recipe ``small``, with five evaluations.

    Args:
        tokens: to train on in an epoch.
    """
    epochs = max(0.001, float(f"{min(EPOCHS, TOKENS / tokens):.3g}"))
    return {"epochs": epochs, "eval_every": epochs / 5}
