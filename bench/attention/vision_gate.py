"""The correctness gate of ``bench.harness.gate`` for the attention of XCiT, DaViT and VOLO."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.attention.vision_peers import cut, eager, join
from bench.harness.gate import Inputs, Problem

GRADIENTS = {
    "cross_covariance": ("dqkv", "dtemperature"),
    "channel": ("dqkv",),
    "window": ("dqkv",),
    "outlook": ("dvalue", "dlogits"),
}
COLDEST, HOTTEST = 1.0, 8.0


class VisionProblem(Problem):
    """The tensors of a ``VisionCase`` and the truth about them: every entry is checked."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the results that are compared."""
        return "out", *GRADIENTS[self.case.op]

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        case, options = self.case, {"dtype": self.case.dtype, "device": self.device}

        def draw(shape: tuple[int, ...]) -> Tensor:
            if len(shape) > 1:
                drawn = torch.randn(shape, device=self.device, generator=generator)
                return drawn.to(case.dtype)
            # Temperatures: cosines of random channels are small, so some heads make them differ.
            return torch.linspace(COLDEST, HOTTEST, *shape, **options)

        return tuple(map(draw, (*case.input_shapes, case.out_shape)))

    def _lay_out(self, tensors: Sequence[Tensor], layout: str) -> Inputs:
        if layout == "windows":
            tensors = [cut(self.case, t).contiguous() for t in tensors]
        return super()._lay_out(tensors, layout)

    def _reference(self, *leaves: Tensor) -> Tensor:
        return eager(self.case, *leaves)

    def _results(self, layout: str, out: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        results = [out, *grads]
        return [join(self.case, t) for t in results] if layout == "windows" else results
