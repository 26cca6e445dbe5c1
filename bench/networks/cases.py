"""Shared by the rows of the paper: the model of a row, and the sizes that it is built with."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from models import papers


@dataclass(frozen=True)
class PaperCase:
    """A row of the paper in one variant, and a batch.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        row: of ``papers.ROWS``.
        variant: ``original`` or ``lean``.
        batch: samples.
        sizes: arguments of the constructor instead of the row's.
    """

    name: str
    device: str
    row: str
    variant: str
    batch: int
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)

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


# Of rows small enough for seconds on a CPU: their sizes, then what the lean one changes.
Small = dict[str, tuple[dict[str, Any], dict[str, Any]]]


def variants(small: Small) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield row, variant and sizes of small models, original and lean side by side."""
    for row, (sizes, changes) in small.items():
        yield row, "original", sizes
        yield row, "lean", sizes | changes
