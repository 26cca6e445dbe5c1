"""The correctness gate of ``bench.harness.gate`` for softmax attention."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from bench.attention.cases import AttentionCase
from bench.attention.peers import eager_attention
from bench.harness.gate import Inputs, Problem

# Number of batch entries to check: they are independent, and float64 is slow and large.
CHECKED_ENTRIES, CHECKED_SCORES = 8, 2**27


def checked_entries(batch: int, scores: int, device: torch.device) -> Tensor:
    """Return evenly spread batch entries with this many scores, including first and last."""
    count = max(1, min(CHECKED_ENTRIES, batch, CHECKED_SCORES // scores))
    return torch.linspace(0, batch - 1, count, device=device).long()


class AttentionProblem(Problem):
    """The tensors of an ``AttentionCase`` and the truth about some entries of its batch."""

    names = "out", "dq", "dk", "dv"

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case, device = self.case, self.device

        def draw(rows: int) -> Tensor:
            shape = case.batch, case.heads, rows, case.head_dim
            drawn = torch.randn(shape, device=device, generator=generator).to(case.dtype)
            return drawn.masked_fill_(outside(case, device), 0) if case.ragged else drawn

        return tuple(map(draw, (case.rows, case.tokens, case.tokens, case.rows)))

    @cached_property
    def entries(self) -> Tensor:
        """The batch entries that are checked."""
        case = self.case
        return checked_entries(case.batch, case.heads * case.rows * case.tokens, self.device)

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        return lay_out(self.case, tensors, layout)

    def _reference(self, *leaves: Tensor) -> Tensor:
        visible = self.case.visible(self.device)
        if self.case.ragged:
            visible = visible[self.entries]
        return self._counted(eager_attention(*leaves, visible, self.case.scale))

    def _counted(self, out: Tensor) -> Tensor:
        """Return the output of the checked entries with zeros in rows past a ragged end."""
        if not self.case.ragged:
            return out
        return out.masked_fill(outside(self.case, self.device)[self.entries], 0)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        if layout == "packed":
            grads = grads[0].unbind(2)
        out, *grads = (heads_first(self.case, t, layout)[self.entries] for t in (out, *grads))
        return [self._counted(out), *grads]


def outside(case: AttentionCase, device: torch.device) -> Tensor:
    """Return (B, 1, N, 1): whether a row of a ragged case lies past the end of its sequence."""
    past = torch.arange(case.tokens, device=device) >= case.key_lengths(device)[:, None]
    return past[:, None, :, None]


def lay_out(case: AttentionCase, tensors: Sequence[Tensor], layout: str) -> Inputs:
    """Return q, k, v and the output's gradient, (B, H, N, D), in a layout of ``Peer``."""
    if layout != "heads":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    if layout == "varlen":
        kept = ~outside(case, tensors[0].device)[:, 0, :, 0]
        tensors = [t[kept] for t in tensors]
    *leaves, grad = tensors
    if layout == "packed":
        leaves = [torch.stack(leaves, dim=2)]
    return Inputs(tuple(t.detach().requires_grad_() for t in leaves), grad)


def heads_first(case: AttentionCase, t: Tensor, layout: str) -> Tensor:
    """Return a tensor of a layout (of ``packed`` one third) as (B, H, N, D), padded with zeros."""
    if layout == "varlen":
        padded = t.new_zeros(case.batch, case.tokens, case.heads, case.head_dim)
        padded[~outside(case, t.device)[:, 0, :, 0]] = t
        t = padded
    return t if layout == "heads" else t.transpose(1, 2)
