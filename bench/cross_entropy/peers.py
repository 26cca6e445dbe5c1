"""Everything that computes the cross-entropy of a classifier, as in ``bench.attention.peers``.

A function takes tokens (T, D), weight (V, D) and, where the case has one, bias (V,), and returns
the mean loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.cross_entropy.cases import CrossEntropyCase
from bench.harness.peers import AbsentError, Peer, compiled, found
from models.cross_entropy import linear_cross_entropy

Loss = Callable[..., Tensor]


def textbook(targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The logits and their cross-entropy, all in the dtype of the inputs."""
    return F.cross_entropy(F.linear(x, weight, bias), targets)


def autocast(targets: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What autocast makes of it: logits in the dtype of the inputs, their softmax in float32."""
    return F.cross_entropy(F.linear(x, weight, bias).float(), targets)


def _leaner(case: CrossEntropyCase, device: torch.device) -> Loss:
    targets = case.targets(device)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias).mean()

    return run


def _logits(function: Loss, case: CrossEntropyCase, device: torch.device) -> Loss:
    return partial(function, case.targets(device))


def _logits_compiled(case: CrossEntropyCase, device: torch.device) -> Loss:
    return compiled(_logits(autocast, case, device), device)


def _torch(case: CrossEntropyCase, device: torch.device) -> Loss:
    """PyTorch's own, in chunks: it computes the gradients in the forward."""
    function = found("torch.nn.functional", "linear_cross_entropy")
    options: Any = found("torch.nn", "LinearCrossEntropyOptions")()
    targets = case.targets(device)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, weight, targets, linear_bias=bias, options=options)

    return run


def _liger(case: CrossEntropyCase, device: torch.device) -> Loss:
    if device.type != "cuda":
        raise AbsentError("runs on CUDA only")
    function = found("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
    targets = case.targets(device)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(weight, x, targets, bias)

    return run


def _quack(case: CrossEntropyCase, device: torch.device) -> Loss:
    if device.type != "cuda":
        raise AbsentError("runs on CUDA only")
    chunked = found("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    whole = found("quack.linear_cross_entropy", "linear_cross_entropy_func")
    targets = case.targets(device)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Its version in chunks takes no bias.
        if bias is None:
            return chunked(x, weight, targets)
        return whole(x, weight, bias, targets)

    return run


CROSS_ENTROPY_PEERS = {
    "leaner": Peer(_leaner, "loss", ours=True),
    "logits": Peer(partial(_logits, textbook), "loss"),
    "logits_float32": Peer(partial(_logits, autocast), "loss"),
    "torch_linear": Peer(_torch, "loss"),
    "liger": Peer(_liger, "loss"),
    "quack": Peer(_quack, "loss"),
    "logits_compiled": Peer(_logits_compiled, "loss"),
}
