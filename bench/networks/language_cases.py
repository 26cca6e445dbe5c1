"""Language models to measure: Crammed BERT and GPT-2, and small ones for a CPU."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.networks.cases import PaperCase, Small, variants
from models import papers

IGNORED = -100  # the target of a token that does not count
MASKED = 0.25  # share of the tokens that Crammed BERT guesses
BATCH = 128  # samples of a step: those of the recipe; of Crammed BERT the microbatch


class Batch(NamedTuple):
    """What a step is taken on: tokens and targets, (B, N) int64 each, ``IGNORED`` among these."""

    tokens: Tensor
    targets: Tensor


class LanguageCase(PaperCase):
    """A language row of the paper in one variant, and a batch of sequences."""

    @property
    def architecture(self) -> str:
        """``bert`` or ``gpt``."""
        return self.entry.architecture

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.config["sequence_length"]

    def draw(self, device: torch.device) -> Batch:
        """Return a batch, the same on every device."""
        generator, length = torch.Generator().manual_seed(0), self.config["sequence_length"]
        size = self.batch, length
        tokens = torch.randint(self.config["vocab_size"], size, generator=generator)
        if self.architecture == "gpt":
            targets = tokens.roll(-1, dims=1)
        else:
            chance = torch.rand(tokens.shape, generator=generator)
            kept = chance.argsort(dim=1).argsort(dim=1) >= int(MASKED * length)
            targets = tokens.masked_fill(kept, IGNORED)
        return Batch(tokens.to(device), targets.to(device))

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        sizes = self.config["sequence_length"], self.config["vocab_size"]
        return super().facts() | dict(zip(("sequence", "vocabulary"), sizes))


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return our model's losses (B, N) of a batch."""
    return model(batch.tokens, targets=batch.targets)


def mean_loss(of_tokens: Tensor, batch: Batch) -> Tensor:
    """Return the mean of ``losses`` over the tokens that count."""
    return of_tokens.sum() / (batch.targets != IGNORED).sum()


_TEXT, _LEAN = (
    {"embed_dim": 64, "sequence_length": 32, "depth": 4, "heads": 4},
    {"depth": 2, "heads": 8},
)
SMALL: Small = {
    "crammed_bert": ({**_TEXT, "vocab_size": 512}, _LEAN),
    # As in the row itself, the original's heads do not divide the width.
    "gpt2_tinystories": ({**_TEXT, "heads": 6, "vocab_size": 500}, _LEAN),
}
LANGUAGE_CASES = (
    *(
        LanguageCase(f"language_{row}_{variant}", "cuda", row, variant, BATCH)
        for row, variant in papers.ROWS
        if row in SMALL
    ),
    *(
        LanguageCase(f"cpu_language_{row}_{variant}", "cpu", row, variant, 4, sizes)
        for row, variant, sizes in variants(SMALL)
    ),
)
