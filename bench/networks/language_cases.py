"""The language models that are measured: every language row of the paper, small ones for a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.networks.cases import PaperCase, Small, variants
from models import papers

LANGUAGE = "bert", "gpt", "nystromformer"
IGNORED = -100  # the target of a token that does not count
MASKED = 0.25  # share of the tokens that Crammed BERT guesses


@dataclass(frozen=True)
class Batch:
    """What a step is taken on.

    Attributes:
        tokens: (B, N) int64, of pairs (B, 2, N).
        key_lengths: (B,) int32, of pairs (B, 2), how much of each sequence is no padding; None
            where all of it.
        targets: the classes (B,), or of a language model the tokens (B, N), ``IGNORED`` among them.
    """

    tokens: Tensor
    key_lengths: Tensor | None
    targets: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all that there are."""
        return [t for t in (self.tokens, self.key_lengths, self.targets) if t is not None]

    def first(self, count: int) -> "Batch":
        """Return the first samples, on the CPU."""
        lengths = None if self.key_lengths is None else self.key_lengths[:count].cpu()
        return Batch(self.tokens[:count].cpu(), lengths, self.targets[:count].cpu())


@dataclass(frozen=True)
class LanguageCase(PaperCase):
    """A language row of the paper in one variant, and a batch of sequences.

    Attributes:
        padded: whether sequences differ in length, from a quarter of the longest up.
    """

    padded: bool = False

    @property
    def architecture(self) -> str:
        """``bert``, ``gpt`` or ``nystromformer``."""
        return self.entry.architecture

    @property
    def tokens(self) -> int:
        """Tokens of a batch, padding among them."""
        return self.batch * self.config["sequence_length"] * (2 if self.config.get("pairs") else 1)

    def draw(self, device: torch.device) -> Batch:
        """Return a batch, the same on every device."""
        generator = torch.Generator().manual_seed(0)
        config = self.config
        sides = (self.batch, 2) if config.get("pairs") else (self.batch,)
        longest = config["sequence_length"]
        tokens = torch.randint(config["vocab_size"], (*sides, longest), generator=generator)
        lengths = None
        if self.padded:
            lengths = torch.linspace(longest // 4, longest, tokens[..., 0].numel())
            lengths = lengths.to(torch.int32).view(sides).to(device)
        if self.architecture == "nystromformer":
            targets = torch.randint(config["num_classes"], (self.batch,), generator=generator)
        elif self.architecture == "gpt":
            targets = tokens.roll(-1, dims=1)
        else:
            chance = torch.rand(tokens.shape, generator=generator)
            kept = chance.argsort(dim=1).argsort(dim=1) >= int(MASKED * longest)
            targets = tokens.masked_fill(kept, IGNORED)
        return Batch(tokens.to(device), lengths, targets.to(device))

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        config = self.config
        return super().facts() | {
            "sequence": config["sequence_length"],
            "pairs": bool(config.get("pairs")),
            "padded": self.padded,
            "vocabulary": config["vocab_size"],
        }


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """Return our model's output on a batch: losses (B, N) of its tokens, or logits (B, C)."""
    if batch.targets.ndim == 2:
        return model(batch.tokens, targets=batch.targets)
    return model(batch.tokens, key_lengths=batch.key_lengths)


def mean_loss(output: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss of ``answers``."""
    if batch.targets.ndim == 1:
        return F.cross_entropy(output, batch.targets)
    return output.sum() / (batch.targets != IGNORED).sum()


# Samples of a step: those of the recipes; of Crammed BERT the microbatch.
BATCHES = {
    "crammed_bert": 128,
    "gpt2_tinystories": 128,
    "nystromformer_listops": 32,
    "nystromformer_text": 32,
    "nystromformer_retrieval": 32,
    "nystromformer_image": 256,
    "nystromformer_pathfinder": 256,
}
# Pictures are all of one length, and packed text too.
PADDED = "nystromformer_listops", "nystromformer_text", "nystromformer_retrieval"


def every_row() -> Iterator[LanguageCase]:
    """Yield every language row at the batch of its recipe, original and lean side by side."""
    for row, variant in papers.ROWS:
        if row in BATCHES:
            name = f"language_{row}_{variant}"
            yield LanguageCase(name, "cuda", row, variant, BATCHES[row], padded=row in PADDED)


_SMALL_TEXT = {"embed_dim": 64, "sequence_length": 32, "depth": 4, "heads": 4}
_SMALL_LRA = {"sequence_length": 128, "num_landmarks": 16, "head_dim": 16}
_LEAN_TEXT, _LEAN_LRA = {"depth": 2, "heads": 8}, {"depth": 1, "heads": 4}
SMALL: Small = {
    "crammed_bert": ({**_SMALL_TEXT, "vocab_size": 512}, _LEAN_TEXT),
    # As in the row itself, the original's heads do not divide the width.
    "gpt2_tinystories": ({**_SMALL_TEXT, "heads": 6, "vocab_size": 500}, _LEAN_TEXT),
    **{row: (_SMALL_LRA, _LEAN_LRA) for row in BATCHES if row.startswith("nystromformer")},
}


def small() -> Iterator[LanguageCase]:
    """Yield a small model of each row, original and lean."""
    for row, variant, sizes in variants(SMALL):
        name = f"cpu_language_{row}_{variant}"
        yield LanguageCase(name, "cpu", row, variant, 4, sizes, padded=row in PADDED)


LANGUAGE_CASES = (*every_row(), *small())
