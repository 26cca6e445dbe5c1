"""What changes the weights: AdamW, its learning rate, and the running average beside them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from train import parallel

# Positions, tokens and the scale of a head's scores: not matrices, whatever their shape.
_SPARED = {"pos_embed", "cls_token", "patch_pos", "pixel_pos", "temperature"}


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> AdamW:
    """Return AdamW that decays matrices, and neither norms and biases nor positions and tokens."""
    decayed, spared = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and name.rpartition(".")[2] not in _SPARED
        (decayed if is_matrix else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, fused=True)


def learning_rate(
    step: int, steps: int, *, peak: float, warmup: float, start: float = 0.0, end: float = 0.0
) -> float:
    """Return the rate of a step: linear up to the peak, then half a cosine down.

    Args:
        step: 0 to ``steps`` - 1.
        steps: of the whole run.
        peak: the largest rate.
        warmup: share of the steps in which it rises.
        start: what it rises from.
        end: what it falls to.
    """
    rising = warmup * steps
    if step < rising:
        return start + (peak - start) * (step + 1) / (rising + 1)
    falling = 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
    return end + (peak - end) * falling


class Average:
    """An exponential moving average of a model's weights, sharded as they are.

    Args:
        model: sharded by FSDP2.
        decay: how much of the average one step keeps, in [0, 1); 0 keeps no average at all.

    Attributes:
        weights: the average by name of the parameter, and of batch norms' statistics; empty with
            decay 0.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = self._copies() if decay else {}

    def _own(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | parallel.statistics(self.model)

    def _copies(self) -> dict[str, Tensor]:
        return {name: own.detach().clone() for name, own in self._own().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights after a step."""
        if self.weights:
            averages, newest = ([*map(_local, v.values())] for v in (self.weights, self._own()))
            torch._foreach_lerp_(averages, newest, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in place of the model's weights for a while."""
        own = self._copies()
        self._copy_into_model(self.weights)
        try:
            yield
        finally:
            self._copy_into_model(own)

    @torch.no_grad()
    def _copy_into_model(self, weights: dict[str, Tensor]) -> None:
        for name, own in self._own().items():
            own.copy_(weights[name])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
