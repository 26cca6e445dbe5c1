"""Update the weights with AdamW, and keep an exponential moving average of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from train.loop.parallel import BatchNorms

# Positions, tokens and the scale of a head's scores are not matrices, whatever their shape.
_SPARED = {"pos_embed", "cls_token", "patch_pos", "pixel_pos", "temperature"}


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> "ShardAdamW":
    """Return AdamW that decays matrices, but not norms, biases, positions and tokens."""
    parameters = dict(model.named_parameters())
    spared = {n for n, p in parameters.items() if p.ndim < 2 or n.rpartition(".")[2] in _SPARED}
    decays = {name: 0.0 if name in spared else weight_decay for name in parameters}
    return ShardAdamW(parameters, decays, lr=lr, betas=betas, eps=eps)


class ShardAdamW(AdamW):
    """Fused AdamW on this rank's share of every parameter.

    The overhead of DTensor for every operator exceeds the update of a small model, and an
    elementwise update does not need it.

    Args:
        parameters: parameters of the model by name, plain or sharded.
        decays: the weight decay of each.
        **options: of AdamW.

    Attributes:
        shares: a tensor that shares memory with this rank's part of each parameter, by name.
        found_inf: () float32 on the device; if it is 1, ``step`` changes nothing.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], decays: Mapping[str, float], **options: Any
    ):
        self.parameters = parameters
        self.shares = {name: _share(parameter) for name, parameter in parameters.items()}
        groups = [
            {"params": [self.shares[n] for n, d in decays.items() if d == decay]}
            | {"weight_decay": decay}
            for decay in sorted(set(decays.values()), reverse=True)
        ]
        super().__init__(groups, fused=True, **options)
        self.found_inf: Tensor | None = None
        # Created at the start, so that a checkpoint can be loaded into it.
        for share in self.shares.values():
            self.state[share] = {
                "step": torch.zeros((), device=share.device),
                "exp_avg": torch.zeros_like(share, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(share, requires_grad=False),
            }

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients, moving those of sharded parameters to their shares."""
        grads = []
        for name, share in self.shares.items():
            parameter = self.parameters[name]
            if share is not parameter and parameter.grad is not None:
                share.grad, parameter.grad = parameter.grad._local_tensor, None
            if share.grad is not None:
                grads.append(share.grad)
        return grads

    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        self.take_gradients()
        return super().step(closure)


def _share(parameter: nn.Parameter) -> Tensor:
    """Return a parameter, or this rank's part of a sharded one."""
    own = local(parameter)
    return parameter if own is parameter else nn.Parameter(own.detach())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded or not."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of gradients taken as one vector, ()."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def clip(grads: Sequence[Tensor], norm: Tensor, largest: float) -> None:
    """Scale gradients down in place to a norm of at most ``largest``, as PyTorch's clip_grad_norm_.

    Args:
        grads: gradients of this rank.
        norm: norm of the whole gradient, (); the host does not wait for it.
        largest: above 0.
    """
    torch._foreach_mul_(grads, (largest / (norm + 1e-6)).clamp(max=1.0))


def moments(optimizer: ShardAdamW) -> dict[str, dict[str, Tensor]]:
    """Return AdamW's state, by name of the parameter: step, exp_avg and exp_avg_sq.

    The tensors are this rank's parts; values copied into them are used by the optimizer.
    """
    return {name: optimizer.state[share] for name, share in optimizer.shares.items()}


class WeightAverage:
    """An exponential moving average of a model's weights, sharded as they are.

    Args:
        model: sharded or not.
        norms: its batch norms.
        decay: how much of the average one step keeps, in [0, 1); 0 keeps no average at all.

    Attributes:
        weights: averages by name of the parameter, and of batch norms' statistics; may be empty.
    """

    def __init__(self, model: nn.Module, norms: BatchNorms, decay: float):
        self.model, self.norms, self.decay = model, norms, decay
        self.weights: dict[str, Tensor] = self._taken() if decay > 0 else {}

    def _own(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | self.norms.statistics

    def _taken(self) -> dict[str, Tensor]:
        return {name: own.detach().clone() for name, own in self._own().items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights of the model."""
        own = self._own()
        for name, weight in self.weights.items():
            weight.copy_(own[name])

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Include the model's weights after a step, unless ``skipped`` is 1: () float32, 1 or 0."""
        if self.weights:
            averages, newest = ([*map(local, v.values())] for v in (self.weights, self._own()))
            torch._foreach_lerp_(
                averages, newest, [(1 - self.decay) * (1 - skipped)] * len(averages)
            )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the averages, if any, within a context."""
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
