"""What changes the weights: AdamW; and the running average that is kept beside them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from train.loop import parallel

# Positions, tokens and the scale of a head's scores: not matrices, whatever their shape.
_SPARED = {"pos_embed", "cls_token", "patch_pos", "pixel_pos", "temperature"}


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> AdamW:
    """Return AdamW that decays matrices, and neither norms and biases nor positions and tokens.

    It holds nothing of parameters that require no gradient.
    """
    decayed, spared = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim > 1 and name.rpartition(".")[2] not in _SPARED
        (decayed if is_matrix else spared).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    # A checkpoint makes the state of an optimizer that has none yet by a step, which must not count
    # where training itself has done none.
    if not any(p.is_meta for p in model.parameters()):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        get_optimizer_state_dict(model, optimizer)
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return AdamW's state, by name of the parameter: step, exp_avg and exp_avg_sq.

    The tensors are this rank's own parts; what is copied into them, the optimizer goes on with.
    """
    named = {name: p for name, p in model.named_parameters() if p in optimizer.state}
    return {
        name: {kind: _local(tensor) for kind, tensor in optimizer.state[p].items()}
        for name, p in named.items()
    }


class WeightAverage:
    """An exponential moving average of a model's weights, sharded as they are.

    Args:
        model: sharded by FSDP2.
        decay: how much of the average one step keeps, in [0, 1); 0 keeps no average at all.

    Attributes:
        weights: averages by name of the parameter, and of batch norms' statistics; may be empty.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = self._taken() if decay > 0 else {}

    def _own(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | parallel.statistics(self.model)

    def _taken(self) -> dict[str, Tensor]:
        return {name: own.detach().clone() for name, own in self._own().items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin from the model's weights as they are now."""
        own = self._own()
        for name, weight in self.weights.items():
            weight.copy_(own[name])

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's weights after a step."""
        if self.weights:
            averages, newest = ([*map(_local, v.values())] for v in (self.weights, self._own()))
            torch._foreach_lerp_(averages, newest, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages, if there are any, in place of the model's weights for a while."""
        own = self._taken() if self.weights else {}
        self._copy_into_model(self.weights)
        try:
            yield
        finally:
            self._copy_into_model(own)

    @torch.no_grad()
    def _copy_into_model(self, weights: dict[str, Tensor]) -> None:
        own = self._own()
        for name, weight in weights.items():
            own[name].copy_(weight)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
