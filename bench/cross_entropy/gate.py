"""The correctness gate of ``bench.harness.gate`` for the cross-entropy of a classifier."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.cross_entropy.peers import textbook
from bench.harness.gate import Inputs, Problem


class CrossEntropyProblem(Problem):
    """The tensors of a ``CrossEntropyCase`` and the truth about them: every token is checked."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results that are compared."""
        return "loss", *("dtokens", "dweight", "dbias")[: len(self.case.input_shapes)]

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case = self.case

        def draw(shape: tuple[int, ...]) -> Tensor:
            drawn = torch.randn(shape, device=self.device, generator=generator)
            # A classifier's weights are small, so that its logits are not.
            return (drawn * case.width**-0.5 if shape[0] == case.vocabulary else drawn).to(
                case.dtype
            )

        leaves = tuple(map(draw, case.input_shapes))
        return *leaves, torch.ones((), dtype=case.dtype, device=self.device)

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        *leaves, grad = tensors
        return Inputs(tuple(t.detach().requires_grad_() for t in leaves), grad)

    def _eager(self, dtype: torch.dtype) -> list[Tensor]:
        *leaves, grad = (t.to(dtype) for t in self.sets[0])
        leaves = [t.detach().requires_grad_() for t in leaves]
        loss = textbook(self.case.targets(self.device), *leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, grad)]

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        return [out, *grads]
