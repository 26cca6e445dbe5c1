"""What changes the weights: AdamW, its learning rate, and the running average beside them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import AdamW


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> AdamW:
    """Return AdamW that decays matrices, and neither norms and biases nor positions and tokens."""
    decayed, spared = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and name not in ("pos_embed", "cls_token")
        (decayed if is_matrix else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, fused=True)


def learning_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """Return the rate of a step: linear up to the peak, then half a cosine down to 0.

    Args:
        step: 0 to ``steps`` - 1.
        steps: of the whole run.
        peak: the largest rate.
        warmup: share of the steps in which it rises.
    """
    rising = warmup * steps
    if step < rising:
        return peak * (step + 1) / (rising + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


class Average:
    """An exponential moving average of a model's weights, sharded as they are.

    Args:
        model: sharded by FSDP2.
        decay: how much of the average one step keeps, in [0, 1); 0 keeps no average at all.

    Attributes:
        weights: the average by name of the parameter; empty with decay 0.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = {}
        if decay:
            self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights after a step."""
        if self.weights:
            averages = [average.to_local() for average in self.weights.values()]
            newest = [parameter.to_local() for parameter in self.model.parameters()]
            torch._foreach_lerp_(averages, newest, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in place of the model's weights for a while."""
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._copy_into_model(self.weights)
        try:
            yield
        finally:
            self._copy_into_model(own)

    @torch.no_grad()
    def _copy_into_model(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
