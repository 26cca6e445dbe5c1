"""The weights of a pre-training run, put into a model that is sharded another way.

Only tensors and JSON are read, as when a run is resumed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from train.checkpoint.checkpoints import (
    load_tensors,
    newest_intact,
    read_details,
    saved_tensors,
)


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint of a pre-training run.

    Attributes:
        path: of the checkpoint, ``RUN/checkpoints/step-00000100``.
        settings: of the run that saved it, as JSON types.
        step: how many optimizer steps it had done.
    """

    path: Path
    settings: dict[str, Any]
    step: int

    @property
    def run(self) -> Path:
        """The folder of the run, where its tokenizer is."""
        return self.path.parent.parent

    def load(self, model: nn.Module, fresh: set[str]) -> None:
        """Put the weights into a model, sharded or not, on every rank.

        Args:
            model: of the architecture that was saved, but for its head.
            fresh: names of the parameters that keep the values they have.

        Raises:
            ValueError: the checkpoint has not the other parameters, or in other shapes.
        """
        weights = get_model_state_dict(model)
        wanted = {name: weight for name, weight in weights.items() if name not in fresh}
        self._check(wanted, saved_tensors(self.path))
        # Every rank reads its own share and needs no other for that.
        load_tensors(self.path, {"model": wanted})
        set_model_state_dict(model, weights)

    def _check(self, wanted: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
        for name, weight in wanted.items():
            kept = saved.get(f"model.{name}")
            if kept is None:
                raise ValueError(f"--checkpoint {self.path} has no parameter {name}")
            if kept.size != weight.shape:
                raise ValueError(
                    f"--checkpoint {self.path} has {name} {tuple(kept.size)}, the model wants "
                    f"{tuple(weight.shape)}"
                )
        names = {key.removeprefix("model.") for key in saved if key.startswith("model.")}
        if unknown := sorted(names - wanted.keys()):
            raise ValueError(f"--checkpoint {self.path} has {unknown[0]}, the model has not")


def open_checkpoint(name: str) -> Pretrained:
    """Choose a checkpoint and read every byte of it once.

    Args:
        name: path of a run, whose newest intact checkpoint is taken, or of one checkpoint.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    path = newest_intact(Path(name), "--checkpoint")
    details = read_details(path)
    return Pretrained(path, details["settings"], details["step"])
