"""The language models that are measured: every language row of the paper, small ones for a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
class LanguageCase:
    """A language row of the paper in one variant, and a batch.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        row: of ``papers.ROWS``.
        variant: ``original`` or ``lean``.
        batch: samples.
        padded: whether sequences differ in length, from a quarter of the longest up.
        sizes: arguments of the constructor instead of the row's.
    """

    name: str
    device: str
    row: str
    variant: str
    batch: int
    padded: bool = False
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def entry(self) -> papers.PaperRow:
        """The row as data."""
        return papers.ROWS[self.row, self.variant]

    @property
    def architecture(self) -> str:
        """``bert``, ``gpt`` or ``nystromformer``."""
        return self.entry.architecture

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        return self.entry.config | self.sizes

    @property
    def tokens(self) -> int:
        """Tokens of a batch, padding among them."""
        return self.batch * self.config["sequence_length"] * (2 if self.config.get("pairs") else 1)

    def build(self, device: torch.device) -> nn.Module:
        """Return our model on a device; one seed gives the same values on all."""
        model = papers.build(self.row, self.variant, device="meta", **self.sizes)
        model.to_empty(device="cpu")
        model.init_weights(torch.Generator().manual_seed(0))
        return model.to(device)

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
        return {
            "device": self.device,
            "dtype": "bfloat16" if self.device == "cuda" else "float32",
            "row": self.row,
            "variant": self.variant,
            "batch": self.batch,
            "sequence": config["sequence_length"],
            "pairs": bool(config.get("pairs")),
            "padded": self.padded,
            "vocabulary": config["vocab_size"],
            "depth": config["depth"],
            "heads": config["heads"],
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
            yield LanguageCase(name, "cuda", row, variant, BATCHES[row], row in PADDED)


# Small enough for seconds on a CPU: the sizes of each row, then what the lean one changes.
_SMALL_TEXT = {"embed_dim": 64, "sequence_length": 32, "depth": 4, "heads": 4}
_SMALL_LRA = {"sequence_length": 128, "num_landmarks": 16, "head_dim": 16}
_LEAN_TEXT, _LEAN_LRA = {"depth": 2, "heads": 8}, {"depth": 1, "heads": 4}
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "crammed_bert": ({**_SMALL_TEXT, "vocab_size": 512}, _LEAN_TEXT),
    # As in the row itself, the original's heads do not divide the width.
    "gpt2_tinystories": ({**_SMALL_TEXT, "heads": 6, "vocab_size": 500}, _LEAN_TEXT),
    **{row: (_SMALL_LRA, _LEAN_LRA) for row in BATCHES if row.startswith("nystromformer")},
}


def small() -> Iterator[LanguageCase]:
    """Yield a small model of each row, original and lean."""
    for row, (sizes, changes) in SMALL.items():
        for variant, given in (("original", sizes), ("lean", sizes | changes)):
            name = f"cpu_language_{row}_{variant}"
            yield LanguageCase(name, "cpu", row, variant, 4, row in PADDED, given)


LANGUAGE_CASES = (*every_row(), *small())
