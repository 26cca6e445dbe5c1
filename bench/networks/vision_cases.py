"""Vision models to measure: every row of the paper, and small ones for a CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.networks.cases import PaperCase, Small, variants
from models import papers


class ModelCase(PaperCase):
    """A vision row of the paper in one variant, and a batch of images."""

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, S, S) and labels (B,) on the device of the generator."""
        side, classes = self.config["image_size"], self.config.get("num_classes", 1000)
        options: dict[str, Any] = {"device": generator.device, "generator": generator}
        images = torch.randn(self.batch, 3, side, side, **options)
        return images, torch.randint(classes, (self.batch,), **options)

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        same = [row for row, variant in twins(self.entry) if variant == self.variant]
        return super().facts() | {"image_size": self.config["image_size"], "same": same}


def twins(entry: papers.PaperRow) -> Iterator[tuple[str, str]]:
    """Yield the other rows that are the same network, as DeiT is ViT."""
    for key, other in papers.ROWS.items():
        same = (other.architecture, other.config) == (entry.architecture, entry.config)
        if same and key[0] != entry.row:
            yield key


def every_row() -> Iterator[ModelCase]:
    """Yield every vision row once at the paper's batch, original and lean side by side."""
    seen = []
    for (row, variant), entry in papers.ROWS.items():
        if not entry.takes_images or variant not in ("original", "lean"):
            continue
        network = entry.architecture, entry.config
        if network not in seen:
            seen.append(network)
            yield ModelCase(f"model_{row}_{variant}", "cuda", row, variant, entry.batch)


SMALL: Small = {
    "vit_base": (
        {"image_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "heads": 4},
        {"depth": 2, "heads": 8},
    ),
    "xcit_medium": (
        {"image_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "heads": 4},
        {"depth": 2, "heads": 8},
    ),
    "tnt_base": (
        {"image_size": 32, "embed_dim": 64, "inner_dim": 16, "inner_heads": 2, "depth": 4}
        | {"patch_size": 8, "heads": 4},
        {"depth": 2, "heads": 8},
    ),
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
}


def small() -> Iterator[ModelCase]:
    """Yield a small model of each architecture, original and lean."""
    for row, variant, sizes in variants(SMALL):
        widens = papers.ROWS[row, "original"].convention == "widen"
        sizes = {"num_classes": 10, **({"head_dim": 16} if widens else {}), **sizes}
        name = f"cpu_model_{papers.ROWS[row, variant].architecture}_{variant}"
        yield ModelCase(name, "cpu", row, variant, 2, sizes)


MODEL_CASES = (*every_row(), *small())
