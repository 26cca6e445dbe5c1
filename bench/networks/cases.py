"""Rows of the paper to measure: vision models, Crammed BERT and GPT-2, and small ones for a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bench.harness.steps import SAMPLES
from models import papers

IGNORED = -100  # the target of a token that does not count
MASKED = 0.25  # share of the tokens that Crammed BERT guesses
BATCH = 128  # samples of a step of text: those of the recipe; of Crammed BERT the microbatch


@dataclass(frozen=True)
class PaperCase:
    """A row of the paper in one variant, and a batch.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        row: row of ``papers.ROWS``.
        variant: ``original`` or ``lean``.
        batch: samples.
        sizes: arguments of the constructor instead of the row's.
        kind: kind of the rows of a result.
        item: unit of a rate, such as images.
        stages: that are measured.
    """

    name: str
    device: str
    row: str
    variant: str
    batch: int
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    kind: ClassVar[str]
    item: ClassVar[str]
    stages: ClassVar[tuple[str, ...]]

    @property
    def entry(self) -> papers.PaperRow:
        """The row as data."""
        return papers.ROWS[self.row, self.variant]

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        return self.entry.config | self.sizes

    def build(self, device: torch.device) -> nn.Module:
        """Return our model on a device, with values drawn there from a fixed seed."""
        model = papers.build(self.row, self.variant, device="meta", **self.sizes)
        model.to_empty(device=device)
        model.init_weights(torch.Generator(device).manual_seed(0))
        return model

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return {
            "device": self.device,
            "dtype": "bfloat16" if self.device == "cuda" else "float32",
            "row": self.row,
            "variant": self.variant,
            "batch": self.batch,
            "depth": self.config.get("depth") or self.config["depths"],
            "heads": self.config["heads"],
        }


class ModelCase(PaperCase):
    """A vision row of the paper in one variant, and a batch of images."""

    kind, item = "model", "image"
    stages = "training", "inference", "one_image"

    def items(self, stage: str) -> int:
        """Return how many images a call of a stage takes."""
        return 1 if stage == "one_image" else self.batch

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, S, S) and labels (B,) on the device of the generator."""
        side, classes = self.config["image_size"], self.config.get("num_classes", 1000)
        options: dict[str, Any] = {"device": generator.device, "generator": generator}
        images = torch.randn(self.batch, 3, side, side, **options)
        return images, torch.randint(classes, (self.batch,), **options)

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return super().facts() | {"image_size": self.config["image_size"]}


@dataclass(frozen=True)
class StepCase(ModelCase):
    """A vision row whose training steps are taken with and without KappaMonitor.

    Attributes:
        compiled: whether torch.compile compiles the model.
    """

    compiled: bool = False
    kind = "step"

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return super().facts() | {"samples": SAMPLES, "compiled": self.compiled}


class Batch(NamedTuple):
    """The input of a step: tokens and targets, (B, N) int64 each, ``IGNORED`` among these."""

    tokens: Tensor
    targets: Tensor


class LanguageCase(PaperCase):
    """A language row of the paper in one variant, and a batch of sequences."""

    kind, item, stages = "language", "token", ("training",)

    @property
    def architecture(self) -> str:
        """``bert`` or ``gpt``."""
        return self.entry.architecture

    def items(self, stage: str) -> int:
        """Return how many tokens a step takes."""
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
            kept = chance.argsort(dim=1).argsort(dim=1) >= masked_of(length)
            targets = tokens.masked_fill(kept, IGNORED)
        return Batch(tokens.to(device), targets.to(device))

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        sizes = self.config["sequence_length"], self.config["vocab_size"]
        return super().facts() | dict(zip(("sequence", "vocabulary"), sizes))


def masked_of(length: int) -> int:
    """Return how many tokens of a sequence Crammed BERT guesses."""
    return int(MASKED * length)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return our model's losses (B, N) of a batch."""
    return model(batch.tokens, targets=batch.targets)


def mean_loss(of_tokens: Tensor, batch: Batch) -> Tensor:
    """Return the mean of ``losses`` over the tokens that count."""
    return of_tokens.sum() / (batch.targets != IGNORED).sum()


# Rows small enough for seconds on a CPU: their sizes, then what the lean one changes.
_SQUARE = {"image_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "heads": 4}
_TEXT = {"embed_dim": 64, "sequence_length": 32, "depth": 4, "heads": 4}
_LEAN = {"depth": 2, "heads": 8}
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit_base": (_SQUARE, _LEAN),
    "xcit_medium": (_SQUARE, _LEAN),
    "tnt_base": (_SQUARE | {"inner_dim": 16, "inner_heads": 2}, _LEAN),
    "volo_d3": (
        {"image_size": 32, "embed_dims": [32, 64, 64, 64], "depths": [2, 2, 2, 2]}
        | {"heads": [2, 4, 4, 4]},
        {"depths": [1, 1, 1, 1], "heads": [4, 8, 8, 8]},
    ),
    "davit_base": (
        {"image_size": 64, "embed_dims": [16, 32, 64, 128], "depths": [1, 1, 4, 1]}
        | {"heads": [1, 2, 4, 8]},
        {"depths": [1, 1, 2, 1], "heads": [1, 2, 8, 8]},
    ),
    "crammed_bert": ({**_TEXT, "vocab_size": 512}, _LEAN),
    # As in the row itself, the original's heads do not divide the width.
    "gpt2_tinystories": ({**_TEXT, "heads": 6, "vocab_size": 500}, _LEAN),
}


def _every_row() -> Iterator[PaperCase]:
    """Yield every row once at its batch, original and lean side by side."""
    seen = []
    for (row, variant), entry in papers.ROWS.items():
        network = entry.architecture, entry.config
        if not entry.takes_images:
            if row in SMALL:
                yield LanguageCase(f"language_{row}_{variant}", "cuda", row, variant, BATCH)
        elif variant in ("original", "lean") and network not in seen:
            seen.append(network)
            yield ModelCase(f"model_{row}_{variant}", "cuda", row, variant, entry.batch)


def _small() -> Iterator[PaperCase]:
    """Yield a small model of each architecture, original and lean."""
    for row, (sizes, changes) in SMALL.items():
        for variant, own in (("original", sizes), ("lean", sizes | changes)):
            entry = papers.ROWS[row, variant]
            if not entry.takes_images:
                yield LanguageCase(f"cpu_language_{row}_{variant}", "cpu", row, variant, 4, own)
                continue
            widens = papers.ROWS[row, "original"].convention == "widen"
            own = {"num_classes": 10, **({"head_dim": 16} if widens else {}), **own}
            yield ModelCase(
                f"cpu_model_{entry.architecture}_{variant}", "cpu", row, variant, 2, own
            )


PAPER_CASES = (*_every_row(), *_small())
# The lean ViT-B with feed-forwards of the original's width.
_WIDE, _SMALL_VIT = {"mlp_ratio": 4.0}, {"image_size": 32, "patch_size": 4, "embed_dim": 192}
STEP_CASES = (
    StepCase("vit_base_lean_step", "cuda", "vit_base", "lean", 128, _WIDE),
    StepCase("vit_base_lean_step_compiled", "cuda", "vit_base", "lean", 128, _WIDE, compiled=True),
    StepCase(
        "cpu_vit_step", "cpu", "vit_base", "original", 4, _SMALL_VIT | {"depth": 4, "heads": 3}
    ),
)
