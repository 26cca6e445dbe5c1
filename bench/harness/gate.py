"""The correctness gate: a peer that computes something else gets no number.

The criterion is the project's error budget, against float64: twice what the textbook computation in
the peer's own dtype errs, plus one rounding of the result. The tests hold the same criterion, and
assert that it is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from bench.attention.cases import Case
from bench.attention.peers import Peer, eager_attention

# Of the batch: entries are independent, and float64 is slow on most GPUs and large on all.
CHECKED_ENTRIES, CHECKED_SCORES = 8, 2**27


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
    """The tensors of a case, ``copies`` sets of them, and the truth about the first set.

    Attributes:
        names: of the results that are compared.
    """

    names = "out", "dq", "dk", "dv"

    def __init__(self, case: Any, device: torch.device, copies: int):
        """Draw every tensor that is differentiated, and the output's gradient, from a fixed seed.

        Args:
            case: of softmax attention, here; a subclass may take others.
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
        case, device = self.case, self.device

        def draw(rows: int) -> Tensor:
            shape = case.batch, case.heads, rows, case.head_dim
            drawn = torch.randn(shape, device=device, generator=generator).to(case.dtype)
            return drawn.masked_fill_(outside(case, device), 0) if case.ragged else drawn

        return tuple(map(draw, (case.rows, case.tokens, case.tokens, case.rows)))

    def _inputs(self, layout: str) -> list[Inputs]:
        return [self._lay_out(tensors, layout) for tensors in self.sets]

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        """Return a set in a peer's layout."""
        return lay_out(self.case, tensors, layout)

    @cached_property
    def entries(self) -> Tensor:
        """The batch entries that are checked: evenly spread, first and last among them."""
        scores = self.case.heads * self.case.rows * self.case.tokens
        count = max(1, min(CHECKED_ENTRIES, self.case.batch, CHECKED_SCORES // scores))
        return torch.linspace(0, self.case.batch - 1, count, device=self.device).long()

    @cached_property
    def truth(self) -> list[tuple[Tensor, float]]:
        """For each of ``names``: the float64 result, and the error allowed."""
        exact, same_dtype = self._eager(torch.float64), self._eager(self.case.dtype)
        return [(e, budget(e, s)) for e, s in zip(exact, same_dtype, strict=True)]

    def _eager(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the textbook results for the entries that are checked, computed in a dtype."""
        q, k, v, grad = (t[self.entries].to(dtype) for t in self.sets[0])
        visible = self.case.visible(self.device)
        if self.case.padded or self.case.ragged:
            visible = visible[self.entries]
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = eager_attention(*leaves, visible, self.case.scale)
        return [self._counted(out.detach()), *torch.autograd.grad(out, leaves, grad)]

    def _counted(self, out: Tensor) -> Tensor:
        """Return the output of the checked entries with zeros in rows past a ragged end."""
        if not self.case.ragged:
            return out
        return out.masked_fill(outside(self.case, self.device)[self.entries], 0)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return a peer's results as ``_eager`` returns its own."""
        if layout == "packed":
            grads = grads[0].unbind(2)
        out, *grads = (heads_first(self.case, t, layout)[self.entries] for t in (out, *grads))
        return [self._counted(out), *grads]

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
            if not error <= allowed:
                raise WrongError(f"{name} is off by {error:.3g}, {allowed:.3g} is allowed")
            fractions[name] = error / allowed
        return fractions


def outside(case: Case, device: torch.device) -> Tensor:
    """Return (B, 1, N, 1): whether a row of a ragged case lies past the end of its sequence."""
    past = torch.arange(case.tokens, device=device) >= case.key_lengths(device)[:, None]
    return past[:, None, :, None]


def lay_out(case: Case, tensors: Sequence[Tensor], layout: str) -> Inputs:
    """Return q, k, v and the output's gradient, (B, H, N, D), in a layout of ``peers.Peer``."""
    if layout != "heads":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    if layout in ("varlen", "jagged"):
        kept = ~outside(case, tensors[0].device)[:, 0, :, 0]
        tensors = [t[kept] for t in tensors]
    if layout == "jagged":
        # One tensor of offsets for all: by it PyTorch knows that their lengths agree.
        offsets, ends = case.offsets(tensors[0].device), (min(case.lengths), case.tokens)
        jagged = torch.nested.nested_tensor_from_jagged
        tensors = [jagged(t, offsets, None, 1, *ends) for t in tensors]
    *leaves, grad = tensors
    if layout == "packed":
        leaves = [torch.stack(leaves, dim=2)]
    return Inputs(tuple(t.detach().requires_grad_() for t in leaves), grad)


def heads_first(case: Case, t: Tensor, layout: str) -> Tensor:
    """Return a tensor of a layout (of ``packed`` one third) as (B, H, N, D), padded with zeros."""
    if layout == "jagged":
        t = t.values()
    if layout in ("varlen", "jagged"):
        padded = t.new_zeros(case.batch, case.tokens, case.heads, case.head_dim)
        padded[~outside(case, t.device)[:, 0, :, 0]] = t
        t = padded
    return t if layout == "heads" else t.transpose(1, 2)


def poison(like: Sequence[Tensor]) -> None:
    """Fill memory of the size of all results with NaN, and free it."""
    # Allocators hand memory back as it was: an output that is never written could otherwise show
    # the right answer of the peer before.
    for t in [torch.full_like(tensor, float("nan")) for tensor in like]:
        del t
