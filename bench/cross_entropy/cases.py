"""The loss of a large vocabulary that is measured: a classifier's product and its cross-entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropyCase:
    """T tokens of width D and a classifier of V; the loss is the mean over tokens.

    Attributes:
        name: an identifier; cases of the CPU begin with ``cpu_``.
        device: ``cuda`` or ``cpu``.
        tokens: T.
        width: D.
        vocabulary: V.
        bias: whether the classifier has one.
        dtype: of tokens, classifier and gradients.
    """

    name: str
    device: str
    tokens: int
    width: int
    vocabulary: int
    bias: bool
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of everything that is differentiated: tokens, weight and, if there is one, bias."""
        shapes = (self.tokens, self.width), (self.vocabulary, self.width), (self.vocabulary,)
        return shapes if self.bias else shapes[:2]

    def targets(self, device: torch.device) -> Tensor:
        """Return the classes (T,), the same for every peer."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocabulary, (self.tokens,), generator=generator).to(device)

    def bytes(self, direction: str) -> int:
        """Least traffic: tokens, weight and bias, and in a backward also their gradients."""
        size = sum(torch.Size(shape).numel() for shape in self.input_shapes) * self.dtype.itemsize
        return size * {"forward": 1, "backward": 2, "both": 3}[direction]

    def flops(self, direction: str) -> int:
        """One product of the forward, two of the backward; what is computed again is no work."""
        product = 2 * self.tokens * self.width * self.vocabulary
        return product * {"forward": 1, "backward": 2, "both": 3}[direction]

    def facts(self) -> dict[str, object]:
        """Return what a reader of a result needs to repeat the case."""
        return {
            "device": self.device,
            "dtype": self.dtype_name,
            "loss_tokens": self.tokens,
            "width": self.width,
            "vocabulary": self.vocabulary,
            "bias": self.bias,
        }


_BF16, _FP32 = torch.bfloat16, torch.float32

CROSS_ENTROPY_CASES = (
    # A quarter of Crammed BERT's 128 x 128 tokens, and all of GPT-2's 128 x 64.
    CrossEntropyCase("cross_entropy_32k", "cuda", 4096, 768, 32768, False, _BF16),
    CrossEntropyCase("cross_entropy_50k", "cuda", 8192, 512, 50257, True, _BF16),
    CrossEntropyCase("cpu_cross_entropy", "cpu", 256, 64, 2000, True, _FP32),
)
