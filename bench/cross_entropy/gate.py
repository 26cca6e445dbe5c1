"""The correctness gate of ``bench.harness.gate`` for the cross-entropy of a classifier."""

import torch
from torch import Tensor

from bench.cross_entropy.peers import textbook
from bench.harness.gate import Problem


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

    def _reference(self, *leaves: Tensor) -> Tensor:
        return textbook(self.case.targets(self.device), *leaves)
