"""The correctness gate: a peer that computes something else gets no number.

The criterion is the project's error budget, against float64: twice what the textbook computation in
the peer's own dtype errs, plus one rounding of the result. The tests hold the same criterion, and
assert that it is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from bench.cases import Case
from bench.peers import Peer, eager_attention

NAMES = ("out", "dq", "dk", "dv")
CHECKED_ENTRIES = 8  # of the batch: entries are independent, and float64 is slow on most cards


class WrongError(Exception):
    """A peer whose result is outside the error budget."""


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
    """The tensors of a case, ``copies`` sets of them, and the truth about the first set."""

    def __init__(self, case: Case, device: torch.device, copies: int):
        """Draw every q, k, v and output gradient from a fixed seed."""
        self.case = case
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        shape = 4, case.batch, case.heads, case.tokens, case.head_dim
        self.sets = [
            torch.randn(shape, device=device, generator=generator).to(case.dtype)
            for _ in range(copies)
        ]
        self.inputs = cache(self._inputs)

    def _inputs(self, layout: str) -> list[Inputs]:
        return [lay_out(*tensors, layout) for tensors in self.sets]

    @cached_property
    def entries(self) -> Tensor:
        """The batch entries that are checked: evenly spread, first and last among them."""
        count = min(CHECKED_ENTRIES, self.case.batch)
        return torch.linspace(0, self.case.batch - 1, count, device=self.device).long()

    @cached_property
    def truth(self) -> list[tuple[Tensor, float]]:
        """For each of ``NAMES``: the float64 result, and the error allowed."""
        exact, same_dtype = self._eager(torch.float64), self._eager(self.case.dtype)
        return [(e, budget(e, s)) for e, s in zip(exact, same_dtype, strict=True)]

    def _eager(self, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, grad = self.sets[0][:, self.entries].to(dtype)
        visible = self.case.visible(self.device)
        if visible is not None and self.case.padded:
            visible = visible[self.entries]
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = eager_attention(*leaves, visible, self.case.scale)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def check(self, peer: Peer, function: Callable[..., Tensor]) -> dict[str, float]:
        """Run a peer once, forward and backward, and compare.

        Returns:
            For each of ``NAMES``, the largest error as a fraction of the error allowed.

        Raises:
            WrongError: one of them is above 1, or not a number.
        """
        inputs = self.inputs(peer.layout)[0]
        poison(self.sets[0])
        out = function(*inputs.leaves)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.grad)
        fractions = {}
        for name, result, (exact, allowed) in zip(
            NAMES, heads_first(out.detach(), grads, peer.layout), self.truth, strict=True
        ):
            error = (result[self.entries].double() - exact).abs().max().item()
            if not error <= allowed:
                raise WrongError(f"{name} is off by {error:.3g}, {allowed:.3g} is allowed")
            fractions[name] = error / allowed
        return fractions


def lay_out(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: str) -> Inputs:
    """Return (B, H, N, D) tensors in a layout of ``peers.Peer``, contiguous, as leaves."""
    if layout != "heads":
        q, k, v, grad = (t.transpose(1, 2).contiguous() for t in (q, k, v, grad))
    leaves = (torch.stack((q, k, v), dim=2),) if layout == "packed" else (q, k, v)
    return Inputs(tuple(t.detach().requires_grad_() for t in leaves), grad)


def heads_first(out: Tensor, grads: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Return a peer's output and the gradients of q, k and v as (B, H, N, D)."""
    if layout == "packed":
        grads = grads[0].unbind(2)
    return [t if layout == "heads" else t.transpose(1, 2) for t in (out, *grads)]


def poison(like: Tensor) -> None:
    """Fill memory of the size of all results with NaN, and free it."""
    # Allocators hand memory back as it was: an output that is never written could otherwise show
    # the right answer of the peer before.
    for t in [torch.full_like(tensor, float("nan")) for tensor in like]:
        del t
