"""Check the results of peers: one with wrong results is not timed.

The criterion is the project's error budget, against float64: twice what the textbook computation in
the peer's own dtype errs, plus one rounding of the result. The tests hold the same criterion, and
assert that it is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.peers import Peer


class WrongError(Exception):
    """A peer whose result is outside the error budget."""


def share_of_budget(what: str, error: float, allowed: float) -> float:
    """Return an error as a fraction of the one allowed.

    Raises:
        WrongError: it is above 1, or not a number; the message begins with ``what``.
    """
    if not error <= allowed:
        raise WrongError(f"{what} off by {error:.3g}, {allowed:.3g} is allowed")
    return error / allowed


def budget(exact: Tensor, same_dtype: Tensor) -> float:
    """Return the largest error allowed, from the float64 result and a plain one in the dtype."""
    rounding = torch.finfo(same_dtype.dtype).eps * exact.abs().max()
    return (2 * ((same_dtype.double() - exact).abs().max() + rounding)).item()


@dataclass(frozen=True)
class Inputs:
    """One set of tensors in one layout: the arguments of a peer, and its output's gradient."""

    leaves: tuple[Tensor, ...]
    grad: Tensor


class Problem:
    """The tensors of a case, ``copies`` sets of them, and the truth about the first set.

    Attributes:
        names: names of the results that are compared.
        entries: of every tensor's first axis that are checked, by default all.
    """

    names: Any
    entries: Any = ...

    def __init__(self, case: Any, device: torch.device, copies: int):
        """Draw every tensor that is differentiated, and the output's gradient, from a fixed seed.

        Args:
            case: of the kind that the subclass is for.
            device: where.
            copies: how many sets.
        """
        self.case = case
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        self.sets = [self._draw(generator) for _ in range(copies)]
        self.inputs = cache(self._inputs)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return a set: the tensors that are differentiated, and the output's gradient."""
        raise NotImplementedError

    def _reference(self, *leaves: Tensor) -> Tensor:
        """Return the textbook output in the dtype of the inputs."""
        raise NotImplementedError

    def _inputs(self, layout: str) -> list[Inputs]:
        return [self._lay_out(tensors, layout) for tensors in self.sets]

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        """Return a set in a peer's layout."""
        *leaves, grad = tensors
        return Inputs(tuple(t.detach().requires_grad_() for t in leaves), grad)

    @cached_property
    def truth(self) -> list[tuple[Tensor, float]]:
        """For each of ``names`` the float64 result, and the error allowed."""
        exact, same_dtype = map(self._eager, (torch.float64, self.case.dtype))
        return [(e, budget(e, s)) for e, s in zip(exact, same_dtype, strict=True)]

    def _eager(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the textbook results for the entries that are checked, computed in a dtype."""
        *leaves, grad = (t[self.entries].to(dtype) for t in self.sets[0])
        leaves = [t.detach().requires_grad_() for t in leaves]
        out = self._reference(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return a peer's results as ``_eager`` returns its own."""
        return [t[self.entries] for t in (out, *grads)]

    def check(self, peer: Peer, function: Callable[..., Tensor]) -> dict[str, float]:
        """Run a peer once, forward and backward, and compare.

        Returns:
            For each of ``names``, the largest error as a fraction of the error allowed.

        Raises:
            WrongError: one of them is above 1, or not a number.
        """
        inputs = self.inputs(peer.layout)[0]
        poison(self.sets[0])
        out = function(*inputs.leaves)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.grad)
        fractions = {}
        results = self._results(peer.layout, out.detach(), grads)
        for name, result, (exact, allowed) in zip(self.names, results, self.truth, strict=True):
            error = (result.double() - exact).abs().max().item()
            fractions[name] = share_of_budget(f"{name} is", error, allowed)
        return fractions


def poison(like: Sequence[Tensor]) -> None:
    """Fill memory of the size of all results with NaN, and free it."""
    # Allocators return memory with its old contents: an output that is never written could
    # otherwise hold the right answer of the previous peer.
    for t in [torch.full_like(tensor, float("nan")) for tensor in like]:
        del t


@torch.no_grad()
def away_from_the_start(model: nn.Module, generator: torch.Generator) -> None:
    """Change values that hide errors: scales of 1e-5, biases of 0, variances of 1."""
    for name, value in model.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=generator)
        elif value.ndim > 1:
            value.normal_(0, value[0].numel() ** -0.5, generator=generator)
        elif value.is_floating_point():
            centre = 0 if name.endswith(("bias", "mean")) else 1
            value.normal_(centre, 0.3, generator=generator)
