"""What the gates of vision and language rows share: whose model a row is, and its first weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.peers import compiled


def eager_and_compiled(models: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Return the rows of models: name, whose model it is, and whether it is compiled."""
    models = tuple(models)
    eager = {name: (name, False) for name in models}
    return eager | {f"{name}_compiled": (name, True) for name in models}


class Models:
    """Models by name, each with the weights that it began with.

    Attributes:
        device: where they are.
        models: by whose they are.
        compiled: by name, and whether for training; each shares the weights of its module.
        weights: the first of each module.
    """

    def __init__(self, device: str):
        """Start without models."""
        self.device = torch.device(device)
        self.models: dict[str, nn.Module] = {}
        self.compiled: dict[tuple[str, bool], Any] = {}
        self.weights: dict[str, dict[str, Tensor]] = {}

    def build(self, whose: str) -> nn.Module:
        """Return a library's model, or ours, on the device."""
        raise NotImplementedError

    def fresh(self, name: str, peers: dict[str, tuple[str, bool]], training: bool) -> nn.Module:
        """Return a model in its mode, with the first weights and no gradients.

        What is compiled for inference replays CUDA graphs (``reduce-overhead``).

        Raises:
            AbsentError: its library is not installed, or it is to be compiled where that is not
                measured.
        """
        whose, is_compiled = peers[name]
        if whose not in self.models:
            self.models[whose] = self.build(whose)
        model = self.models[whose]
        if whose not in self.weights:
            state = model.state_dict()
            self.weights[whose] = {k: v.to("cpu", copy=True) for k, v in state.items()}
        model.load_state_dict(self.weights[whose])
        model.zero_grad(set_to_none=True)
        model.train(training)
        if not is_compiled:
            return model
        if (name, training) not in self.compiled:
            mode = None if training else "reduce-overhead"
            self.compiled[name, training] = compiled(model, self.device, mode)
        return self.compiled[name, training]
